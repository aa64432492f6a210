"""Recorded rounds, decided once more: by another policy of the same knowledge, and by the rule as it is
written down, without any of the shortcuts that make it cheap."""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest

from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.base import Spent
from jetspec.budget.cost import CostModel, RoundSize
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.maps import LAST, STEPS, Calibration, Group, Knot, Ratios
from jetspec.budget.profile import Measurement
from jetspec.budget.turn import Turn
from jetspec.tree import GROW, Tree
from tests.budget.world import Head, Machine, accepted, sequences

CALIBRATION = Calibration(
    {
        Group(False, True, 0): [Knot(-6.0, -5.5, 9), Knot(-0.1, -0.15, 9)],
        Group(False, False, 0): [Knot(-6.0, -6.5, 9), Knot(-0.1, -0.4, 9)],
        Group(False, True, 2): [Knot(-6.0, -6.1, 9), Knot(-1.0, -0.8, 9)],
    }
)


class Recorded(NamedTuple):
    """One round: what the policy was given and what it decided."""

    grown: list[Tree]
    paths: list[list[int]]
    spent: Spent
    limits: list[int]
    floor: float
    cut: list[Tree]


def policy(machine: Machine) -> AdaptiveBudget:
    """A policy of the same knowledge each time."""
    cost = machine.model(0.05)
    cost.row_context, cost.context = 2e-7, 1e-7
    return AdaptiveBudget(Knowledge(Measurement(cost, 1.0, False), CALIBRATION))


def record(machine: Machine, batch: int, rounds: int) -> list[Recorded]:
    """Rounds with good drafts, on a noisy clock."""
    budget, head, members, dice = policy(machine), Head(sure=1.5), sequences(batch), random.Random(3)
    found = []
    for _ in range(rounds):
        limits = budget.limits(members)
        drafts = [head.draft() for _ in members]
        grown = [
            GROW["best-first"](0, proposal, limit, floor=budget.floor)
            for (proposal, _), limit in zip(drafts, limits, strict=True)
        ]
        floor, trees = budget.floor, budget.cut(members, grown)
        paths = [accepted(tree, truth) for tree, (_, truth) in zip(trees, drafts, strict=True)]
        rows, drafted = sum(tree.size for tree in trees), sum(limit > 0 for limit in limits)
        size = RoundSize(batch, drafted, sum(tree.budget for tree in grown), rows, 64 * batch, 64 * rows)
        spent = machine.spent(size, dice)
        budget.record(members, trees, paths, spent)
        found.append(Recorded(grown, paths, spent, limits, floor, trees))
    return found


def chances(tree: Tree, ratios: Ratios, factor: float) -> list[float]:
    """The chance of every node, by its definition."""
    found: list[float] = []
    for node in range(tree.size):
        if not node:
            found.append(1.0)
            continue
        above = tree.path_to(node)[:-1]
        spine = all(tree.children(tree.parents[n])[0] == n for n in above[1:])
        depth, own = tree.depths[node], ratios.spine if spine else ratios.off
        table = CALIBRATION.table(Group(False, spine, depth))
        value = table[min(LAST, int(0.5 - STEPS * tree.logps[node]))]
        found.append(min(found[above[-1]], value * own[min(depth, len(own) - 1)] * factor))
    return found


def decide(turn: Turn, cost: CostModel, ratios: Ratios, factors: list[float], grown: list[Tree]) -> float:
    """The most that a cut of these trees is worth, in tokens: every number of best nodes is priced as a round
    of its own."""
    batch = len(grown)
    stated = [chances(tree, ratios, factor) for tree, factor in zip(grown, factors, strict=True)]
    ranked = sorted((value for own in stated for value in own[1:]), reverse=True)
    assert turn.rate is not None
    worth = []
    for count in range(len(ranked) + 1):
        rows = batch + count
        size = RoundSize(batch, sum(turn.drafts), sum(t.budget for t in grown), rows, 64 * batch, 64 * rows)
        worth.append(batch + sum(ranked[:count]) - turn.rate * cost.seconds(size))
    return max(worth)


@pytest.mark.parametrize("batch", [1, 3])
def test_recorded_rounds_are_decided_the_same_way_again(batch: int) -> None:
    """Guards cheap decisions: for the same inputs a policy decides the same, and in every settled round that
    tries nothing new its cut is worth as much as the best one by the rule as it is written down, with chances
    node by node and costs number by number."""
    machine = Machine(verify=lambda rows: 0.012 + 0.004 * (rows // 8), noise=0.1)
    rounds = record(machine, batch, 60 if batch == 1 else 160)
    budget, members = policy(machine), sequences(batch)
    checked = 0
    for then in rounds:
        assert budget.limits(members) == then.limits and budget.floor == then.floor
        if budget._repeated:  # follows the look ahead, and nothing is decided
            assert batch > 1 and budget.cut(members, then.grown) == then.cut == then.grown
            budget.record(members, then.cut, then.paths, then.spent)
            continue
        turn = budget._turn
        assert turn is not None
        known = budget.knowledge
        ratios = known.correction.ratios(False)
        factors = [member.trust(turn.prospect.trust) for member in turn.members]
        best = None
        if turn.kind == "draft" and not turn.explores:
            best = decide(turn, known.cost, ratios, factors, then.grown)
        cut = budget.cut(members, then.grown)
        assert cut == then.cut
        if best is not None and turn.rate is not None:
            rows = sum(tree.size for tree in cut)
            size = RoundSize(
                batch, sum(turn.drafts), sum(t.budget for t in then.grown), rows, 64 * batch, 64 * rows
            )
            tokens = batch + sum(sum(chances(t, ratios, f)[1:]) for t, f in zip(cut, factors, strict=True))
            spines_changed = any(
                kept.tokens != whole.tokens[: kept.size] for kept, whole in zip(cut, then.grown, strict=True)
            )
            worth = tokens - turn.rate * known.cost.seconds(size)
            if not spines_changed:  # a cut in the middle changes who is the first child
                assert math.isclose(worth, best, rel_tol=1e-9)
                checked += 1
        budget.record(members, cut, then.paths, then.spent)
    assert checked > 20
