"""What the adaptive budget knows and learns, shared by all engines of one target and drafter: costs, chances,
and in which situations drafting pays.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass

from jetspec.budget.base import Spent
from jetspec.budget.calibrate import Calibration, Sample, fit
from jetspec.budget.correction import Correction
from jetspec.budget.cost import RoundSize
from jetspec.budget.gain import Gain
from jetspec.budget.profile import Measurement
from jetspec.budget.store import CostFile
from jetspec.sequence import Sequence
from jetspec.tree import Tree

CAREFUL = 4  # sequences from which on the first round is a probe; a round of a large batch is a lot to lose
LEAST_REACH = 4  # nodes that are grown at least
_FIRST_REACH = 16.0
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
            reach = max(LEAST_REACH, _FIRST_REACH / len(sequences) ** 0.5)
            gain = Gain(self._expected(*key), careful=len(sequences) >= CAREFUL)
            self.situations[key] = Situation(gain, reach)
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
