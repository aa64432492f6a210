"""What a budget promises to the round, and what the round tells it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple, Protocol

from jetspec.sequence import Sequence
from jetspec.tree import Tree


class Spent(NamedTuple):
    """Seconds of one round by phase.

    `verify` leaves out the drawing of tokens above temperature 0: it costs the same per emitted token
    whatever was drafted, so it cannot decide between two budgets.
    """

    draft: float
    build: float
    verify: float
    commit: float


class Budget(Protocol):
    """How many nodes are worth drafting and verifying. The three calls of one round come in this order, all
    with the same sequences. A policy may also have numbers that are read after `limits`: `floor`, the
    log-prob of a path below which nothing need be grown, and `depth`, below which no node need be drafted.
    """

    def limits(self, sequences: Many[Sequence]) -> list[int]:
        """Nodes to grow at most, per sequence. Where all are 0, nothing is drafted in this round."""
        ...

    def cut(self, sequences: Many[Sequence], trees: Many[Tree]) -> list[Tree]:
        """The grown trees without what is not worth verifying, across the batch."""
        ...

    def record(
        self, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]], spent: Spent
    ) -> None:
        """The outcome: the verified trees, their accepted paths (`walk`), and what the round took. The
        sequences have gone on already.
        """
        ...
