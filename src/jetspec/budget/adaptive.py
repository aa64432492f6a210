"""The budget that follows the draft, the load and the machine: each round verifies the nodes that pay.

Expected tokens come from the draft's path probabilities, calibrated and corrected by what was accepted
lately; seconds come from the measured cost of a round. Over the whole batch the nodes are taken in the order
of their chances, and the number of nodes is chosen that earns the most (CaDDTree, arXiv 2606.01813, for one
request and a convex cost; DSpark, arXiv 2607.05147, for a batch of chains). No node is a valid number. Where
drafting does not pay at all, it stops, but for probes.

The policy reads drafts, times and past outcomes, and decides how long a round takes. It cannot decide what is
emitted: every emitted token is the target's own pick at the committed prefix, whatever was verified.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

import numpy as np

from jetspec.budget.base import Spent
from jetspec.budget.calibrate import chances
from jetspec.budget.cost import RoundSize
from jetspec.budget.fixed import MAX_BUDGET
from jetspec.budget.knowledge import CAREFUL, LEAST_REACH, Knowledge, Situation
from jetspec.budget.plan import best_count, keep, rank
from jetspec.sequence import Sequence
from jetspec.tree import Tree

_MOST_NODES = 256  # grown per sequence
_BATCH_NODES = 2048  # grown in all
_PROBE_NODES = 4  # verified in a probe at least, whatever they promise: it is there to learn


class _Round(NamedTuple):
    """What was decided in the round under way."""

    situation: Situation
    contexts: list[int]
    drafts: list[bool]  # for whom is drafted
    grown: int
    gain: float  # expected tokens beyond one per sequence


class AdaptiveBudget:
    """The policy of one engine; see the module's docstring."""

    def __init__(self, knowledge: Knowledge) -> None:
        self.knowledge = knowledge
        self._round: _Round | None = None
        self._probes = 0

    def limits(self, sequences: Many[Sequence]) -> list[int]:
        """0 for all where drafting does not pay, else the same for all, a little more than is likely to be
        kept. A probe drafts for a quarter of a large batch, for others each time.
        """
        situation = self.knowledge.situation(sequences)
        count = len(sequences)
        drafts = [s.room > 1 for s in sequences]  # else the bonus is all that may be emitted
        if not situation.gain.wants_draft():
            drafts = [False] * count
        elif not situation.gain.drafting:
            self._probes += 1
            step = CAREFUL if count >= CAREFUL else 1
            drafts = [able and (n + self._probes) % step == 0 for n, able in enumerate(drafts)]
        self._round = _Round(situation, [s.position for s in sequences], drafts, 0, 0.0)
        limit = min(int(situation.reach), _MOST_NODES, MAX_BUDGET, max(1, _BATCH_NODES // count))
        return [limit * drafted for drafted in drafts]

    def cut(self, sequences: Many[Sequence], trees: Many[Tree]) -> list[Tree]:
        """The nodes that pay, over the whole batch."""
        now = self._round
        assert now is not None and len(now.contexts) == len(trees), "limits() comes first"
        grown = sum(tree.budget for tree in trees)
        if not grown:
            return list(trees)
        known = self.knowledge
        kinds = [not s.sampling.greedy for s in sequences]
        stated = [
            chances(known.calibration, tree, kind, known.correction.ratios(kind))
            for tree, kind in zip(trees, kinds, strict=True)
        ]
        gains, owners, nodes = rank(stated)
        count = self._count(gains, np.array(now.contexts)[owners], now, grown)
        kept: list[list[int]] = [[] for _ in trees]
        for owner, node in zip(owners[:count].tolist(), nodes[:count].tolist(), strict=True):
            kept[owner].append(node)
        cut = [keep(tree, sorted(own)) for tree, own in zip(trees, kept, strict=True)]
        self._round = now._replace(grown=grown, gain=float(gains[:count].sum()))
        self._move_reach(now.situation, trees, int(nodes[:count].max(initial=0)))
        return cut

    def _count(self, gains: np.ndarray, contexts: np.ndarray, now: _Round, grown: int) -> int:
        """How many of the ranked nodes to verify. contexts [n]: committed tokens before each."""
        cost, batch = self.knowledge.cost, len(now.contexts)
        base = RoundSize.plain(now.contexts)._replace(drafts=sum(now.drafts), grown=grown)
        rows = batch + np.arange(len(gains) + 1, dtype=np.float64)
        further = np.concatenate([[0.0], np.cumsum(contexts)]) * cost.row_context
        seconds = cost.seconds(base) - cost.verify.at(batch) + cost.verify.along(rows) + further
        gain = now.situation.gain
        rate = None
        if gain.speedup is not None:
            rate = max(1.0, gain.speedup) * batch / cost.plain(now.contexts)
        count = best_count(gains, seconds, batch, rate)
        if not gain.drafting:
            count = max(count, min(len(gains), _PROBE_NODES))
        return count

    @staticmethod
    def _move_reach(situation: Situation, grown: Many[Tree], last: int) -> None:
        """Grow more next time if nodes were kept right up to where the limit had stopped a tree, else less.
        `last` is the last node that was kept of any tree.
        """
        limit = int(situation.reach)
        if last >= 0.9 * limit and any(tree.budget >= limit for tree in grown):
            situation.reach = min(_MOST_NODES, 1.5 * situation.reach + 1.0)
        else:
            situation.reach = max(0.95 * situation.reach, 1.25 * last + 2.0, LEAST_REACH)

    def record(
        self, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]], spent: Spent
    ) -> None:
        """Learn from the outcome: chances, costs, and whether drafting pays."""
        now, known = self._round, self.knowledge
        assert now is not None, "limits() comes first"
        self._round = None
        for s, tree, path in zip(sequences, trees, paths, strict=True):
            known.observe(tree, path, not s.sampling.greedy)
        size = RoundSize(
            len(trees),
            sum(now.drafts),
            now.grown,
            rows=sum(tree.size for tree in trees),
            context=sum(now.contexts),
            row_context=sum(tree.size * context for tree, context in zip(trees, now.contexts, strict=True)),
        )
        self._judge(now, size, paths)
        known.learn(size, spent)

    def _judge(self, now: _Round, size: RoundSize, paths: Many[Many[int]]) -> None:
        """Count the round for or against drafting. One that drafted for a part of the batch counts as if it
        had done the same for all.
        """
        gain, cost = now.situation.gain, self.knowledge.cost
        if not size.drafts:
            gain.plain()
            return
        share = size.sequences / size.drafts
        whole = RoundSize(
            size.sequences,
            size.sequences,
            round(share * size.grown),
            round(size.sequences + share * (size.rows - size.sequences)),
            size.context,
            round(size.context + share * (size.row_context - size.context)),
        )
        accepted = sum(len(path) - 1 for path, drafted in zip(paths, now.drafts, strict=True) if drafted)
        gain.drafted(
            expected=1.0 + now.gain / size.drafts,
            emitted=1.0 + accepted / size.drafts,
            cost=cost.seconds(whole) / cost.plain(now.contexts),
            trees=size.drafts,
        )
