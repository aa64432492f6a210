"""A server in this process: the app of a tiny model, a client, a gate before its rounds, a client by hand."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
from fastapi import FastAPI

import jetspec
from jetspec.decode.engine import Engine
from jetspec.serve.app import create_app
from jetspec.serve.desk import Desk

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
PATIENCE = 30.0  # seconds; only a fault uses them up


def load(folder: Path, head: str = "decoy", budget: int = 6, **options: Any) -> jetspec.LanguageModel:
    """The tiny model with a stub drafter."""
    return jetspec.load(str(folder), head, budget=budget, **options)


def engine_of(app: FastAPI) -> Engine:
    """The engine behind an app, to look at."""
    engine = app.state.service.engine
    assert isinstance(engine, Engine)
    return engine


def desk_of(app: FastAPI) -> Desk:
    """The desk of an app."""
    desk = app.state.service.desk
    assert isinstance(desk, Desk)
    return desk


@asynccontextmanager
async def serving(app: FastAPI, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the app while it is served."""
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://test", timeout=PATIENCE, **options) as client,
    ):
        yield client


@asynccontextmanager
async def served(model: jetspec.LanguageModel, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a new app for the model."""
    async with serving(create_app(model, **options)) as client:
        yield client


def run(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Run a test's coroutine."""

    async def limited() -> Any:
        async with asyncio.timeout(2 * PATIENCE):
            return await coroutine

    return asyncio.run(limited())


async def until(condition: Any) -> None:
    """Wait until it holds."""
    async with asyncio.timeout(PATIENCE):
        while not condition():
            await asyncio.sleep(0.002)


def events(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream, whose form and end are checked."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    return events_in(response.text)


def events_in(text: str) -> list[dict[str, Any]]:
    """The objects of a stream's body."""
    lines = text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""] and all(line.startswith("data: ") for line in lines[:-1])
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def joined(chunks: list[dict[str, Any]], index: int = 0) -> str:
    """The text that the chunks of one choice add up to."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    return "".join(c["text"] if "text" in c else c["delta"].get("content", "") for c in choices)


class Gate:
    """Holds the engine before each round until it is opened, so that a test knows what is going on."""

    def __init__(self, engine: Engine) -> None:
        self._step, self._allowed = engine.step, threading.Semaphore(0)
        self._open = threading.Event()
        engine.step = self._wait  # type: ignore[method-assign]

    def _wait(self) -> Any:
        while not self._open.is_set():
            if self._allowed.acquire(timeout=0.01):
                break
        return self._step()

    def let(self, rounds: int) -> None:
        """Let so many rounds go by."""
        self._allowed.release(rounds)

    def open(self) -> None:
        """Hold nothing any more."""
        self._open.set()


@asynccontextmanager
async def gated(app: FastAPI) -> AsyncIterator[tuple[httpx.AsyncClient, Gate]]:
    """As `serving`, with a gate that is opened at the end, whatever happens."""
    gate = Gate(engine_of(app))
    async with serving(app) as client:
        try:
            yield client, gate
        finally:
            gate.open()


class Visitor:
    """A client below HTTP, which leaves or stops reading when the test says so."""

    def __init__(self, app: FastAPI, path: str, fields: dict[str, Any]) -> None:
        self.messages: list[Any] = []  # what the app has sent
        self.left = asyncio.Event()
        self.taking = asyncio.Event()  # while it is not set, nothing is taken
        self.taking.set()
        self._body: bytes | None = json.dumps(fields).encode()
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self._send))

    async def _receive(self) -> Any:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Any) -> None:
        await self.taking.wait()
        self.messages.append(message)

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(m.get("body", b"") for m in self.messages).decode()
