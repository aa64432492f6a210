"""Requests of several kinds, one batch after the other through one knowledge: drafting pays for some of them
and not for the others, and which is which comes out anew with every batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from itertools import count
from statistics import fmean

import pytest

from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.maps import Calibration, Group, Knot
from jetspec.budget.profile import Measurement
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from tests.budget.world import Head, Machine, fixed_rates, run

ROUNDS = 64
BUDGETS = (0, 4, 8)
# Milliseconds of a forward of so many rows, by batch size, of a target of 0.6 billion parameters on two cores.
SMALL = {1: 9.8, 4: 11.0, 8: 13.5, 16: 19.0, 20: 22.0, 36: 35.0}
FORWARDS = {1: SMALL, 4: SMALL, 16: {16: 18.6, 32: 32.6, 80: 63.6}}
# Heads, as sure as they are for the kinds in turn: best at 1.2 to 1.3 and at 0.8 to 0.9 of plain decoding.
KINDS = {
    1: [-5.0, -1.0, -4.0, -5.0, -0.8, -5.0, -4.0],
    4: [-0.5, 0.7, -0.7, -0.5, 1.0, -0.8, -0.5],
    16: [1.2, 3.0, 1.0, 1.2, 2.8, 0.8, 1.0],
}


def forward(batch: int) -> Callable[[float], float]:
    """Seconds of so many rows, linear between those that were measured, and beyond."""
    points = FORWARDS[batch]
    sizes = sorted(points)

    def seconds(rows: float) -> float:
        left = min(max(bisect_right(sizes, rows) - 1, 0), len(sizes) - 2)
        low, high = sizes[left], sizes[left + 1]
        return 1e-3 * (points[low] + (points[high] - points[low]) * (rows - low) / (high - low))

    return seconds


def policy(machine: Machine) -> AdaptiveBudget:
    """A new one, with costs that are wrong by 3 % and chances that are right."""
    knots = [Knot(-6.0, -6.0, 9), Knot(0.0, 0.0, 9)]
    maps = Calibration({Group(False, spine, 0): knots for spine in (False, True)})
    return AdaptiveBudget(Knowledge(Measurement(machine.model(0.03), 1.0, False), maps))


def heads(sure: float, batch: int, seed: int) -> list[Head]:
    return [Head(sure=sure, others=0.2 if batch == 1 else 0.4, seed=100 * seed + n) for n in range(batch)]


def rates(batch: int, groups: int, seed: int) -> list[tuple[float, float]]:
    """Per kind the tokens per second of the policy / those of plain decoding and of the best fixed budget."""
    machine = Machine(draft=0.0014, verify=forward(batch), noise=0.08, stalls=0.005, seed=seed)
    budget, ids, kinds = policy(machine), count(), KINDS[batch]
    tokens, seconds = [0] * len(kinds), [0.0] * len(kinds)
    fixed: list[list[dict[int, float]]] = [[] for _ in kinds]
    for group in range(groups):
        kind, dice = group % len(kinds), 1000 * seed + group
        limits = Limits(max_tokens=10**6)
        members = [
            Sequence(next(ids), [1] * 65, Sampling(), limits, lambda ids: "") for _ in range(batch)
        ]
        log = run(budget, heads(kinds[kind], batch, dice), machine, ROUNDS, members=members)
        tokens[kind] += sum(log.tokens)
        seconds[kind] += sum(log.seconds)
        fixed[kind].append(fixed_rates(heads(kinds[kind], batch, dice), machine, ROUNDS, batch, BUDGETS))
    found = []
    for own, spent, those in zip(tokens, seconds, fixed, strict=True):
        best = max(fmean(found[nodes] for found in those) for nodes in BUDGETS)
        found.append((own / spent / those[0][0], own / spent / best))
    return found


if __name__ == "__main__":
    import sys

    for batch, groups in ((1, 28), (4, 28), (16, 14)):
        runs = [rates(batch, groups, seed) for seed in range(int(sys.argv[1]))]
        print(batch)
        for kind in range(7):
            p = [r[kind][0] for r in runs]
            b = [r[kind][1] for r in runs]
            print(
                f"  sure {KINDS[batch][kind]:5.1f}: best/plain {fmean(p)/fmean(b):.3f} "
                f"auto/plain {fmean(p):.3f} ({min(p):.3f})  auto/best {fmean(b):.3f} ({min(b):.3f})", flush=True
            )
