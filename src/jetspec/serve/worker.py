"""The thread that owns the engine: it takes commands between rounds and reports what came of them.

Nobody else touches the engine, so requests join, leave and are given up between two rounds only. What one
request brings about is that request's own affair: the others go on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import NamedTuple

from jetspec.budget.fixed import FixedBudget
from jetspec.decode.engine import Engine
from jetspec.decode.result import Tally
from jetspec.decode.round import Outcome
from jetspec.draft.stubs import Off
from jetspec.errors import HeadError, ModelError, is_out_of_memory
from jetspec.sequence import Sequence
from jetspec.serve.errors import ApiError, failure, out_of_memory
from jetspec.serve.metrics import Metrics
from jetspec.serve.pulse import Pulse
from jetspec.serve.ticket import Added, Died, Emitted, Event, Failed, Piece, Ticket

log = logging.getLogger("jetspec.serve")


class _Add(NamedTuple):
    ticket: Ticket
    since: float  # when it was handed in, by time.perf_counter


class _Drop(NamedTuple):
    ticket: Ticket | None  # None is all
    error: ApiError


class _Stop(NamedTuple):
    pass


_Command = _Add | _Drop | _Stop


@dataclass
class _Open:
    """A choice in the engine."""

    ticket: Ticket
    index: int
    sequence: Sequence
    tally: Tally
    since: float
    first: float = 0.0  # when its first token came; 0.0 before


class Worker:
    """Decodes on a thread of its own until it is stopped.

    post: is called on that thread with the events of each step.
    """

    def __init__(self, engine: Engine, metrics: Metrics, post: Callable[[list[Event]], None]) -> None:
        self.engine, self.metrics, self.pulse = engine, metrics, Pulse()
        self._post = post
        self._commands: SimpleQueue[_Command] = SimpleQueue()
        self._open: dict[int, _Open] = {}  # by the sequence's id
        self._events: list[Event] = []
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="jetspec-engine", daemon=True)

    # --- for other threads

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def add(self, ticket: Ticket) -> None:
        """Queue all choices of a request, or none: Added or Failed follows."""
        self._commands.put(_Add(ticket, time.perf_counter()))

    def drop(self, ticket: Ticket | None, error: ApiError) -> None:
        """End a request, or all, before the next round: Failed with `error` follows unless it has ended."""
        self._commands.put(_Drop(ticket, error))

    def stop(self) -> None:
        """End the thread after the round that is going on, and wait for it."""
        self._commands.put(_Stop())
        if self._thread.is_alive():
            self._thread.join()

    # --- the thread

    def _run(self) -> None:
        try:
            while self._obey():
                self._report()  # who was taken or has gone need not wait for a round
                if self.engine.busy:
                    self._step()
                    self._report()
        except BaseException as error:
            log.critical("the engine's thread ends, and with it the service: %s", error, exc_info=error)
            self._die(failure(error))

    def _die(self, error: ApiError) -> None:
        """Tell everybody, and go on telling those who come."""
        self._events += [Failed(ticket, error) for ticket in {o.ticket: None for o in self._open.values()}]
        self._open.clear()
        self._post([*self._events, Died()])
        while not isinstance(command := self._commands.get(), _Stop):
            if isinstance(command, _Add):
                self._post([Failed(command.ticket, error)])

    def _obey(self) -> bool:
        """Carry out all commands there are, waiting for one if there is nothing else to do. False to end."""
        try:
            command = self._commands.get(block=not self.engine.busy)
            while True:
                if isinstance(command, _Stop):
                    return False
                if isinstance(command, _Add):
                    self._add(command)
                else:
                    for ticket in [command.ticket] if command.ticket else self._tickets():
                        self._fail(ticket, command.error)
                command = self._commands.get(block=False)
        except Empty:
            return True

    def _add(self, command: _Add) -> None:
        ticket, added = command.ticket, list[Sequence]()
        try:
            for choice in ticket.choices:
                added.append(self.engine.add(choice.ids, choice.sampling, choice.limits))
        except Exception as error:
            for sequence in added:
                self.engine.abort(sequence)
            self._events.append(Failed(ticket, failure(error)))
            return
        for index, sequence in enumerate(added):
            self._open[sequence.id] = _Open(ticket, index, sequence, Tally(sequence), command.since)
        self._events.append(Added(ticket))

    def _step(self) -> None:
        """One round, and what may go wrong in it."""
        cache = self.engine.cache
        before = {key: cache.length(key) for key in cache.keys()}  # noqa: SIM118 (not a dict)
        try:
            outcomes = self.engine.step()
        except ModelError as error:  # the engine has aborted the sequences that it names
            sick = {self._open[s.id].ticket: None for s in error.sequences if s.id in self._open}
            if not sick:
                raise
            log.error("%s", error)
            for ticket in sick:
                self._fail(ticket, failure(error))
        except HeadError as error:
            self._stop_drafting(error)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            log.error("no memory is left for a round: %s", error)
            self._make_room(before)
        else:
            self._take(outcomes)

    def _take(self, outcomes: Many[Outcome]) -> None:
        """Report what a round emitted."""
        now = time.perf_counter()
        for outcome in outcomes:
            key = outcome.sequence.id
            found = self._open[key]
            found.tally.add(outcome)
            if not found.first:
                found.first = now
                self.metrics.first_token.observe(now - found.since)
            piece = Piece(found.index, outcome.emissions)
            if outcome.sequence.finished is not None:
                piece.result = found.tally.result(self.engine.stats)
                self.metrics.count_answer(piece.result, now - found.first)
                del self._open[key]
            self._events.append(Emitted(found.ticket, piece))
        if outcomes:
            self.metrics.count_round(outcomes)
            self.pulse.beat(outcomes)

    def _fail(self, ticket: Ticket, error: ApiError) -> None:
        """End all choices of a request that have not ended."""
        found = [o for o in self._open.values() if o.ticket is ticket]
        for o in found:
            self.engine.abort(o.sequence)
            del self._open[o.sequence.id]
        if found:
            self._events.append(Failed(ticket, error))

    def _stop_drafting(self, error: HeadError) -> None:
        """Go on plainly: a head that failed once has nothing to do with the text."""
        engine = self.engine
        if isinstance(engine.drafter, Off):
            raise error
        log.error("decoding goes on plainly, without drafts, until the server is started again: %s", error)
        for key in self._open:
            engine.drafter.free(key)
        engine.drafter, engine.budget = Off(), FixedBudget(0)
        self.metrics.drafting.set(0)

    def _make_room(self, before: dict[int, int]) -> None:
        """End what a failed step has left half done (its cache has grown, but nobody was told); if there is
        nothing like that, the request that came last of those that hold memory.
        """
        cache = self.engine.cache
        held = [key for key in self._open if key in cache]
        gone = [key for key in held if cache.length(key) != before.get(key, 0)]
        gone = gone or [max(held) if held else min(self._open)]
        for ticket in {self._open[key].ticket: None for key in gone}:
            self._fail(ticket, out_of_memory())

    def _tickets(self) -> list[Ticket]:
        return list({o.ticket: None for o in self._open.values()})

    def _report(self) -> None:
        if self._events:
            self.metrics.look_at(self.engine)
            events, self._events = self._events, []
            self._post(events)
