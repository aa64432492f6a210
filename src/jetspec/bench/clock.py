"""The clock: several decoders on the same prompts, in turns, each step timed.

Whatever else the machine does hits all of them alike, because the one that has emitted the fewest tokens goes
next. What is timed of our own engines is one `Engine.step` at a time: draft, build, verify, commit and the
engine's work between them. Prefill is timed apart and is in no speedup but `whole`.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

import torch

from jetspec.decode.engine import Engine
from jetspec.decode.stats import Stats
from jetspec.noise import NoiseRows, keep_rows_in
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence

PHASES = ("draft", "build", "verify", "commit")


@dataclass
class Measured:
    """What one decoder did with one group of prompts, decoded as one batch.

    seconds       of decoding; prefill is not in it
    clocked       tokens that `seconds` brought; fewer than `tokens` where the first ones came with prefill
    prefill       seconds of it
    tokens, rounds, finish   per prompt; a round is a target forward, seen from one sequence
    steps         target forwards of decoding, whatever the batch
    step_ms       median of a step
    split         seconds per phase; split_ms: medians of a step. Empty where the phases are not known
    accepted, nodes          drafted tokens emitted; drafted nodes verified, roots excluded
    by_depth      [rounds that drafted depth d + 1 at all, rounds that accepted it]
    cache_bytes   most memory that the target's keys and values took
    """

    tokens: list[int]
    rounds: list[int]
    finish: list[str]
    seconds: float
    clocked: int
    prefill: float
    steps: int
    step_ms: float
    split: dict[str, float] = field(default_factory=dict)
    split_ms: dict[str, float] = field(default_factory=dict)
    accepted: int = 0
    nodes: int = 0
    by_depth: list[list[int]] = field(default_factory=list)
    cache_bytes: int | None = None

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


class Runner(Protocol):
    """A decoder of groups of prompts that can be stopped between steps."""

    def start(self, prompts: Many[Many[int]], sampling: Sampling, limits: Limits) -> None:
        """Take a group in and prefill it."""
        ...

    @property
    def running(self) -> bool:
        """Whether anything of the group is unfinished."""
        ...

    @property
    def emitted(self) -> int:
        """Tokens of the group so far."""
        ...

    def step(self) -> None:
        """Go on a little, on the clock."""
        ...

    def finish(self) -> tuple[Measured, list[list[int]]]:
        """The outcome, and the emitted ids of each prompt."""
        ...

    def abort(self) -> None:
        """Give up the group and free its memory; harmless afterwards."""
        ...


class EngineRunner:
    """Runs one engine: all prompts of a group at once, prefilled before the first round.

    Noise is made anew for each group, as in a process of its own: else the runner that comes first would make
    it for all others.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._sequences: list[Sequence] = []
        self._tallies: dict[int, Stats] = {}
        self._forget()

    def _forget(self) -> None:
        self.engine.stats = Stats()
        self._steps: list[float] = []
        self._splits: dict[str, list[float]] = {phase: [] for phase in PHASES}
        self._prefill = 0.0
        self._cache = 0
        self._noise = NoiseRows()

    def start(self, prompts: Many[Many[int]], sampling: Sampling, limits: Limits) -> None:
        """Add and prefill the prompts."""
        assert not self.engine.busy, "a group is still running"
        self._forget()
        self._sequences = [self.engine.add(ids, sampling, limits) for ids in prompts]
        self._tallies = {sequence.id: Stats() for sequence in self._sequences}
        with _timed(self.engine.target.device) as seconds:
            self.engine.prefill()
        self._prefill = seconds()

    @property
    def running(self) -> bool:
        """Whether a prompt is unfinished."""
        return self.engine.busy

    @property
    def emitted(self) -> int:
        """Tokens of all prompts."""
        return sum(stats.tokens for stats in self._tallies.values())

    def step(self) -> None:
        """One round."""
        before = dict(self.engine.stats.seconds)
        with keep_rows_in(self._noise), _timed(self.engine.target.device) as seconds:
            outcomes = self.engine.step()
        self._steps.append(seconds())
        for phase in PHASES:
            self._splits[phase].append(self.engine.stats.seconds[phase] - before[phase])
        for outcome in outcomes:
            outcome.count_in(self._tallies[outcome.sequence.id])
        self._cache = max(self._cache, self.engine.cache.bytes)

    def finish(self) -> tuple[Measured, list[list[int]]]:
        """Everything that was counted."""
        assert not self.engine.busy and self._steps, "the group has not been decoded to its end"
        stats = self.engine.stats
        tallies = list(self._tallies.values())
        tokens = [len(sequence.emitted) for sequence in self._sequences]
        measured = Measured(
            tokens=tokens,
            rounds=[tally.rounds for tally in tallies],
            finish=[str(sequence.finished) for sequence in self._sequences],
            seconds=sum(self._steps),
            clocked=sum(tokens),
            prefill=self._prefill,
            steps=stats.forwards,
            step_ms=1e3 * statistics.median(self._steps),
            split={phase: sum(values) for phase, values in self._splits.items()},
            split_ms={phase: 1e3 * statistics.median(values) for phase, values in self._splits.items()},
            accepted=stats.accepted,
            nodes=stats.nodes,
            by_depth=[list(level) for level in stats.by_depth],
            cache_bytes=self._cache,
        )
        return measured, [sequence.emitted for sequence in self._sequences]

    def abort(self) -> None:
        """End what is unfinished."""
        for sequence in self._sequences:
            self.engine.abort(sequence)
        self._noise = NoiseRows()


def take_turns(
    runners: Many[Runner], prompts: Many[Many[int]], sampling: Sampling, limits: Limits
) -> list[tuple[Measured, list[list[int]]]]:
    """Decode one group of prompts with every runner, in turns: next is the one with the fewest tokens.

    Of those that are level, the one that went last goes again (ABBA), so that none is always first; the
    caller rotates the order from group to group. Garbage is collected before, and not on the clock.
    """
    gc.collect()
    gc.disable()
    last: Runner | None = None
    try:
        for runner in runners:
            runner.start(prompts, sampling, limits)
        while unfinished := [runner for runner in runners if runner.running]:
            last = min(unfinished, key=lambda runner: (runner.emitted, runner is not last))
            last.step()
        return [runner.finish() for runner in runners]
    finally:
        gc.enable()
        for runner in runners:
            runner.abort()


def warm_up(runner: Runner, prompts: Many[Many[int]], sampling: Sampling, limits: Limits) -> None:
    """Decode prompts that are not measured."""
    try:
        runner.start(prompts, sampling, limits)
        while runner.running:
            runner.step()
    finally:
        runner.abort()


@contextmanager
def _timed(device: torch.device) -> Iterator[Callable[[], float]]:
    """Wall time of what is inside, to be asked for afterwards; waits for the device at both ends."""
    _wait(device)
    start, end = time.perf_counter(), 0.0
    yield lambda: end - start
    _wait(device)
    end = time.perf_counter()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
