"""Progress of a training run: a bar with the loss of every depth, and a line per validation."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console

from jetspec.cli.plain_lines import PlainLines
from jetspec.cli.progress import new_bar

if TYPE_CHECKING:
    from jetspec.train.loop import Report

_SMOOTHING = 0.95
_NO_TAU = "no greedy answer is held out; answer some prompts at temperature 0 (--temperatures)"
# Characters of the bar's line beside the losses: name, counts of five digits, times, and a bar of 12. In less
# room rich makes the bar short first, and then cuts the numbers, too.
_BESIDE = 56


class Watch:
    """A callback for `train_head`. Losses are smoothed over about twenty steps."""

    def __init__(self) -> None:
        self.console = Console(stderr=True)
        self._bar = new_bar(self.console, "{task.fields[loss]}", elapsed=True)
        self._task = self._bar.add_task("training", total=None, loss="")
        self._lines = PlainLines("training", "steps", hidden=not self._bar.disable)
        self._smooth: list[float] = []
        self._begun = self._warned = False

    def __enter__(self) -> Watch:
        self._bar.start()
        self._lines.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._lines.__exit__()
        self._bar.stop()

    def __call__(self, report: Report) -> None:
        """Show a report."""
        if not self._begun and not report.by_depth and 0 < report.step == report.steps:
            self.say(f"{report.step} of {report.steps} steps are done, nothing is left to train")
        elif not self._begun and report.step > 1:
            self.say(f"going on behind step {report.step - 1}")
        self._begun = True
        if report.by_depth:
            new = [report.loss, *report.by_depth]
            old = self._smooth or new
            self._smooth = [_SMOOTHING * a + (1 - _SMOOTHING) * b for a, b in zip(old, new, strict=True)]
            total, *depths = (f"{value:.2f}" for value in self._smooth)
            text, more = f"loss {total}", f", by depth {' '.join(depths)}"
            if _BESIDE + len(text + more) <= self.console.width:
                text += more
            self._bar.update(self._task, completed=report.step, total=report.steps or None, loss=text)
            self._lines.total = report.steps or None
            self._lines.show(report.step, f"loss {total}")
        if report.validation is not None:
            taus = ", ".join(f"{name} {tau:.2f}" for name, tau in report.validation.tau.items())
            found = f"tau {taus}" if taus else f"no tau, as {_NO_TAU}"
            self.say(f"step {report.step}, {report.seconds / 60:.1f} min: {found}")
            few = self._few(report.validation.answers, last=not report.by_depth)
            if few:
                self.say(few)
            if seen := report.validation.seen:
                taus = ", ".join(f"{name} {tau:.2f}" for name, tau in seen.items())
                self.say(
                    f"  on answers of the training: tau {taus}; if that is far more, new answers help most"
                )

    def _few(self, answers: int, last: bool) -> str:
        """A warning about a tau of very few answers, with the first validation and with the last."""
        from jetspec.train.validate import FEW

        if not 0 < answers < FEW or (self._warned and not last):
            return ""
        self._warned = True
        held_out = "1 held-out answer" if answers == 1 else f"{answers} held-out answers"
        return f"  tau rests on {held_out} and means little; train with more answers (--tokens)"

    def say(self, text: str) -> None:
        """A line beside the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)


@contextmanager
def stop_between_steps() -> Iterator[Callable[[], bool]]:
    """Within the block the first Ctrl-C asks to stop behind the step under way, so that nothing is lost; the
    second one stops at once. Yields the question whether to stop.
    """
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("jetspec: saving behind this step; Ctrl-C again stops at once", file=sys.stderr, flush=True)

    try:
        before = signal.signal(signal.SIGINT, ask)
    except ValueError:  # not the main thread, which alone may do this
        yield lambda: asked
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
