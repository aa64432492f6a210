"""What recent rounds say about calibrated chances: factors by depth that bring them to the accepted share."""

from __future__ import annotations

from collections.abc import Sequence as Many

from jetspec.budget.calibrate import LAST, STEPS, Calibration, Group, Ratios, spines
from jetspec.tree import Tree

_MEMORY = 1 - 1 / 200  # per round: about how many rounds count
_LEAST, _MOST = 0.01, 3.0
_DEPTHS = 16  # deeper nodes share a factor


class Correction:
    """Per kind of sampling, spine and depth: accepted nodes / expected ones among those that were verified.

    Args:
        trust: how many expected acceptances the calibration's own word counts for. A depth that has hardly
            been verified takes the factor of the depth above.
    """

    def __init__(self, trust: float) -> None:
        self._trust = trust
        # [sampled][spine][depth] -> [accepted, expected]
        self._seen = [[[[0.0, 0.0] for _ in range(_DEPTHS + 1)] for _ in range(2)] for _ in range(2)]
        self._ratios: list[Ratios | None] = [None, None]

    def ratios(self, sampled: bool) -> Ratios:
        """The factors now."""
        found = self._ratios[sampled]
        if found is None:
            on = self._chain(self._seen[sampled][True], [1.0])
            off = self._chain(self._seen[sampled][False], [1.0, on[1]])
            found = self._ratios[sampled] = Ratios(on, off)
        return found

    def _chain(self, seen: Many[Many[float]], start: list[float]) -> list[float]:
        ratios = start
        for accepted, expected in seen[len(start) :]:
            ratio = (accepted + self._trust * ratios[-1]) / (expected + self._trust)
            ratios.append(min(_MOST, max(_LEAST, ratio)))
        return ratios

    def record(self, calibration: Calibration, tree: Tree, path: Many[int], sampled: bool) -> None:
        """One verified tree."""
        own, kept = self._seen[sampled], set(path)
        for by_depth in own:
            for pair in by_depth:
                pair[0] *= _MEMORY
                pair[1] *= _MEMORY
        for node, spine in enumerate(spines(tree)):
            if node:
                depth = tree.depths[node]
                pair = own[spine][min(depth, _DEPTHS)]
                place = int(0.5 - STEPS * tree.logps[node])
                pair[1] += calibration.table(Group(sampled, spine, depth))[min(place, LAST)]
                pair[0] += node in kept
        self._ratios[sampled] = None
