"""A small world for budget policies: heads whose guesses are right as often as they should be, a machine with
a clock of its own, and the loop of a round without a model.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, cast

from jetspec.budget.base import Budget, Spent
from jetspec.budget.cost import CostModel, RoundSize, blocks
from jetspec.budget.curve import Curve
from jetspec.budget.profile import _HALVINGS, _ROWS, _WIDE, halfway
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.tree import GROW, Grow, MarginalProposal, Tree
from jetspec.verify import walk

WIDTH = 6


@dataclass
class Head:
    """A made-up head. Per round and depth the target's token is candidate 0 with a chance that varies from
    round to round, each further one with half the chance of the one before, or none of them.

    sure    mean log-odds of candidate 0; drift: how much they vary
    others  what the chances of the further candidates are multiplied with
    boast   power that turns the true chances into the stated ones: below 1 it promises too much
    right   False: the target's token is never among the candidates
    """

    sure: float = 0.8
    drift: float = 1.0
    others: float = 1.0
    boast: float = 1.0
    depth: int = 7
    right: bool = True
    seed: int = 0
    _dice: random.Random = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._dice = random.Random(self.seed)

    def draft(self, most: int | None = None) -> tuple[MarginalProposal, list[int]]:
        """A proposal of at most so many depths, and the tokens that the target will pick, one per depth and
        one more.
        """
        dice = self._dice
        level = dice.gauss(self.sure, self.drift)
        tokens, logps, truth = [], [], []
        for depth in range(self.depth):
            first = 1.0 / (1.0 + math.exp(-(level - 0.15 * depth)))
            chances = [first, *(self.others * (1.0 - first) * 0.5**rank for rank in range(1, WIDTH))]
            chosen = dice.choices([*range(WIDTH), -1], [*chances, max(0.0, 1.0 - sum(chances))])[0]
            truth.append(chosen if self.right else -1)
            tokens.append(list(range(WIDTH)))
            logps.append([self.boast * math.log(chance) for chance in chances])
        return MarginalProposal(tokens[:most], logps[:most]), [*truth, -1]


@dataclass
class Machine:
    """What rounds take, in seconds, with noise: `draft` per forward, `verify` of so many rows. `whole`: depth
    of a whole draft, where a part of it costs less.
    """

    draft: float = 0.004
    verify: Callable[[float], float] = lambda rows: 0.012 + 0.0002 * rows
    noise: float = 0.0
    stalls: float = 0.0  # share of rounds that take ten times as long
    seed: int = 0
    whole: int | None = None

    def model(self, wrong: float = 0.0) -> CostModel:
        """What a measurement would give; `wrong` is the spread of its errors, in logs."""
        dice = random.Random(self.seed)

        def measured(rows: int) -> float:
            return self.verify(rows) * math.exp(wrong * dice.gauss(0, 1))

        verify = {rows: measured(rows) for rows in (*_ROWS, *_WIDE)}
        for _ in range(_HALVINGS):
            if rows := halfway(verify):
                verify[rows] = measured(rows)
        return CostModel(
            Curve({n: self.draft * (0.6 + 0.4 * n) * math.exp(wrong * dice.gauss(0, 1)) for n in (1, 4, 16)}),
            Curve({0: 1e-4, 32: 6e-4}),
            Curve(verify),
            Curve({1: 3e-4, 4: 9e-4}),
        )

    def expected(self, size: RoundSize) -> Spent:
        """What one round takes without noise."""
        draft = self.draft * (0.6 + 0.4 * size.drafts) if size.drafts else 0.0
        build, commit = 1e-4 + 1.6e-5 * size.grown, 1e-4 + 2e-4 * size.sequences
        return Spent(draft, build, self.verify(size.rows), commit)

    def spent(self, size: RoundSize, dice: random.Random) -> Spent:
        """What one round takes."""
        factor = math.exp(self.noise * dice.gauss(0, 1)) * (10.0 if dice.random() < self.stalls else 1.0)
        return Spent(*(factor * value for value in self.expected(size)))

    def plain(self, batch: int) -> float:
        """Seconds of a round of plain decoding, without noise."""
        return sum(self.expected(RoundSize.plain([64] * batch)))


@dataclass
class Log:
    """What happened: per round sequences drafted for, nodes verified, tokens emitted, and seconds. The
    seconds are those without noise, so that a few hundred rounds are enough to compare policies to a percent.
    """

    drafted: list[int] = field(default_factory=list)
    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)

    @property
    def rate(self) -> float:
        """Tokens per second."""
        return sum(self.tokens) / sum(self.seconds)

    def rounds(self, first: int, last: int | None = None) -> Log:
        """A part of it."""
        part = slice(first, last)
        return Log(self.drafted[part], self.nodes[part], self.tokens[part], self.seconds[part])


def sequences(count: int, sampling: Sampling | None = None) -> list[Sequence]:
    """Requests without an end."""
    limits = Limits(max_tokens=10**6)
    return [Sequence(n, [1] * 65, sampling or Sampling(), limits, lambda ids: "") for n in range(count)]


def accepted(tree: Tree, truth: list[int]) -> list[int]:
    """The accepted path, where the target picks truth[d] at depth d."""
    return walk(tree, lambda node: truth[tree.depths[node]])[0]


def run(
    budget: Budget,
    heads: Head | Many[Head],
    machine: Machine,
    rounds: int,
    batch: int = 1,
    grow: Grow = GROW["best-first"],
    members: Many[Sequence] = (),
) -> Log:
    """Rounds of a policy in this world. One head drafts for all, or each sequence has its own."""
    log = Log()
    members = members or sequences(batch)
    own = [heads] * len(members) if isinstance(heads, Head) else list(heads)
    dice = random.Random(own[0].seed + 1)
    for _ in range(rounds):
        limits = budget.limits(members)
        floor: float = getattr(budget, "floor", -math.inf)
        depth: int | None = getattr(budget, "depth", None) if machine.whole else None
        drafts = [head.draft(depth) if limit else None for head, limit in zip(own, limits, strict=True)]
        grown = [
            Tree.root_only(0) if draft is None else grow(0, draft[0], limit, floor=floor)
            for draft, limit in zip(drafts, limits, strict=True)
        ]
        trees = budget.cut(members, grown)
        paths = [
            [0] if draft is None else accepted(tree, draft[1])
            for tree, draft in zip(trees, drafts, strict=True)
        ]
        rows = sum(tree.size for tree in trees)
        size = RoundSize(
            len(members),
            blocks(sum(limit > 0 for limit in limits), depth, machine.whole),
            sum(tree.budget for tree in grown),
            rows,
            64 * len(members),
            64 * rows,
        )
        budget.record(members, trees, paths, machine.spent(size, dice))
        log.drafted.append(size.drafts)
        log.nodes.append(rows - len(members))
        log.tokens.append(sum(map(len, paths)))
        log.seconds.append(sum(machine.expected(size)))
    return log


def fixed_rates(
    heads: Head | Many[Head], machine: Machine, rounds: int, batch: int, budgets: Many[int]
) -> dict[int, float]:
    """Tokens per second of fixed budgets, best-first: growing once to the largest gives all of them."""
    own = [heads] * batch if isinstance(heads, Head) else list(heads)
    tokens = dict.fromkeys(budgets, 0)
    for _ in range(rounds):
        for head in own:
            proposal, truth = head.draft()
            path = accepted(GROW["best-first"](0, proposal, max(budgets)), truth)
            for nodes in budgets:
                tokens[nodes] += sum(node <= nodes for node in path)
    return {
        nodes: tokens[nodes]
        / rounds
        / sum(
            machine.expected(
                RoundSize(
                    batch,
                    blocks(batch * (nodes > 0), max(1, nodes), machine.whole),
                    batch * nodes,
                    batch * (nodes + 1),
                    64 * batch,
                    0,
                )
            )
        )
        for nodes in budgets
    }


def fake(**values: Any) -> Any:
    """An object with just these attributes."""
    return cast(Any, type("Fake", (), values)())
