"""How often a run says where it stands."""

from __future__ import annotations

import time


class Pace:
    """Says when something is due that must not come too often, since a round may be over in a millisecond.

    seconds: least time between two times that it is due. The first one is at once.
    """

    def __init__(self, seconds: float = 0.25) -> None:
        self._seconds = seconds
        self._next = 0.0

    def due(self) -> bool:
        """Whether it is time; asked again at once, it is not."""
        now = time.monotonic()
        if now < self._next:
            return False
        self._next = now + self._seconds
        return True
