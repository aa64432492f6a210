"""The project's own scripts: the README's table, and what they call lossless."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jetspec.bench import summary
from jetspec.bench.record import Journal
from jetspec.bench.runs import runs_of
from jetspec.decode.compare import TIE_BELOW
from jetspec.decode.engine import Engine
from jetspec.errors import DataError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from tests.bench.tiny import facts, items, method
from tests.decode.tiny import tiny_target

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PROMPT = [3, 14, 15, 9, 26]


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of benchmarks/, which is no package: its scripts find each other as Python starts them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what the README says: stubs and trials stay out, the newest run wins, misses, differences and
    missing methods are written down, records of the older script count as well, and text around the markers
    stays."""
    table = script("table", monkeypatch)
    monkeypatch.setattr(summary, "RESAMPLES", 200)
    journal = Journal(tmp_path / "bench.jsonl")
    assert table.table(tmp_path) == table.NOTHING

    def add(key: str, date: str, records: list[dict[str, Any]], **arguments: Any) -> None:
        run = {**facts(**arguments), "date": date}
        for record in [{"kind": "run", "key": key, "run": run}, *records]:
            journal.append({**record, "key": key})

    add("stub", "2030-01-09", items(20, 9.0), heads={"jetspec-tree": {"name": "random"}})
    add("trial", "2030-01-08", items(3, 8.0))
    assert table.table(tmp_path) == table.NOTHING
    wrong = {"place": 0, "gap": 1.0, "tie": False}
    add("new", "2030-01-02", [*items(12, 0.5, divergence=[wrong]), *items(2, 6.0, "mbpp")],
        skipped={"mtp": "no head: none"})  # fmt: skip
    add("old", "2030-01-01", items(20, 7.0))
    text = table.table(tmp_path)
    assert "| method | gsm8k (12) |" in text and "0.50×/" in text
    assert "7.00×" not in text and "mbpp (" not in text
    assert "Left out: mbpp, 2 prompts only." in text
    assert "- Miss: jetspec-tree 8, T = 0, batch 1: slower than plain decoding on gsm8k" in text
    assert "and 12 DIFFER." in text and "| mtp | no head |" in text and "NOT LOSSLESS" in text
    heads = {name: {"name": name, "drafter": name} for name in ("jetspec", "dflash")}
    add("side by side", "2030-01-05", items(9, 3.0), heads=heads)
    add("older", "2030-01-04", items(9, 4.0), heads=heads)
    both = table.table(tmp_path)
    assert "0.50×/" in both and "All methods" in both and "3.00×/" in both and "4.00×/" not in both
    readme = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    once = table.put(readme, text, "README.md")
    assert once.startswith("before\n") and once.endswith("after\n") and text.strip() in once
    assert table.put(once, text, "README.md") == once
    with pytest.raises(DataError, match="must hold"):
        table.put("no markers", text, "README.md")


def test_each_part_says_where_it_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the sources, which stood in one sentence behind all tables; and answers that follow plain
    decoding's law, which were said to differ from its text."""
    table = script("table", monkeypatch)
    monkeypatch.setattr(summary, "RESAMPLES", 200)
    journal = Journal(tmp_path / "bench.jsonl")
    wrong = [{"place": 0, "gap": 1.0, "tie": False}]
    records = [{**record, "temperature": 1.0} for record in items(9, 2.0)]
    for record in records:
        counts = ([20], [10])
        record["methods"].append(method("dspark-rejection", 7, 1.0, *counts, divergence=wrong))
    for record in [{"kind": "run", "key": "k", "run": {**facts(), "dirty": True}}, *records]:
        journal.append(record)
    text = table.table(tmp_path)
    assert (
        "9 of 9 of these answers have plain decoding's token ids; dspark-rejection follows the same law"
        in text
    )
    assert "DIFFER" not in text
    assert (
        "Measured on a processor, 2 threads, torch 2, transformers 5, commit abc with changes, 2030-01-01."
        in text
    )
    assert "A plain round took 100.0 ms (median), one of jetspec-tree 8 135.0 ms (1.35×)." in text


def test_committed_records_stay_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the records of the older script, from before methods had names."""
    monkeypatch.setattr(summary, "RESAMPLES", 200)
    run = runs_of(Journal(BENCHMARKS / "results" / "speedup.jsonl").read())[0]
    rows = {row.name: row for row in summary.summarise(run.items)}
    assert list(rows) == ["plain", "jetspec-tree 8", "jetspec-tree 16", "jetspec-chain 7"]
    assert rows["jetspec-tree 8"].speedup.value == pytest.approx(2.07, abs=0.005)
    assert rows["jetspec-tree 8"].tau.value == pytest.approx(3.14, abs=0.005)


def test_scripts_share_the_prompts_of_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards forward.py and lossless.py: the same choice of questions as `jetspec bench`."""
    common = script("common", monkeypatch)
    lines = "\n".join(json.dumps({"id": f"q{n}", "turns": [f"text {n}", "later"]}) for n in range(10))
    (tmp_path / "gsm8k.jsonl").write_text(lines, "utf-8")
    found = common.read_set(tmp_path, "gsm8k", 4)
    assert [(q.id, q.text) for q in found] == [(f"q{n}", f"text {n}") for n in (0, 2, 5, 7)]
    run = common.provenance(BENCHMARKS / "forward.py", {"tokens": 1})
    assert run["script"] == "forward.py" and common.run_key(run) == common.run_key({**run, "date": "x"})


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=1.0, seed=4)], ids=["greedy", "sampled"]
)
def test_differences(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the excuse for ties: a wrong token with a clear gap is never excused, an answer that ends early
    neither, and behind an excused tie the rest is still compared."""
    lossless = script("lossless", monkeypatch)
    target, limits = tiny_target(), Limits(max_tokens=12, ignore_eos=True)

    def check(other: list[int]) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = lossless._differences(target, PROMPT, plain, other, sampling, limits)
        return found

    def decode(prompt: list[int], tokens: int) -> list[int]:
        follow = Limits(max_tokens=tokens, ignore_eos=True)
        return Engine(target, None, budget=0).generate([prompt], sampling, follow)[0].emitted

    plain = decode(PROMPT, 12)
    assert check(plain) == []
    assert [d["tie"] for d in check(plain[:7])] == [False]
    wrong = (plain[4] + 1) % 60
    other = [*plain[:4], wrong, *decode([*PROMPT, *plain[:4], wrong], 7)]
    (first,) = check(other)
    assert (first["place"], first["tie"]) == (4, False) and first["lag"] >= first["gap"] > 0
    monkeypatch.setitem(TIE_BELOW, target.dtype, first["lag"] * 1.01)  # now it counts as a tie …
    assert [(d["place"], d["tie"]) for d in check(other)] == [(4, True)]  # … and the rest agrees
    monkeypatch.setitem(TIE_BELOW, target.dtype, first["gap"] * 0.99)
    assert [d["tie"] for d in check(other)] == [False]
    monkeypatch.setitem(TIE_BELOW, target.dtype, first["lag"] * 1.01)
    second = [*other[:9], (other[9] + 1) % 60, *other[10:]]
    assert [d["place"] for d in check(second)][:2] == [4, 9]


def test_unfinished_runs_are_no_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the README against a run that was stopped, whose numbers were printed as those of all; small
    sets were left out, and another library's answers differed, without a word."""
    table = script("table", monkeypatch)
    monkeypatch.setattr(summary, "RESAMPLES", 200)
    path = tmp_path / "bench.jsonl"
    records = [*items(9, 2.0), *items(2, 2.0, "mbpp")]
    records[0]["methods"].append(
        method("hf-generate", 0, 1.0, [20], [20], divergence=[{"place": 0, "gap": 1.0, "tie": False}])
    )
    for planned in (12, 11):
        path.unlink(missing_ok=True)
        journal = Journal(path)
        journal.append({"kind": "run", "key": "k", "planned": planned, "done": 0, "run": facts()})
        for record in records:
            journal.append(record)
        if planned == 12:
            with pytest.raises(DataError, match=r"^run k is no table yet \(11 of 12 groups"):
                table.table(tmp_path)
    text = table.table(tmp_path)
    assert "Left out: mbpp, 2 prompts only." in text
    assert "1 of 1 answers of hf-generate differ: transformers rounds differently." in text


def test_losslessness_is_that_of_all_cases(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the README's sentence: of a part of the cases it named all combinations of their values, rows
    that differ in bits were no difference, and answers' length and plain decoding's batch were not said."""
    table = script("table", monkeypatch)
    arguments = {"head": {"name": "auto"}, "prompts": 6, "tokens": 96, "plain_batch": 16}
    run = {"kind": "run", "key": "k", "run": facts(**arguments)}
    case = {"kind": "case", "key": "k", "set": "a", "temperature": 0.0, "batch": 4, "prompts": 6, "tokens": 5}
    case |= {"ties": 0, "unexcused": 1, "rows_that_differ": 2}
    cases = [{**case, "set": name, "budget": budget} for name in "ab" for budget in (4, 8)]
    for few, start in ((cases[:3], run), (cases[:2], {**run, "planned": 4, "done": 0})):
        with pytest.raises(DataError, match=r"run k is no table yet .* of 4 cases"):
            table._checks([start, *few])
    text = table._lossless(*table._checks([{**run, "planned": 4, "done": 0}, *cases]))
    assert (
        "12 other differences" in text and "and 96 tokens" in text and "plain decoding with batch 16" in text
    )
