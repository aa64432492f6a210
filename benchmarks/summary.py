"""From the records of `speedup.py` to one row per set and method, with intervals."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

RESAMPLES = 10_000
PHASES = ("draft", "build", "verify", "commit")


class Interval(NamedTuple):
    """A value with the bounds of its 95 % interval."""

    value: float
    low: float
    high: float


def bootstrap(
    columns: Iterable[Iterable[float]], statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0
) -> Interval:
    """A pooled statistic and its 95 % percentile interval when prompts are drawn anew with replacement.

    Args:
        columns: one row of numbers per prompt, [n, k].
        statistic: maps sums over prompts, [..., k], to the statistic, [...].
    """
    table = np.asarray([list(row) for row in columns], dtype=np.float64)  # [n, k]
    assert table.ndim == 2 and len(table), "no prompts"
    dice = np.random.default_rng(seed)
    # How often each prompt is drawn is multinomial; the product with the table sums over the draws.
    draws = dice.multinomial(
        len(table), np.full(len(table), 1 / len(table)), size=RESAMPLES
    )  # [RESAMPLES, n]
    low, high = np.quantile(statistic(draws @ table), (0.025, 0.975))
    return Interval(float(statistic(table.sum(0))), float(low), float(high))


@dataclass(frozen=True)
class Row:
    """One method on one set, pooled over prompts: every token and every round counts the same.

    speedup, tau   with bootstrap 95 % intervals over prompts
    whole          speedup when prefill is counted too
    per_second     emitted tokens per second, prefill left out
    round_ms       mean milliseconds per round and phase
    same, ties     prompts with plain decoding's token ids; prompts whose first difference is a numeric tie
    """

    set: str
    grow: str
    budget: int
    prompts: int
    tokens: int
    speedup: Interval
    whole: float
    tau: Interval
    per_second: float
    round_ms: dict[str, float]
    same: int
    ties: int

    @property
    def name(self) -> str:
        """The method in words."""
        return "plain" if self.grow == "plain" else f"{self.grow} {self.budget}"

    @property
    def verdict(self) -> str | None:
        """A miss in words; None where the method is faster than plain decoding beyond its interval."""
        if self.grow == "plain" or self.speedup.low > 1.0:
            return None
        value, low, high = self.speedup
        what = "slower than plain decoding" if high < 1.0 else "not told apart from plain decoding"
        return f"{self.name} on {self.set}: {what} ({value:.2f}×, 95 % interval {low:.2f} to {high:.2f})"


def summarise(records: list[dict[str, Any]]) -> list[Row]:
    """One row per set and method of prompt records that share a run key, in the order of the records."""
    groups: dict[tuple[str, str, int], list[tuple[dict[str, Any], dict[str, Any]]]] = {}
    for record in records:
        plain = record["methods"][0]
        for method in record["methods"]:
            groups.setdefault((record["set"], method["grow"], method["budget"]), []).append((plain, method))
    return [_row(*key, pairs) for key, pairs in groups.items()]


def _row(name: str, grow: str, budget: int, pairs: list[tuple[dict[str, Any], dict[str, Any]]]) -> Row:
    methods = [method for _, method in pairs]
    seconds = sum(m["seconds"] for m in methods)
    tokens = sum(m["tokens"] for m in methods)
    rounds = sum(m["rounds"] for m in methods)
    speedup = bootstrap([(p["seconds"], p["tokens"], m["seconds"], m["tokens"]) for p, m in pairs], _speedup)
    whole = np.array(
        [
            [p["seconds"] + p["prefill"], p["tokens"], m["seconds"] + m["prefill"], m["tokens"]]
            for p, m in pairs
        ]
    )
    return Row(
        set=name,
        grow=grow,
        budget=budget,
        prompts=len(pairs),
        tokens=tokens,
        speedup=speedup,
        whole=float(_speedup(whole.sum(0))),
        tau=bootstrap(
            [(m["tokens"], m["rounds"]) for m in methods], lambda sums: sums[..., 0] / sums[..., 1]
        ),
        per_second=tokens / seconds,
        round_ms={phase: 1e3 * sum(m["split"][phase] for m in methods) / rounds for phase in PHASES},
        same=sum(m["divergence"] is None for m in methods),
        ties=sum(m["divergence"] is not None and m["divergence"]["tie"] for m in methods),
    )


def _speedup(sums: np.ndarray) -> np.ndarray:
    """From sums of plain decoding's seconds and tokens and the method's seconds and tokens, [..., 4]."""
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def prompt_records(records: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """The prompts of one run, each once (the newest, should there be two)."""
    found = {(r["set"], r["id"]): r for r in records if r["kind"] == "prompt" and r["key"] == key}
    return list(found.values())


def run_facts(records: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Provenance by run key; the newest start of each run."""
    return {r["key"]: r["run"] for r in records if r["kind"] == "run"}
