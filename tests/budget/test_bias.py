"""How drafted rounds and plain ones are compared."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest

from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.bias import Bias
from jetspec.budget.fixed import FixedBudget
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.profile import Measurement
from jetspec.budget.store import CostFile
from tests.budget.world import Head, Machine, run


@pytest.mark.parametrize("gap", [-0.15, 0.0, 0.12])
def test_the_gap_is_found_whichever_kind_is_rare(gap: float) -> None:
    """Guards the judgement of drafting: curves that are off by a tenth for one kind of round."""
    for usual in (True, False):
        dice, bias = random.Random(3), Bias()
        for n in range(200):
            drafted = usual if n % 9 else not usual
            noise = math.exp(dice.gauss(0.0, 0.03))
            bias.see(drafted, 1.4 * noise * (math.exp(gap) if drafted else 1.0))
        assert bias.value == pytest.approx(gap, abs=0.03)
        assert bias.plain == pytest.approx(math.exp(-gap), abs=0.03)


def test_a_change_of_pace_is_no_gap() -> None:
    """Guards against other work on the machine: rounds of one kind long ago are compared with nothing."""
    bias = Bias()
    for n in range(60):
        bias.see(False, 1.0 + (n > 30))
    for _ in range(60):
        bias.see(True, 2.0)
    assert abs(bias.value) < 0.01
    for _ in range(60):
        bias.see(True, 0.7)
    bias.see(False, 0.7)
    assert abs(bias.value) < 0.05


def test_where_drafting_is_off_a_few_probes_tell() -> None:
    """Guards a machine whose memory got slower, which makes plain rounds dear and drafted ones hardly: with
    shares of 1/12 it took some forty probes, hundreds of rounds apart, until drafting was tried again."""
    dice, bias = random.Random(5), Bias.kept(0.1)
    for n in range(1, 6 * 40 + 1):
        probe = n % 40 == 0
        bias.see(probe, math.exp(dice.gauss(0.0, 0.03) - 0.2 * probe), tries=True)
    assert bias.value < -0.1  # 0.0 with shares of 1/12


def test_one_stall_moves_little() -> None:
    """Guards against a round of a second."""
    bias = Bias()
    for n in range(40):
        bias.see(bool(n % 4), 1.0)
    bias.see(False, 90.0)
    bias.see(True, 1.0)
    assert abs(bias.value) < 0.1


def test_drafting_that_only_seems_to_pay_is_stopped() -> None:
    """Guards batches where plain rounds are faster than the curves say: what drafting seems to gain there is
    lost in truth. The next process knows."""
    real = Machine(draft=0.0105, verify=lambda rows: 0.010 if rows <= 4 else 0.0125)
    said = Machine(draft=0.0105, verify=lambda rows: 0.0125)
    file = CostFile({"test": "bias"})
    known = Knowledge(Measurement(said.model(), 1e9, False), file=file)
    run(AdaptiveBudget(known), Head(sure=-2.0), real, 100, batch=4)
    log = run(AdaptiveBudget(known), Head(sure=-2.0, seed=5), real, 300, batch=4)
    plain = run(FixedBudget(0), Head(), real, 20, batch=4)
    assert log.rate > 0.98 * plain.rate
    known.keep()
    kept = file.load()
    assert kept is not None
    assert kept.biases[3] == pytest.approx(known.biases[3].value, abs=1e-3)
    assert Knowledge(Measurement(kept.cost, 1.0, False), biases=kept.biases).bias(4).known


@pytest.mark.parametrize("value", ["x", 7.0, None])
def test_a_damaged_bias_is_left_out(value: object) -> None:
    """Guards a file that somebody edited."""
    file = CostFile({"test": f"bias {value}"})
    file.save(Machine().model(), {}, {1: 0.1})
    path: Path = file.path
    values = json.loads(path.read_text())
    path.write_text(json.dumps({**values, "biases": {"1": value}}))
    assert file.load() is None
