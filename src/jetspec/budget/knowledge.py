"""What the adaptive budget knows and learns, shared by all engines of one target and drafter: costs, chances,
and in which situations drafting pays.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many

from jetspec.budget.base import Spent
from jetspec.budget.bias import Bias
from jetspec.budget.calibrate import Sample
from jetspec.budget.correction import Correction
from jetspec.budget.cost import RoundSize
from jetspec.budget.early import fit_early
from jetspec.budget.maps import KINDS, Calibration
from jetspec.budget.profile import Measurement
from jetspec.budget.prospect import Prospect
from jetspec.budget.store import CostFile
from jetspec.budget.turn import Situation
from jetspec.tree import Tree

_TRUST = {False: 1.0, True: 30.0}  # in the chances as they come, without and with a calibration
_FIRST_FIT, _WINDOW = 8, 1500  # trees: before the first fit of maps, and that a fit looks at
_ODD, _VERY_ODD = 1.7, 4.0  # times slower or faster than measured; such a machine is measured again...
_MEASURE_SHARE = 0.02  # ...if that takes no more than this share of the rounds since; less each time
_KEEP_SECONDS = 60.0


class Knowledge:
    """What a policy knows and learns, shared by all engines of one target and drafter, which may run in
    threads of their own: a policy holds `lock` while it thinks.

    Args:
        measured: costs, as measured or read from the cache.
        gains: mean chances by rank and kind of sampling, as met in earlier processes; else those that the
            calibration was made on.
        biases: of the costs, as met in earlier processes; see `Bias`.
        whole_depth: of the drafts, if a part of their depths costs less.
        calibration: of the head; None takes the head's word until rounds say otherwise.
        measure: measures again; it may return None.
        file: where the costs are kept.
    """

    def __init__(
        self,
        measured: Measurement,
        calibration: Calibration | None = None,
        *,
        gains: Mapping[str, Many[float]] | None = None,
        biases: Mapping[int, float] | None = None,
        whole_depth: int | None = None,
        measure: Callable[[], Measurement | None] = lambda: None,
        file: CostFile | None = None,
    ) -> None:
        self.cost, self._measuring, self.noisy = measured
        self.whole_depth = whole_depth
        self.calibration = calibration if calibration is not None else Calibration()
        self.correction = Correction(_TRUST[calibration is not None])
        first = {**self.calibration.gains, **(gains or {})}
        self.prospects = {name: Prospect(first.get(name, ())) for name in KINDS}
        self.situations: dict[tuple[int, bool], Situation] = {}
        self.biases = {octave: Bias.kept(value) for octave, value in (biases or {}).items()}
        self._samples: deque[Sample] | None = None if calibration is not None else deque(maxlen=_WINDOW)
        self._fit_at = _FIRST_FIT
        self._trees = 0
        self._measure, self._file = measure, file
        self._measured_again = 0
        self._spent = 0.0  # seconds of rounds since the last measurement
        self._kept_at = time.monotonic()
        self.lock = threading.RLock()

    def prospect(self, sampled: bool) -> Prospect:
        """What drafting brings with one kind of sampling."""
        return self.prospects[KINDS[sampled]]

    def situation(self, count: int, sampled: bool, nodes: int) -> Situation:
        """The one that a batch of so many sequences is in, where so many nodes of each may be worth it."""
        key = (count.bit_length(), sampled)
        found = self.situations.get(key)
        if found is None:
            found = self.situations.setdefault(key, Situation.first(count, nodes))
        return found

    def bias(self, count: int) -> Bias:
        """Of batches of about so many sequences."""
        return self.biases.setdefault(count.bit_length(), Bias())

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
            self.calibration = fit_early(self._samples)
            self.correction = Correction(_TRUST[True])
            for prospect in self.prospects.values():
                prospect.renew()

    @property
    def odd(self) -> float:
        """How many times slower or faster than measured the machine is now; at least 1.0."""
        pace = self.cost.pace
        return max(pace, 1.0 / pace)

    def learn(self, size: RoundSize, spent: Spent) -> None:
        """Refine the costs by a round; measure them again, or keep them, if it is time to."""
        self.cost.learn(size, spent)
        self._spent += sum(spent)
        if self.noisy or self.odd > _ODD:
            share = (1 if self.odd < _VERY_ODD else 10) * _MEASURE_SHARE / 2**self._measured_again
            if self._spent > self._measuring / share:
                self._measure_again()
        elif time.monotonic() - self._kept_at > _KEEP_SECONDS:
            self.keep()

    def _measure_again(self) -> None:
        self._measured_again += 1
        measured = self._measure()
        self._spent = 0.0
        if measured is not None:
            self.cost, self._measuring, self.noisy = measured
            self.keep()

    def keep(self) -> None:
        """Write the costs to the cache, unless the machine was too busy for them to be good. What no longer
        describes the machine is removed from there.
        """
        with self.lock:
            self._keep()

    def _keep(self) -> None:
        self._kept_at = time.monotonic()
        if self._file is not None and self.odd > _ODD:
            self._file.remove()
        elif self._file is not None and not self.noisy:
            gains = {name: p.kept() for name, p in self.prospects.items() if p.gains}
            self._file.save(
                self.cost, gains, {n: bias.value for n, bias in self.biases.items() if bias.known}
            )
