"""How far the costs of drafted rounds and of plain ones are out of proportion."""

from __future__ import annotations

import math
from dataclasses import dataclass

_FRESH = 12  # rounds in which the machine is taken to be as fast as before
_NEWEST = 0.3  # share of the newest round in the mean of its kind
_LEAST_SHARE = 1 / 12  # of the newest comparison, once there are many
_MOST = 0.3  # logs: a round further off was disturbed
_ENOUGH = 4  # comparisons
_PRIOR = 1.0  # comparisons' worth of trust in the measured costs


@dataclass
class Bias:
    """Compares drafted rounds with plain ones that were run next to them, for one batch size.

    Costs are refined by rounds, but what is refined is what rounds are made of, and the pace of the machine
    is that of the usual rounds. Where nearly all of them draft, nothing tells that the few plain ones take 10
    % less than the curves say, and then drafting looks better than it is by just these 10 %.

    A round's measured over modelled seconds is compared, in logs, with the mean of the other kind's lately.
    """

    value: float = 0.0
    samples: int = 0
    _mean: tuple[float, float] = (0.0, 0.0)  # of plain rounds, of drafted ones
    _seen: tuple[int, int] = (-(10**9), -(10**9))
    _rounds: int = 0

    @staticmethod
    def kept(value: float) -> Bias:
        """As an earlier process left it."""
        return Bias(value, _ENOUGH)

    @property
    def plain(self) -> float:
        """What the modelled seconds of a plain round are multiplied with, to be in proportion."""
        return math.exp(-self.value)

    @property
    def known(self) -> bool:
        """Whether there were enough comparisons."""
        return self.samples >= _ENOUGH

    def see(self, drafted: bool, ratio: float) -> None:
        """A round of so many times the modelled seconds."""
        self._rounds += 1
        own = math.log(max(ratio, 1e-3))
        other = not drafted
        if self._rounds - self._seen[other] <= _FRESH and self._is_turn(drafted):
            gap = own - self._mean[other] if drafted else self._mean[other] - own
            self.samples += 1
            share = max(1.0 / (self.samples + _PRIOR), _LEAST_SHARE)
            self.value += share * (min(_MOST, max(-_MOST, gap)) - self.value)
        fresh = self._rounds - self._seen[drafted] <= _FRESH
        mean = self._mean[drafted] + _NEWEST * (own - self._mean[drafted]) if fresh else own
        self._mean = (mean, self._mean[1]) if not drafted else (self._mean[0], mean)
        seen = self._rounds
        self._seen = (seen, self._seen[1]) if not drafted else (self._seen[0], seen)

    def _is_turn(self, drafted: bool) -> bool:
        """Whether the kind changes: the usual rounds are not compared with one and the same unusual one."""
        return self._seen[not drafted] == self._rounds - 1
