"""Where a long command stands, in plain lines: for logs and pipes, which cannot show a bar."""

from __future__ import annotations

import contextlib
import sys
import time
from dataclasses import dataclass
from threading import Event, Thread

from jetspec.cli.screen import printable

FIRST, EVERY = 30.0, 60.0  # seconds to the first line, and from one to the next


@dataclass
class _Place:
    """How far the work was at some moment."""

    done: float
    moment: float


class PlainLines:
    """A line on standard error after half a minute and then every minute, within a `with` block: what, how
    far, how fast, and the time that is left if it is known.

    A thread of its own writes them, since a single piece of the work may take minutes.

    Args:
        what: what is going on, such as "answers".
        unit: what is counted, in the plural.
        total: how many there will be; None if that is not known yet.
        hidden: write nothing, because a bar shows it, or nobody wants to know.
    """

    def __init__(self, what: str, unit: str, total: int | None = None, *, hidden: bool = False) -> None:
        self.what, self.unit, self.total = what, unit, total
        self._more, self._ending = "", False
        self._begun: _Place | None = None  # what earlier runs left counts, and says nothing about the speed
        self._last: _Place | None = None
        self._ended = Event()
        self._thread = None if hidden else Thread(target=self._write, name="progress", daemon=True)

    def __enter__(self) -> PlainLines:
        if self._thread is not None:
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def show(self, done: float, more: str = "", *, ending: bool = False) -> None:
        """How far it is by now; `more` stands behind the count. ending: the time that is left does not follow
        from the count any more.
        """
        self._last = _Place(done, time.monotonic())
        self._begun = self._begun or self._last
        self._more, self._ending = more, ending

    def line(self) -> str:
        """The line for this moment."""
        last, begun, now = self._last, self._begun, time.monotonic()
        if last is None or begun is None:
            return f"{self.what}: no {self.unit} yet"
        of = "" if self.total is None else f" of {self.total}"
        parts = [f"{last.done:.0f}{of} {self.unit}", *([self._more] if self._more else [])]
        if last.done > begun.done and last.moment > begun.moment:
            rate = (last.done - begun.done) / (last.moment - begun.moment)
            parts.append(_speed(rate, self.unit))
            if self.total is not None and self.total > last.done and not self._ending:
                left = (self.total - last.done) / rate - (now - last.moment)
                parts.append(f"about {_duration(max(1.0, left))} left")
        return f"{self.what}: {', '.join(parts)}"

    def _write(self) -> None:
        pause = FIRST
        while not self._ended.wait(pause):
            pause = EVERY
            with contextlib.suppress(OSError, ValueError):  # nobody reads it; the work goes on
                sys.stderr.write(printable(self.line()) + "\n")  # in one piece, beside other lines
                sys.stderr.flush()


def _speed(rate: float, unit: str) -> str:
    """Per second, or per minute where little happens in a second."""
    if rate >= 10:
        return f"{rate:.0f} {unit}/s"
    return f"{rate:.1f} {unit}/s" if rate >= 1 else f"{60 * rate:.1f} {unit}/min"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
