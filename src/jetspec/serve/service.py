"""One model, served: a request is read, handed in and answered, and what came of it is counted."""

from __future__ import annotations

import asyncio
import hmac
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from jetspec.api import LanguageModel
from jetspec.decode.engine import Engine
from jetspec.errors import OptionError, brief
from jetspec.serve.answers import Answer
from jetspec.serve.desk import Desk
from jetspec.serve.errors import ApiError
from jetspec.serve.metrics import Metrics
from jetspec.serve.prepare import Job, Preparer
from jetspec.serve.streaming import EventStream, encode, gone
from jetspec.serve.ticket import Ticket

BODY_SECONDS = 30.0  # for sending a request's body
_PREPARERS = 2  # threads that parse and encode
_PREFILL_ROWS = 64  # while others decode: a quarter of the pause between their tokens, and a slower prompt
_LEFT = 499  # nobody reads it


class Service:
    """What the routes of one server share.

    engine: decodes; `desk` is the way to it.
    """

    def __init__(
        self,
        model: LanguageModel,
        name: str | None,
        *,
        max_batch: int,
        max_queue: int,
        api_key: str | None,
        max_body: int | None,
        stall: float,
    ) -> None:
        self.name = served_name(model.target.name) if name is None else name
        if not self.name or not self.name.isprintable():
            raise OptionError(f"the served name must be a printable text, got {brief(self.name)}")
        if api_key is not None and not (api_key and all("!" <= letter <= "~" for letter in api_key)):
            # Without the key itself, which no message shows.
            raise OptionError("the API key must be ASCII letters, digits or signs, no blanks, at least one")
        self.engine = Engine(
            model.target,
            model.drafter,
            budget=model.budget,
            grow=model.grow,
            max_batch=max_batch,
            prefill_rows=_PREFILL_ROWS if model.target.device.type == "cpu" else None,
        )
        self.metrics = Metrics()
        self.metrics.drafting.set(self.engine.drafter.name != "off")
        self.desk = Desk(self.engine, self.metrics, max_queue)
        self.preparer = Preparer(model.target, self.name, self.desk.capacity)
        # A context of text in JSON escapes takes less, except for odd tokens of many characters.
        self.max_body = max(4 << 20, 32 * self.preparer.context) if max_body is None else max_body
        self.stall, self.created = stall, int(time.time())
        self._key = None if api_key is None else api_key.encode()
        self._threads = ThreadPoolExecutor(_PREPARERS, "jetspec-prepare")

    @asynccontextmanager
    async def running(self, app: FastAPI) -> AsyncIterator[None]:
        """The engine's thread lives as long as the app does."""
        self.desk.open()
        try:
            yield
        finally:
            await self.desk.close()
            self._threads.shutdown(wait=False, cancel_futures=True)

    async def check_key(self, request: Request) -> None:
        """Raise ApiError unless the request has the key, if one is set."""
        if self._key is None:
            return
        kind, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("utf-8", "replace"), self._key)
        if kind.lower() != "bearer" or not same:
            raise ApiError(
                401,
                "the API key is missing or wrong; send it as Authorization: Bearer KEY",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def complete(self, request: Request, chat: bool) -> Response:
        """Answer a request for completions, and count its outcome."""
        try:
            with self.desk.place():
                body = await read_body(request, self.max_body)
                run = asyncio.get_running_loop().run_in_executor
                job = await run(self._threads, self.preparer.job, body, chat)
                ticket = self.desk.submit(job.choices, keep=job.stream)
        except ClientDisconnect:
            self._count("cancelled")
            return Response(status_code=_LEFT)
        except Exception as error:
            status = error.status if isinstance(error, ApiError) else 500
            self._count("full" if status == 429 else "refused" if status < 500 else "failed")
            raise
        return await self._answer(request, job, ticket)

    async def _answer(self, request: Request, job: Job, ticket: Ticket) -> Response:
        answer = Answer(job, self.name)
        outcome = "cancelled"
        waiting: asyncio.Future[Any] = asyncio.ensure_future(
            ticket.started() if job.stream else ticket.whole()
        )
        watcher = asyncio.ensure_future(gone(request.receive))
        try:
            await asyncio.wait({waiting, watcher}, return_when=asyncio.FIRST_COMPLETED)
            if not waiting.done():
                return Response(status_code=_LEFT)
            outcome = "failed"
            found = waiting.result()
            if job.stream:
                outcome = ""  # to be seen
                return EventStream(ticket, answer, lambda how: self._end(ticket, how), self.stall)
            outcome = "done"
            return json_response(answer.whole(found))
        finally:
            if outcome:
                self._end(ticket, outcome)
            for task in (waiting, watcher):
                task.cancel()
            await asyncio.gather(waiting, watcher, return_exceptions=True)

    def _end(self, ticket: Ticket, outcome: str) -> None:
        """Nobody waits for the ticket any more."""
        self.desk.cancel(ticket)
        self._count(outcome)

    def _count(self, outcome: str) -> None:
        self.metrics.requests.labels(outcome).inc()

    def about(self) -> dict[str, Any]:
        """The model as /v1/models lists it."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "jetspec",
            "max_model_len": self.preparer.context,
        }


def served_name(name: str) -> str:
    """What clients call a model: its name, or the last part of the path of a folder or file."""
    return Path(name).resolve().name if Path(name).exists() else name


async def read_body(request: Request, most: int) -> bytes:
    """The body of a request. Raises ApiError if it is no JSON, longer than `most` bytes, or slow to come;
    ClientDisconnect if the client leaves.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        raise ApiError(415, f"the body must be JSON; send Content-Type: application/json, got {brief(kind)}")
    closing = {"Connection": "close"}  # what is left of the body is not read
    large = ApiError(413, f"the body is larger than {most} bytes; shorten the prompt", headers=closing)
    stated = request.headers.get("content-length", "")
    if stated.isdigit() and (len(stated) > 15 or int(stated) > most):
        raise large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                body += piece
                if len(body) > most:
                    raise large
    except TimeoutError:
        raise ApiError(
            408, f"the body did not come within {BODY_SECONDS:g} seconds", headers=closing
        ) from None
    return bytes(body)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """A value as the body of a response."""
    return Response(encode(value), status, headers, "application/json")
