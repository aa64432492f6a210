from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.budget.base import Spent
from jetspec.budget.cost import GRID, CostModel, Curve, RoundSize
from tests.budget.world import Machine

SIZES = st.integers(0, 200)


@given(st.dictionaries(SIZES, st.floats(1e-6, 1.0), min_size=1), st.lists(st.tuples(SIZES, st.floats(-9, 9))))
def test_curves_never_fall(points: dict[int, float], seen: list[tuple[int, float]]) -> None:
    """Guards monotony, which planners may rely on, whatever was measured and whatever rounds take."""
    curve = Curve.through(points)
    for size, log_ratio in seen:
        curve.nudge(size, log_ratio)
        assert (np.diff(curve.values) >= 0).all() and (curve.values > 0).all()
        assert np.isfinite(curve.values).all()


def test_a_curve_goes_through_its_points_and_on() -> None:
    """Guards interpolation between sizes and the slope beyond the last one."""
    curve = Curve.through({1: 1.0, 8: 1.0, 16: 3.0, 32: 5.0})
    assert [curve.at(n) for n in (1, 4, 8, 12, 16, 24, 32)] == pytest.approx([1, 1, 1, 2, 3, 4, 5])
    assert curve.at(64) == pytest.approx(9.0)
    assert Curve.through({4: 2.0}).at(1000) == pytest.approx(2.0)


def test_a_stall_moves_nothing() -> None:
    """Guards against one stall (a page fault, another process) that makes a size look useless for good."""
    curve = Curve.through({1: 0.012, 64: 0.030})
    for _ in range(20):
        curve.nudge(8, 0.0)
    before = curve.at(8)
    curve.nudge(8, math.log(50.0))
    assert curve.at(8) < 1.02 * before


def test_a_lasting_change_is_learned() -> None:
    """Guards against costs that stay wrong: a size that is twice as expensive as measured is found out."""
    curve = Curve.through({1: 0.012, 64: 0.030})
    for _ in range(200):
        curve.nudge(16, math.log(0.032 / curve.at(16)))
    assert curve.at(16) == pytest.approx(0.032, rel=0.03)
    assert curve.at(2) < 0.013, "far smaller sizes keep what was measured"


def learn(model: CostModel, machine: Machine, rounds: int, seed: int, slower: float = 1.0) -> None:
    """Rounds of all sizes on a machine that is slower than measured by a factor."""
    dice = random.Random(seed)
    for _ in range(rounds):
        rows = dice.choice([1, 2, 5, 9, 17, 33])
        size = RoundSize(1, int(rows > 1), rows - 1, rows, 64, 64 * rows)
        spent = machine.spent(size, dice)
        model.learn(size, Spent(*(slower * value for value in spent)))


def test_other_work_on_the_machine_changes_no_comparison() -> None:
    """Guards the pace: three times slower all over, with noise, leaves the ratios of sizes as they are."""
    machine = Machine(noise=0.1, stalls=0.01)
    model = machine.model()
    learn(model, machine, 400, 1, slower=3.0)
    assert model.pace == pytest.approx(3.0, rel=0.2)
    assert model.verify.at(17) / model.verify.at(1) == pytest.approx(
        machine.verify(17) / machine.verify(1), rel=0.06
    )


def test_a_wrong_measurement_is_put_right() -> None:
    """Guards online refinement: where the curve was measured twice too high, rounds bring it down."""
    machine = Machine(noise=0.05)
    model = machine.model()
    model.verify = Curve.through({1: 0.012, 8: 0.014, 16: 0.032, 64: 0.05})
    learn(model, machine, 600, 2)
    ratio = model.verify.at(17) / model.verify.at(1)
    assert ratio == pytest.approx(machine.verify(17) / machine.verify(1), rel=0.1)


def test_parts_add_up() -> None:
    """Guards the formula: batch and context are priced as documented, drafting only where it happened."""
    model = Machine().model()
    model.sequence, model.context, model.row_context = 1e-3, 2e-6, 3e-7
    size = RoundSize(3, 2, 30, 33, 1000, 5000)
    parts = model.parts(size)
    assert parts.verify == pytest.approx(model.verify.at(33) + 2e-3 + 2e-3 + 1.5e-3)
    assert parts.draft == model.draft.at(2) and parts.build == model.build.at(30)
    undrafted = size._replace(drafts=0)
    assert model.seconds(size) - model.seconds(undrafted) == pytest.approx(parts.draft)
    assert model.plain([10, 20]) == model.seconds(RoundSize(2, 0, 0, 2, 30, 30))


def test_sizes_that_were_never_run_are_tried() -> None:
    """Guards against a cliff that only a faulty measurement put there: what has not been run looks a little
    cheaper, what has been run often does not."""
    curve = Curve.through({1: 1.0, 64: 1.0})
    for _ in range(100):
        curve.nudge(4, 0.0)
    known, unknown = curve.along(np.array([4.0, 40.0]))
    assert unknown < 0.96 < 0.99 < known <= 1.0


def test_costs_come_back_from_json() -> None:
    """Guards the file's content."""
    model = Machine().model()
    model.sequence, model.context = 1e-3, 2e-6
    back = CostModel.from_values(json.loads(json.dumps(model.to_values())))
    size = RoundSize(2, 2, 20, 22, 300, 2000)
    assert back.seconds(size) == pytest.approx(model.seconds(size), rel=1e-4)


@pytest.mark.parametrize(
    "change",
    [
        {"grid": [1, 2]},
        {"verify": [1.0]},
        {"verify": ["x"] * len(GRID)},
        {"verify": [float("nan")] * len(GRID)},
        {"verify": [-1.0] * len(GRID)},
        {"sequence": -1.0},
        {"context": None},
    ],
)
def test_damaged_costs_are_refused(change: dict[str, object]) -> None:
    """Guards against a file that would make the planner choose at random."""
    with pytest.raises((ValueError, TypeError, KeyError)):
        CostModel.from_values({**Machine().model().to_values(), **change})
