"""How far the costs of drafted rounds and of plain ones are out of proportion."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

_FRESH = 12  # rounds in which the machine is taken to be as fast as before
_NEWEST = 0.3  # share of the newest round in the mean of its kind
_LEAST_SHARE = 1 / 12  # of the newest comparison, once there are many...
_LEAST_RARE = 1 / 6  # ...and where drafting is off: old evidence is what a probe is there to replace
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
    _mean: list[float] = field(default_factory=lambda: [0.0, 0.0])  # of plain rounds, of drafted ones
    _since: list[int] = field(default_factory=lambda: [_FRESH, _FRESH])  # rounds since the last of each
    _rare: bool = False  # whether the last drafted round was one that only tries

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

    def see(self, drafted: bool, ratio: float, tries: bool = False) -> None:
        """A round of so many times the modelled seconds; `tries`: it drafts only to see whether that pays."""
        self._rare = tries if drafted else self._rare
        own, other = math.log(max(ratio, 1e-3)), not drafted
        if not self._since[other]:  # the kind changes; an unusual round is compared once with usual ones
            gap = own - self._mean[other] if drafted else self._mean[other] - own
            self.samples += 1
            least = _LEAST_RARE if self._rare else _LEAST_SHARE
            share = max(1.0 / (self.samples + _PRIOR), least)
            self.value += share * (min(_MOST, max(-_MOST, gap)) - self.value)
        share = _NEWEST if self._since[drafted] < _FRESH else 1.0
        self._mean[drafted] += share * (own - self._mean[drafted])
        self._since[drafted] = 0
        self._since[other] += 1
