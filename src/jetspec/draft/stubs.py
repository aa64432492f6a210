"""Drafters without weights, made to find faults in everything around a drafter.

They are public: use them to test an engine, a tree builder or a budget policy without a trained head. The
text must be the same with each of them, so a difference is a fault of the round. What each of them looks
for is in its docstring.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from random import Random as Dice
from typing import NamedTuple

from torch import Tensor

from jetspec.errors import OptionError
from jetspec.sampling import History, pick_tokens
from jetspec.sequence import Sequence
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.tree.proposal import NO_CHILDREN, Children, EmptyProposal, MarginalProposal, Proposal


class _Stub:
    """What the stubs have in common: they read tokens only and learn nothing from observed rows."""

    taps: tuple[int, ...] = ()
    needs_hidden = False

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Nothing to learn."""

    def free(self, key: int) -> None:
        """Nothing to forget."""


class Off(_Stub):
    """No drafter: every round is plain decoding.

    It guards the baseline: plain decoding is the same code with nothing drafted, on the same clock.
    """

    name = "off"

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """Empty proposals: every tree is its root."""
        return [EmptyProposal() for _ in sequences]


class Random(_Stub):
    """Random children for every node, a function of (seed, root, its position, path).

    Nearly everything is rejected, at a random place. It guards the rejecting side: rows that are not given
    back, rejected tokens that leak into the text, and trees of every shape going through masks and
    positions. With a small vocabulary some tokens are accepted by luck.

    Args:
        vocab: token ids are drawn from 0..vocab - 1.
        width: children per node; no more than `vocab` of them exist.
    Raises:
        OptionError: vocab, depth or width is below 1.
    """

    name = "random"

    def __init__(self, seed: int, vocab: int, depth: int = 4, width: int = 3) -> None:
        _at_least_one(vocab=vocab, depth=depth, width=width)
        self.seed, self.vocab, self.depth, self.width = seed, vocab, depth, min(width, vocab)

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """One proposal per sequence, the same again for the same root at the same position."""
        return [_RandomProposal(self, f"{self.seed} {s.root} {s.position}") for s in sequences]


class _RandomProposal:
    """The state of a node is its path, as a tuple of tokens."""

    def __init__(self, stub: Random, name: str) -> None:
        self._stub, self._name = stub, name
        self.max_depth = stub.depth
        self.root_state: tuple[int, ...] = ()

    def expand(self, states: Many[tuple[int, ...]]) -> list[Children]:
        return [self._children(path) for path in states]

    def _children(self, path: tuple[int, ...]) -> Children:
        if len(path) >= self.max_depth:
            return NO_CHILDREN
        dice = Dice(f"{self._name} {path}")  # a text is hashed the same way in every process
        tokens = dice.sample(range(self._stub.vocab), self._stub.width)
        weights = [1.0 - dice.random() for _ in tokens]  # in (0, 1]
        total = sum(weights)
        costs = [math.log(total / weight) for weight in weights]
        ranked = sorted(zip(costs, tokens, strict=True))
        chosen = [token for _, token in ranked]
        return Children(chosen, [0.0 - cost for cost, _ in ranked], [(*path, token) for token in chosen])


class Echo(_Stub):
    """The target drafts for itself: one chain of the tokens that it will emit at the request's own
    temperature and seed. Every drafted token is accepted.

    It guards what happens when a whole block arrives at once: an end-of-text token, a stop string,
    max_tokens or the context's end in the middle of it. It drafts `depth` tokens even if fewer may still be
    emitted. Anything below full acceptance means that rows of a cache are wrong (or, in float32 and below,
    that two tokens nearly tie). It is the WEAKEST check of masks, positions and compaction: its path is the
    first rows in order, so faults there pass by luck; `Decoy` finds them.

    Drafting costs `depth` forwards of the target, and the whole prompt goes through in one piece: for
    tests, not for speed.

    Attributes:
        cache: its own keys and values, apart from the engine's; empty once every sequence has been freed.
    Raises:
        OptionError: depth is below 1.
    """

    name = "echo"

    def __init__(self, target: Target, depth: int = 4) -> None:
        _at_least_one(depth=depth)
        self.target, self.depth = target, depth
        self.cache = target.new_cache()

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """One chain per sequence, stated with probability 1, which is the truth."""
        zeros = [[0.0]] * self.depth
        return [
            MarginalProposal([[step.token] for step in steps], zeros) for steps in self._continue(sequences)
        ]

    def free(self, key: int) -> None:
        """Release the sequence's rows; unknown keys are ignored."""
        if key in self.cache:
            self.cache.free(key)

    def _continue(self, sequences: Many[Sequence]) -> list[list[_Step]]:
        """The next `depth` picks of the target for each sequence.

        Each forward repeats the tokens drafted so far behind those that are not cached yet, and nothing but
        committed tokens is ever kept. So the cache is right whatever happened to the last draft.
        """
        new: list[list[int]] = []  # committed tokens that are not cached, the root last
        for s in sequences:
            if s.id not in self.cache:
                self.cache.add(s.id, capacity=len(s.tokens) + self.depth)
            new.append(s.tokens[self.cache.length(s.id) :])
        steps: list[list[_Step]] = [[] for _ in sequences]
        for _ in range(self.depth):
            parts = [
                (s.id, [*known, *(step.token for step in drafted)])
                for s, known, drafted in zip(sequences, new, steps, strict=True)
            ]
            plan = chunk(parts, self.cache, logits=True)
            logits = self.target.forward(plan, self.cache).logits
            assert logits is not None
            for s, segment, drafted in zip(sequences, plan.segments, steps, strict=True):
                last = segment.start + segment.count - 1
                drafted.append(_step(s, [step.token for step in drafted], logits[last : last + 1]))
        for s, known in zip(sequences, new, strict=True):
            self.cache.keep(s.id, range(len(known) - 1))  # the root may come again, as in the engine
        return steps


class _Step(NamedTuple):
    """One token that the target will emit, and the logits [1, V] it was picked from."""

    token: int
    logits: Tensor


def _step(sequence: Sequence, drafted: list[int], logits: Tensor) -> _Step:
    """The target's pick after `drafted`, exactly as the verification makes it."""
    tokens = [*sequence.tokens, *drafted]
    histories = [History(tokens, sequence.prompt_len)]
    return _Step(pick_tokens(logits, [len(tokens)], sequence.sampling, histories)[0], logits)


class Decoy(Echo):
    """Like Echo, but the right token always stands at `place` among its siblings (1 = second), behind wrong
    ones.

    Wrong siblings are the target's other favourites, and they have children of their own: the same
    candidates again, the right token of that depth among them. So every accepted path has gaps between its
    rows, each right token also occurs at the same position below a wrong parent, and a chain accepts
    nothing. It guards what Echo cannot: ancestor masks, positions by depth instead of by row, compaction of
    the cache and of the observed rows, and the walk itself.

    Args:
        depth, width: as everywhere; `width` children per node.
        place: rank of the right token among its siblings, 0..width - 1; 0 makes an Echo with wrong siblings.
    Raises:
        OptionError: a value is out of range.
    """

    name = "decoy"

    def __init__(self, target: Target, depth: int = 4, width: int = 3, place: int = 1) -> None:
        super().__init__(target, depth)
        vocab = target.config.vocab_size
        if not 1 <= width <= vocab:
            raise OptionError(f"width is {width}; valid: 1..{vocab}, the size of the target's vocabulary")
        if not 0 <= place < width:
            raise OptionError(f"place is {place}; valid: 0..{width - 1}, a rank among {width} siblings")
        self.width, self.place = width, place

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """One proposal per sequence, in which the target's own tokens are always at `place`."""
        return [
            _DecoyProposal([self._candidates(step) for step in steps], self.place)
            for steps in self._continue(sequences)
        ]

    def _candidates(self, step: _Step) -> list[int]:
        """`width` tokens with the right one at `place`; the others are the target's favourites."""
        favourites: list[int] = step.logits[0].topk(self.width).indices.tolist()
        wrong = [token for token in favourites if token != step.token][: self.width - 1]
        return [*wrong[: self.place], step.token, *wrong[self.place :]]


class _DecoyProposal:
    """The state of a node is (depth, whether its path is right so far).

    Off the right path half of the mass goes to tokens that are not offered: wrong branches grow, but more
    slowly.
    """

    root_state = (0, True)

    def __init__(self, candidates: list[list[int]], place: int) -> None:
        self._candidates, self._place = candidates, place  # [D][W]
        self.max_depth = len(candidates)
        weights = [0.9**rank for rank in range(len(candidates[0]))]  # nearly even, so that depth pays
        self._logps = [math.log(weight / sum(weights)) for weight in weights]

    def expand(self, states: Many[tuple[int, bool]]) -> list[Children]:
        return [self._children(depth, right) for depth, right in states]

    def _children(self, depth: int, right: bool) -> Children:
        if depth >= self.max_depth:
            return NO_CHILDREN
        tokens = self._candidates[depth]
        logps = self._logps if right else [logp - math.log(2.0) for logp in self._logps]
        states = [(depth + 1, right and rank == self._place) for rank in range(len(tokens))]
        return Children(tokens, [min(logp, 0.0) for logp in logps], states)


def _at_least_one(**values: int) -> None:
    for name, value in values.items():
        if value < 1:
            raise OptionError(f"{name} is {value}; valid: 1 or more")
