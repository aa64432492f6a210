from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

import pytest

from jetspec.budget import choose
from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.choose import check_budget_option, knowledge_of, make_budget
from jetspec.budget.fixed import DEFAULT_BUDGET, FixedBudget
from jetspec.budget.profile import Measurement, measure
from jetspec.budget.store import CostFile, cost_facts
from jetspec.draft.stubs import Decoy, Off, Random
from jetspec.errors import OptionError
from jetspec.tree import GROW
from tests.budget.world import Machine
from tests.decode.tiny import VOCAB, shared_target

GROWER = GROW["best-first"]
FACTS = {"cpu": "test", "threads": 1}


def test_a_file_comes_back(cost_folder: Path) -> None:
    """Guards keeping: the next process finds what this one measured, and nothing else is left behind."""
    file = CostFile(FACTS)
    assert file.load() is None
    assert file.save(Machine().model(), {"greedy": [0.5, 0.25]})
    kept = file.load()
    assert kept is not None and kept.gains == {"greedy": [0.5, 0.25]}
    assert kept.cost.verify.at(1) == pytest.approx(Machine().model().verify.at(1))
    assert [path.name for path in cost_folder.iterdir()] == [file.path.name]
    file.remove()
    assert file.load() is None and not list(cost_folder.iterdir())


@pytest.mark.parametrize("text", ["", "{", "null", "[1]", '{"format": 1}', "\x00\xff", "[" * 100_000])
def test_a_damaged_file_counts_as_none(text: str) -> None:
    """Guards against a crash, or a budget by chance, after a disk was full or a file was edited."""
    file = CostFile(FACTS)
    file.save(Machine().model(), {})
    file.path.write_bytes(text.encode("latin-1"))
    assert file.load() is None


def test_a_number_without_end_counts_as_damage() -> None:
    """Guards against an overflow, which no other damage raises: integers of JSON may have 400 digits."""
    file = CostFile(FACTS)
    file.save(Machine().model(), {"greedy": [0.125]})
    text = file.path.read_text()
    assert "0.125" in text
    file.path.write_text(text.replace("0.125", "9" * 400))
    assert file.load() is None


def test_another_machines_file_counts_as_none() -> None:
    """Guards against costs that were copied along with a home folder."""
    file, other = CostFile(FACTS), CostFile({**FACTS, "threads": 2})
    assert file.path != other.path
    file.save(Machine().model(), {})
    other.path.write_text(file.path.read_text())
    assert other.load() is None
    values = json.loads(file.path.read_text())
    file.path.write_text(json.dumps({**values, "format": 99}))
    assert file.load() is None


def _write_often(number: int) -> bool:
    file = CostFile(FACTS)
    model = Machine(draft=1e-3 * (number + 1)).model()
    return all(file.save(model, {}) and file.load() is not None for _ in range(40))


def test_processes_that_write_at_once_never_meet_half_a_file() -> None:
    """Guards concurrency: four processes write and read one file, and always find a whole one."""
    with multiprocessing.get_context("fork").Pool(4) as pool:
        assert all(pool.map(_write_often, range(4)))
    kept = CostFile(FACTS).load()
    assert kept is not None and round(1e3 * kept.cost.draft.at(1)) in (1, 2, 3, 4)


def test_a_cache_that_cannot_be_written_stops_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a read-only home: costs are measured at every start instead."""
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "file"))
    assert not CostFile(FACTS).save(Machine().model(), {})
    assert CostFile(FACTS).load() is None
    monkeypatch.setenv("JETSPEC_CACHE", "~nobody-of-this-name/cache")
    assert not CostFile(FACTS).save(Machine().model(), {})
    CostFile(FACTS).remove()


def test_facts_tell_what_time_depends_on() -> None:
    """Guards the key: other drafters, builders and dtypes have files of their own."""
    target = shared_target()
    drafters = [Random(0, VOCAB), Decoy(target), Decoy(target, depth=9)]
    keys = {CostFile(cost_facts(target, drafter, GROWER)).key for drafter in drafters}
    keys |= {CostFile(cost_facts(target, drafters[0], GROW["chain"])).key}
    assert len(keys) == 4
    assert cost_facts(target, drafters[0], GROWER) == cost_facts(target, Random(0, VOCAB), GROWER)


@pytest.mark.parametrize("grow", GROW)
def test_every_builder_and_stub_can_be_measured(grow: str) -> None:
    """Guards the measurement: it runs on real parts, gives curves, and leaves nothing in their caches."""
    target = shared_target()
    drafter = Decoy(target, depth=3, width=3)
    measured = measure(target, drafter, GROW[grow], seconds=0.2)
    assert measured.cost.plain([64]) > 0 and measured.cost.draft.at(1) > 0
    assert drafter.cache.bytes == 0


def test_what_is_kept_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards start-up: a second process (another drafter object) reads the file; what a damaged file holds is
    measured again."""
    target = shared_target()
    calls: list[int] = []

    def fake(*parts: object) -> Measurement:
        calls.append(1)
        return Measurement(Machine().model(), 1.0, False)

    monkeypatch.setattr(choose, "measure", fake)
    first = Random(0, VOCAB)
    assert knowledge_of(target, first, GROWER) is knowledge_of(target, first, GROWER)
    knowledge_of(target, Random(0, VOCAB), GROWER)
    assert len(calls) == 1
    file = CostFile(cost_facts(target, first, GROWER))
    file.path.write_text("{")
    knowledge_of(target, Random(0, VOCAB), GROWER)
    assert len(calls) == 2


def test_where_measuring_fails_the_budget_is_fixed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards machines where something in the measurement does not work: they decode with a fixed budget, and
    say so once."""

    def broken(*parts: object) -> Measurement:
        raise RuntimeError("no such\nkernel")

    monkeypatch.setattr(choose, "measure", broken)
    target, drafter = shared_target(), Random(0, VOCAB)
    for _ in range(2):
        budget = make_budget("auto", target, drafter, GROWER)
        assert isinstance(budget, FixedBudget) and budget.nodes == DEFAULT_BUDGET
    (line,) = capsys.readouterr().err.splitlines()
    assert "no such kernel" in line


def test_options_for_a_budget() -> None:
    """Guards what users may write: auto, a number, a policy. The rest is refused with what is valid."""
    target = shared_target()
    assert isinstance(make_budget("auto", target, Random(0, VOCAB), GROWER), AdaptiveBudget)
    off = make_budget("auto", target, Off(), GROWER)
    assert isinstance(off, FixedBudget) and off.nodes == 0, "without a drafter nothing is measured"
    own = FixedBudget(3)
    assert make_budget(own, target, Off(), GROWER) is own
    for wrong in ("8", "fast", -1, 1025, 1.5, True, None):
        with pytest.raises(OptionError, match="auto"):
            check_budget_option(wrong)
