"""The settings of a run: how many answers a training of so many minutes gets."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.cli.train_settings import answers_given, timed
from jetspec.train.recipe import find_recipe

RECIPE = find_recipe("jetspec", "smollm2-135m")  # 90 minutes, 650,000 tokens


@pytest.mark.parametrize(
    ("minutes", "steps", "tokens"),
    [
        (30.0, None, 216_667),
        (0.5, None, 20_000),
        (180.0, None, 650_000),
        (None, None, 650_000),
        (None, 50, 650_000),
        (30.0, 50, 650_000),
    ],
)
def test_a_shorter_training_gets_fewer_answers(
    minutes: float | None, steps: int | None, tokens: int, tmp_path: Path
) -> None:
    """Guards an hour of answering for half an hour of training, and a schedule in steps, whose length in
    minutes nobody knows.
    """
    settings = timed(RECIPE, minutes, steps, 0, tmp_path, False)
    assert settings.answers.tokens == tokens
    assert (settings.loop.minutes, settings.loop.steps) == (minutes or 90.0, steps)


def test_a_number_that_was_given_stands(tmp_path: Path) -> None:
    """Guards --tokens and --set answers.tokens against being scaled."""
    assert timed(RECIPE, 30.0, None, 0, tmp_path, True).answers.tokens == 650_000
    assert answers_given(5, []) and answers_given(None, ["answers.tokens = 7"])
    assert not answers_given(None, ["answers.max_tokens=7"])


def test_a_training_that_has_begun_keeps_its_answers(tmp_path: Path) -> None:
    """Guards resuming with more minutes: more answers would make it another run, which is refused."""
    (tmp_path / "checkpoint.safetensors").touch()
    assert timed(RECIPE, 60.0, None, 0, tmp_path, False).answers.tokens == 1
