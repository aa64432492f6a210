from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.budget.curve import GRID, Curve

SIZES = st.integers(0, 400)


@given(st.dictionaries(SIZES, st.floats(1e-6, 1.0), min_size=1), st.lists(st.tuples(SIZES, st.floats(-9, 9))))
def test_curves_never_fall(points: dict[int, float], seen: list[tuple[int, float]]) -> None:
    """Guards monotony, which planners may rely on, whatever was measured and whatever rounds take."""
    curve = Curve(points)
    for size, log_ratio in seen:
        curve.nudge(size, log_ratio)
        values = curve.along(0, 500)
        assert all(0 < a <= b + 1e-12 < math.inf for a, b in pairwise(values))


@given(
    st.dictionaries(SIZES, st.floats(1e-3, 1.0), min_size=1),
    st.integers(0, 300),
    st.integers(0, 700),
    st.lists(SIZES, max_size=4),
)
def test_along_is_at_and_hope_is_below(
    points: dict[int, float], first: int, count: int, seen: list[int]
) -> None:
    """Guards the fast walk along many sizes against the look-up of one, and hope against being more
    expensive than what is known."""
    curve = Curve(points)
    for size in seen:
        curve.nudge(size, 0.3)
    along = curve.along(first, count)
    assert along == pytest.approx([curve.at(size) for size in range(first, first + count + 1)])
    hoped = curve.hoped(first, count)
    assert len(hoped) == count + 1 and all(a <= b + 1e-12 for a, b in zip(hoped, along, strict=True))
    assert all(curve.at(size) <= curve.at_most(size) + 1e-12 for size in GRID if size <= max(points))


def test_a_curve_goes_through_its_points_and_on() -> None:
    """Guards interpolation between sizes and the slope beyond the last one."""
    curve = Curve({1: 1.0, 8: 1.0, 16: 3.0, 32: 5.0})
    assert [curve.at(n) for n in (1, 4, 8, 12, 16, 24, 32)] == pytest.approx([1, 1, 1, 2, 3, 4, 5])
    assert curve.at(64) == pytest.approx(9.0) and curve.at(200) == pytest.approx(26.0)
    assert Curve({4: 2.0}).at(1000) == pytest.approx(2.0)
    assert Curve(curve.points).at(24) == pytest.approx(4.0)


def test_a_stall_moves_nothing() -> None:
    """Guards against one stall (a page fault, another process) that makes a size look useless for good."""
    curve = Curve({1: 0.012, 64: 0.030})
    for _ in range(20):
        curve.nudge(8, 0.0)
    before = curve.at(8)
    for _ in range(12):  # small changes are drawn together
        curve.nudge(8, math.log(50.0) if _ == 3 else 0.0)
    assert curve.at(8) < 1.02 * before


def test_a_lasting_change_is_learned() -> None:
    """Guards against costs that stay wrong: a size that is twice as expensive as measured is found out."""
    curve = Curve({1: 0.012, 4: 0.0122, 64: 0.030})
    for _ in range(200):
        curve.nudge(16, math.log(0.032 / curve.at(16)))
    assert curve.at(16) == pytest.approx(0.032, rel=0.03)
    assert curve.at(2) < 0.013, "far smaller sizes keep what was measured"


@pytest.mark.parametrize("step", [33, 38, 47, 64])
def test_a_step_between_two_measured_sizes_is_found_by_trying(step: int) -> None:
    """Guards what probes of small sizes never see: a cost that is flat up to a step. A planner who takes the
    largest size that is hoped to be cheap comes to stand right before the step within a few rounds, and does
    not try every size."""
    curve = Curve({32: 1.0, 64: 2.0})
    tried = set()
    for _ in range(25):
        hoped = curve.hoped(32, 32)
        size = 32 + max(n for n, value in enumerate(hoped) if value < 1.15)
        tried.add(size)
        curve.nudge(size, math.log((1.0 if size < step else 2.0) / curve.at(size)))
    assert step - 3 <= size < step
    assert len(tried) < 12


def test_sizes_that_were_never_run_are_tried() -> None:
    """Guards against a cliff that only a faulty measurement put there: what has not been run looks a little
    cheaper, what has been run often does not."""
    curve = Curve({1: 1.0, 4: 1.0, 40: 1.0})
    for _ in range(100):
        curve.nudge(4, 0.0)
    hoped = curve.hoped(4, 36)
    assert hoped[-1] < 0.96 < 0.99 < hoped[0] <= 1.0
