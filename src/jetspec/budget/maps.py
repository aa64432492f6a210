"""From a head's stated log-prob of a path to the chance that the target takes that path.

A head states q(path); what a budget needs is the chance that a node is accepted. The two differ by depth, by
whether the head could see the node's ancestors coming, and by how the target picks its tokens. So there is
one monotone map per group: (greedy or sampled, on or off the spine, depth). A node is on the spine if all its
ancestors are first children (the root's children always are); siblings are in one group, and keep their
order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jetspec.tree import Tree

STEPS = 32  # entries of a table per unit of log-prob
LAST = 20 * STEPS  # rarer paths count as this one
KINDS = ("greedy", "sampled")


class Group(NamedTuple):
    """Nodes that share a map. Depth 0 stands for all depths: the wider group that small ones lean on."""

    sampled: bool
    spine: bool
    depth: int


class Knot(NamedTuple):
    """A point of a map: the mean stated log-prob of some nodes, the log of their chance, their number."""

    stated: float
    chance: float
    nodes: int


class Calibration:
    """Maps by group. Without knots every map is the identity: the head's own word.

    Args:
        knots: stated log-probs ascending, chances non-decreasing and at most 0.0.
        gains: by kind of sampling (`KINDS`) the mean chance of a tree's best node, second best, ..., as far
            as it was looked at: what a first draft may promise.
    """

    def __init__(
        self,
        knots: Mapping[Group, Many[Knot]] | None = None,
        gains: Mapping[str, Many[float]] | None = None,
    ) -> None:
        self.knots = {group: tuple(points) for group, points in (knots or {}).items() if points}
        self.gains = {kind: tuple(values) for kind, values in (gains or {}).items() if values}
        self._tables: list[list[list[float]]] = [[], [], [], []]  # [sampled and spine][depth]

    def table(self, group: Group) -> list[float]:
        """Chances at stated log-probs 0, -1/STEPS, ..., -LAST/STEPS. A depth without knots of its own uses
        those of all depths, and a kind of sampling without any those of the other kind.
        """
        return self.tables(group.sampled, group.spine, group.depth)[group.depth]

    def tables(self, sampled: bool, spine: bool, depth: int) -> list[list[float]]:
        """The tables of depths 0 to at least `depth`."""
        found = self._tables[2 * sampled + spine]
        while len(found) <= depth:
            found.append(tabulate(self._points(Group(sampled, spine, len(found)))))
        return found

    def without_sampled(self) -> Calibration:
        """The maps of greedy decoding alone."""
        greedy = KINDS[False]
        return Calibration(
            {group: points for group, points in self.knots.items() if not group.sampled},
            {greedy: self.gains[greedy]} if greedy in self.gains else None,
        )

    def _points(self, group: Group) -> Many[Knot]:
        for sampled in (group.sampled, not group.sampled):
            for depth in (group.depth, 0):
                found = self.knots.get(Group(sampled, group.spine, depth))
                if found:
                    return found
        return ()


def tabulate(points: Many[Knot]) -> list[float]:
    """Chances at stated log-probs 0, -1/STEPS, ...; without points the head's own word."""
    stated = -np.arange(LAST + 1) / STEPS
    if not points:
        return np.exp(stated).tolist()
    x, y = np.array([p.stated for p in points]), np.array([p.chance for p in points])
    log_chance = np.interp(stated, x, y) + np.minimum(stated - x[0], 0.0)  # beyond the rarest: as stated
    return np.exp(np.minimum(log_chance, 0.0)).tolist()


def spines(tree: Tree) -> list[bool]:
    """Per node whether all its ancestors are first children."""
    parents = tree.parents
    size = len(parents)
    line = [True] * size  # whether a node and all its ancestors are first children
    opened = [False] * size
    found = [True] * size
    for node in range(1, size):
        parent = parents[node]
        found[node] = spine = line[parent]
        if opened[parent]:
            line[node] = False
        else:
            line[node] = spine
            opened[parent] = True
    return found


class Ratios(NamedTuple):
    """What chances are multiplied with, [depth] from 0 on for nodes on and off the spine."""

    spine: Many[float]
    off: Many[float]


def chances(
    calibration: Calibration,
    tree: Tree,
    sampled: bool,
    ratios: Ratios | None = None,
    factor: float = 1.0,
) -> list[float]:
    """The chance of acceptance per node, 1.0 for the root, never above the parent's: the best nodes by it
    form a tree, if ties are broken by the nodes' order.

    factor: what all of them are multiplied with besides.
    """
    size, parents, depths, logps = len(tree.tokens), tree.parents, tree.depths, tree.logps
    deepest = max(depths)
    tables = (calibration.tables(sampled, False, deepest), calibration.tables(sampled, True, deepest))
    by_depth = _NO_RATIOS if ratios is None else (ratios.off, ratios.spine)
    last = len(by_depth[0]) - 1
    found = [1.0] * size
    line = [True] * size  # as in `spines`
    opened = [False] * size
    for node in range(1, size):
        parent, depth = parents[node], depths[node]
        spine = line[parent]
        if opened[parent]:
            line[node] = False
        else:
            line[node] = spine
            opened[parent] = True
        place = int(0.5 - STEPS * logps[node])
        value = tables[spine][depth][place if place < LAST else LAST]
        value *= by_depth[spine][depth if depth < last else last] * factor
        above = found[parent]
        found[node] = value if value < above else above
    return found


_NO_RATIOS = ((1.0,), (1.0,))


def to_values(calibration: Calibration) -> list[dict[str, Any]]:
    """Maps for JSON."""
    return [
        {
            "sampled": group.sampled,
            "spine": group.spine,
            "depth": group.depth,
            "stated": [point.stated for point in points],
            "chance": [point.chance for point in points],
            "count": [point.nodes for point in points],
        }
        for group, points in sorted(calibration.knots.items())
    ]


def from_values(values: Any, gains: Mapping[str, Any] | None = None) -> Calibration:
    """Raises ValueError, TypeError, KeyError or OverflowError if these are not maps, or not chances."""
    knots: dict[Group, list[Knot]] = {}
    for entry in values:
        group = Group(bool(entry["sampled"]), bool(entry["spine"]), int(entry["depth"]))
        columns = (entry["stated"], entry["chance"], entry["count"])
        points = [Knot(float(x), float(y), int(n)) for x, y, n in zip(*columns, strict=True)]
        stated, chance = [p.stated for p in points], [p.chance for p in points]
        rising = all(a < b for a, b in pairwise(stated)) and all(a <= b for a, b in pairwise(chance))
        if not (points and rising and chance[-1] <= 0.0 and all(map(math.isfinite, stated + chance))):
            raise ValueError(f"the map of {group} is not monotone")
        knots[group] = points
    if not isinstance(gains, Mapping | None):
        raise ValueError("gains are no object")
    means = {kind: [float(gain) for gain in (gains or {}).get(kind, ())] for kind in KINDS}
    if not all(0.0 <= gain <= 1.0 for own in means.values() for gain in own):
        raise ValueError("gains are chances")
    return Calibration(knots, means)
