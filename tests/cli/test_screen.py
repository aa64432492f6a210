"""What reaches the terminal or pipe is the model's text, and not a rendering of it."""

from __future__ import annotations

import pytest

from jetspec.cli.screen import Screen


def test_text_is_not_laid_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards code in answers: rich turns tabs into spaces, wraps at 80 columns and reads [tags]."""
    screen = Screen()
    pieces = ["def f():\n\treturn 1", " " + "x" * 200, " [bold]:smile:[/bold]"]
    for piece in pieces:
        screen.text(piece, "green")
    screen.end_text()
    screen.line("a\tb")
    screen.note("c\td")
    captured = capsys.readouterr()
    assert captured.out == "".join(pieces) + "\na\tb\n"
    assert captured.err == "c\td\n"
