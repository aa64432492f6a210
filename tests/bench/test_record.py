from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.bench import record
from jetspec.bench.record import Journal, footer, peak_memory, provenance, run_key


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
    with journal.path.open("a") as file:
        file.write("[1]\n")
    assert journal.read() == [{"kind": "a"}, {"kind": "b"}]
    assert [text.split(" is ")[0] for text in told] == ["x.jsonl line 2", "x.jsonl line 4"]


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
