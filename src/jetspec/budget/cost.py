"""What a round costs on this machine, in seconds: draft, build, verify and commit, as curves that were
measured and that go on learning from the rounds that are run.

    round = draft(blocks drafted) + build(grown nodes) + commit(B)
          + verify(rows) + sequence * (B - 1) + context * S + row_context * (S of every row)

B sequences, S committed tokens of a sequence. Curves never fall, and are free to have steps: planners look at
every size instead of stopping at the first one that does not pay.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jetspec.budget.base import Spent
from jetspec.budget.curve import LEAST, Curve

_PACE_ROUNDS = 15
_SETTLED = 48  # rounds after which the parts that hardly decide anything are refined less often...
_SELDOM = 4  # ...in every fourth round
_MOST = 1e4  # seconds; what takes longer was not measured but damaged


class RoundSize(NamedTuple):
    """What a round's cost depends on.

    sequences   B
    drafts      sequences that were drafted for, in whole blocks: see `blocks`
    grown       nodes grown, all trees together, before they are cut
    rows        rows of the target's forward, roots included
    context     committed tokens, summed over sequences
    row_context committed tokens, summed over rows
    """

    sequences: int
    drafts: int
    grown: int
    rows: int
    context: int
    row_context: int

    @staticmethod
    def plain(contexts: Many[int]) -> RoundSize:
        """Plain decoding of sequences with so many committed tokens."""
        total = sum(contexts)
        return RoundSize(len(contexts), 0, 0, len(contexts), total, total)


def blocks(drafts: int, depth: int | None, whole: int | None) -> int:
    """Whole blocks of draft that cost about as much as `drafts` blocks of which `depth` of `whole` depths are
    drafted; None is all of them.
    """
    if depth is None or whole is None:
        return drafts
    return -(-drafts * (1 + min(depth, whole)) // (1 + whole))


@dataclass
class CostModel:
    """The parts of a round's cost; see the module's docstring. All in seconds.

    pace    seconds of recent rounds / those expected of them; 1.0 before enough rounds were seen
    """

    draft: Curve
    build: Curve
    verify: Curve
    commit: Curve
    sequence: float = 0.0
    context: float = 0.0
    row_context: float = 0.0
    pace: float = field(default=1.0, init=False)
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_ROUNDS), repr=False)
    _rounds: int = field(default=0, init=False, repr=False)

    def beside(self, size: RoundSize) -> float:
        """What batch and context add to the forward."""
        return (
            self.sequence * (size.sequences - 1)
            + self.context * size.context
            + self.row_context * size.row_context
        )

    def further(self, rows: int, size: RoundSize) -> float:
        """What the contexts of so many drafted rows add to a round of that size, spread evenly."""
        return self.row_context * rows * size.context / size.sequences

    def parts(self, size: RoundSize) -> Spent:
        """Seconds by phase, at the pace at which the curves were measured."""
        return Spent(
            self.draft.at(size.drafts) if size.drafts else 0.0,
            self.build.at(size.grown),
            self.verify.at(size.rows) + self.beside(size),
            self.commit.at(size.sequences),
        )

    def seconds(self, size: RoundSize) -> float:
        """Of the whole round."""
        found = self.verify.at(size.rows) + self.beside(size) + self.build.at(size.grown)
        if size.drafts:
            found += self.draft.at(size.drafts)
        return found + self.commit.at(size.sequences)

    def plain(self, contexts: Many[int]) -> float:
        """Seconds of a round of plain decoding."""
        return self.seconds(RoundSize.plain(contexts))

    def learn(self, size: RoundSize, spent: Spent) -> None:
        """Refine the curves by a round that was run.

        Other work slows every part down alike and comes and goes. That common factor, the pace, is the median
        of recent rounds and is divided out: only how sizes and parts compare is learned, and only that can
        decide between budgets.
        """
        draft, build, verify, commit = expected = self.parts(size)
        ratios = self._ratios
        ratios.append(max(sum(spent), LEAST) / sum(expected))
        pace = _median(ratios)
        if len(ratios) > _PACE_ROUNDS // 2:
            self.pace = pace
        self.verify.nudge(size.rows, math.log(max(spent.verify, LEAST) / (pace * max(verify, LEAST))))
        self._rounds += 1
        if self._rounds > _SETTLED and self._rounds % _SELDOM:
            return
        if size.drafts:
            self.draft.nudge(size.drafts, math.log(max(spent.draft, LEAST) / (pace * max(draft, LEAST))))
        self.build.nudge(size.grown, math.log(max(spent.build, LEAST) / (pace * max(build, LEAST))))
        self.commit.nudge(size.sequences, math.log(max(spent.commit, LEAST) / (pace * max(commit, LEAST))))

    def to_values(self) -> dict[str, Any]:
        """For JSON."""
        return {
            **{
                name: {str(size): float(f"{value:.6g}") for size, value in getattr(self, name).points.items()}
                for name in _CURVES
            },
            **{name: getattr(self, name) for name in _RATES},
        }

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> CostModel:
        """Raises ValueError, KeyError, TypeError or AttributeError if these are not the values of a cost
        model.
        """
        curves: list[Curve] = []
        for name in _CURVES:
            points = {int(size): float(value) for size, value in values[name].items()}
            if not points or min(points) < 0 or not all(0 < value < _MOST for value in points.values()):
                raise ValueError(f"{name} is no curve")
            curves.append(Curve(points))
        rates = [float(values[name]) for name in _RATES]
        if not all(0 <= rate < _MOST for rate in rates):
            raise ValueError("a rate is out of range")
        draft, build, verify, commit = curves
        sequence, context, row_context = rates
        return CostModel(draft, build, verify, commit, sequence, context, row_context)


_CURVES = ("draft", "build", "verify", "commit")
_RATES = ("sequence", "context", "row_context")


def _median(values: deque[float]) -> float:
    ranked = sorted(values)
    middle = len(ranked) // 2
    return ranked[middle] if len(ranked) % 2 else 0.5 * (ranked[middle - 1] + ranked[middle])
