"""Ctrl-C while training: the step under way is finished and saved; a second one ends at once."""

from __future__ import annotations

import io
import signal

import pytest
from rich.console import Console

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
    assert lines[-2] == (
        "step 3, 1.0 min: no tau, as no greedy answer is held out; "
        "answer some prompts at temperature 0 (--temperatures)"
    )
    assert lines[-1] == "step 6, 1.5 min: tau chain-7 1.25"


def test_what_the_head_has_seen_is_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the advice at the end: tau on answers of the training must not read like held-out tau."""
    with Watch() as watch:
        seen = Validation({"chain-7": 1.25}, [0.25], {"chain-7": 2.5})
        watch(Report(6, 6, 90.0, float("nan"), [], [], 0.0, seen))
    held_out, training = capsys.readouterr().err.splitlines()[-2:]
    assert held_out == "step 6, 1.5 min: tau chain-7 1.25"
    assert training.startswith("  on answers of the training: tau chain-7 2.50;")


def test_a_tau_of_few_answers_is_no_tau(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards first tries: the table of one held-out answer read like that of forty. It is said with the first
    validation and with the last, and not of ten answers."""
    one = Validation({"chain-7": 1.25}, [0.25], answers=1)
    middle = [Report(n, 9, 60.0 * n, 1.0, [1.0], [0.5], 1e-3, one) for n in (1, 2, 3)]
    end = Report(9, 9, 600.0, float("nan"), [], [], 0.0, one)
    lines = said(capsys, *middle, end)
    warning = "  tau rests on 1 held-out answer and means little; train with more answers (--tokens)"
    assert [n for n, line in enumerate(lines) if line == warning] == [1, 5] and len(lines) == 6
    ten = Validation({"chain-7": 1.25}, [0.25], answers=10)
    assert len(said(capsys, Report(1, 9, 60.0, 1.0, [1.0], [0.5], 1e-3, ten))) == 1


def bar_line(watch: Watch, width: int) -> str:
    """The bar of a watch as a terminal of some width shows it."""
    paper = io.StringIO()
    Console(file=paper, width=width, force_terminal=True, color_system=None).print(watch._bar)
    return paper.getvalue().splitlines()[0]


@pytest.mark.parametrize(("width", "depths"), [(80, False), (109, False), (110, True), (200, True)])
def test_a_narrow_terminal_shows_the_numbers(
    width: int, depths: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards steps and time left: at 80 columns the losses of the depths took their place."""
    monkeypatch.setenv("COLUMNS", str(width))
    watch = Watch()
    watch(Report(12_345, 23_456, 60.0, 3.9, [3.64, 3.91, 4.02, 4.1, 4.2, 4.3, 4.4], [0.5], 1e-3))
    line = bar_line(watch, width)
    assert "12345/23456" in line and "loss 3.90" in line and "…" not in line
    assert line.rstrip().endswith("left -:--:--") and "0:00:00" in line
    assert ("by depth 3.64 3.91 4.02 4.10 4.20 4.30 4.40" in line) == depths


def said(capsys: pytest.CaptureFixture[str], *reports: Report) -> list[str]:
    """The lines of a new watch about some reports."""
    with Watch() as watch:
        for report in reports:
            watch(report)
    return capsys.readouterr().err.splitlines()


def test_where_a_run_stands_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the first line of a run given again: one that was complete "went on behind step 19" of 20."""
    end = Report(20, 20, 60.0, float("nan"), [], [], 0.0, Validation({"chain-7": 1.25}, [0.25]))
    assert said(capsys, end) == [
        "20 of 20 steps are done, nothing is left to train",
        "step 20, 1.0 min: tau chain-7 1.25",
    ]
    last = Report(20, 20, 60.0, 1.0, [1.0], [0.5], 1e-3)
    assert said(capsys, last, end)[0] == "going on behind step 19"
    first = Report(1, 20, 3.0, 1.0, [1.0], [0.5], 1e-3)
    assert said(capsys, first, end) == ["step 20, 1.0 min: tau chain-7 1.25"]
