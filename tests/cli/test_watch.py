"""Ctrl-C while training: the step under way is finished and saved; a second one ends at once."""

from __future__ import annotations

import signal

import pytest

from jetspec.cli.watch import stop_between_steps


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
