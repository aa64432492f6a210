"""What is printed: the model's text and results on standard output, everything else on standard error.

Text of a model (and of a prompt) is data. It is never read as markup, and no control character of it reaches
the terminal: they are shown as symbols (␛ for escape), also on a pipe, which may end on a terminal. `--json`
gives the exact text.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.segment import Segment, Segments
from rich.style import Style

if TYPE_CHECKING:
    from jetspec.bench.table import Grid

_NO_END = 100_000  # columns

STYLES = {"accepted": "green", "bonus": "yellow", "plain": ""}
_SYMBOLS = {
    **{code: chr(0x2400 + code) for code in range(0x20) if code not in (0x09, 0x0A)},
    0x7F: "␡",
    **dict.fromkeys(range(0x80, 0xA0), "\ufffd"),
}


def printable(text: str) -> str:
    """The text with its control characters, except tab and line feed, replaced by symbols."""
    return text.translate(_SYMBOLS)


def _as_it_is(text: str, style: str) -> Segments:
    """The text unchanged but for control characters: rich would turn tabs into spaces, which breaks code."""
    return Segments([Segment(printable(text), Style.parse(style) if style else None)])


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Leave it to `main`; by default rich ends the process."""
        raise BrokenPipeError


class Screen:
    """Standard output and standard error with their colours."""

    def __init__(self, *, no_color: bool = False, quiet: bool = False) -> None:
        plain = no_color or bool(os.environ.get("NO_COLOR"))
        self.out, self.err = (
            _Console(
                color_system=None if plain else "auto",
                highlight=False,
                markup=False,
                emoji=False,
                stderr=stderr,
            )
            for stderr in (False, True)
        )
        if not self.out.is_terminal:
            self.out.width = _NO_END  # nothing is cut or wrapped where there is no terminal
        self.colours = self.out.color_system is not None
        self.quiet = quiet
        self._mid_line = False
        self._later = ""

    def text(self, text: str, style: str = "") -> None:
        """A piece of the model's text, at once and without a line break of ours."""
        self._catch_up()
        if text:
            self.out.print(_as_it_is(text, style), end="", crop=False)
            self._mid_line = not text.endswith("\n")

    def end_text(self) -> None:
        """End the line that the model's text left open."""
        if self._mid_line:
            self.line("")

    def line(self, text: str, style: str = "") -> None:
        """A line of a result."""
        self._catch_up()
        self.out.print(_as_it_is(text + "\n", style), crop=False)
        self._mid_line = False

    def show(self, what: RenderableType) -> None:
        """A table."""
        self._catch_up()
        self.out.print(what, crop=False)

    def grid(self, grid: Grid) -> None:
        """A table of numbers, none of which is cut: on a terminal that is too narrow it is divided."""
        for table in grid.tables(self.out.width if self.out.is_terminal else None):
            self.show(table)

    def note(self, text: str, style: str = "dim") -> None:
        """A line beside the result, on standard error; not with --quiet."""
        if not self.quiet:
            self.err.print(_as_it_is(text + "\n", style), crop=False)

    def note_later(self, text: str) -> None:
        """A note that comes with the first output, and not at all if there is an error before it."""
        self._later = text

    def _catch_up(self) -> None:
        if self._later:
            later, self._later = self._later, ""
            self.note(later)

    def progress(self, text: str) -> None:
        """What is being done just now: on a terminal only."""
        if self.err.is_terminal:
            self.note(f"jetspec: {text} …")

    def json(self, values: dict[str, Any]) -> None:
        """One JSON object, and nothing else on standard output."""
        self._catch_up()
        print(json.dumps(values, ensure_ascii=False, allow_nan=False))
