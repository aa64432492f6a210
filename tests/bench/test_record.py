from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from jetspec.bench import record
from jetspec.bench.record import Journal, footer, peak_memory, provenance, run_key
from jetspec.errors import DataError
from tests.bench.tiny import facts, items


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
        ('{"step": 1, "lo', "line 1 is no record of jetspec bench: expected a whole object"),
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


@pytest.mark.parametrize("before", [b"", b'{"kind": "a"}\n'], ids=["only", "last"])
@pytest.mark.parametrize("cut", [b'{"kind": "it', '{"kind": "é'.encode()[:-1]], ids=["json", "letter"])
def test_a_line_may_be_cut_anywhere(tmp_path: Path, before: bytes, cut: bytes) -> None:
    """Guards the promise that a killed process breaks no file: a first line that was cut made it another kind
    of file, and one that was cut inside of a letter could not be decoded."""
    path = tmp_path / "x.jsonl"
    path.write_bytes(before + cut)
    told: list[str] = []
    assert len(Journal(path, told.append).read()) == len(before.splitlines())
    assert len(told) == 1 and "cut off and left out" in told[0]


def _without(record: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in record.items() if name not in names}


_ITEM = items(1, 2.0)[0]
_PLAIN, _TREE = _ITEM["methods"]
_RUN = {"kind": "run", "key": "k", "run": facts()}


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({**_ITEM, "methods": []}, "methods"),
        ({**_ITEM, "methods": [_TREE]}, "methods: plain"),
        (_without(_ITEM, "digest"), "digest"),
        ({**_ITEM, "ids": ["a", "b"]}, "methods: tokens"),
        *(
            ({**_ITEM, "methods": [_PLAIN, _without(_TREE, name)]}, f"methods: {name}")
            for name in ("seconds", "split", "nodes")
        ),
        ({**_ITEM, "methods": [_PLAIN, {**_TREE, "rounds": [0]}]}, "methods: rounds"),
        ({**_ITEM, "methods": [_PLAIN, {**_TREE, "divergence": [{"place": 1}]}]}, "methods: divergence"),
        ({**_RUN, "run": _without(facts(), "date")}, "run"),
        ({**_RUN, "run": "text"}, "run"),
        ({"kind": "prompt", "key": "k", "set": "s", "id": "i", "methods": [{"grow": "plain"}]}, "methods: "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_odd_records_are_left_out(tmp_path: Path, record: dict[str, Any], wrong: str) -> None:
    """Guards tables, plots and reports against tracebacks: such a line is told of, the others are read."""
    path = tmp_path / "x.jsonl"
    path.write_text("\n".join(map(json.dumps, [_RUN, record, _ITEM])), "utf-8")
    told: list[str] = []
    assert Journal(path, told.append).read() == [_RUN, _ITEM]
    assert len(told) == 1 and f"x.jsonl line 2 is left out: expected a `{wrong}" in told[0]


def test_a_device_is_no_file_of_records() -> None:
    """Guards the memory: /dev/full gives zeros without an end; and hours of measuring, which /dev/null keeps
    nothing of."""
    for device in ("/dev/full", "/dev/null", "/"):
        with pytest.raises(DataError, match=f"{device} is no regular file; give a file of JSON lines"):
            Journal(Path(device)).read()
