"""From the records of a run to one row per method, budget and set, with intervals."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np

from jetspec.bench.clock import PHASES
from jetspec.bench.methods import METHODS, PLAIN
from jetspec.bench.prompts import SETS
from jetspec.bench.runs import prompts_of

RESAMPLES = 10_000
POOLED = "all"  # the set that stands for all of them
ENOUGH = 5  # groups of prompts; an interval over fewer is rough


class Interval(NamedTuple):
    """A value with the bounds of its 95 % interval, which are NaN where there is none."""

    value: float
    low: float
    high: float

    @property
    def known(self) -> bool:
        """Whether there is an interval."""
        return not math.isnan(self.low)


def bootstrap(
    columns: Iterable[Iterable[float]], statistic: Callable[[np.ndarray], np.ndarray], seed: int = 0
) -> Interval:
    """A pooled statistic and its 95 % percentile interval when prompts are drawn anew with replacement.
    A single prompt has no interval: drawn anew it is always itself, which says nothing about others.

    Args:
        columns: one row of numbers per prompt, [n, k].
        statistic: maps sums over prompts, [..., k], to the statistic, [...].
    """
    table = np.asarray([list(row) for row in columns], dtype=np.float64)  # [n, k]
    assert table.ndim == 2 and len(table), "no prompts"
    value = float(statistic(table.sum(0)))
    if len(table) == 1:
        return Interval(value, math.nan, math.nan)
    dice = np.random.default_rng(seed)
    # How often each prompt is drawn is multinomial; the product with the table sums over the draws.
    draws = dice.multinomial(
        len(table), np.full(len(table), 1 / len(table)), size=RESAMPLES
    )  # [RESAMPLES, n]
    low, high = np.quantile(statistic(draws @ table), (0.025, 0.975))
    return Interval(value, float(low), float(high))


@dataclass(frozen=True)
class Row:
    """One method on one set (or on all of them), pooled over prompts: every token and round counts the same.

    prompts        different ones; answers: compared, one per prompt and seed, and per batch that it fills up
    groups         of prompts decoded as one batch, different ones, which intervals are drawn from
    speedup, tau   with bootstrap 95 % intervals over groups of prompts
    median         of the groups' speedups, each group of prompts weighing the same
    tau_response   mean over answers of each answer's tau, with its interval
    whole          speedup when prefill is counted too
    per_second     emitted tokens per second, prefill left out
    survival       acceptance by depth, S_d: share of all rounds that accepted depth d, from 1 on; tau is
                   about 1 + their sum
    conditional    conditional acceptance, a_d = S_d / S_(d-1), with S_0 = 1
    nodes_per_token drafted nodes verified per emitted token
    round_ms       mean milliseconds of a step (one target forward) per phase; round_ms_median: medians
    same, ties     answers with plain decoding's token ids; answers whose first difference is a numeric tie
    cache_bytes    most memory of keys and values in any group
    """

    set: str
    temperature: float
    batch: int
    method: str
    budget: int | str  # "auto", or drafted nodes
    prompts: int
    answers: int
    groups: int
    tokens: int
    speedup: Interval
    median: float
    whole: float
    tau: Interval
    tau_response: Interval
    per_second: float
    survival: list[float]
    conditional: list[float]
    nodes_per_token: float
    round_ms: dict[str, float]
    round_ms_median: dict[str, float]
    step_ms: float
    same: int
    ties: int
    cache_bytes: int | None

    @property
    def name(self) -> str:
        """The method and its budget in words."""
        return f"{self.method} {self.budget}" if self.budget else self.method

    @property
    def fixed(self) -> int:
        """Drafted nodes of a fixed budget; 0 for plain decoding and for a budget that follows the cost."""
        return self.budget if isinstance(self.budget, int) else 0

    @property
    def in_law(self) -> bool:
        """Whether it follows plain decoding's law but not its text, so that texts are not compared."""
        return self.method in METHODS and METHODS[self.method].in_law and self.temperature > 0.0

    @property
    def broken(self) -> int:
        """Answers that differ from plain decoding by more than rounding, though they should not."""
        return 0 if self.in_law else self.answers - self.same - self.ties

    @property
    def outside(self) -> bool:
        """Whether another library decoded."""
        return self.method in METHODS and METHODS[self.method].outside

    @property
    def where(self) -> str:
        """Set, temperature and batch in words, as far as they are not the usual ones."""
        more = [f"T = {self.temperature:g}"] if self.temperature else []
        more += [f"batch {self.batch}"] if self.batch != 1 else []
        return ", ".join(["all sets" if self.set == POOLED else self.set, *more])

    @property
    def verdict(self) -> str | None:
        """A miss in words; None where the method is faster than plain decoding beyond its interval, or where
        one group of prompts says nothing about others."""
        if self.method == PLAIN or not self.speedup.known or self.speedup.low > 1.0:
            return None
        value, low, high = self.speedup
        what = "slower than plain decoding" if high < 1.0 else "not told apart from plain decoding"
        return f"{self.name} on {self.where}: {what} ({value:.2f}×, 95 % interval {low:.2f} to {high:.2f})"

    def values(self) -> dict[str, Any]:
        """For JSON, which has no NaN: bounds that are not known are null."""
        bounds = {
            name: [None if math.isnan(bound) else bound for bound in getattr(self, name)]
            for name in ("speedup", "tau", "tau_response")
        }
        return {**asdict(self), **bounds, "name": self.name, "verdict": self.verdict}


def summarise(items: Many[dict[str, Any]]) -> list[Row]:
    """One row per temperature, batch, set and method; where there are several sets, also pooled over them.

    In the order: temperature, batch, set as in the papers and the pooled one last, method, budget.
    """
    groups: dict[tuple[float, int, int, str, int, int | str], list[_Pair]] = {}
    sets = _set_order(items)
    for item in items:
        plain = item["methods"][0]
        for method in item["methods"]:
            pair = _Pair(item, plain, method)
            for name in (item["set"], POOLED) if len(sets) > 1 else (item["set"],):
                number = sets.index(name) if name != POOLED else len(sets)
                known = list(METHODS).index(method["method"]) if method["method"] in METHODS else len(METHODS)
                key = (item["temperature"], item["batch"], number, method["method"], known, method["budget"])
                groups.setdefault(key, []).append(pair)
    # "auto" comes behind all numbers
    ordered = sorted(groups, key=lambda key: (key[:3], key[4], key[3], isinstance(key[5], str), key[5]))
    return [_row([*sets, POOLED][key[2]], groups[key]) for key in ordered]


class _Pair(NamedTuple):
    item: dict[str, Any]
    plain: dict[str, Any]
    method: dict[str, Any]

    @property
    def speeds(self) -> tuple[float, float, float, float]:
        """Plain decoding's seconds and tokens on the clock, the method's seconds and tokens."""
        return (self.plain["seconds"], self.plain["clocked"], self.method["seconds"], self.method["clocked"])

    @property
    def whole(self) -> tuple[float, float, float, float]:
        """The same with prefill, and all tokens."""
        sides = []
        for side in (self.plain, self.method):
            sides += [side["seconds"] + side["prefill"], sum(side["tokens"])]
        return (sides[0], sides[1], sides[2], sides[3])


def _row(name: str, pairs: list[_Pair]) -> Row:
    methods = [pair.method for pair in pairs]
    steps, rounds = sum(m["steps"] for m in methods), sum(sum(m["rounds"]) for m in methods)
    seconds, tokens = sum(m["seconds"] for m in methods), sum(sum(m["tokens"]) for m in methods)
    answers = [n / r for m in methods for n, r in zip(m["tokens"], m["rounds"], strict=True)]
    differences = [first for m in methods for first in m["divergence"]]
    survival = _survival(methods, rounds)
    # Seeds of one prompt are no independent prompts: they are added up before prompts are drawn.
    by_prompts: dict[tuple[str, str], list[_Pair]] = {}
    for pair in pairs:
        by_prompts.setdefault((pair.item["set"], pair.item["digest"]), []).append(pair)
    clusters = list(by_prompts.values())
    caches = [m["cache_bytes"] for m in methods if m["cache_bytes"] is not None]
    first = pairs[0]
    return Row(
        set=name,
        temperature=first.item["temperature"],
        batch=first.item["batch"],
        method=first.method["method"],
        budget=first.method["budget"],
        prompts=len({prompt for pair in pairs for prompt in prompts_of(pair.item)}),
        answers=len(answers),
        groups=len(clusters),
        tokens=tokens,
        speedup=bootstrap([np.sum([p.speeds for p in cluster], axis=0) for cluster in clusters], _speedup),
        median=statistics.median(float(_speedup(np.array(pair.speeds))) for pair in pairs),
        whole=float(_speedup(np.sum([pair.whole for pair in pairs], axis=0))),
        tau=bootstrap([_sums(c, lambda n, r: (n, r)) for c in clusters], _ratio),
        tau_response=bootstrap([_sums(c, lambda n, r: (n / r, 1)) for c in clusters], _ratio),
        per_second=sum(m["clocked"] for m in methods) / seconds if seconds else 0.0,
        survival=survival,
        conditional=[b / a if a else 0.0 for a, b in zip([1.0, *survival], survival, strict=False)],
        nodes_per_token=sum(m["nodes"] for m in methods) / tokens,
        round_ms=_phases(methods, lambda p: 1e3 * sum(m["split"][p] for m in methods) / steps),
        round_ms_median=_phases(methods, lambda p: statistics.median(m["split_ms"][p] for m in methods)),
        step_ms=statistics.median(m["step_ms"] for m in methods),
        same=sum(first is None for first in differences),
        ties=sum(first is not None and first["tie"] for first in differences),
        cache_bytes=max(caches) if caches else None,
    )


def _sums(pairs: list[_Pair], count: Callable[[int, int], tuple[float, float]]) -> np.ndarray:
    """Sums over the answers of a cluster of what `count` makes of tokens and rounds: [2]."""
    both = [
        count(n, r)
        for pair in pairs
        for n, r in zip(pair.method["tokens"], pair.method["rounds"], strict=True)
    ]
    return np.sum(both, axis=0)


def _phases(methods: list[dict[str, Any]], value: Callable[[str], float]) -> dict[str, float]:
    """A value per phase; empty for methods whose phases are not known."""
    return {phase: value(phase) for phase in PHASES} if all(m["split"] for m in methods) else {}


def _survival(methods: list[dict[str, Any]], rounds: int) -> list[float]:
    depth = max((len(m["by_depth"]) for m in methods), default=0)
    kept = [sum(m["by_depth"][k][1] for m in methods if k < len(m["by_depth"])) for k in range(depth)]
    return [count / rounds for count in kept]


def _ratio(sums: np.ndarray) -> np.ndarray:
    return sums[..., 0] / sums[..., 1]


def _speedup(sums: np.ndarray) -> np.ndarray:
    """From sums of plain decoding's seconds and tokens and the method's seconds and tokens, [..., 4].

    An outside answer of one token has no decoding time at all, and no speedup.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.nan_to_num((sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3]), posinf=0.0)


def _set_order(items: Many[dict[str, Any]]) -> list[str]:
    found = list(dict.fromkeys(item["set"] for item in items))
    return sorted(found, key=lambda name: SETS.index(name) if name in SETS else len(SETS))
