"""What recent rounds say about calibrated chances: factors by depth that bring them to the accepted share."""

from __future__ import annotations

from collections.abc import Sequence as Many

from jetspec.budget.maps import LAST, STEPS, Calibration, Ratios, spines
from jetspec.tree import Tree

_MEMORY = 1 - 1 / 200  # per tree: about how many count
_LEAST, _MOST = 0.01, 3.0
_DEPTHS = 16  # deeper nodes share a factor
_HEAVY = 1e6


class Correction:
    """Per kind of sampling, spine and depth: accepted nodes / expected ones among those that were verified.

    Args:
        trust: how many expected acceptances the calibration's own word counts for. A depth that has hardly
            been verified takes the factor of the depth above.
    """

    def __init__(self, trust: float) -> None:
        self._trust = trust
        # [sampled][spine][depth] -> [accepted, expected]. Instead of the past getting lighter, the present
        # gets heavier: `_weight` is that of the newest tree.
        self._seen = [[[[0.0, 0.0] for _ in range(_DEPTHS + 1)] for _ in range(2)] for _ in range(2)]
        self._weight = [1.0, 1.0]
        self._deepest = [1, 1]
        self._ratios: list[Ratios | None] = [None, None]

    def ratios(self, sampled: bool) -> Ratios:
        """The factors now, as deep as nodes were verified."""
        found = self._ratios[sampled]
        if found is None:
            trust, deepest = self._trust * self._weight[sampled], self._deepest[sampled]
            off, on = self._seen[sampled]
            spine = _chain(on[: deepest + 1], trust, [1.0])
            found = self._ratios[sampled] = Ratios(spine, _chain(off[: deepest + 1], trust, [1.0, spine[1]]))
        return found

    def record(self, calibration: Calibration, tree: Tree, path: Many[int], sampled: bool) -> None:
        """One verified tree."""
        self._weight[sampled] /= _MEMORY
        if self._weight[sampled] > _HEAVY:
            self._lighten(sampled)
        weight, own = self._weight[sampled], self._seen[sampled]
        depths, logps = tree.depths, tree.logps
        spine = spines(tree)
        deepest = max(depths)
        self._deepest[sampled] = min(_DEPTHS, max(self._deepest[sampled], deepest))
        tables = (calibration.tables(sampled, False, deepest), calibration.tables(sampled, True, deepest))
        for node in range(1, len(logps)):
            depth = depths[node]
            place = int(0.5 - STEPS * logps[node])
            pair = own[spine[node]][depth if depth < _DEPTHS else _DEPTHS]
            pair[1] += weight * tables[spine[node]][depth][place if place < LAST else LAST]
        for node in path[1:]:
            own[spine[node]][min(depths[node], _DEPTHS)][0] += weight
        self._ratios[sampled] = None

    def _lighten(self, sampled: bool) -> None:
        """Bring the weights back to a size at which they add up well."""
        for by_depth in self._seen[sampled]:
            for pair in by_depth:
                pair[0] /= self._weight[sampled]
                pair[1] /= self._weight[sampled]
        self._weight[sampled] = 1.0


def _chain(seen: Many[Many[float]], trust: float, start: list[float]) -> list[float]:
    ratios = start
    for accepted, expected in seen[len(start) :]:
        if not expected:  # nothing as deep as this was seen
            ratios.append(ratios[-1])
            continue
        ratio = (accepted + trust * ratios[-1]) / (expected + trust)
        ratios.append(min(_MOST, max(_LEAST, ratio)))
    return ratios
