"""Ctrl-C while training: the step under way is finished and saved; a second one ends at once."""

from __future__ import annotations

import signal

import pytest

from jetspec.cli.watch import Watch, stop_between_steps
from jetspec.train.loop import Report
from jetspec.train.validate import Validation


def test_the_first_asks_and_the_second_ends(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards up to five minutes of training between two checkpoints, and the way out if a step hangs."""
    before = signal.getsignal(signal.SIGINT)
    with stop_between_steps() as asked:
        assert not asked()
        signal.raise_signal(signal.SIGINT)
        assert asked()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before
    assert "Ctrl-C again stops at once" in capsys.readouterr().err


def test_no_held_out_answer_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards small runs: without a held-out greedy answer a tau of 1.00 was shown, as if the head were never
    right."""
    with Watch() as watch:
        watch(Report(3, 9, 60.0, 1.0, [1.0], [0.5], 1e-3, Validation()))
        watch(Report(6, 9, 90.0, 1.0, [1.0], [0.5], 1e-3, Validation({"chain-7": 1.25}, [0.25])))
    lines = capsys.readouterr().err.splitlines()
    assert lines[-2] == "step 3, 1.0 min: no tau, as no greedy answer is held out; more answers help"
    assert lines[-1] == "step 6, 1.5 min: tau chain-7 1.25"
