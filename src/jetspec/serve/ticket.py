"""What the engine's thread tells the event loop, and how one HTTP request waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field

from jetspec.decode.result import Result
from jetspec.sequence import Emission
from jetspec.serve.errors import ApiError
from jetspec.serve.prepare import Choice


@dataclass
class Piece:
    """What a round emitted for one choice; with its last one comes the result."""

    index: int
    emissions: list[Emission]
    result: Result | None = None


class Ticket:
    """One HTTP request's share of the engine. Everything here happens on the event loop.

    keep: pieces are kept until `pieces` hands them out; else only results are.
    """

    def __init__(self, choices: Many[Choice], keep: bool) -> None:
        self.choices = choices
        self.results: dict[int, Result] = {}
        self.error: ApiError | None = None
        self.added = False
        self._keep, self._kept = keep, list[Piece]()
        self._news = asyncio.Event()

    @property
    def open(self) -> int:
        """Choices that have not ended."""
        return 0 if self.error is not None else len(self.choices) - len(self.results)

    def accept(self) -> None:
        """The engine has queued all choices."""
        self.added = True
        self._news.set()

    def take(self, piece: Piece) -> None:
        """A round has gone by."""
        if piece.result is not None:
            self.results[piece.index] = piece.result
        if self._keep:
            self._kept.append(piece)
        if self._keep or not self.open:
            self._news.set()

    def fail(self, error: ApiError) -> None:
        """The request has ended without an answer."""
        self.error = error
        self._news.set()

    async def started(self) -> None:
        """Wait until the engine has taken the request. Raises ApiError if it did not."""
        while not (self.added or self.error):
            self._news.clear()
            await self._news.wait()
        if self.error is not None and not self.added:
            raise self.error

    async def whole(self) -> list[Result]:
        """Wait for all results, in the order of the choices. Raises ApiError."""
        while self.open:
            self._news.clear()
            await self._news.wait()
        if self.error is not None:
            raise self.error
        return [self.results[index] for index in range(len(self.choices))]

    async def pieces(self) -> AsyncIterator[list[Piece]]:
        """Everything new since the last time, until the end: a reader that comes late gets more at once.
        Raises ApiError behind the last piece if the request failed.
        """
        while True:
            taken, self._kept = self._kept, []
            if taken:
                yield taken
            elif self.error is not None:
                raise self.error
            elif not self.open:
                return
            else:
                self._news.clear()
                await self._news.wait()


@dataclass(frozen=True)
class Added:
    """The engine has queued a request."""

    ticket: Ticket


@dataclass(frozen=True)
class Failed:
    """A request is gone."""

    ticket: Ticket
    error: ApiError


@dataclass(frozen=True)
class Emitted:
    """A round emitted something for a request."""

    ticket: Ticket
    piece: Piece = field(repr=False)


@dataclass(frozen=True)
class Died:
    """The engine's thread will not decode any more."""


Event = Added | Failed | Emitted | Died
