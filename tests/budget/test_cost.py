from __future__ import annotations

import json
import random

import pytest

from jetspec.budget.base import Spent
from jetspec.budget.cost import CostModel, RoundSize
from jetspec.budget.curve import Curve
from jetspec.budget.profile import halfway
from tests.budget.world import Machine


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
    model.verify = Curve({1: 0.012, 8: 0.014, 16: 0.032, 64: 0.05})
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
        {"verify": {}},
        {"verify": [1.0]},
        {"verify": {"1": "x"}},
        {"verify": {"x": 1.0}},
        {"verify": {"1": float("nan")}},
        {"verify": {"1": -1.0}},
        {"verify": {"-1": 1.0}},
        {"verify": {"1": 1.7e308}},
        {"sequence": -1.0},
        {"context": 1e308},
        {"context": None},
    ],
)
def test_damaged_costs_are_refused(change: dict[str, object]) -> None:
    """Guards against a file that would make the planner choose at random."""
    with pytest.raises((ValueError, TypeError, KeyError, AttributeError)):
        CostModel.from_values({**Machine().model().to_values(), **change})


def test_steps_are_looked_for_where_the_cost_jumps() -> None:
    """Guards the measurement: sizes are added by halving the largest jump until the step is located, and
    none where the cost rises slowly."""
    points = {1: 1.0, 16: 1.0, 32: 1.5, 64: 1.55}
    added = []
    while size := halfway(points):
        added.append(size)
        points[size] = 1.0 if size < 22 else 1.5
    assert 21 in points and 22 in points and len(added) <= 4
    assert halfway({1: 1.0, 8: 1.1, 64: 1.3}) is None
