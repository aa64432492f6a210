"""The minutes of one call, after which it has to be given again."""

from __future__ import annotations

import time
from typing import Any

RESERVE = 90.0  # seconds before the end of a call at which training pauses: validation comes after its end


class OutOfTime(Exception):
    """The call's minutes are over; everything so far is kept."""


class Clock:
    """The minutes of this call."""

    def __init__(self, minutes: float) -> None:
        self.start = time.monotonic()
        self.end = self.start + minutes * 60

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def must_pause(self) -> bool:
        """Whether training has to stop for this call."""
        return self.left() < RESERVE

    def check(self, *anything: Any) -> None:
        """Raise OutOfTime at the end."""
        if self.left() <= 0:
            raise OutOfTime

    def say(self, text: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)


def check_minutes(minutes: float) -> None:
    """Raise SystemExit for a call in which training pauses before it has begun: calls like it never end."""
    least = RESERVE / 60 + 0.5
    if not minutes >= least:
        raise SystemExit(
            f"--minutes {minutes:g} leaves no time to train, which pauses {RESERVE:g} seconds before the end "
            f"of a call; give at least {least:g}"
        )
