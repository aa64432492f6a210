"""Validation tau: how long the accepted paths would be, computed from known continuations without running
the target.

At temperature 0 the target's tokens are the recorded answer itself, so a draft tree can be walked along it:
the result is what decoding these prompts would give, at the cost of draft forwards alone.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from jetspec.draft.base import Drafter
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.train.corpus import Corpus, Entry
from jetspec.tree import GROW, Grow, Proposal
from jetspec.verify import walk

Setting: TypeAlias = tuple[str, Grow, int]  # name of the builder, builder, budget

SETTINGS: list[Setting] = [
    ("chain", GROW["chain"], 16),
    *(("best-first", GROW["best-first"], n) for n in (4, 8, 16, 32)),
]
FEW = 10  # held-out answers below which tau is hardly more than chance
_BATCH = 16  # answers that a drafter follows at once


@dataclass
class Validation:
    """tau by (builder, budget), and the share of rounds that accepted at least k tokens, k = 1.. (largest
    best-first budget), on held-out answers.

    seen: tau on as many answers that the head was trained on, where that was asked for. How far it lies above
    `tau` is what new answers have to give; more steps on the same ones cannot.
    answers: how many held-out answers `tau` rests on; 0 where nobody counted them.
    """

    tau: dict[str, float] = field(default_factory=dict)
    survival: list[float] = field(default_factory=list)
    seen: dict[str, float] = field(default_factory=dict)
    answers: int = field(default=0, compare=False)


class Tally:
    """Accepted tokens per round and setting, counted while trees are walked along recorded answers.

    depth: the deepest path that can be accepted.
    """

    def __init__(self, settings: Many[Setting], depth: int) -> None:
        self.settings = settings
        self._kept = [[0] * (depth + 1) for _ in settings]

    def start(self, tokens: list[int], prompt_len: int) -> Follower:
        """Begin with an answer."""
        return Follower(self, tokens, prompt_len)

    def count(self, setting: int, accepted: int) -> None:
        """One round."""
        self._kept[setting][accepted] += 1

    def result(self) -> Validation:
        """tau and survival over all rounds so far. A chain is named by what it drafts, which is not more than
        the depth.
        """
        result = Validation()
        for (name, grow, budget), kept in zip(self.settings, self._kept, strict=True):
            accepted = sum(k * count for k, count in enumerate(kept))
            drafted = min(budget, len(kept) - 1) if grow is GROW["chain"] else budget
            result.tau[f"{name}-{drafted}"] = 1 + accepted / max(1, sum(kept))
        largest = max(range(len(self.settings)), key=lambda n: self.settings[n][2])
        kept = self._kept[largest]
        result.survival = [sum(kept[k:]) / max(1, sum(kept)) for k in range(1, len(kept))]
        return result


class Follower:
    """One answer, along which every setting goes its own way: where its next root stands."""

    def __init__(self, tally: Tally, tokens: list[int], prompt_len: int) -> None:
        self._tally, self._tokens = tally, tokens
        self._roots = [prompt_len - 1] * len(tally.settings)

    @property
    def position(self) -> int | None:
        """The foremost place at which a setting needs a proposal; None at the end."""
        nearest = min(self._roots)
        return nearest if nearest < len(self._tokens) - 1 else None

    def take(self, position: int, proposal: Proposal) -> None:
        """Grow and walk the trees of all settings whose root stands at `position`."""
        tokens = self._tokens
        for n, (_, grow, budget) in enumerate(self._tally.settings):
            if self._roots[n] == position:
                tree = grow(tokens[position], proposal, budget)
                path, _ = walk(tree, _follow(tree.depths, tokens, position))
                accepted = min(len(path) - 1, len(tokens) - 2 - position)
                self._tally.count(n, accepted)
                self._roots[n] += accepted + 1


def _follow(depths: Many[int], tokens: list[int], position: int) -> Callable[[int], int]:
    """The target's pick at a node whose path agrees with the answer: the answer's next token, -1 behind its
    end.
    """

    def pick(node: int) -> int:
        place = position + depths[node] + 1
        return tokens[place] if place < len(tokens) else -1

    return pick


@torch.inference_mode()
def validate_drafter(
    drafter: Drafter,
    corpus: Corpus,
    entries: Many[Entry],
    settings: Many[Setting],
    *,
    depth: int,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> Validation:
    """Walk the trees of `settings` along recorded greedy answers, with any drafter.

    The drafter sees what it would see while decoding: the recorded rows of committed tokens, and a sequence
    that ends at the root. It proposes only where some setting has a root.

    Args:
        depth: the deepest path that the drafter can propose.
        dtype, device: of the rows that it is given; those of the target.
    """
    tally = Tally(settings, depth)
    for first in range(0, len(entries), _BATCH):
        runs = [
            _Run(key, entry, corpus, tally, drafter, dtype, device)
            for key, entry in enumerate(entries[first : first + _BATCH])
        ]
        while active := [run for run in runs if run.follower.position is not None]:
            proposals = drafter.propose([run.advance() for run in active])
            for run, proposal in zip(active, proposals, strict=True):
                run.follower.take(run.sequence.position, proposal)
        for run in runs:
            drafter.free(run.sequence.id)
    return tally.result()


class _Run:
    """One answer as a drafter meets it."""

    def __init__(
        self,
        key: int,
        entry: Entry,
        corpus: Corpus,
        tally: Tally,
        drafter: Drafter,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        self._tokens = corpus.tokens(entry).tolist()
        self._taps = corpus.taps_of(entry).to(device, dtype) if drafter.taps else None
        self._hidden = corpus.hidden_of(entry).to(device, dtype) if drafter.needs_hidden else None
        self._drafter, self._seen = drafter, 0
        self.follower = tally.start(self._tokens, entry.prompt_len)
        limits = Limits(max_tokens=entry.length, ignore_eos=True)
        self.sequence = Sequence(key, self._tokens[: entry.prompt_len], Sampling(), limits, lambda ids: "")

    def advance(self) -> Sequence:
        """Commit tokens and rows up to the foremost root."""
        position = self.follower.position
        assert position is not None
        self.sequence.tokens.extend(self._tokens[len(self.sequence.tokens) : position + 1])
        if position > self._seen:
            rows = slice(self._seen, position)
            parts: list[Tensor | None] = [
                x[rows] if x is not None else None for x in (self._taps, self._hidden)
            ]
            self._drafter.observe(self.sequence.id, parts[0], parts[1])
            self._seen = position
        return self.sequence


def unigram_coverage(corpus: Corpus, vocab: Tensor) -> float:
    """Share of the training answers' tokens that the draft vocabulary holds."""
    inside = total = 0
    for entry in corpus.training:
        answer = corpus.tokens(entry)[entry.prompt_len :]
        inside += int(torch.isin(answer, vocab).sum())
        total += answer.shape[0]
    return inside / max(1, total)
