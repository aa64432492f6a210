"""Monotone regression: the non-decreasing sequence that lies nearest to given values."""

from __future__ import annotations

from collections.abc import Sequence as Many


def isotonic(values: Many[float], weights: Many[float] | None = None) -> list[float]:
    """The non-decreasing sequence with the least weighted squared distance from `values`.

    Pool adjacent violators: neighbours in the wrong order take their common mean, until none are left.
    """
    blocks: list[list[float]] = []  # [mean, weight, members]
    for index, value in enumerate(values):
        blocks.append([value, 1.0 if weights is None else weights[index], 1])
        while len(blocks) > 1 and blocks[-2][0] > blocks[-1][0]:
            mean, weight, members = blocks.pop()
            before = blocks[-1]
            total = before[1] + weight
            before[0] = (before[0] * before[1] + mean * weight) / total if total else before[0]
            before[1], before[2] = total, before[2] + members
    return [mean for mean, _, members in blocks for _ in range(int(members))]
