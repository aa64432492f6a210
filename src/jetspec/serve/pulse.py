"""The last seconds of decoding, for the live panel: the engine's thread writes, the event loop reads."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

from jetspec.decode.round import Outcome

SECONDS = 5.0
_ROUNDS = 2048  # kept at most


class _Round(NamedTuple):
    when: float
    batch: int
    nodes: int
    tokens: int


class Pulse:
    """What rounds of the last seconds did. No locks: a deque's methods are whole under CPython's own."""

    def __init__(self) -> None:
        self._rounds: deque[_Round] = deque(maxlen=_ROUNDS)

    def beat(self, outcomes: Many[Outcome]) -> None:
        """Note a round."""
        nodes = sum(outcome.tree.budget for outcome in outcomes)
        tokens = sum(len(outcome.emissions) for outcome in outcomes)
        self._rounds.append(_Round(time.perf_counter(), len(outcomes), nodes, tokens))

    def view(self) -> dict[str, Any]:
        """Means over the rounds of the last five seconds; zeros if there were none.

        batch   requests per round
        nodes   drafted nodes per round, over its batch
        tau     tokens per request and round
        tokens_per_second   of all requests together
        """
        now = time.perf_counter()
        recent = [r for r in list(self._rounds) if now - r.when <= SECONDS]
        if not recent:
            return {"batch": 0.0, "nodes": 0.0, "tau": 0.0, "tokens_per_second": 0.0}
        batch, nodes, tokens = (sum(values) for values in list(zip(*recent, strict=True))[1:])
        # The first round's tokens were made before it was noted.
        span = recent[-1].when - recent[0].when
        pace = (tokens - recent[0].tokens) / span if span > 0 else 0.0
        busy = now - recent[-1].when < 1.0
        return {
            "batch": round(batch / len(recent), 2),
            "nodes": round(nodes / len(recent), 2),
            "tau": round(tokens / batch, 3),
            "tokens_per_second": round(pace, 1) if busy else 0.0,
        }
