from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jetspec.bench import run as running
from jetspec.bench.methods import METHODS
from jetspec.bench.prompts import Question
from jetspec.bench.run import Settings, plan
from jetspec.bench.runs import choose_run, place_of, runs_of, volume
from jetspec.bench.summary import summarise
from jetspec.errors import DataError, OptionError, PromptError
from tests.bench.tiny import bench, facts, item, items, method, questions, tiny_target

HEADS = {"jetspec": "decoy", "dflash": "random"}
NAMES = ["jetspec-tree", "jetspec-accum", "dflash"]


def test_plan_mixes_the_sets() -> None:
    """Guards runs that are stopped early: one group of each set, then the next; groups of the batch size, the
    last one filled up; and seeds only where they matter."""
    target = tiny_target()
    asked = [*questions(3, "a"), *questions(2, "b")]
    settings = Settings(temperatures=(0.0, 1.0), seeds=(0, 1), batches=(1, 2), tokens=8)
    found = plan(asked, target, settings, lambda text: None)
    greedy = [item for item in found if item.temperature == 0.0]
    assert [(i.set, i.number) for i in greedy if len(i.prompts) == 1] == [
        ("a", 0), ("b", 0), ("a", 1), ("b", 1), ("a", 2)]  # fmt: skip
    pairs = [[q.id for q in i.questions] for i in greedy if len(i.prompts) == 2]
    assert pairs == [["a-0", "a-1"], ["b-0", "b-1"], ["a-2", "a-0"]]
    assert {item.seed for item in greedy} == {0}
    assert {item.seed for item in found if item.temperature == 1.0} == {0, 1}
    assert len({item.place for item in found}) == len(found)


def test_another_method_begins_each_time() -> None:
    """Guards sets of one group, where plain decoding began every time; whatever varies, the turn does."""
    target = tiny_target()
    one_each = [*questions(1, "a"), *questions(1, "b"), *questions(1, "c")]
    settings = Settings(temperatures=(1.0,), seeds=(0, 1), tokens=8)
    for asked, turns in ((one_each, [0, 1, 2, 1, 2, 3]), (questions(3), [0, 1, 2, 1, 2, 3])):
        found = plan(asked, target, settings, lambda text: None)
        assert [item.turn for item in found] == turns


def test_warm_up_has_the_samplings_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first measured group at T > 0: the warm-up was greedy only, so sampling and rejection ran
    cold in it."""
    seen: list[float] = []
    monkeypatch.setattr(running, "warm_up", lambda runner, ids, sampling, limits: seen.append(
        sampling.temperature))  # fmt: skip
    target, settings = tiny_target(), Settings(budgets=(4,), temperatures=(0.0, 1.0), tokens=4)
    made, _ = bench(target, tmp_path / "r.jsonl", ["dspark-rejection"], {"dspark": "decoy"}, settings)
    list(made.run(plan(questions(1), target, settings, lambda text: None)))
    assert seen == [0.0, 1.0, 1.0]  # plain decoding at both, rejection sampling above 0 only


def test_an_interrupted_fresh_run_goes_on(tmp_path: Path) -> None:
    """Guards --fresh against Ctrl-C: the same command without it found nothing missing, and old and new
    groups were mixed in one table, unfinished for ever; groups not asked for stay."""
    target, settings = tiny_target(), Settings(tokens=4)
    made, _ = bench(target, tmp_path / "r.jsonl", [], {}, settings)
    found = plan(questions(4), target, settings, lambda text: None)
    list(made.run(found))
    going = made.run(found[:3], fresh=True)
    next(going)
    going.close()
    assert made.done() == {found[0].place, found[3].place}
    list(made.run(found[1:3], done=1))
    (run,) = runs_of(made.journal.read())
    assert len(run.items) == 4 and run.unfinished is None and len(made.done()) == 4


def test_long_prompts_are_left_out_aloud() -> None:
    """Guards the end of the context: a prompt without room would end early and look fast."""
    told: list[str] = []
    target = tiny_target()
    settings = Settings(tokens=118)
    found = plan(questions(12), target, settings, told.append)
    lengths = {len(item.prompts[0]) for item in found}
    assert max(lengths) + 118 <= target.config.max_positions and len(found) + len(told) == 12
    with pytest.raises(PromptError, match="no prompt fits"):
        plan(questions(2), target, Settings(tokens=127), told.append)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"budgets": ()}, "--budgets is empty"),
        ({"budgets": (0,)}, "budget 0 is plain decoding"),
        ({"budgets": (5000,)}, "from 0"),
        ({"batches": (0,)}, "a batch must be from 1"),
        ({"temperatures": (-1.0,)}, "temperature must be"),
        ({"seeds": (-1,)}, "seed must be"),
        ({"tokens": 0}, "max_tokens must be"),
        ({"outside_prompts": -1}, "--outside-prompts"),
    ],
)
def test_settings_are_checked(changes: dict[str, Any], message: str) -> None:
    """Guards hours of measuring with a value that fails at its end."""
    with pytest.raises(OptionError, match=message):
        Settings(**changes)


def test_every_method_is_measured_and_lossless(tmp_path: Path) -> None:
    """Guards the whole run: T = 0 and 1, batch 1 and 2; each variant has one entry per group, and all texts
    are those of plain decoding although every drafter is wrong on purpose."""
    target = tiny_target()
    settings = Settings(budgets=(6, "auto"), temperatures=(0.0, 1.0), batches=(1, 2), tokens=7)
    made, skipped = bench(target, tmp_path / "r.jsonl", [*NAMES, "mtp"], HEADS, settings)
    found = plan(questions(2), target, settings, lambda text: None)
    assert [done.place for done in made.run(found)] == [item.place for item in found]
    (run,) = runs_of(made.journal.read())
    assert run.facts["arguments"]["skipped"] == skipped and set(skipped) == {"mtp"}
    assert len(run.items) == len(found) == 6
    for record in run.items:
        variants = [[m["method"], m["budget"]] for m in record["methods"]]
        assert variants == run.facts["arguments"]["methods"] and variants[0] == ["plain", 0]
        assert all(m["divergence"] == [None] * record["batch"] for m in record["methods"])
        assert all(m["tokens"] == record["methods"][0]["tokens"] for m in record["methods"])
        assert record["peak_memory"] > 0
    rows = summarise(run.items)
    assert all(row.same == row.prompts for row in rows)
    assert max(row.tau.value for row in rows if row.method == "jetspec-tree") > 1.5


def test_rejection_sampling_is_compared_in_law(tmp_path: Path) -> None:
    """Guards DSpark's published rule: it runs above T = 0 only, there beside the walk with the same head, its
    text is its own and no alarm, while the walk's is plain decoding's."""
    target = tiny_target()
    settings = Settings(budgets=(4,), temperatures=(0.0, 1.0), tokens=12)
    made, _ = bench(
        target, tmp_path / "r.jsonl", ["dspark", "dspark-rejection"], {"dspark": "decoy"}, settings
    )
    list(made.run(plan(questions(4), target, settings, lambda text: None)))
    rows = {(row.method, row.temperature): row for row in summarise(runs_of(made.journal.read())[0].items)}
    assert set(rows) == {("plain", 0.0), ("dspark", 0.0), ("plain", 1.0), ("dspark", 1.0),
                         ("dspark-rejection", 1.0)}  # fmt: skip
    rejection = rows["dspark-rejection", 1.0]
    assert rejection.in_law and rejection.same < 4 and rejection.broken == 0
    assert rows["dspark", 1.0].same == 4 and not rows["dspark", 1.0].in_law
    assert settings.reaches(METHODS["hf-generate"])
    assert not Settings(temperatures=(0.0,)).reaches(METHODS["dspark-rejection"])
    assert not Settings(batches=(2,)).reaches(METHODS["hf-generate"])


def test_a_second_start_measures_only_what_is_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards resuming after Ctrl-C: what was done is kept and found again, more prompts are added to
    it, other arguments start anew, and tau of a repeated run is the same."""
    monkeypatch.setattr("jetspec.bench.record.source_hash", lambda: "code")  # somebody may be editing it
    target = tiny_target()
    settings = Settings(tokens=5)
    path = tmp_path / "r.jsonl"

    def start(count: int, chosen: Settings = settings) -> tuple[Any, list[Any]]:
        made, _ = bench(target, path, NAMES, HEADS, chosen)
        found = plan(questions(count), target, chosen, lambda text: None)
        return made, [item for item in found if item.place not in made.done()]

    made, missing = start(3)
    measure, calls = type(made).measure, []

    def interrupted(self: Any, item: Any) -> dict[str, Any]:
        calls.append(item)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(self, item)

    monkeypatch.setattr(running.Bench, "measure", interrupted)
    with pytest.raises(KeyboardInterrupt):
        list(made.run(missing))
    assert len(start(3)[1]) == 2
    made, missing = start(4)
    list(made.run(missing))
    (run,) = runs_of(made.journal.read())
    assert len(run.items) == 4 and start(4)[1] == []
    assert len(start(4, Settings(tokens=6))[1]) == 4
    before = [row.tau.value for row in summarise(run.items)]
    list(made.run(plan(questions(4), target, settings, lambda text: None)))
    (again,) = runs_of(made.journal.read())
    assert len(again.items) == 4 and [row.tau.value for row in summarise(again.items)] == before


def test_differences_are_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the alarm: with a cache that keeps the wrong rows the run goes on and the record says where each
    answer parted; where one has ended, JSON's missing infinity is null."""
    from jetspec.target.cache import KVCache

    keep = KVCache.keep
    monkeypatch.setattr(KVCache, "keep", lambda self, key, path: keep(self, key, range(len(path))))
    target = tiny_target()
    settings = Settings(tokens=12)
    made, _ = bench(target, tmp_path / "r.jsonl", ["jetspec-tree"], HEADS, settings)
    list(made.run(plan(questions(3), target, settings, lambda text: None)))
    (run,) = runs_of(made.journal.read())
    rows = summarise(run.items)
    assert rows[1].broken > 0
    first = next(m["divergence"][0] for i in run.items for m in i["methods"][1:] if m["divergence"][0])
    assert set(first) == {"place", "plain", "other", "gap", "lag", "tie"} and not first["tie"]


def test_runs_of_several_files() -> None:
    """Guards which run is shown: the newest, or the one that is asked for; a key without records is no run,
    and the newest of two records of one group counts."""
    early = {**facts(), "date": "2029-01-01T00:00:00+0000"}
    records = [
        {"kind": "run", "key": "new", "run": facts()},
        {"kind": "run", "key": "old", "run": early},
        {"kind": "run", "key": "empty", "run": facts()},
        *({**record, "key": "old"} for record in items(2, 2.0)),
        *({**record, "key": "new"} for record in items(3, 2.0)),
        {**items(1, 4.0)[0], "key": "new"},
        {**items(1, 4.0)[0], "key": "unknown"},
    ]
    runs = runs_of(records)
    assert [run.key for run in runs] == ["old", "new"] and len(runs[1].items) == 3
    assert runs[1].items[0]["methods"][1]["seconds"] == pytest.approx(0.1 * 50 / 4)
    assert choose_run(runs, None, "x").key == "new" and choose_run(runs, "o", "x").key == "old"
    with pytest.raises(DataError, match="holds no run 'z'; valid: old, new"):
        choose_run(runs, "z", "x")
    with pytest.raises(DataError, match="holds no records"):
        choose_run([], None, "x")


def test_older_records_are_read() -> None:
    """Guards the committed speedup.jsonl: its builders are today's methods, and its numbers stay."""
    old = {
        "grow": "chain", "budget": 7, "tokens": 30, "finish": "stop", "seconds": 2.0, "prefill": 0.5,
        "split": dict.fromkeys(("draft", "build", "verify", "commit"), 0.5), "rounds": 10, "accepted": 20,
        "nodes": 70, "tau": 3.0, "divergence": None,
    }  # fmt: skip
    plain = {**old, "grow": "plain", "budget": 0, "seconds": 4.0, "rounds": 30, "nodes": 0}
    records = [
        {"kind": "run", "key": "k", "run": facts(temperature=1.0, seed=4)},
        {"kind": "prompt", "key": "k", "set": "gsm8k", "id": "g", "methods": [plain, old]},
    ]
    (run,) = runs_of(records)
    row = summarise(run.items)[1]
    assert (row.name, row.temperature) == ("jetspec-chain 7", 1.0)
    assert (row.tau.value, row.speedup.value) == (3.0, 2.0) and row.round_ms["verify"] == pytest.approx(50.0)


def test_place_of_a_record_is_that_of_its_item() -> None:
    """Guards resuming: a renamed field would measure everything again for ever."""
    found = plan(questions(1), tiny_target(), Settings(tokens=4), lambda text: None)[0]
    record = item(0, [method("plain", 0, 1.0, [4], [4])], "own", digest=found.digest)
    assert place_of(record) == found.place


def test_prompts_of_one_text_and_empty_ones() -> None:
    """Guards the number of prompts: one text under two ids was measured twice and then counted once, in
    silence; and an empty prompt ended the run without a name."""
    target, told = tiny_target(), list[str]()
    asked = [Question("own", name, ({"role": "user", "content": "same"},)) for name in ("a", "b")]
    found = plan([*asked, *questions(1)], target, Settings(tokens=4), told.append)
    assert [item.questions[0].id for item in found] == ["a", "own-0"]
    assert told == ["b of own is left out: it has the text of a"]
    empty = Question("own", "c", ({"role": "user", "content": ""},))
    with pytest.raises(PromptError, match="c of own is an empty prompt"):
        plan([*asked, empty], target, Settings(tokens=4), told.append)


def test_no_prompt_vanishes_between_edits_of_a_file() -> None:
    """Guards the merging of records: a line without an id that was edited and edited back had three
    measurements under one id, of which the last one hid the others, and the run lacked a prompt."""
    first, other, third = items(3, 2.0)
    edited = [{**other, "ids": first["ids"]}, {**third, "ids": first["ids"]}]
    (run,) = runs_of([{"kind": "run", "key": "k", "run": facts()}, first, *edited])
    assert [place_of(item)[-1] for item in run.items] == ["gsm8k-0", "gsm8k-1", "gsm8k-2"]
    assert volume(run).startswith("3 prompts")


def test_a_stopped_run_says_so(tmp_path: Path) -> None:
    """Guards tables of an interrupted run, which showed fewer groups without a word."""
    target, settings = tiny_target(), Settings(tokens=4)
    made, _ = bench(target, tmp_path / "r.jsonl", [], {}, settings)
    found = plan(questions(4), target, settings, lambda text: None)
    going = made.run(found)
    next(going), next(going)
    going.close()
    (run,) = runs_of(made.journal.read())
    assert run.unfinished == "2 of 4 groups of prompts, unfinished" and run.unfinished in volume(run)
    list(made.run(found[2:], done=2))
    (run,) = runs_of(made.journal.read())
    assert run.unfinished is None and (run.planned, run.done) == (4, 4)
