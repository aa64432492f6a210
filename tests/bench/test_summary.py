from __future__ import annotations

import json

import numpy as np
import pytest

from jetspec.bench import summary
from jetspec.bench.summary import POOLED, bootstrap, summarise
from tests.bench.tiny import item, items, method


def test_interval_covers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the bootstrap: 95 % intervals of a pooled ratio must cover the truth in about 95 % of samples.

    Percentile intervals of 40 draws cover a little less; with 200 samples the count is below 0.88 by chance
    less than once in a thousand. The seed is fixed.
    """
    monkeypatch.setattr(summary, "RESAMPLES", 500)  # ten thousand would take a minute
    dice = np.random.default_rng(5)
    hits = 0
    for _ in range(200):
        lengths = dice.integers(20, 128, 40).astype(float)
        seconds = lengths * dice.normal(2.0, 0.3, 40)
        found = bootstrap(zip(seconds, lengths, strict=True), lambda sums: sums[..., 0] / sums[..., 1])
        assert found.low <= found.value <= found.high
        hits += found.low <= 2.0 <= found.high
    assert 0.88 <= hits / 200 <= 0.99


def test_pooling() -> None:
    """Guards the definitions: speedup and tau are ratios of sums, tau per answer is a mean of ratios, the
    median weighs groups alike, prefill counts only where it is said to, and a tie is not identical."""
    records = items(2, 2.0)
    records[1]["methods"][1]["divergence"] = [{"place": 3, "gap": 1e-5, "tie": True}]
    records[1]["methods"][1]["seconds"] *= 2.0
    plain, row = summarise(records)
    assert plain.speedup.value == 1.0 and plain.tau.value == 1.0 and plain.verdict is None
    assert row.speedup.value == pytest.approx(10.1 / (2.5 + 5.1))
    assert row.median == pytest.approx((2.0 + 1.0) / 2)
    assert row.tau.value == pytest.approx(101 / 40)
    assert row.tau_response.value == pytest.approx((50 / 20 + 51 / 20) / 2)
    assert row.whole == pytest.approx((10.1 + 2.0) / (7.6 + 2.0))
    assert (row.same, row.ties, row.broken) == (1, 1, 0)
    assert row.nodes_per_token == pytest.approx(8 * 40 / 101)
    slow = summarise(items(3, 0.8))[1]
    assert slow.verdict is not None and "slower than plain decoding (0.80×" in slow.verdict


def test_acceptance_by_depth() -> None:
    """Guards the two conventions: S_k counts all rounds, also those that did not draft so deep; a_k is
    S_k / S_(k-1); and tau is 1 + the sum of S_k where no answer was cut short."""
    tree = method("jetspec-tree", 8, 1.0, [20], [10], by_depth=[[10, 6], [8, 3], [2, 1]])
    row = summarise([item(0, [method("plain", 0, 2.0, [20], [20]), tree])])[1]
    assert row.survival == [0.6, 0.3, 0.1]
    assert row.conditional == pytest.approx([0.6, 0.5, 1 / 3])
    assert row.tau.value == pytest.approx(1.0 + sum(row.survival))


def test_sets_are_pooled_and_ordered() -> None:
    """Guards the table's columns: sets as in the papers, own ones after them, all of them last; the pooled
    row is over prompts and no mean of the sets; one set alone has no pooled row."""
    rows = summarise([*items(1, 4.0, "mine"), *items(3, 2.0, "math500"), *items(1, 2.0, "gsm8k")])
    assert list(dict.fromkeys(row.set for row in rows)) == ["gsm8k", "math500", "mine", POOLED]
    pooled = rows[-1]
    assert pooled.prompts == 5 and 2.0 < pooled.speedup.value < 2.5
    assert {row.set for row in summarise(items(2, 2.0))} == {"gsm8k"}


def test_seeds_of_a_prompt_are_no_independent_prompts() -> None:
    """Guards the intervals at T > 0: ten seeds of two prompts vary like two prompts."""

    def records(seeds: int) -> list[dict[str, object]]:
        return [
            {**record, "temperature": 1.0, "seed": seed}
            for seed in range(seeds)
            for record in (items(1, 1.5)[0], items(2, 3.0)[1])
        ]

    once, often = summarise(records(1))[1], summarise(records(10))[1]
    assert (often.prompts, often.answers, often.groups) == (2, 20, 2)
    assert often.speedup == pytest.approx(once.speedup)


def test_outside_methods_are_compared_on_their_own_prompts() -> None:
    """Guards baselines that decode only some prompts: the speedup is against plain decoding of those, without
    the first token, which came with prefill."""
    records = items(4, 2.0)
    records[0]["methods"].append(
        method("hf-generate", 0, 9.8, [50], [50], clocked=49, split={}, split_ms={}, cache_bytes=None)
    )
    row = next(row for row in summarise(records) if row.outside)
    assert row.prompts == 1 and row.speedup.value == pytest.approx((5.0 / 50) / (9.8 / 49))
    assert row.round_ms == {} and row.cache_bytes is None
    records[0]["methods"][-1].update(seconds=0.0, clocked=0)  # an answer of one token
    assert next(row for row in summarise(records) if row.outside).speedup.value == 0.0


def test_rows_are_json() -> None:
    """Guards --json: no NaN, intervals as lists, the verdict in words."""
    values = json.loads(json.dumps(summarise(items(2, 0.5))[1].values(), allow_nan=False))
    assert values["speedup"][0] == pytest.approx(0.5) and len(values["tau"]) == 3
    assert values["name"] == "jetspec-tree 8" and "slower" in values["verdict"]


def test_one_group_of_prompts_decides_nothing() -> None:
    """Guards against an interval of no width: one group drawn anew is always itself, and the table said for
    certain that a method is slower. Without an interval there is no verdict, and JSON has null."""
    row = summarise(items(1, 0.5))[1]
    assert not row.speedup.known and not row.tau.known and row.verdict is None and row.groups == 1
    values = json.loads(json.dumps(row.values(), allow_nan=False))
    assert values["speedup"] == [pytest.approx(0.5), None, None] and values["verdict"] is None
    assert summarise(items(2, 0.5))[1].speedup.known


def test_prompts_that_fill_up_a_batch_count_once() -> None:
    """Guards the counts in brackets: one prompt three times in a batch was three prompts."""
    counts = ([4, 5, 4], [4, 5, 4])
    methods = [method("plain", 0, 1.0, *counts), method("jetspec-tree", 8, 1.0, *counts)]
    old = item(0, methods, batch=3, ids=["a", "b", "a"])
    for record in (old, {**old, "ids": ["x", "x", "x"], "digests": ["1", "2", "1"]}):
        row = summarise([record])[1]
        assert (row.prompts, row.answers, row.same) == (2, 3, 3)


def test_prompts_are_told_apart_by_their_text() -> None:
    """Guards the number of prompts: three texts under one id were one prompt, and one group to draw from."""
    records = [{**record, "ids": ["a"]} for record in items(3, 2.0)]
    row = summarise(records)[1]
    assert (row.prompts, row.groups) == (3, 3) and row.speedup.known
