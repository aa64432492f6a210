"""What reaches the terminal or pipe is the model's text, and not a rendering of it."""

from __future__ import annotations

import io

import pytest
from rich.table import Table

from jetspec.bench.table import Grid
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


def test_tables_fill_a_pipe_and_fit_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards wide tables: on a pipe each row is one line however long, where 80 columns were assumed; on a
    terminal no line is longer than it is wide."""
    grid = Grid("numbers", ("name", *map(str, range(90))), [("row", *("1.2345",) * 90)])
    screen = Screen()
    screen.grid(grid)
    table = Table()
    table.add_column("one")
    table.add_row("x" * 300)
    screen.show(table)
    out = capsys.readouterr().out
    assert max(line.count("1.2345") for line in out.splitlines()) == 90 and "x" * 300 in out
    screen.out.file, screen.out._force_terminal = io.StringIO(), True
    screen.out.width = 50
    screen.grid(grid)
    lines = screen.out.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60  # with colour codes
    assert sum(line.count("1.2345") for line in lines) == 90
