"""The event loop's side of the engine: who may come in, and who is told what."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import Any, Literal

from jetspec.decode.engine import Engine
from jetspec.errors import OptionError, brief
from jetspec.sampling import as_integer
from jetspec.serve.errors import SOON, ApiError, invalid, shutting_down
from jetspec.serve.metrics import Metrics
from jetspec.serve.prepare import Choice
from jetspec.serve.ticket import Added, Died, Emitted, Event, Ticket
from jetspec.serve.worker import Worker

State = Literal["new", "open", "closing", "dead"]


class Desk:
    """Admits requests to one engine. All methods are for the event loop that `open` was called on.

    max_queue: answers that may wait for a place in the engine's batch.
    Raises OptionError if it is out of range.
    """

    def __init__(self, engine: Engine, metrics: Metrics, max_queue: int) -> None:
        most = as_integer(max_queue)
        if most is None or most < 0:
            raise OptionError(f"max_queue must be an integer of at least 0, got {brief(max_queue)}")
        self.engine, self.metrics = engine, metrics
        self.capacity = engine.max_batch + most
        self.state: State = "new"
        self.live = 0  # answers that are in the engine, waiting or running
        self._reading = 0  # requests whose bodies are being read and prepared
        self._worker = Worker(engine, metrics, self._from_worker)
        self._loop: asyncio.AbstractEventLoop | None = None

    def open(self) -> None:
        """Start the engine's thread."""
        assert self.state == "new", "a server is started once; make a new one"
        self._loop = asyncio.get_running_loop()
        self.state = "open"
        self._worker.start()

    @contextmanager
    def place(self) -> Iterator[None]:
        """A place for a request that is being read. Raises ApiError if there is none."""
        self.check()
        if self.live + self._reading >= self.capacity:
            raise self._full()
        self._reading += 1
        try:
            yield
        finally:
            self._reading -= 1

    def check(self) -> None:
        """Raise ApiError unless requests are taken."""
        if self.state == "dead":
            raise ApiError(503, "decoding has failed for good; the server must be started again", code="dead")
        if self.state != "open":
            raise shutting_down()

    def submit(self, choices: Many[Choice], keep: bool) -> Ticket:
        """Hand a request to the engine; see `Ticket` for `keep`. Raises ApiError if there is no room."""
        self.check()
        if len(choices) > self.capacity:
            raise invalid(
                f"the request asks for {len(choices)} answers; the server holds {self.capacity}", "n"
            )
        if self.live + len(choices) > self.capacity:
            raise self._full()
        ticket = Ticket(choices, keep)
        self.live += len(choices)
        self._worker.add(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request that nobody waits for; one that has ended is left alone."""
        if ticket.open:
            self._worker.drop(ticket, ApiError(499, "the client has left", code="cancelled"))

    def stop_intake(self) -> None:
        """Take nothing more; what is there goes on."""
        if self.state == "open":
            self.state = "closing"

    def end_all(self) -> None:
        """End all requests; their clients are told that the server shuts down."""
        self._worker.drop(None, shutting_down())

    async def close(self) -> None:
        """End everything and the thread."""
        self.stop_intake()
        if self._loop is not None:
            self.end_all()
            await asyncio.to_thread(self._worker.stop)

    def live_view(self) -> dict[str, Any]:
        """What is going on, for the page; numbers of another thread may be a round old."""
        engine = self.engine
        return {
            "running": engine.running,
            "waiting": engine.waiting,
            "max_batch": engine.max_batch,
            "drafting": engine.drafter.name != "off",
            **self._worker.pulse.view(),
        }

    def _full(self) -> ApiError:
        return ApiError(
            429,
            f"the server is full: {self.engine.max_batch} answers are decoded at once and "
            f"{self.capacity - self.engine.max_batch} may wait; ask again soon",
            code="queue_full",
            headers=SOON,
        )

    def _from_worker(self, events: list[Event]) -> None:
        """On the engine's thread."""
        assert self._loop is not None
        with contextlib.suppress(RuntimeError):  # the loop is gone, and so is everybody who waited
            self._loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            if isinstance(event, Died):
                self.state = "dead"
                continue
            before = event.ticket.open
            if isinstance(event, Added):
                event.ticket.accept()
            elif isinstance(event, Emitted):
                event.ticket.take(event.piece)
            else:
                event.ticket.fail(event.error)
            self.live -= before - event.ticket.open
