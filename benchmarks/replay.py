"""Rounds walked along texts that the target has already written.

The target answers prompts once, plainly. Since the text does not depend on the draft, rounds with any drafter
and budget can be walked along it afterwards, at the price of draft forwards alone: tau is the one that
decoding gives, and whatever is compared is paired.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetspec.decode.engine import Engine
from jetspec.decode.round import _grow
from jetspec.draft.base import Drafter
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.tree import Tree, best_first
from jetspec.tree.proposal import EmptyProposal, Proposal
from jetspec.verify import walk

# --- what the target writes


class Answer(NamedTuple):
    """A plain answer, and the outputs of `layers` at all its tokens but the last: taps [n, layers * H].

    limit: new tokens that it could have had.
    """

    tokens: list[int]
    prompt_len: int
    sampling: Sampling
    taps: Tensor
    layers: tuple[int, ...]
    limit: int

    @property
    def first(self) -> int:
        """Position of the first root, the prompt's last token."""
        return self.prompt_len - 1

    @property
    def last(self) -> int:
        """Position of the last token, which is never a root."""
        return len(self.tokens) - 1

    def taps_of(self, layers: tuple[int, ...]) -> Tensor:
        """The outputs of some of the layers, side by side in the given order: [n, layers * H]."""
        if layers == self.layers:
            return self.taps
        rows = self.taps.view(len(self.taps), len(self.layers), -1)
        return rows[:, [self.layers.index(layer) for layer in layers]].flatten(1)


class Recorder:
    """Drafts nothing and keeps the taps."""

    name, needs_hidden = "recorder", False

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps, self.rows = taps, defaultdict[int, list[Tensor]](list)

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Keep copies."""
        assert taps is not None
        self.rows[key].append(taps.clone())

    def propose(self, sequences: list[Sequence]) -> list[Proposal]:
        """Nothing."""
        return [EmptyProposal() for _ in sequences]

    def free(self, key: int) -> None:
        """Everything is kept."""


def record(
    target: Target,
    layers: Iterable[int],
    prompts: Many[list[int]],
    samplings: Many[Sampling],
    tokens: int,
    batch: int = 32,
) -> list[Answer]:
    """Plain answers of at most `tokens` tokens to prompts of ids, and the outputs of `layers`."""
    recorder = Recorder(tuple(sorted(set(layers))))
    engine = Engine(target, recorder, budget=0, max_batch=batch)
    limits = Limits(max_tokens=tokens)
    sequences = [engine.add(ids, s, limits) for ids, s in zip(prompts, samplings, strict=True)]
    for _ in engine.run(sequences):
        pass
    return [
        Answer(s.tokens, s.prompt_len, s.sampling, torch.cat(recorder.rows[s.id]), recorder.taps, tokens)
        for s in sequences
    ]


# --- walking along it


class Walk:
    """One answer as a drafter meets it: the sequence up to a root, whose position only ever rises."""

    def __init__(self, drafter: Drafter, key: int, answer: Answer) -> None:
        self.drafter, self.answer = drafter, answer
        self._taps, self._seen = answer.taps_of(drafter.taps), 0
        prompt, limits = answer.tokens[: answer.prompt_len], Limits(max_tokens=answer.limit)
        self.sequence = Sequence(key, prompt, answer.sampling, limits, lambda ids: "")

    def at(self, position: int) -> Sequence:
        """The sequence whose root stands at `position`; the drafter has seen all rows before it."""
        tokens = self.sequence.tokens
        tokens.extend(self.answer.tokens[len(tokens) : position + 1])
        assert self.sequence.position == position, "a walk does not turn back"
        if position > self._seen:
            self.drafter.observe(self.sequence.id, self._taps[self._seen : position], None)
            self._seen = position
        return self.sequence

    def grow(self, proposal: Proposal, budget: int) -> Tree:
        """The best-first tree that a round of decoding grows at the present root: no deeper than there is
        room for."""
        return _grow(self.sequence, proposal, budget, -math.inf, best_first)

    def path(self, tree: Tree) -> list[int]:
        """The nodes of a tree at the present root that agree with the text, the root first. Nothing agrees
        with the text's last token, which comes as a bonus, or would be drafted in vain."""
        path, _ = walk(tree, _follow(tree.depths, self.answer.tokens, self.sequence.position))
        return path

    def close(self) -> None:
        """Let the drafter forget the sequence."""
        self.drafter.free(self.sequence.id)


def _follow(depths: tuple[int, ...], tokens: list[int], root: int) -> Callable[[int], int]:
    """The target's pick at a node: the answer's next token."""

    def pick(node: int) -> int:
        place = root + depths[node] + 1
        return tokens[place] if place < len(tokens) - 1 else -1

    return pick


# --- tau


def tau(rows: Many[Any]) -> float:
    """Tokens per round, pooled over rows that begin with (tokens, rounds)."""
    return sum(row[0] for row in rows) / sum(row[1] for row in rows)


def ratio_interval(a: Many[Any], b: Many[Any], draws: int = 2000) -> tuple[float, float]:
    """95 % bootstrap interval, over answers, of tau(b) / tau(a); row n of both is answer n's (tokens, rounds,
    ...)."""
    dice = np.random.default_rng(0)
    x, y = (np.array([row[:2] for row in rows], dtype=float) for rows in (a, b))
    ratios = []
    for _ in range(draws):
        i = dice.integers(0, len(x), len(x))
        (t, r), (u, q) = x[i].sum(0), y[i].sum(0)
        ratios.append((u / q) / (t / r))
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(low), float(high)
