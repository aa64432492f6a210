"""Measures what a round costs here: the target, the drafter and the tree builder on made-up sequences, for at
most a few seconds.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import count, pairwise
from typing import NamedTuple

import torch

from jetspec.budget.cost import CostModel
from jetspec.budget.curve import Curve
from jetspec.draft.base import Drafter
from jetspec.sampling import Sampling, pick_tokens
from jetspec.sequence import Limits, Sequence
from jetspec.target.plan import pack
from jetspec.target.target import Target
from jetspec.tree import Grow, Tree

SECONDS, SECONDS_AGAIN = 2.4, 0.8  # at the first use; between rounds, where somebody waits for tokens
_PASSES = 9
_BATCH = 4
_MANY = 16  # sequences drafted for at once, at most
_SOME = 16  # rows at which context and batch are told apart
_ROWS = (1, 16, 8, 4, 32, 2, 12, 24, 6, 48, 3, 64)  # in the order in which they matter
_WIDE = (96, 128, 192, 256)  # for batches
_CLOSER = 0.2  # of the time for these and for finding steps, on top
_HALVINGS = 8  # sizes looked at to find where the cost jumps
_JUMP = 1.2  # from one measured size to the next, from which on there may be a step between them
_TWICE = 2  # samples of these sizes
_GROWN = (8, 32, 0)
_CONTEXT, _LONG = 64, 512  # committed tokens
_MARGIN = 16  # positions behind them that trees may reach
_KEYS = count(-1, -1)  # of made-up sequences; engines count upwards from 0

_NEEDED = (("verify", 1), ("verify", _SOME), ("build", 8), ("commit", 1))
_JOBS = (
    *_NEEDED,
    *(("verify", rows) for rows in _ROWS if rows not in (1, _SOME)),
    *(("build", grown) for grown in _GROWN if grown != 8),
    *(
        ("draft", _BATCH),
        ("draft", _MANY),
        ("long", _BATCH),
        ("batch", _BATCH),
        ("long", _SOME),
        ("batch", _SOME),
        ("commit", _BATCH),
    ),
)
_NOISY = 1.25  # median / fastest sample, from which on a measurement does not deserve to be kept

_Job = tuple[str, int]  # what is measured, and at which size


class Measurement(NamedTuple):
    """A cost model, how long it took to measure, and whether the machine was too busy for it to be good."""

    cost: CostModel
    seconds: float
    noisy: bool


def measure(target: Target, drafter: Drafter, grow: Grow, seconds: float = SECONDS) -> Measurement:
    """Measure in passes over all sizes until the time is over, and take the fastest sample of each: what
    disturbs the machine only ever adds.

    The first pass is a warm-up, if there is time for a second one. Where one forward takes long, fewer sizes
    are measured, and the rest is learned from real rounds; the sizes that nothing can do without are measured
    even beyond the time. Raises whatever the target or the drafter raises.
    """
    start = time.perf_counter()
    samples: dict[_Job, list[float]] = {}
    with _sequences(target, drafter, _MANY) as sequences:
        bench = _Bench(target, drafter, grow, sequences)
        for number in range(_PASSES + 1):
            begun = time.perf_counter()
            for what, size in _JOBS:
                late = time.perf_counter() - start > seconds
                if late and (number or (what, size) not in _NEEDED):
                    continue
                for job, value in bench.sample(what, size).items():
                    samples.setdefault(job, []).append(value)
            now = time.perf_counter()
            if number == 0 and now + (now - begun) - start < seconds:
                samples.clear()
            elif now - start > seconds:
                break
        fastest = {job: min(values) for job, values in samples.items()}
        if number > 1:
            fastest.update(bench.look_closer(fastest, time.perf_counter() + _CLOSER * seconds))
        spread = statistics.median(
            statistics.median(values) / max(min(values), 1e-9) for values in samples.values()
        )
        few = min(map(len, samples.values())) < 3
        model = _model(fastest, bench.context, bench.long)
    return Measurement(model, time.perf_counter() - start, spread > _NOISY or few)


def _model(seconds: dict[_Job, float], short: int, long: int) -> CostModel:
    """Curves and rates from samples at a short and a long context."""

    def points(what: str) -> dict[int, float]:
        return {size: value for (name, size), value in seconds.items() if name == what}

    verify, far, few = points("verify"), points("long"), points("batch")
    context = row_context = beside = 0.0
    if len(far) == len(few) == 2 and long >= 2 * short:
        further = _BATCH * (long - short)  # tokens; a batch, since one sequence keeps few cores busy
        each = _SOME // _BATCH  # rows of a sequence
        at_one = max(0.0, (far[_BATCH] - few[_BATCH]) / further)  # context + row_context
        at_last = (far[_SOME] - few[_SOME]) / further  # context + each * row_context
        row_context = min(max(0.0, (at_last - at_one) / (each - 1)), at_one)
        context = at_one - row_context
    if _SOME in few:
        beside = (few[_SOME] - verify[_SOME]) / (_BATCH - 1) - short * context
    base = {size: value - short * (context + size * row_context) for size, value in verify.items()}
    return CostModel(
        draft=Curve(points("draft")),
        build=Curve(points("build")),
        verify=Curve(base),
        commit=Curve(points("commit")),
        sequence=max(0.0, beside),
        context=context,
        row_context=row_context,
    )


def halfway(points: Mapping[int, float]) -> int | None:
    """A size in the middle of the largest jump from one measured size to the next, to find out where between
    them the cost steps; None if there is no jump, or it is located.
    """
    found, most = None, _JUMP
    for small, large in pairwise(sorted(points)):
        if large - small > 1 and points[large] > most * points[small]:
            found, most = (small + large) // 2, points[large] / points[small]
    return found


class _Bench:
    """One target and drafter on the bench, with sequences that both know.

    context, long: committed tokens of the sequences, and of some that stand for a long context.
    """

    def __init__(self, target: Target, drafter: Drafter, grow: Grow, sequences: list[Sequence]) -> None:
        self._target, self._drafter, self._grow, self._sequences = target, drafter, grow, sequences
        self._cache = target.new_cache()
        self.context = sequences[0].position
        self.long = max(self.context, min(_LONG, target.config.max_positions - _MARGIN))
        self._long = [next(_KEYS) for _ in range(_BATCH)]
        short = [(s.id, s.position) for s in sequences[:_BATCH]]
        for key, rows in [*short, *((key, self.long) for key in self._long)]:
            self._cache.add(key, capacity=rows + max(_WIDE if key == sequences[0].id else _ROWS))
            self._cache.extend(key, rows)
            self._cache.keep(key, range(rows))
            # What is in the rows does not change the time, but it must be finite, and memory that was never
            # written need not be there at all.
            self._cache.block(key).zero_()

    def sample(self, what: str, size: int) -> dict[_Job, float]:
        """Seconds of one job; a tree is built from a draft, so that gives both."""
        if what == "verify":
            return {(what, size): self.verify([_tree(size)])}
        if what in ("long", "batch"):
            return {(what, size): self.verify([_tree(size // _BATCH)] * _BATCH, long=what == "long")}
        if what == "build":
            draft, build = self._draft(1, size)
            return {("draft", 1): draft, (what, size): build}
        if what == "draft":
            return {(what, size): self._draft(size, 0)[0]}
        return {(what, size): self._commit(size)}

    def look_closer(self, fastest: Mapping[_Job, float], end: float) -> dict[_Job, float]:
        """Sizes that only batches need, and sizes at which costs step, as far as time allows."""
        known = {size: value for (what, size), value in fastest.items() if what == "verify"}
        wide = [rows for rows in _WIDE if rows > max(known)]
        found: dict[_Job, float] = {}
        for number in range(len(wide) + _HALVINGS):
            rows = wide[number] if number < len(wide) else halfway(known)
            if rows is None:
                break
            below = max(size for size in known if size <= rows)
            if time.perf_counter() + _TWICE * known[below] * rows / below > end:
                continue
            known[rows] = min(self.verify([_tree(rows)]) for _ in range(_TWICE))
            found["verify", rows] = known[rows]
        return found

    def verify(self, trees: list[Tree], *, long: bool = False) -> float:
        """Seconds of one forward and of picking greedily at every row."""
        keys = self._long if long else [s.id for s in self._sequences]
        plan = pack(list(zip(keys, trees, strict=False)), self._cache)
        start = time.perf_counter()
        output = self._target.forward(plan, self._cache, self._drafter.taps, self._drafter.needs_hidden)
        assert output.logits is not None
        pick_tokens(output.logits, [self.context] * plan.size, Sampling())
        spent = time.perf_counter() - start
        for segment in plan.segments:
            self._cache.keep(segment.key, [])
        return spent

    def _draft(self, batch: int, grown: int) -> tuple[float, float]:
        """Seconds of a proposal, and of growing and packing a tree of `grown` nodes from it."""
        chosen = self._sequences[:batch]
        start = time.perf_counter()
        proposals = self._drafter.propose(chosen)
        middle = time.perf_counter()
        tree = self._grow(chosen[0].root, proposals[0], grown) if grown else Tree.root_only(chosen[0].root)
        pack([(chosen[0].id, tree)], self._cache)
        end = time.perf_counter()
        self._cache.keep(chosen[0].id, [])
        return middle - start, end - middle

    def _commit(self, batch: int) -> float:
        """Seconds of keeping one row per sequence. What drafter and text make of it is learned later."""
        keys = [self._long[0], *(s.id for s in self._sequences)][:batch]
        for key in keys:
            self._cache.extend(key, 1)
        start = time.perf_counter()
        for key in keys:
            self._cache.keep(key, [])
        return time.perf_counter() - start


def _tree(size: int) -> Tree:
    """A tree of so many rows that is no chain, so that its mask has to be made."""
    return Tree.of([node % 7 for node in range(size)], [(node + 1) // 2 - 1 for node in range(size)])


@contextmanager
def _sequences(target: Target, drafter: Drafter, count: int) -> Iterator[list[Sequence]]:
    """Sequences of random tokens whose rows the drafter has observed; it forgets them at the end."""
    config = target.config
    dice = random.Random(0)
    length = max(2, min(_CONTEXT + 1, config.max_positions - _MARGIN))
    decode: Callable[[list[int]], str] = lambda ids: ""  # noqa: E731
    made = [
        Sequence(
            next(_KEYS),
            [dice.randrange(config.vocab_size) for _ in range(length)],
            Sampling(),
            Limits(),
            decode,
        )
        for _ in range(count)
    ]
    try:
        for s in made:
            taps = torch.zeros(
                s.position,
                len(drafter.taps) * config.hidden_size,
                dtype=target.dtype,
                device=target.device,
            )
            hidden = taps.new_zeros(s.position, config.hidden_size)
            drafter.observe(s.id, taps if drafter.taps else None, hidden if drafter.needs_hidden else None)
        yield made
    finally:
        for s in made:
            drafter.free(s.id)
