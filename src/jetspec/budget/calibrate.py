"""Maps from stated log-probs to chances are fitted to verified trees, and judged by others."""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Many
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from jetspec.budget.isotonic import isotonic
from jetspec.budget.maps import KINDS, LAST, STEPS, Calibration, Group, Knot, chances, spines, tabulate
from jetspec.tree import Tree

_LEAST = 1e-6
_BINS, _BIN_SIZE = 20, 60  # most bins of a group, least nodes in a bin
_PRIOR = 10.0  # nodes that the wider group counts for in each bin


class Sample(NamedTuple):
    """One verified tree: which prompt it belongs to, how the target picked, and the accepted path."""

    prompt: int
    sampled: bool
    tree: Tree
    path: tuple[int, ...]


def fit(samples: Many[Sample]) -> Calibration:
    """Maps from verified trees: per group, bins of equal counts along the stated log-prob, their share of
    accepted nodes, made monotone. A bin leans on the group of all depths, and that one on the head's word.
    With them the mean gains of these trees.
    """
    nodes = by_group(samples)
    knots: dict[Group, list[Knot]] = {}
    for group in sorted(nodes):  # depth 0 first
        wider = tabulate(knots.get(Group(group.sampled, group.spine, 0), ()))
        knots[group] = _fit_group(nodes[group], wider)
    maps = Calibration(knots)
    return Calibration(knots, {kind: _mean_gains(samples, maps, n == 1) for n, kind in enumerate(KINDS)})


def _mean_gains(samples: Many[Sample], maps: Calibration, sampled: bool) -> list[float]:
    """Of the ranks that every tree has, up to those few that ended early."""
    trees = [
        sorted(chances(maps, sample.tree, sampled)[1:], reverse=True)
        for sample in samples
        if sample.sampled == sampled
    ]
    if not trees:
        return []
    usual = sorted(map(len, trees))[len(trees) // 10]
    ranks = [[tree[n] for tree in trees if n < len(tree)] for n in range(usual)]
    return [float(f"{sum(rank) / len(rank):.4g}") for rank in ranks]


def by_group(samples: Iterable[Sample]) -> dict[Group, list[tuple[float, bool]]]:
    """Stated log-prob and outcome of every drafted node, by group and in the group of all depths."""
    nodes: dict[Group, list[tuple[float, bool]]] = {}
    for sample in samples:
        kept = set(sample.path)
        tree = sample.tree
        for node, spine in enumerate(spines(tree)):
            if node:
                pair = (tree.logps[node], node in kept)
                for depth in (0, tree.depths[node]):
                    nodes.setdefault(Group(sample.sampled, spine, depth), []).append(pair)
    return nodes


def _fit_group(nodes: list[tuple[float, bool]], wider: list[float]) -> list[Knot]:
    nodes.sort()
    bins = max(1, min(_BINS, len(nodes) // _BIN_SIZE))
    edges = [len(nodes) * n // bins for n in range(bins + 1)]
    stated, shares, weights = [], [], []
    for low, high in pairwise(edges):
        part = nodes[low:high]
        mean = sum(logp for logp, _ in part) / len(part)
        prior = wider[min(LAST, int(0.5 - STEPS * mean))]
        weight = len(part) + _PRIOR
        stated.append(round(mean, 4))  # as the file holds it
        shares.append((sum(hit for _, hit in part) + _PRIOR * prior) / weight)
        weights.append(weight)
    found: list[Knot] = []
    for x, share, low, high in zip(stated, isotonic(shares, weights), edges[:-1], edges[1:], strict=True):
        if found and x <= found[-1].stated:  # many nodes with one log-prob
            x, count = found[-1].stated, found.pop().nodes + high - low
        else:
            count = high - low
        found.append(Knot(x, round(math.log(min(1.0, max(share, _LEAST))), 4), count))
    return found


class Reliability(NamedTuple):
    """How far stated chances are from shares.

    error   expected calibration error: mean over nodes of |chance - share of accepted nodes in its bin|
    bins    (mean chance, share of accepted nodes, nodes) of each bin that is not empty
    """

    error: float
    bins: list[tuple[float, float, int]]


def reliability(stated: Many[float], hits: Many[bool], bins: int = 20) -> Reliability:
    """Over bins of equal width in the chance."""
    chance = np.asarray(stated, dtype=np.float64)
    hit: npt.NDArray[np.float64] = np.asarray(hits, dtype=np.float64)
    place = np.minimum((chance * bins).astype(int), bins - 1)
    found = []
    error = 0.0
    for number in range(bins):
        inside = place == number
        count = int(inside.sum())
        if count:
            mean, share = float(chance[inside].mean()), float(hit[inside].mean())
            error += count * abs(mean - share)
            found.append((mean, share, count))
    return Reliability(error / max(1, len(chance)), found)


def judge(calibration: Calibration, samples: Iterable[Sample]) -> dict[str, Reliability]:
    """Reliability on verified trees: "path", all drafted nodes; "step", the nodes whose parent was accepted,
    given that it was (chance of the node / chance of the parent).
    """
    path: tuple[list[float], list[bool]] = ([], [])
    step: tuple[list[float], list[bool]] = ([], [])
    for _, sampled, tree, kept_path in samples:
        kept = set(kept_path)
        values = chances(calibration, tree, sampled)
        for node in range(1, tree.size):
            parent = tree.parents[node]
            path[0].append(values[node])
            path[1].append(node in kept)
            if parent in kept:
                step[0].append(values[node] / max(values[parent], 1e-12))
                step[1].append(node in kept)
    return {"path": reliability(*path), "step": reliability(*step)}
