"""What long work shows: a bar on a terminal (`plain_lines` elsewhere), lines at the end, and a question
before gigabytes are written. All on standard error.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import typer

from jetspec.cli.plain_lines import PlainLines
from jetspec.cli.screen import printable
from jetspec.errors import StorageError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from jetspec.target.config import ModelConfig

ASK_ABOVE = 4_000_000_000  # bytes of features that are written without asking


def say(*lines: str) -> None:
    """Lines on standard error, as they are."""
    for line in lines:
        print(printable(line), file=sys.stderr, flush=True)


def new_bar(
    console: Console | None = None,
    *texts: str,
    elapsed: bool = False,
    hidden: bool = False,
    transient: bool = False,
) -> Progress:
    """The progress bar of every verb: what is done, the bar, how much of it, and the time that is left. There
    is none where the console is no terminal.

    Args:
        console: standard error if it is left out.
        texts: rich's templates of what stands behind the count, such as "{task.fields[loss]}".
        elapsed: show the time since the start, too.
        transient: take the bar away at the end.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        ProgressColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    console = Console(stderr=True) if console is None else console
    columns: list[ProgressColumn] = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    columns += [TextColumn(text) for text in texts]
    columns += [TimeElapsedColumn(), TextColumn("left")] if elapsed else []
    return Progress(
        *columns,
        TimeRemainingColumn(),
        console=console,
        disable=hidden or not console.is_terminal,
        transient=transient,
    )


class Count(Protocol):
    """What a bar shows of a run."""

    answered: int
    tokens: int
    begun: int
    written: int

    @property
    def skipped(self) -> int:
        """Prompts without an answer."""


class AnswerBar:
    """Progress of answers on standard error: a bar on a terminal, plain lines elsewhere.

    What is counted is tokens, those of answers under way included, or answers where `answers` says how many
    there will be.

    Attributes:
        kept: answers that were done when it was told last; None before.
    """

    def __init__(self, label: str, tokens: int | None = None, answers: int | None = None) -> None:
        by_answers = answers is not None
        self._by_answers, self._total = by_answers, answers if by_answers else tokens
        self.kept: int | None = None
        unit = "answers" if by_answers else "tokens"
        self._bar = new_bar(None, unit + "{task.fields[more]}")
        self._task = self._bar.add_task(label, total=self._total, more="")
        self._lines = PlainLines(label, unit, self._total, hidden=not self._bar.disable)

    def __enter__(self) -> AnswerBar:
        self._bar.start()
        self._lines.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lines.__exit__()
        self._bar.stop()

    def show(self, count: Count) -> None:
        """Where a run stands."""
        self.kept = count.answered
        if self._by_answers:
            done, more = count.answered + count.skipped, f"{count.tokens} tokens"
        else:
            done, more = count.tokens + count.written, f"{count.answered} answers"
            more += f", {count.begun} under way" if count.begun else ""
        ending = False
        if self._total is not None and done >= self._total:
            # The run ends when that many tokens are those of whole answers; a full bar would say it has.
            ending = not self._by_answers and count.tokens < self._total
            done = self._total - ending
        self._bar.update(self._task, completed=done, more=f", {more}")
        self._lines.show(done, more, ending=ending)


def confirm_size(config: ModelConfig, taps: tuple[int, ...], tokens: float, folder: Path, yes: bool) -> None:
    """Say how large the features of `tokens` tokens (prompts included) will be, and ask on a terminal if
    that is much.

    Raises StorageError if the disk is too small, unless `yes`; Abort if the answer is no.
    """
    from jetspec.train.answer_folder import feature_bytes, folder_bytes, free_bytes

    each = feature_bytes(config, taps)
    there, free = folder_bytes(folder), free_bytes(folder)
    size = max(0.0, tokens * each - there)
    more = " more" if there else ""
    say(f"features: about {_gb(size)}{more} ({each / 1000:.1f} kB per token), {_gb(free)} free")
    if yes:
        return
    if size > free:
        raise StorageError(
            f"about {_gb(size)} of features do not fit into {_gb(free)} in {folder}; use fewer --tokens,"
            " another --out, --text-only, or --yes to try all the same"
        )
    if size > ASK_ABOVE and sys.stdin is not None and sys.stdin.isatty():
        typer.confirm(f"write about {_gb(size)} to {folder}?", default=True, abort=True, err=True)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e8 else f"{size / 1e6:.1f} MB"
