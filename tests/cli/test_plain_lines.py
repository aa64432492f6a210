"""Lines of long commands where there is no terminal, and the numbers of answers under way on one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from jetspec.cli import plain_lines
from jetspec.cli.plain_lines import PlainLines
from jetspec.cli.progress import AnswerBar
from jetspec.cli.watch import Watch
from jetspec.train.answer_folder import Progress
from jetspec.train.loop import Report
from tests.helpers import jetspec, tiny_folder

__all__ = ["tiny_folder"]  # a fixture


class Clock:
    """A time that passes when it is told to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        monkeypatch.setattr(plain_lines.time, "monotonic", lambda: self.now)


def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines at once and a hundred times a second."""
    monkeypatch.setattr(plain_lines, "FIRST", 0.0)
    monkeypatch.setattr(plain_lines, "EVERY", 0.01)


def test_a_line_tells_how_far_how_fast_and_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the numbers: what an earlier run left says nothing about the speed, and time that passed since
    the last piece of work is not left any more."""
    clock = Clock(monkeypatch)
    lines = PlainLines("answers", "tokens", 10_000)
    assert lines.line() == "answers: no tokens yet"
    lines.show(4000)
    assert lines.line() == "answers: 4000 of 10000 tokens"
    clock.now = 10.0
    lines.show(5000, "7 answers")
    assert lines.line() == "answers: 5000 of 10000 tokens, 7 answers, 100 tokens/s, about 50 s left"
    clock.now = 40.0
    assert lines.line().endswith("about 20 s left")
    clock.now = 200.0
    assert lines.line().endswith("about 1 s left")


@pytest.mark.parametrize(
    ("done", "seconds", "text"),
    [
        (3, 600, "3 of 40 groups, 0.3 groups/min, about 2.1 h left"),
        (10, 600, "10 of 40 groups, 1.0 groups/min, about 30 min left"),
        (20, 10, "20 of 40 groups, 2.0 groups/s, about 10 s left"),
        (40, 10, "40 of 40 groups, 4.0 groups/s"),
    ],
)
def test_units_suit_the_numbers(
    done: int, seconds: float, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards readers from 0 groups per second and from 7400 seconds."""
    clock = Clock(monkeypatch)
    lines = PlainLines("measuring", "groups", 40)
    lines.show(0)
    clock.now = seconds
    lines.show(done)
    assert lines.line() == f"measuring: {text}"


def test_lines_come_while_nothing_moves(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards work whose single piece takes minutes: a line came only behind a finished piece. None comes
    behind the end."""
    often(monkeypatch)
    with PlainLines("measuring", "groups", 4) as lines:
        lines.show(0)
        time.sleep(0.2)
    found = capsys.readouterr().err.splitlines()
    assert len(found) > 1 and found[-1] == "measuring: 0 of 4 groups"
    time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_hidden_lines_do_not_come(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards terminals, --json and -q."""
    often(monkeypatch)
    with PlainLines("measuring", "groups", 4, hidden=True) as lines:
        lines.show(1)
        time.sleep(0.05)
    assert capsys.readouterr().err == ""


def test_long_commands_speak_without_a_terminal(
    tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards nohup: answers, their features and prompts were silent from their first line to their last."""
    often(monkeypatch)
    source, out = tmp_path / "p.txt", tmp_path / "a"
    source.write_text("Hello there\nCount to ten\nWhy is it so?\n", "utf-8")
    common = ["--model", tiny_folder]
    done = jetspec("answers", *common, "--prompts", source, "--max-tokens", 60, "-o", out)
    assert done.code == 0 and "\nanswers: " in done.err and done.out == ""
    given = ["--from", out / "answers.jsonl", "-o", tmp_path / "b"]
    assert "\nfeatures: " in jetspec("answers", *common, *given).err
    written = jetspec("prompts", *common, "-n", 2, "--max-tokens", 60, "-o", tmp_path / "w.jsonl")
    assert "prompts: " in written.err
    checked = jetspec("doctor", *common, "--max-tokens", 8, "--no-reference")
    assert "\ndecoding with drafts: " in checked.err


def test_training_speaks_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards nohup: nothing came between two validations, that is, for ten minutes."""
    often(monkeypatch)
    with Watch() as watch:
        watch(Report(1, 0, 1.0, 4.0, [4.0], [0.5], 1e-3))
        time.sleep(0.1)
        watch(Report(2, 80, 2.0, 4.0, [4.0], [0.5], 1e-3))
        time.sleep(0.1)
    found = capsys.readouterr().err.splitlines()
    assert "training: 1 steps, loss 4.00" in found
    assert any(line.startswith("training: 2 of 80 steps, loss 4.00, ") for line in found)
    assert found[-1].endswith("left")


def bar_at(bar: AnswerBar) -> tuple[float, str]:
    """What a bar shows: how far, and the words."""
    task = bar._bar.tasks[0]
    return task.completed, task.fields["more"]


def test_answers_under_way_move_the_bar() -> None:
    """Guards the first minutes of 64 answers at once: the bar stood at 0 until one of them was finished. It
    is full when the run is done, and not before."""
    bar = AnswerBar("answers", 1000)
    assert bar.kept is None
    bar.show(Progress(begun=64, written=640))
    assert bar_at(bar) == (640, ", 0 answers, 64 under way") and bar.kept == 0
    bar.show(Progress(answered=2, tokens=40, begun=64, written=1200))
    assert bar_at(bar) == (999, ", 2 answers, 64 under way")
    assert "left" not in bar._lines.line()
    bar.show(Progress(answered=20, tokens=1010))
    assert bar_at(bar) == (1000, ", 20 answers") and bar.kept == 20


def test_features_are_counted_by_answers() -> None:
    """Guards the time left: how many answers there are is known, how many tokens they have is not."""
    bar = AnswerBar("features", answers=8)
    bar.show(Progress(answered=3, tokens=100, too_long=1))
    assert bar_at(bar) == (4, ", 100 tokens") and bar.kept == 3
