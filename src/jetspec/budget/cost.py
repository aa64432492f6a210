"""What a round costs on this machine, in seconds: draft, build, verify and commit, as curves that were
measured and that go on learning from the rounds that are run.

    round = draft(sequences drafted for) + build(grown nodes) + commit(B)
          + verify(rows) + sequence * (B - 1) + context * S + row_context * (S of every row)

B sequences, S committed tokens of a sequence. Curves never fall, and are free to have steps: planners look at
every size instead of stopping at the first one that does not pay.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from jetspec.budget.base import Spent
from jetspec.budget.isotonic import isotonic

Floats: TypeAlias = npt.NDArray[np.float64]

_LARGEST = 16384  # rows of one forward that a curve can tell apart
_REACH = 0.25  # an observation at n also moves sizes up to so much smaller or larger, less the further away
_LARGEST_STEP = 0.3  # of one observation, in logs: a stall moves a curve no further than a slow round
_FIRST_STEP = 2.0  # of the first two at a size that was not measured
_SLOWEST = 1 / 50  # share of an observation that a well-known size takes over
_MEASURED = 10.0  # rounds that a measurement counts for
_PACE_ROUNDS = 15
_HOPE = 0.05  # by how much a size that was never run may turn out cheaper
_LEAST = 1e-7  # seconds; keeps logs finite


def _grid() -> Floats:
    """Every size up to 32, then ever larger steps of about 8 %."""
    sizes = list(range(33))
    while sizes[-1] < _LARGEST:
        sizes.append(sizes[-1] + max(2, sizes[-1] // 12))
    return np.array(sizes, dtype=np.float64)


GRID = _grid()


class Curve:
    """Seconds as a non-decreasing function of a size, linear between the sizes of GRID.

    Args:
        values: [len(GRID)] seconds.
        known: sizes up to which they were measured; beyond, the first rounds count for more.
    """

    def __init__(self, values: Floats, known: float = 0.0) -> None:
        assert values.shape == GRID.shape and bool((np.diff(values) >= 0).all()), values
        self.values, self.known = values, known
        self._visits = np.zeros_like(values)  # rounds that were run at or near each size

    @staticmethod
    def through(points: Mapping[int, float]) -> Curve:
        """A curve through measured sizes, made monotone; beyond the last it goes on with its slope over the
        upper half. One size alone makes it constant.
        """
        sizes = sorted(points)
        seconds = isotonic([max(points[size], _LEAST) for size in sizes])
        values = np.interp(GRID, sizes, seconds)
        if len(sizes) > 1:
            middle = min(len(sizes) - 2, next(n for n, size in enumerate(sizes) if 2 * size >= sizes[-1]))
            slope = (seconds[-1] - seconds[middle]) / (sizes[-1] - sizes[middle])
            values += slope * np.maximum(GRID - sizes[-1], 0.0)
        return Curve(values, sizes[-1])

    def at(self, size: float) -> float:
        """Seconds at one size."""
        return float(np.interp(size, GRID, self.values))

    def along(self, sizes: Floats) -> Floats:
        """Seconds at many sizes, a little too few where hardly any round was run: a size that a faulty
        measurement made look expensive is tried, and then it is known.
        """
        doubt = _HOPE / np.sqrt(1.0 + self._visits)
        return np.interp(sizes, GRID, self.values * (1.0 - doubt))

    def nudge(self, size: float, log_ratio: float) -> None:
        """Move towards an observation: log of (seconds seen / seconds expected) at `size`.

        Steps are clipped, so the curve follows the median of what it sees, and a stall counts little.
        """
        width = max(1.0, _REACH * size)
        low, high = np.searchsorted(GRID, (size - width, size + width), side="left")
        high = max(high, low + 1)
        near = slice(low, high)
        closeness = np.maximum(0.0, 1.0 - np.abs(GRID[near] - size) / width)
        visits = self._visits[near]  # a view
        trusted = visits + np.where(GRID[near] <= self.known, _MEASURED, 0.0)
        share = closeness * np.maximum(_SLOWEST, 1.0 / (2.0 + trusted))
        most = np.where(trusted < 2.0, _FIRST_STEP, _LARGEST_STEP)
        self.values[near] *= np.exp(np.clip(log_ratio, -most, most) * share)
        visits += closeness
        # Monotone again. The newest observation is right, and its neighbours give way.
        centre = int(low) + int(closeness.argmax())
        self.values[: centre + 1] = np.minimum.accumulate(self.values[centre::-1])[::-1]
        self.values[centre:] = np.maximum.accumulate(self.values[centre:])


class RoundSize(NamedTuple):
    """What a round's cost depends on.

    sequences   B
    drafts      sequences that were drafted for
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
        return RoundSize(len(contexts), 0, 0, len(contexts), sum(contexts), sum(contexts))


@dataclass
class CostModel:
    """The parts of a round's cost; see the module's docstring. All in seconds."""

    draft: Curve
    build: Curve
    verify: Curve
    commit: Curve
    sequence: float = 0.0
    context: float = 0.0
    row_context: float = 0.0
    _ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_PACE_ROUNDS), repr=False)

    def parts(self, size: RoundSize) -> Spent:
        """Seconds by phase, at the pace at which the curves were measured."""
        beside = (
            self.sequence * (size.sequences - 1)
            + self.context * size.context
            + self.row_context * size.row_context
        )
        return Spent(
            self.draft.at(size.drafts) if size.drafts else 0.0,
            self.build.at(size.grown),
            self.verify.at(size.rows) + beside,
            self.commit.at(size.sequences),
        )

    def seconds(self, size: RoundSize) -> float:
        """Of the whole round."""
        return sum(self.parts(size))

    def plain(self, contexts: Many[int]) -> float:
        """Seconds of a round of plain decoding."""
        return self.seconds(RoundSize.plain(contexts))

    @property
    def pace(self) -> float:
        """Seconds of recent rounds / those expected of them; 1.0 before enough rounds were seen."""
        return statistics.median(self._ratios) if len(self._ratios) > _PACE_ROUNDS // 2 else 1.0

    def learn(self, size: RoundSize, spent: Spent) -> None:
        """Refine the curves by a round that was run.

        Other work slows every part down alike and comes and goes. That common factor, the pace, is the median
        of recent rounds and is divided out: only how sizes and parts compare is learned, and only that can
        decide between budgets.
        """
        expected = self.parts(size)
        self._ratios.append(max(sum(spent), _LEAST) / sum(expected))
        pace = statistics.median(self._ratios)
        places = (size.drafts, size.grown, size.rows, size.sequences)
        for curve, place, seen, wanted, counts in zip(
            (self.draft, self.build, self.verify, self.commit),
            places,
            spent,
            expected,
            (size.drafts > 0, True, True, True),
            strict=True,
        ):
            if counts:
                curve.nudge(place, math.log(max(seen, _LEAST) / (pace * max(wanted, _LEAST))))

    def to_values(self) -> dict[str, Any]:
        """For JSON."""
        curves = {name: getattr(self, name) for name in _CURVES}
        return {
            "grid": GRID.tolist(),
            **{name: [float(f"{v:.6g}") for v in curve.values] for name, curve in curves.items()},
            "known": {name: float(curve.known) for name, curve in curves.items()},
            **{name: getattr(self, name) for name in _RATES},
        }

    @staticmethod
    def from_values(values: Mapping[str, Any]) -> CostModel:
        """Raises ValueError, KeyError or TypeError if these are not the values of a cost model."""
        if values["grid"] != GRID.tolist():
            raise ValueError("other sizes")
        curves: list[Curve] = []
        for name in _CURVES:
            seconds = np.array(values[name], dtype=np.float64)
            if seconds.shape != GRID.shape or not np.isfinite(seconds).all() or seconds[0] <= 0:
                raise ValueError(f"{name} is no curve")
            curves.append(Curve(np.maximum.accumulate(seconds), float(values["known"][name])))
        rates = [float(values[name]) for name in _RATES]
        if not all(0 <= rate < math.inf for rate in rates):
            raise ValueError("a rate is out of range")
        draft, build, verify, commit = curves
        sequence, context, row_context = rates
        return CostModel(draft, build, verify, commit, sequence, context, row_context)


_CURVES = ("draft", "build", "verify", "commit")
_RATES = ("sequence", "context", "row_context")
