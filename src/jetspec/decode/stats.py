"""What decoding cost and what it brought: counters and the split of time, per run and per sequence."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field

PHASES = ("prefill", "draft", "build", "verify", "commit")


@dataclass
class Stats:
    """Counters over rounds. A round counts once per sequence in it, so tau does not depend on the batch.

    tokens      emitted tokens
    rounds      verified trees (target forwards, seen from one sequence)
    forwards    target forwards of the decode phase, whatever the batch
    nodes       drafted nodes that were verified, roots excluded
    accepted    drafted tokens that were emitted
    by_depth    by_depth[d] = [rounds that drafted depth d + 1 at all, rounds that accepted it]
    seconds     wall time per phase: prefill, draft, build, verify, commit
    """

    tokens: int = 0
    rounds: int = 0
    forwards: int = 0
    nodes: int = 0
    accepted: int = 0
    by_depth: list[list[int]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time spent inside to one phase."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[name] += time.perf_counter() - start

    def record(self, drafted: int, depth: int, accepted: int, emitted: int) -> None:
        """Count one sequence's share of a round: nodes drafted, depth of the tree, tokens accepted and
        emitted.
        """
        self.rounds += 1
        self.nodes += drafted
        self.accepted += accepted
        self.tokens += emitted
        while len(self.by_depth) < depth:
            self.by_depth.append([0, 0])
        for level in range(depth):
            self.by_depth[level][0] += 1
            self.by_depth[level][1] += level < accepted

    @property
    def tau(self) -> float:
        """Tokens per target forward, pooled over rounds: mean(accepted) + 1, less what a stop or an early
        end cut off.

        0.0 before the first round.
        """
        return self.tokens / self.rounds if self.rounds else 0.0

    @property
    def decode_seconds(self) -> float:
        """Wall time of everything but prefill."""
        return sum(value for name, value in self.seconds.items() if name != "prefill")

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens per second of decoding, prefill excluded."""
        return self.tokens / self.decode_seconds if self.decode_seconds else 0.0

    def add(self, other: Stats) -> None:
        """Pool with another run, whose time comes on top.

        Not for results of one batch: each has the seconds of the whole batch (`Result.batch` is their sum).
        """
        for name in ("tokens", "rounds", "forwards", "nodes", "accepted"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        while len(self.by_depth) < len(other.by_depth):
            self.by_depth.append([0, 0])
        for level, (drafted, kept) in enumerate(other.by_depth):
            self.by_depth[level][0] += drafted
            self.by_depth[level][1] += kept
        for name, value in other.seconds.items():
            self.seconds[name] += value

    def as_dict(self) -> dict[str, object]:
        """Everything, with the derived figures, for JSON."""
        return {**asdict(self), "tau": self.tau, "tokens_per_second": self.tokens_per_second}
