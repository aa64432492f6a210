"""What the measurement scripts compute from what they measured, and what they call lossless."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from jetspec.decode.compare import TIE_BELOW
from jetspec.decode.engine import Engine
from jetspec.errors import DataError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from tests.decode.tiny import tiny_target

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"
PROMPT = [3, 14, 15, 9, 26]


def script(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A module of benchmarks/, which is no package: its scripts find each other as Python starts them."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module(name)


def test_questions_are_spread_over_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the stated rule of choosing prompts: sets are sorted by topic, so the first n would be a
    biased sample; and U+2028 inside a JSON string is no line end."""
    common = script("common", monkeypatch)
    lines = [
        json.dumps({"id": f"q{n}", "turns": [f"a\u2028{n}", "later"]}, ensure_ascii=False) for n in range(10)
    ]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    assert [q.id for q in common.read_set(tmp_path, "gsm8k", 4)] == ["q0", "q2", "q5", "q7"]
    assert [q.text for q in common.read_set(tmp_path, "gsm8k", 99)] == [f"a\u2028{n}" for n in range(10)]
    (tmp_path / "mbpp.jsonl").write_text('{"turns": []}\n', "utf-8")
    with pytest.raises(DataError, match="line 1"):
        common.read_set(tmp_path, "mbpp", 1)


def test_journal_survives_a_killed_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards resuming: half a line left by a killed process must neither stop the next run nor swallow its
    first record."""
    common = script("common", monkeypatch)
    journal = common.Journal(tmp_path / "new" / "x.jsonl")
    assert journal.read() == []
    journal.append({"n": 1})
    with journal.path.open("a") as file:
        file.write('{"n": ')
    journal.append({"n": 2})
    assert journal.read() == [{"n": 1}, {"n": 2}]


def test_run_key_tells_runs_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards resuming against mixing: only the date and the machine's load may differ within one run."""
    common = script("common", monkeypatch)
    facts = common.provenance(BENCHMARKS / "speedup.py", {"tokens": 128})
    assert common.run_key({**facts, "date": "x", "load": 9.0}) == common.run_key(facts)
    for other in ({"commit": "0"}, {"source": "0"}, {"threads": 99}, {"arguments": {"tokens": 64}}):
        assert common.run_key({**facts, **other}) != common.run_key(facts)


def test_interval_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bootstrap: 95 % intervals of a pooled ratio must cover the truth in about 95 % of samples.

    Percentile intervals of 40 draws cover a little less; with 200 samples the count is below 0.88 by chance
    less than once in a thousand. The seed is fixed.
    """
    summary = script("summary", monkeypatch)
    monkeypatch.setattr(summary, "RESAMPLES", 500)  # ten thousand would take a minute
    dice = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        lengths = dice.integers(20, 128, 40).astype(float)
        seconds = lengths * dice.normal(2.0, 0.3, 40)
        found = summary.bootstrap(
            zip(seconds, lengths, strict=True), lambda sums: sums[..., 0] / sums[..., 1]
        )
        assert found.low <= found.value <= found.high
        hits += found.low <= 2.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def method(
    grow: str, budget: int, seconds: float, tokens: int, rounds: int, **changes: Any
) -> dict[str, Any]:
    """One method's share of a record of speedup.py."""
    return {
        "grow": grow,
        "budget": budget,
        "tokens": tokens,
        "finish": "length",
        "seconds": seconds,
        "prefill": 1.0,
        "split": dict.fromkeys(("draft", "build", "verify", "commit"), seconds / 4),
        "rounds": rounds,
        "accepted": tokens - rounds,
        "nodes": budget * rounds,
        "divergence": None,
        **changes,
    }


def prompts(count: int, speedup: float, **changes: Any) -> list[dict[str, Any]]:
    """Records of `count` prompts, decoded plainly and with one tree."""
    return [
        {
            "kind": "prompt",
            "key": "k",
            "set": "gsm8k",
            "id": f"q{n}",
            "methods": [
                method("plain", 0, 0.1 * (50 + n), 50 + n, 50 + n),
                method("best-first", 8, 0.1 * (50 + n) / speedup, 50 + n, 20, **changes),
            ],
        }
        for n in range(count)
    ]


def test_pooling(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the definitions: speedup and tau are ratios of sums, prefill counts only where it is said to,
    and a tie is not an identical answer."""
    summary = script("summary", monkeypatch)
    records = prompts(2, 2.0)
    records[1]["methods"][1]["divergence"] = {"place": 3, "gap": 1e-5, "tie": True}
    plain, row = summary.summarise(records)
    assert plain.speedup.value == 1.0 and plain.tau.value == 1.0 and plain.verdict is None
    assert row.speedup.value == pytest.approx(2.0) and row.verdict is None
    assert row.tau.value == pytest.approx(101 / 40)
    assert row.whole == pytest.approx((10.1 + 2.0) / (5.05 + 2.0))
    assert (row.same, row.ties) == (1, 1)
    slow = summary.summarise(prompts(3, 0.8))[1]
    assert "slower than plain decoding (0.80×" in slow.verdict


def test_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what the README says: stubs and trials stay out, the newest run wins, misses and differences are
    written down, and text around the markers stays."""
    table = script("table", monkeypatch)
    common = script("common", monkeypatch)
    facts = common.provenance(BENCHMARKS / "speedup.py", {})
    settings = {
        "head": {"name": "auto"},
        "temperature": 0.0,
        "tokens": 128,
        "dtype": "float32",
        "clock": "first",
    }
    journal = common.Journal(tmp_path / "speedup.jsonl")
    assert table.table(tmp_path) == table.NOTHING

    def add(key: str, date: str, records: list[dict[str, Any]], **changes: Any) -> None:
        run = {**facts, "date": date, "arguments": {**settings, **changes}}
        for record in [{"kind": "run", "key": key, "run": run}, *records]:
            journal.append({**record, "key": key})

    add("stub", "2030-01-09", prompts(20, 9.0), head={"name": "random"})
    add("trial", "2030-01-08", prompts(3, 8.0))
    assert table.table(tmp_path) == table.NOTHING
    add("new", "2030-01-02", prompts(12, 0.5, divergence={"place": 0, "gap": 1.0, "tie": False}))
    add("old", "2030-01-01", prompts(20, 7.0))
    text = table.table(tmp_path)
    assert "| gsm8k (12) | 0.50× (" in text and "7.00×" not in text
    assert "Miss: best-first 8 on gsm8k: slower than plain decoding" in text and "12 DIFFER" in text
    readme = f"before\n{table.BEGIN}\nold\n{table.END}\nafter\n"
    once = table.put(readme, text, "README.md")
    assert once.startswith("before\n") and once.endswith("after\n") and text.strip() in once
    assert table.put(once, text, "README.md") == once
    with pytest.raises(DataError, match="must hold"):
        table.put("no markers", text, "README.md")


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
