"""One request handed out as it is decoded, to a reader that may leave early, from any thread."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from threading import Event, Lock

from jetspec.decode.engine import Engine
from jetspec.decode.result import Result, Tally
from jetspec.errors import OptionError
from jetspec.sequence import Emission, Sequence


class Stream:
    """An iterator over the emissions of one request: token, kind, and the text that may be shown now.

    `result` is there once it has ended. Closing it early, or leaving a `with` block, ends the request and
    frees its memory; so does dropping the last reference. Any thread may close it.
    """

    def __init__(self, engine: Engine, sequence: Sequence) -> None:
        self._engine = engine
        self._tally = Tally(sequence)
        self._given = self._shown = 0  # emissions and characters that the reader got
        self._closed, self._reading = Event(), Lock()
        # No method: its frame would hold this object, and a ring of both would keep the request's memory
        # until the next garbage collection.
        self._emissions = _emissions(engine, self._tally, self._closed)

    def __iter__(self) -> Iterator[Emission]:
        return self

    def __next__(self) -> Emission:
        with self._reading:
            emission = next(self._emissions)
            self._given += 1
            self._shown += len(emission.text)
        if self._closed.is_set():  # by another thread, which could not end it meanwhile
            self.close()
        return emission

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End the request; what was handed out so far is in `result`.

        While another thread waits for an emission this returns at once: that thread's step is its last one,
        and it ends the request.
        """
        self._closed.set()
        if self._reading.acquire(blocking=False):
            try:
                self._emissions.close()
                self._engine.abort(self._tally.sequence)
            finally:
                self._reading.release()

    @property
    def result(self) -> Result:
        """The outcome, cut to what was handed out if it was closed early. Raises OptionError before the
        end.
        """
        ended = self._closed.is_set() or self._given == self._tally.emitted
        if self._tally.sequence.finished is None or not ended:
            raise OptionError("the stream has not ended yet; read it to its end, or close it, for the result")
        return self._tally.result(self._engine.stats, self._given, self._shown)


def _emissions(engine: Engine, tally: Tally, closed: Event) -> Generator[Emission, None, None]:
    """What a stream hands out, until it was closed."""
    try:
        while engine.busy and not closed.is_set():
            for outcome in engine.step():
                tally.add(outcome)
                yield from outcome.emissions
    finally:
        engine.abort(tally.sequence)
