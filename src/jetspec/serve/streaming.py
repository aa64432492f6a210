"""Server-sent events: chunks as they come, to a client that may be slow or leave."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from jetspec.serve.answers import Answer
from jetspec.serve.errors import ApiError, failure
from jetspec.serve.ticket import Piece, Ticket

log = logging.getLogger("jetspec.serve")

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # nginx would collect the chunks
]


def encode(value: Any) -> bytes:
    """A value as compact JSON."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


async def gone(receive: Receive) -> None:
    """Wait until the client has left. The body must have been read."""
    while (await receive())["type"] != "http.disconnect":
        pass


class EventStream(Response):
    """The chunks of one request.

    A client that is slower than decoding gets what has gathered meanwhile in one chunk, so no more is kept
    for it than its answer; one that takes nothing at all for `stall` seconds has left.

    end: is called once, with the outcome (see `metrics`), whatever happens.
    """

    def __init__(self, ticket: Ticket, answer: Answer, end: Callable[[str], None], stall: float) -> None:
        super().__init__()
        self._ticket, self._answer = ticket, answer
        self._end, self._stall = end, stall

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send until the end, or until the client leaves."""
        outcome = "cancelled"
        sender = asyncio.ensure_future(self._send_all(send))
        watcher = asyncio.ensure_future(gone(receive))
        try:
            await asyncio.wait({sender, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if sender.done():
                outcome = sender.result()
        except (TimeoutError, OSError):
            pass  # the client takes nothing, or its connection broke
        finally:
            self._end(outcome)
            for task in (sender, watcher):
                task.cancel()
            await asyncio.gather(sender, watcher, return_exceptions=True)

    async def _send_all(self, send: Send) -> str:
        """Returns the outcome."""
        outcome = "done"
        await self._send(send, {"type": "http.response.start", "status": 200, "headers": _HEADERS})
        try:
            async for pieces in self._ticket.pieces():
                await self._send_events(send, *self._chunks(pieces))
            results = await self._ticket.whole()
            last = self._answer.last_chunk(results)
            await self._send_events(send, *([last] if last else []))
        except (TimeoutError, OSError):
            raise
        except Exception as error:
            if not isinstance(error, ApiError):
                log.exception("a stream failed")
            outcome = "failed"
            await self._send_events(send, failure(error).body)
        await self._send(
            send, {"type": "http.response.body", "body": b"data: [DONE]\n\n", "more_body": False}
        )
        return outcome

    def _chunks(self, pieces: list[Piece]) -> list[dict[str, Any]]:
        """One chunk for each choice that has something new, whatever the number of rounds."""
        merged: dict[int, Piece] = {}
        for piece in pieces:
            if piece.index in merged:
                before = merged[piece.index]
                piece = Piece(piece.index, before.emissions + piece.emissions, piece.result)
            merged[piece.index] = piece
        chunks = [self._answer.chunk(p.index, p.emissions, p.result) for p in merged.values()]
        return [chunk for chunk in chunks if chunk is not None]

    async def _send_events(self, send: Send, *values: dict[str, Any]) -> None:
        body = b"".join(b"data: " + encode(value) + b"\n\n" for value in values)
        if body:
            await self._send(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _send(self, send: Send, message: Message) -> None:
        async with asyncio.timeout(self._stall):
            await send(message)
