"""How long a training run is, and how fast it learns."""

from __future__ import annotations

import pytest

from jetspec.train.loop_options import LoopOptions
from jetspec.train.schedule import measured_steps, planned_steps, rate_at


def test_what_gives_the_length() -> None:
    """Guards the order of the three wishes: steps, else epochs, else minutes at the measured speed. What is
    done is never more than the schedule."""
    minutes = LoopOptions(minutes=2.0, answers=8)
    assert planned_steps(minutes, 100) is None
    assert planned_steps(LoopOptions(epochs=2.0, answers=8), 100) == 25
    assert planned_steps(LoopOptions(epochs=0.001, answers=8), 100) == 1
    assert planned_steps(LoopOptions(steps=7, epochs=2.0, answers=8), 100) == 7
    assert measured_steps(minutes, 12, 6.0) == 240
    assert measured_steps(minutes, 12, 600.0) == 12


def test_the_rate_rises_and_falls() -> None:
    """Guards the curve: up to the peak in the warm-up's share of the steps, down to `final_share` of it at
    the end, and a warm-up that is slow enough while the length is not known."""
    options = LoopOptions(learning_rate=2.0, warmup_share=0.1, final_share=0.25)
    rates = [rate_at(options, step, 100) for step in range(101)]
    assert rates[:10] == pytest.approx([2.0 * n / 10 for n in range(1, 11)])
    assert rates[10] == 2.0 and rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[55] == pytest.approx(2.0 * (1 + 0.25) / 2)
    assert rates[100] == pytest.approx(2.0 * 0.25)
    assert rate_at(options, 200, 100) == rates[100]
    assert rate_at(options, 3, None) == rate_at(options, 3, 1000) == pytest.approx(2.0 * 4 / 100)
    assert rate_at(LoopOptions(learning_rate=2.0, warmup_share=0.0), 0, 100) == 2.0
