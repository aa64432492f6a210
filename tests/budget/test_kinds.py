"""Requests of several kinds, one batch after the other through one knowledge: drafting pays for some of them
and not for the others, and which is which comes out anew with every batch."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator
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
# Milliseconds of a forward of so many rows, by batch size, of a small target on two cores.
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


def policy(machine: Machine, whole: int | None = None) -> AdaptiveBudget:
    """A new one, with costs that are wrong by 3 % and chances that are right."""
    knots = [Knot(-6.0, -6.0, 9), Knot(0.0, 0.0, 9)]
    maps = Calibration({Group(False, spine, 0): knots for spine in (False, True)})
    costs = Measurement(machine.model(0.03), 1.0, False)
    return AdaptiveBudget(Knowledge(costs, maps, whole_depth=whole))


def requests(ids: Iterator[int], batch: int) -> list[Sequence]:
    """New ones, without an end."""
    limits = Limits(max_tokens=10**6)
    return [Sequence(next(ids), [1] * 65, Sampling(), limits, lambda ids: "") for _ in range(batch)]


def heads(sure: float, batch: int, seed: int) -> list[Head]:
    """One per request, of one kind."""
    return [Head(sure=sure, others=0.4 if batch > 1 else 0.2, seed=100 * seed + n) for n in range(batch)]


def rates(batch: int, groups: int, seed: int) -> list[tuple[float, float]]:
    """Per kind the tokens per second of the policy / those of plain decoding and of the best fixed budget."""
    machine = Machine(draft=0.0014, verify=forward(batch), noise=0.08, stalls=0.005, seed=seed)
    budget, ids, kinds = policy(machine), count(), KINDS[batch]
    tokens, seconds = [0] * len(kinds), [0.0] * len(kinds)
    fixed: list[list[dict[int, float]]] = [[] for _ in kinds]
    for group in range(groups):
        kind, dice = group % len(kinds), 1000 * seed + group
        log = run(budget, heads(kinds[kind], batch, dice), machine, ROUNDS, members=requests(ids, batch))
        tokens[kind] += sum(log.tokens)
        seconds[kind] += sum(log.seconds)
        fixed[kind].append(fixed_rates(heads(kinds[kind], batch, dice), machine, ROUNDS, batch, BUDGETS))
    found = []
    for own, spent, those in zip(tokens, seconds, fixed, strict=True):
        best = max(fmean(found[nodes] for found in those) for nodes in BUDGETS)
        found.append((own / spent / those[0][0], own / spent / best))
    return found


@pytest.mark.parametrize(("batch", "groups", "least"), [(1, 28, 0.87), (4, 28, 0.96), (16, 14, 0.96)])
def test_every_kind_of_request_gets_what_pays_for_it(batch: int, groups: int, least: float) -> None:
    """Guards against judging requests by those before them: where drafting had not paid lately, probes were
    too rare to find that it pays for those that have just come (0.88 to 0.92 of the best fixed budget), and
    where it had paid, it went on for too long with others. Single requests show little of themselves in 64
    rounds, hence their lower bound."""
    runs = [rates(batch, groups, seed) for seed in range(5)]
    for number, sure in enumerate(KINDS[batch]):
        plain, best = (fmean(found[number][n] for found in runs) for n in (0, 1))
        assert plain > 0.975, sure
        assert best > least, sure


@pytest.mark.parametrize("sure", [0.8, 3.0])
def test_new_requests_do_not_bring_a_useless_head_back(sure: float) -> None:
    """Guards short requests: a head that is never right is not looked at anew with every request."""
    machine = Machine(draft=0.0014, verify=forward(4), noise=0.08)
    budget, ids, head = policy(machine), count(), Head(sure=sure, right=False)
    logs = [run(budget, head, machine, 16, members=requests(ids, 4)) for _ in range(60)]
    assert sum(sum(map(bool, log.drafted)) for log in logs[20:]) <= 10
    assert sum(sum(log.seconds) for log in logs) < 1.01 * 60 * 16 * machine.plain(4)


def test_small_trees_need_no_deep_drafts() -> None:
    """Guards batches where whole drafts do not pay and shallow ones do: their price has to be known before
    the first one."""
    for whole, least in ((7, 1.06), (None, 0.98)):
        machine = Machine(draft=0.0036, verify=forward(4), noise=0.08, whole=whole)
        fixed = fixed_rates(heads(0.7, 4, 1), machine, 400, 4, (0, 2, 4))
        assert (max(fixed.values()) > 1.1 * fixed[0]) == (whole is not None)
        budget = policy(machine, whole)
        log = run(budget, heads(0.7, 4, 2), machine, 600, members=requests(count(), 4))
        assert log.rounds(100).rate > least * fixed[0]
