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

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jetspec.budget.base import Spent
from jetspec.budget.calibrate import Calibration, Sample, chances, fit
from jetspec.budget.correction import Correction
from jetspec.budget.cost import RoundSize
from jetspec.budget.fixed import MAX_BUDGET
from jetspec.budget.gain import Gain
from jetspec.budget.plan import best_count, keep, rank
from jetspec.budget.profile import Measurement
from jetspec.budget.store import CostFile
from jetspec.sequence import Sequence
from jetspec.tree import Tree

_FIRST_REACH = 16.0
_MOST_NODES = 256  # grown per sequence
_BATCH_NODES = 2048  # grown in all
_CAREFUL = 4  # sequences from which on the first round is a probe; probes draft for a quarter of them
_PROBE_NODES = 4  # verified in a probe at least, whatever they promise: it is there to learn
_TRUST = {False: 1.0, True: 12.0}  # in the chances as they come, without and with a calibration
_FIRST_FIT, _WINDOW = 40, 1500  # trees: before the first fit of maps, and that a fit looks at
_ODD, _VERY_ODD = 1.7, 4.0  # times slower or faster than measured; such a machine is measured again...
_MEASURE_SHARE = 0.02  # ...if that takes no more than this share of the time since; less each time
_KEEP_SECONDS = 60.0


@dataclass
class Situation:
    """What is learned per batch size (in octaves) and kind of sampling.

    gain    whether drafting pays
    reach   nodes to grow per sequence: somewhat more than were worth verifying lately
    """

    gain: Gain
    reach: float


class Knowledge:
    """What a policy knows and learns, shared by all engines of one target and drafter.

    Args:
        measured: costs, as measured or read from the cache.
        speedups: of drafted rounds by situation, as met in earlier processes.
        calibration: of the head; None takes the head's word until rounds say otherwise.
        measure: measures again; it may return None.
        file: where the costs are kept.
    """

    def __init__(
        self,
        measured: Measurement,
        calibration: Calibration | None = None,
        *,
        speedups: Mapping[str, float] | None = None,
        measure: Callable[[], Measurement | None] = lambda: None,
        file: CostFile | None = None,
    ) -> None:
        self.cost, self._measuring, self.noisy = measured
        self.calibration = calibration if calibration is not None else Calibration()
        self.correction = Correction(_TRUST[calibration is not None])
        self._speedups = dict(speedups or {})
        self.situations: dict[tuple[int, bool], Situation] = {}
        self._samples: deque[Sample] | None = None if calibration is not None else deque(maxlen=_WINDOW)
        self._fit_at = _FIRST_FIT
        self._trees = 0
        self._measure, self._file = measure, file
        self._measured_again = 0
        self._measured_at = self._kept_at = time.monotonic()

    def situation(self, sequences: Many[Sequence]) -> Situation:
        """The one that a batch is in."""
        sampled = 2 * sum(not s.sampling.greedy for s in sequences) > len(sequences)
        key = (len(sequences).bit_length(), sampled)
        if key not in self.situations:
            reach = max(_PROBE_NODES, _FIRST_REACH / len(sequences) ** 0.5)
            careful = len(sequences) >= _CAREFUL  # a round of a large batch is a lot to lose
            self.situations[key] = Situation(Gain(self._expected(*key), careful), reach)
        return self.situations[key]

    def _expected(self, octave: int, sampled: bool) -> float | None:
        """The speedup when this situation, or one like it, was last met."""
        if (before := self._speedups.get(_name(octave, sampled))) is not None:
            return before
        near = min(self.situations, key=lambda k: (k[1] != sampled, abs(k[0] - octave)), default=None)
        return None if near is None else self.situations[near].gain.speedup

    def observe(self, tree: Tree, path: Many[int], sampled: bool) -> None:
        """The outcome of one verified tree. Without a calibration, maps are fitted as trees come in."""
        if tree.size == 1:
            return
        self.correction.record(self.calibration, tree, path, sampled)
        if self._samples is None:
            return
        self._samples.append(Sample(0, sampled, tree, tuple(path)))
        self._trees += 1
        if self._trees >= self._fit_at:
            self._fit_at = min(2 * self._trees, self._trees + _WINDOW)
            self.calibration, self.correction = fit(self._samples), Correction(_TRUST[True])

    @property
    def odd(self) -> float:
        """How many times slower or faster than measured the machine is now; at least 1.0."""
        return max(self.cost.pace, 1.0 / self.cost.pace)

    def learn(self, size: RoundSize, spent: Spent) -> None:
        """Refine the costs by a round; measure them again, or keep them, if it is time to."""
        self.cost.learn(size, spent)
        now = time.monotonic()
        if self.noisy or self.odd > _ODD:
            share = (1 if self.odd < _VERY_ODD else 10) * _MEASURE_SHARE / 2**self._measured_again
            if now - self._measured_at > self._measuring / share:
                self._measure_again()
        elif now - self._kept_at > _KEEP_SECONDS:
            self.keep()

    def _measure_again(self) -> None:
        self._measured_again += 1
        measured = self._measure()
        self._measured_at = time.monotonic()
        if measured is not None:
            self.cost, self._measuring, self.noisy = measured
            self.keep()

    def keep(self) -> None:
        """Write the costs to the cache, unless the machine was too busy for them to be good. What no longer
        describes the machine is removed from there.
        """
        self._kept_at = time.monotonic()
        if self._file is not None and self.odd > _ODD:
            self._file.remove()
        elif self._file is not None and not self.noisy:
            found = {_name(*key): s.gain.speedup for key, s in self.situations.items()}
            self._speedups.update({name: value for name, value in found.items() if value is not None})
            self._file.save(self.cost, self._speedups)


def _name(octave: int, sampled: bool) -> str:
    """A situation's name in a file: the smallest batch of its octave, and how tokens are picked."""
    return f"{1 << (octave - 1)} {'sampled' if sampled else 'greedy'}"


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
        kept. A probe drafts for some of a batch only, for others each time.
        """
        situation = self.knowledge.situation(sequences)
        count = len(sequences)
        drafts = [s.room > 1 for s in sequences]  # else the bonus is all that may be emitted
        if not situation.gain.wants_draft():
            drafts = [False] * count
        elif not situation.gain.drafting:
            self._probes += 1
            step = _CAREFUL if count >= _CAREFUL else 1
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
            situation.reach = max(0.95 * situation.reach, 1.25 * last + 2.0, _PROBE_NODES)

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
