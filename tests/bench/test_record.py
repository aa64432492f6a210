from __future__ import annotations

import re
from pathlib import Path

import pytest

from jetspec.bench import record
from jetspec.bench.record import Journal, footer, peak_memory, provenance, run_key
from jetspec.errors import DataError


def test_journal_survives_a_killed_writer(tmp_path: Path) -> None:
    """Guards resuming: half a line left by a killed process must neither stop the next run nor swallow its
    first record, and it is told of."""
    told: list[str] = []
    journal = Journal(tmp_path / "new" / "x.jsonl", told.append)
    assert journal.read() == []
    journal.append({"kind": "a"})
    with journal.path.open("a") as file:
        file.write('{"kind": ')
    journal.append({"kind": "b"})
    assert journal.read() == [{"kind": "a"}, {"kind": "b"}]
    assert told == ["x.jsonl line 2 is cut off and left out"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            '{"kind": "run", "key": "k", "run": {}}\n[1]\n',
            "line 2 is no record of jetspec bench: expected an",
        ),
        (
            '{"step": 1, "loss": 2.0}\n{"step": 2}\n',
            "line 1 is no record of jetspec bench: expected an object",
        ),
        ("# A title\n\nand text\n", "line 1 is no record of jetspec bench: expected an object with a `kind`"),
        ('{\n  "kind": "run"\n}\n', "line 1 is no record"),
        ('{"kind": "it', "line 1 is no record of jetspec bench: expected a whole object"),
        ('\n{"kind": "item", "key": "k"}\n', "line 2 is no record of jetspec bench: expected a `set` in a"),
    ],
    ids=["list", "log", "text", "pretty", "cut", "lacking"],
)
def test_another_file_is_one_error(tmp_path: Path, text: str, expected: str) -> None:
    """Guards against a line of complaint for every line of a wrong file, against a KeyError, and against
    records that are added to somebody's other file: the first wrong line is named, and nothing else said."""
    path = tmp_path / "x.jsonl"
    path.write_text(text, "utf-8")
    told: list[str] = []
    with pytest.raises(DataError, match=re.escape(f"{path} {expected}")):
        Journal(path, told.append).read()
    assert told == []


def test_run_key_tells_runs_apart() -> None:
    """Guards resuming against mixing: date, load and commit may differ within one run (the code's hash says
    what ran), arguments, code, threads and versions may not."""
    facts = provenance({"tokens": 128})
    for same in ({"date": "x"}, {"load": 9.0}, {"commit": "0", "dirty": True}):
        assert run_key({**facts, **same}) == run_key(facts)
    for other in ({"source": "0"}, {"threads": 99}, {"torch": "0"}, {"arguments": {"tokens": 64}}):
        assert run_key({**facts, **other}) != run_key(facts)


def test_provenance_of_an_installed_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards numbers from a machine without the checkout: no commit is claimed, above all not that of a
    repository that happens to lie around the environment."""
    (tmp_path / ".git").mkdir()
    package = tmp_path / "lib" / "site-packages" / "jetspec"
    package.mkdir(parents=True)
    monkeypatch.setattr(record, "PACKAGE", package)
    facts = provenance({})
    assert facts["commit"] is None and facts["dirty"] is None
    assert "commit" not in footer(facts) and facts["cpu"] in footer(facts)


def test_peak_memory_is_in_bytes() -> None:
    """Guards the unit, which is KiB on Linux: this process holds more than 50 MB and less than 50 GB."""
    peak = peak_memory()
    assert peak is not None and 50e6 < peak < 50e9
