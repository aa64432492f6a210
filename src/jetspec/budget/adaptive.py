"""The budget that follows the draft, the load and the machine: each round verifies the nodes that pay.

Expected tokens come from the draft's path probabilities, calibrated and corrected by what was accepted
lately; seconds come from the measured cost of a round. Over the whole batch the nodes are taken in the order
of their chances, and the number of nodes is chosen that earns the most (CaDDTree, arXiv 2606.01813, for one
request and a convex cost; DSpark, arXiv 2607.05147, for a batch of chains). No node is a valid number. Where
drafting does not pay at all, it stops, but for probes. What trying out may lose is limited by a credit.

The policy reads drafts, times and past outcomes, and decides how long a round takes. It cannot decide what is
emitted: every emitted token is the target's own pick at the committed prefix, whatever was verified.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

from jetspec.budget.base import Spent
from jetspec.budget.choice import LOOK_GROWN, PROBE_GROWN, choose, worth_drafting
from jetspec.budget.cost import RoundSize, blocks
from jetspec.budget.count import how_many
from jetspec.budget.fixed import MAX_BUDGET
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.maps import chances
from jetspec.budget.members import Members
from jetspec.budget.outlook import MOST_ROWS, Forecaster, planned_depth
from jetspec.budget.plan import Ranking, keep, rank
from jetspec.budget.prospect import FIRST, MOST
from jetspec.budget.turn import MOST_REACH, TRIALS, Situation, Turn
from jetspec.sequence import Sequence
from jetspec.tree import Tree

_SETTLED = 12  # plain rounds in a row after which they go on...
_REST, _SELDOM = 11, 4  # ...for so many without a thought, and every fourth one is learned from
_REPEATS = 5  # drafted rounds of a batch that follow the last look ahead, without a thought...
_KNOWN, _MET = 32, 3  # ...after so many rounds in all, and trees of each request...
_CLEAR = 1.1  # ...where at least such a speedup is expected


class AdaptiveBudget:
    """The policy of one engine; see the module's docstring.

    floor     log-prob of a path below which nothing need be grown in this round
    depth     below which nothing need be drafted; None drafts whole blocks
    """

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self.floor = -math.inf
        self.depth: int | None = None
        self._turn: Turn | None = None
        self._ids: list[int] = []
        self._fresh = False
        self._undrafted = 0  # plain rounds in a row
        self._rest = 0  # of these, to come, that need no thought
        self._repeats = self._nodes = 0  # rounds to come that grow and verify so many nodes of each tree
        self._situation = Situation(0.0)  # that of these
        self._repeated = False  # the round under way is one of them
        self._members = Members()
        self._forecaster = Forecaster(knowledge.whole_depth)

    def limits(self, sequences: Many[Sequence]) -> list[int]:
        """0 for whom drafting does not pay, else the same for all, a little more than is likely to be
        kept.
        """
        with self.knowledge.lock:
            return self._limits(sequences)

    def cut(self, sequences: Many[Sequence], trees: Many[Tree]) -> list[Tree]:
        """The nodes that pay, over the whole batch."""
        with self.knowledge.lock:
            return self._cut(sequences, trees)

    def record(
        self, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]], spent: Spent
    ) -> None:
        """Learn from the outcome: chances, costs, and whether drafting pays."""
        with self.knowledge.lock:
            self._record(sequences, trees, paths, spent)

    def _limits(self, sequences: Many[Sequence]) -> list[int]:
        known, count, forecaster = self.knowledge, len(sequences), self._forecaster
        ids = [s.id for s in sequences]
        self._repeated = False
        if self._rest and ids == self._ids:
            self._rest -= 1
            return [0] * count
        if self._repeats and ids == self._ids:
            self._repeats, self._repeated = self._repeats - 1, True
            self.depth = None if known.whole_depth is None else min(known.whole_depth, self._nodes)
            self._situation.undrafted += 1
            return [self._nodes] * count
        self._ids, self._repeats = ids, 0
        sampled = 2 * sum([not s.sampling.greedy for s in sequences]) > count
        prospect = known.prospect(sampled)
        contexts = [s.position for s in sequences]
        members, changed = self._members.of(sequences)
        self._fresh = prospect.rare if changed else self._fresh
        bias = known.bias(count)
        plain = known.cost.plain(contexts) * bias.plain
        forecaster.meet(count, sampled, changed)
        forecaster.look(known.cost, prospect, contexts, plain, members)
        outlook = forecaster.outlook
        turn = self._turn = Turn(
            prospect,
            known.situation(count, sampled, outlook.nodes),
            outlook,
            prospect.yields * outlook.speedup,
            contexts,
            plain,
            members,
            drafts=[False] * count,
            extra=[False] * count,
            compared=bias.known,
            fresh=self._fresh,
        )
        choose(turn, known.cost, forecaster.hoped, sequences)
        self._fresh = self._fresh and turn.kind == "plain"
        rests = turn.rests and self._undrafted >= _SETTLED
        self._rest = min(_REST, max(0, prospect.until_due - 1)) if rests else 0
        if self._rest:
            forecaster.hurry()
        self.depth = None if turn.tries else planned_depth(turn.outlook.nodes, known.whole_depth)
        turn.blocks = blocks(sum(turn.drafts), self.depth, known.whole_depth)
        reach = self._reach(turn)
        limit = max(1, min(int(reach), MAX_BUDGET, MOST_ROWS // count))
        return [limit * drafted for drafted in turn.drafts]

    def _reach(self, turn: Turn) -> float:
        """Nodes to grow per tree. Sets the floor."""
        nodes, situation = turn.outlook.nodes, turn.situation
        if turn.kind == "plain":
            return 0.0
        if turn.tries:
            self.floor = -math.inf
            return LOOK_GROWN if turn.kind == "look" else max(situation.reach, PROBE_GROWN, 1.5 * nodes)
        situation.widen(nodes)
        reach, self.floor = situation.limits(nodes, turn.explores)
        return min(reach, self._forecaster.reach, MOST_REACH)

    def _cut(self, sequences: Many[Sequence], trees: Many[Tree]) -> list[Tree]:
        if self._repeated:
            return list(trees)
        turn = self._turn
        assert turn is not None and len(turn.contexts) == len(trees), "limits() comes first"
        turn.expected = [0.0] * len(trees)
        turn.grown = sum([len(tree.tokens) for tree in trees]) - len(trees)
        if not turn.grown:
            return list(trees)
        known, common = self.knowledge, turn.prospect.trust
        factors = [member.trust(common) for member in turn.members]
        stated = turn.stated = [
            chances(known.calibration, tree, kind, known.correction.ratios(kind), factor)
            for tree, kind, factor in zip(
                trees, [not s.sampling.greedy for s in sequences], factors, strict=True
            )
        ]
        ranking = rank(stated)
        if turn.learns:
            _see(turn, len(trees), ranking, factors)
        count = how_many(turn, known.cost, ranking)
        kept: list[list[int]] = [[] for _ in trees]
        for owner, node in zip(ranking.owners[:count], ranking.nodes[:count], strict=True):
            kept[owner].append(node)
        for owner, own in enumerate(kept):
            own.sort()
            values = stated[owner]
            turn.expected[owner] = sum([values[node] for node in own])
        turn.rows = len(trees) + count
        if not turn.tries:
            turn.situation.move(trees, kept)
        return [keep(tree, own) for tree, own in zip(trees, kept, strict=True)]

    def _record(
        self, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]], spent: Spent
    ) -> None:
        if self._repeated:
            return
        turn, known = self._turn, self.knowledge
        assert turn is not None, "limits() comes first"
        if self._rest:  # the same turn, and nothing to find out
            if self._rest % _SELDOM:
                turn.prospect.wait()
                return
        else:
            self._turn = None
        rows = [len(tree.tokens) for tree in trees]
        size = RoundSize(
            len(trees),
            turn.blocks,
            turn.grown,
            rows=sum(rows),
            context=sum(turn.contexts),
            row_context=sum([count * context for count, context in zip(rows, turn.contexts, strict=True)]),
        )
        if turn.grown and size.rows != turn.rows:
            _expect_uncut(turn, trees)
        if size.drafts:
            self._count_outcomes(turn, sequences, trees, paths)
            self._judge(turn, size, sum([len(path) for path in paths]) - len(paths))
        else:
            turn.prospect.wait()
        if not turn.tries:  # a try that promises something ends the rest by what follows it
            self._undrafted = 0 if size.drafts else self._undrafted + 1
        known.bias(len(trees)).see(bool(size.drafts), sum(spent) / known.cost.seconds(size), turn.tries)
        if turn.learns:
            known.learn(size, spent)
        if _is_steady(turn):
            self._repeats, self._nodes, self._situation = _REPEATS, turn.outlook.nodes, turn.situation
        if turn.allowed is not None:
            turn.prospect.pay(0.0, max(0.0, known.cost.verify.at(size.rows) - turn.allowed) / turn.plain)

    def _count_outcomes(
        self, turn: Turn, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]]
    ) -> None:
        """What was accepted, against what was expected."""
        prospect, probe = turn.prospect, turn.tries
        if turn.kind == "probe":
            prospect.forget()
        common = prospect.trust
        for n, tree in enumerate(trees):
            member, extra = turn.members[n], turn.extra[n]
            if turn.drafts[n] and not probe:
                member.looked_at(not extra)
            if len(tree.tokens) == 1:
                continue
            accepted, stated = len(paths[n]) - 1, turn.expected[n] / member.trust(common)
            if turn.learns and member.typical(common):
                self.knowledge.observe(tree, paths[n], not sequences[n].sampling.greedy)
            if not extra:
                prospect.count(accepted, stated, tree.budget)
            member.count(accepted, stated, probe or extra)

    def _judge(self, turn: Turn, size: RoundSize, accepted: int) -> None:
        """Count the round for or against drafting."""
        prospect, situation, batch = turn.prospect, turn.situation, size.sequences
        cost = self.knowledge.cost.seconds(size) / turn.plain
        # What was expected scatters less, what came has no bias.
        speedup = (batch + 0.5 * (accepted + sum(turn.expected))) / (batch * cost)
        if turn.kind == "draft":
            prospect.pay(cost, (1.0 - speedup) * cost)
            self._forecaster.hurry(2 if situation.trials < 4 * TRIALS else 0)
        else:
            prospect.pay(cost, cost - 1.0 - accepted / batch)
            self._forecaster.hurry()
        if turn.tries:
            self._end_probe(turn, accepted, cost)
            return
        prospect.earn(speedup, cost, max(turn.outlook.speedup, 1e-3))
        situation.trials += 1
        turn.forecast = prospect.yields * turn.outlook.speedup
        if not worth_drafting(turn):
            situation.trials = 0
            prospect.stop()
            self._forecaster.hurry()

    def _end_probe(self, turn: Turn, accepted: int, cost: float) -> None:
        """A probe that promises something, or that has paid for itself, is followed by another one."""
        prospect, forecaster = turn.prospect, self._forecaster
        forecaster.look(self.knowledge.cost, prospect, turn.contexts, turn.plain, turn.members)
        promising = prospect.yields * forecaster.outlook.speedup >= 1.0
        paid = promising or 1.0 + accepted / len(turn.contexts) >= cost
        if paid or turn.kind == "probe":
            prospect.probed(paid)
        turn.situation.trials = 0


def _see(turn: Turn, count: int, ranking: Ranking, factors: list[float]) -> None:
    """Take down the gains of every tree, as they are without its sequence's factor."""
    prospect, probe = turn.prospect, turn.tries
    by_tree: list[list[float]]
    if count == 1:
        by_tree = [ranking.gains]
    else:
        by_tree = [[] for _ in range(count)]
        for owner, gain in zip(ranking.owners, ranking.gains, strict=True):
            by_tree[owner].append(gain)
    for member, gains, factor, extra in zip(turn.members, by_tree, factors, turn.extra, strict=True):
        if gains:
            own = [gain / factor for gain in gains[:MOST]]
            member.see(own, prospect.first or sum(own[:FIRST]))
            if not extra:
                prospect.see(own, not probe and len(gains) < int(turn.situation.reach), probe)


def _is_steady(turn: Turn) -> bool:
    """Whether the next rounds may be like this one. In a batch the requests make up for each other, and what
    a plan of its own gains a round is less than it takes; a single one has drafts that differ.
    """
    return (
        turn.kind == "draft"
        and not turn.explores
        and len(turn.members) > 1
        and all(turn.drafts)
        and turn.forecast >= _CLEAR
        and turn.situation.rounds >= _KNOWN
        and all(member.trees >= _MET for member in turn.members)
    )


def _expect_uncut(turn: Turn, trees: Many[Tree]) -> None:
    """Trees that another rule verifies are never cut, so all of their nodes may be accepted."""
    for n, (tree, stated) in enumerate(zip(trees, turn.stated, strict=True)):
        if len(tree.tokens) == len(stated):
            turn.expected[n] = sum(stated[1:])
