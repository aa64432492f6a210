"""Seconds as a function of a size: measured at some sizes, guessed between them, refined by every round.

Plain lists and floats: a round touches a handful of entries, and after a forward that has swept the caches a
call into an array library costs more than they do.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Mapping

from jetspec.budget.isotonic import isotonic

LEAST = 1e-7  # seconds; keeps logs finite
_EACH = 64  # up to here every size has an entry
_LARGEST = 16384  # rows of one forward that a curve can tell apart
_LARGEST_STEP = 0.3  # of one observation, in logs: a stall moves a curve no further than a slow round
_FIRST_STEP = 0.7  # of the first at a size that was not measured
_SLOWEST = 1 / 50  # share of an observation that a well-known size takes over
_MEASURED = 6.0  # rounds that a measurement counts for
_GUESSED = 0.5  # rounds that a guess counts for
_HOPE = 0.08  # by how much a measured size that was never run may turn out cheaper
_NOISE = 0.1  # of a round
_STEP = 1.02  # how many times as expensive the next known size has to be for a step before it to matter
_SETTLED, _SELDOM = 1 / 5, 12  # smaller shares enter the curve every so many rounds


def _grid() -> tuple[int, ...]:
    """Every size up to 64, then 16 per octave: powers of two, where costs like to step, are among them."""
    sizes = list(range(_EACH + 1))
    step = _EACH // 16
    while sizes[-1] < _LARGEST:
        sizes += [sizes[-1] + step * n for n in range(1, 17)]
        step *= 2
    return tuple(sizes)


GRID = _grid()
_SIZES = len(GRID)


class Curve:
    """Seconds as a non-decreasing function of a size: through what is known (made monotone, by how well it is
    known), linear between, and beyond the last known size with the slope over the upper half.

    Args:
        points: seconds at measured sizes, at least one. One alone makes the curve constant.
    """

    def __init__(self, points: Mapping[int, float]) -> None:
        self._seen = [0.0] * _SIZES  # seconds at the sizes of GRID, where known
        self._weight = [0.0] * _SIZES  # rounds that this counts for; 0.0 where it is not known
        self._runs = [0] * _SIZES
        self._measured = [False] * _SIZES
        for size in sorted(points):
            place = _place(size)
            self._seen[place], self._weight[place] = max(points[size], LEAST), _MEASURED
            self._measured[place] = True
        self._pending = 0
        self.values = [0.0] * _SIZES  # seconds at the sizes of GRID
        self._draw()

    @property
    def points(self) -> dict[int, float]:
        """Seconds at the sizes that are known."""
        return {
            size: value for size, value, weight in zip(GRID, self.values, self._weight, strict=True) if weight
        }

    def at(self, size: float) -> float:
        """Seconds at one size."""
        if isinstance(size, int) and size <= _EACH:  # as mostly
            return self.values[size]
        cell = _cell(size)
        value, low = self.values[cell], GRID[cell]
        if size == low or cell == _SIZES - 1:
            return value
        return value + (size - low) / (GRID[cell + 1] - low) * (self.values[cell + 1] - value)

    def along(self, first: int, count: int) -> list[float]:
        """Seconds at first, first + 1, ..., first + count."""
        return _along(self.values, first, count)

    def hoped(self, first: int, count: int) -> list[float]:
        """The same if things go well.

        A size that was hardly run may be some percent cheaper than it looks: one that a faulty measurement
        made look expensive is tried, and then it is known. Between two known sizes the curve may have a step
        anywhere. It is hoped to lie in the upper half, so where it is comes out by halving.
        """
        values, weight, runs = self.values, self._weight, self._runs
        cell, last = _cell(first), min(_cell(first + count) + 1, _SIZES - 1)
        left = cell
        while left and not weight[left]:
            left -= 1
        found = values[: last + 1]
        right = left
        for n in range(cell, last + 1):
            if weight[n]:
                left = n
                if self._measured[n]:
                    found[n] *= 1.0 - _HOPE / math.sqrt(1.0 + runs[n])
                else:
                    found[n] *= 1.0 - _NOISE / math.sqrt(runs[n])
                continue
            if right < n:
                right = n
                while right < _SIZES - 1 and not weight[right]:
                    right += 1
            if 2 * GRID[n] <= GRID[left] + GRID[right] and values[right] > _STEP * values[left]:
                found[n] = values[left]
        return _along(found, first, count)

    def at_most(self, size: float) -> float:
        """Seconds at the next known size from `size` on: no step before it leads higher."""
        cell = _place(size)
        while cell < _SIZES - 1 and not self._weight[cell]:
            cell += 1
        return self.values[cell]

    def nudge(self, size: float, log_ratio: float) -> None:
        """Move towards an observation: log of (seconds seen / seconds expected) at `size`.

        Steps are clipped, so the curve follows the median of what it sees, and a stall counts little.
        """
        place = _place(size)
        weight = self._weight[place]
        most = _LARGEST_STEP
        if not weight:
            self._seen[place], weight, most = self.values[place], _GUESSED, _FIRST_STEP
        share = max(_SLOWEST, 1.0 / (1.0 + weight))
        self._seen[place] *= math.exp(share * min(most, max(-most, log_ratio)))
        self._weight[place] = min(weight + 1.0, 1.0 / _SLOWEST)
        self._runs[place] += 1
        self._pending += 1
        if share > _SETTLED or self._pending >= _SELDOM:
            self._draw()

    def _draw(self) -> None:
        """The curve through what is known."""
        self._pending = 0
        places = [n for n, weight in enumerate(self._weight) if weight]
        seconds = isotonic([self._seen[n] for n in places], [self._weight[n] for n in places])
        values = [seconds[0]] * places[0]
        for n in range(len(places) - 1):
            left, right, value = places[n], places[n + 1], seconds[n]
            values.append(value)
            if right > left + 1:
                low = GRID[left]
                slope = (seconds[n + 1] - value) / (GRID[right] - low)
                values += [value + slope * (size - low) for size in GRID[left + 1 : right]]
        last, slope = GRID[places[-1]], 0.0
        if len(places) > 1:
            middle = min(
                len(places) - 2, next(n for n, place in enumerate(places) if 2 * GRID[place] >= last)
            )
            slope = (seconds[-1] - seconds[middle]) / (last - GRID[places[middle]])
        values += [seconds[-1] + slope * (size - last) for size in GRID[places[-1] :]]
        self.values = values


def _along(values: list[float], first: int, count: int) -> list[float]:
    """Values at first, ..., first + count; `values` at the sizes of GRID, at least beyond the last one."""
    last = first + count
    if last <= _EACH:
        return values[first : last + 1]
    cell = _cell(first)
    if first <= _EACH:
        found, cell = values[first : _EACH + 1], _EACH
    elif cell < len(values) - 1:
        share = (first - GRID[cell]) / (GRID[cell + 1] - GRID[cell])
        found = [values[cell] + share * (values[cell + 1] - values[cell])]
    else:
        found = []
    while cell < len(values) - 1 and GRID[cell] < last:
        low, high, value = GRID[cell], GRID[cell + 1], values[cell]
        slope = (values[cell + 1] - value) / (high - low)
        start = max(first, low) + 1
        found += [value + slope * (size - low) for size in range(start, min(high, last) + 1)]
        cell += 1
    found += [values[-1]] * (count + 1 - len(found))
    return found


def _cell(size: float) -> int:
    """The entry of the largest size of GRID that does not exceed `size`."""
    return int(size) if size <= _EACH else bisect_right(GRID, size) - 1


def _place(size: float) -> int:
    """The entry of the size of GRID that is nearest to `size`."""
    cell = _cell(size)
    if cell < _SIZES - 1 and size - GRID[cell] > GRID[cell + 1] - size:
        return cell + 1
    return cell
