"""Maps from stated log-probs to chances after a few rounds, where a head came without a calibration.

Few trees hold few accepted nodes, so a map says little of its own: the head's word to some power, times a
factor per bin that leans on 1.0 (a gamma prior on the rate of a Poisson variable).
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import pairwise

import numpy as np

from jetspec.budget.calibrate import Sample, by_group
from jetspec.budget.isotonic import isotonic
from jetspec.budget.maps import LAST, STEPS, Calibration, Group, Knot, tabulate

_BINS, _BIN_SIZE = 12, 60  # most bins of a group, least nodes in a bin
_TRUST = 4.0  # accepted nodes that the wider group counts for in each bin
_SPREAD = 0.7  # in logs, of the powers of their own word that heads are expected to keep
_LEAST = 1e-6
_FAR = 8.0  # below the rarest bin


def fit_early(samples: Iterable[Sample]) -> Calibration:
    """Per kind of sampling, on and off the spine: the power of the head's word that explains the outcomes
    best, then factors by bins of equal counts, and by bins of each depth.
    """
    nodes = by_group(samples)
    knots: dict[Group, list[Knot]] = {}
    power = 1.0
    for group in sorted(nodes):  # depth 0 first
        own = sorted(nodes[group])
        if group.depth == 0:
            power = _power(own)
            wider = tabulate([Knot(-30.0, -30.0 * power, 0), Knot(0.0, 0.0, 0)])
        else:
            wider = tabulate(knots[Group(group.sampled, group.spine, 0)])
        knots[group] = _beyond(_fit(own, wider), power)
    return Calibration(knots)


def _power(nodes: list[tuple[float, bool]]) -> float:
    """The exponent under which stated chances fit the outcomes best, leaning on 1.0."""
    stated = np.array([logp for logp, _ in nodes])
    hits = np.array([hit for _, hit in nodes])
    powers = np.exp(np.linspace(-2.0, 2.0, 41))
    fits = [
        power * stated[hits].sum()
        + np.log(np.maximum(-np.expm1(power * stated[~hits]), 1e-12)).sum()
        - 0.5 * (math.log(power) / _SPREAD) ** 2
        for power in powers
    ]
    return float(powers[int(np.argmax(fits))])


def _fit(nodes: list[tuple[float, bool]], wider: list[float]) -> list[Knot]:
    """nodes: ascending."""
    bins = max(1, min(_BINS, len(nodes) // _BIN_SIZE))
    edges = [len(nodes) * n // bins for n in range(bins + 1)]
    stated: list[float] = []
    chances: list[float] = []
    weights: list[float] = []
    counts: list[int] = []
    for low, high in pairwise(edges):
        part = nodes[low:high]
        mean = sum([logp for logp, _ in part]) / len(part)
        expected = _TRUST + sum([wider[_place(logp)] for logp, _ in part])
        factor = (sum([hit for _, hit in part]) + _TRUST) / expected
        chance = math.log(max(_LEAST, min(1.0, factor * wider[_place(mean)])))
        if stated and mean <= stated[-1]:  # many nodes with one log-prob
            continue
        stated.append(mean)
        chances.append(chance)
        weights.append(expected)
        counts.append(high - low)
    return [Knot(*knot) for knot in zip(stated, isotonic(chances, weights), counts, strict=True)]


def _beyond(knots: list[Knot], power: float) -> list[Knot]:
    """Knots further out, along the power of the head's word."""
    first, last = knots[0], knots[-1]
    found = [Knot(first.stated - _FAR, first.chance - _FAR * power, 0), *knots]
    if last.stated < 0.0:
        found.append(Knot(0.0, max(last.chance, min(0.0, last.chance - power * last.stated)), 0))
    return found


def _place(logp: float) -> int:
    return min(LAST, int(0.5 - STEPS * logp))
