"""The schedule of a training run: how many steps it has, and the learning rate at each of them."""

from __future__ import annotations

import math

from jetspec.train.loop_options import LoopOptions

PROBE_STEPS = 12  # that measure the speed before a schedule in minutes is fixed; they count as training


def planned_steps(options: LoopOptions, answers: int) -> int | None:
    """Steps for so many answers of training, if they are known before the first one: None where only the
    minutes are given.
    """
    if options.steps is not None or options.epochs is None:
        return options.steps
    return max(1, round(options.epochs * answers / options.answers))


def measured_steps(options: LoopOptions, done: int, seconds: float) -> int:
    """Steps that fill the minutes, when the first `done` ones took so many seconds."""
    return max(done, round(options.minutes * 60 / (seconds / done)))


def rate_at(options: LoopOptions, step: int, steps: int | None) -> float:
    """The learning rate: linear warm-up, then a cosine; while the length is not known yet, the warm-up of a
    thousand steps.
    """
    steps = steps or 1000
    warm = max(1, round(options.warmup_share * steps))
    if step < warm:
        return options.learning_rate * (step + 1) / warm
    progress = min(1.0, (step - warm) / max(1, steps - warm))
    low = options.final_share
    return options.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))
