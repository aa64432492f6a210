"""Batches for training: which answers, which anchors, and what each slot is to learn.

A batch is a pure function of (data, seed, step), so a resumed run sees exactly what an uninterrupted one
would have seen.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor

from jetspec.train.corpus import Corpus, Entry


@dataclass(frozen=True)
class Batch:
    """n answers with A anchors each; D tokens behind each anchor are supervised.

    An anchor a is the position of a root: context is every row before it, and depth d (1..D) learns token
    a + d, whose parent is token a + d - 1. Everything behind the end of an answer is zero.

    entries  the n answers
    tokens   [n, T + D] ids
    lengths, prompt_lens   [n]
    taps     [n, T, taps * H]
    hidden   [n, T, H] final normed states; row t gives the target's law of token t + 1
    anchors  [n, A]
    weight   [n, A, D], the weight of each depth; 0 where the answer has ended, and at revealed depths
    revealed [n, A], how many slots behind each root carry the token that was really written instead of the
             mask, a + 1 .. a + revealed; None where no slot does
    """

    entries: tuple[Entry, ...]
    tokens: Tensor
    lengths: Tensor
    prompt_lens: Tensor
    taps: Tensor
    hidden: Tensor
    anchors: Tensor
    weight: Tensor
    revealed: Tensor | None = None

    @property
    def roots(self) -> Tensor:
        """Ids of the roots [n, A]."""
        return self.tokens.gather(1, self.anchors)

    @property
    def last_taps(self) -> Tensor:
        """The newest taps that a root has, those of row a - 1: [n, A, taps * H]; zero at the first token."""
        rows = self.taps[_column(self.anchors), (self.anchors - 1).clamp(min=0)]
        return rows.masked_fill((self.anchors == 0).unsqueeze(-1), 0.0)

    @property
    def parents(self) -> Tensor:
        """Ids of the tokens before the supervised ones, a .. a + D - 1: [n, A, D]."""
        return self._behind(0)

    @property
    def labels(self) -> Tensor:
        """Ids of the supervised tokens, a + 1 .. a + D: [n, A, D]; 0 where the answer has ended."""
        return self._behind(1)

    @property
    def teacher(self) -> Tensor:
        """States [n * T, H] that give the laws to learn."""
        return self.hidden.flatten(0, 1)

    @property
    def teacher_row(self) -> Tensor:
        """Row of `teacher` that gives the law of each supervised token: [n, A, D]."""
        places = self._places().minimum(self.lengths[:, None, None] - 1)
        return places + self.hidden.shape[1] * _column(places)

    def to(self, device: torch.device) -> Batch:
        """The same batch on another device."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {name: x.to(device) for name, x in values.items() if isinstance(x, Tensor)}
        return replace(self, **moved)

    def _places(self) -> Tensor:
        depth = self.weight.shape[-1]
        return self.anchors.unsqueeze(-1) + torch.arange(depth, device=self.anchors.device)  # [n, A, D]

    def _behind(self, shift: int) -> Tensor:
        places = self._places() + shift
        return self.tokens[_column(places), places]


def _column(like: Tensor) -> Tensor:
    """0 .. n - 1 along the first axis, to index it together with `like`."""
    rows = torch.arange(like.shape[0], device=like.device)
    return rows.view(-1, *(1,) * (like.ndim - 1))


def make_batch(
    corpus: Corpus, entries: Many[Entry], anchors: Tensor, weights: Tensor, revealed: Tensor | None = None
) -> Batch:
    """Assemble a batch.

    Args:
        anchors: [n, A] positions of roots, each from prompt_len - 1 to length - 2.
        weights: [D], the weight of each depth.
        revealed: [n, A], how many depths are given away and so not supervised, or None.
    """
    depth = weights.shape[0]
    longest = max(entry.length for entry in entries)
    lengths = torch.tensor([entry.length for entry in entries])
    depths = torch.arange(1, depth + 1)
    supervised = anchors.unsqueeze(-1) + depths < lengths[:, None, None]  # [n, A, D]
    if revealed is not None:
        supervised = supervised & (depths > revealed.unsqueeze(-1))
    return Batch(
        entries=tuple(entries),
        tokens=_stacked([corpus.tokens(entry) for entry in entries], longest + depth),
        lengths=lengths,
        prompt_lens=torch.tensor([entry.prompt_len for entry in entries]),
        taps=_stacked([corpus.stored_taps(entry) for entry in entries], longest, torch.float32),
        hidden=_stacked([corpus.stored_hidden(entry) for entry in entries], longest, torch.float32),
        anchors=anchors,
        weight=supervised * weights,
        revealed=revealed,
    )


def _stacked(rows: Many[Tensor], length: int, dtype: torch.dtype | None = None) -> Tensor:
    """[n, length, ...], zero-padded, and converted on the way."""
    padded = rows[0].new_empty(len(rows), length, *rows[0].shape[1:], dtype=dtype)
    for row, values in zip(padded, rows, strict=True):
        row[: len(values)] = values
        row[len(values) :] = 0
    return padded


def batches_at(
    corpus: Corpus,
    step: int,
    *,
    seed: int,
    answers: int,
    anchors: int,
    weights: Tensor,
    part: int,
    share: tuple[int, int] = (0, 1),
    reveal: float = 0.0,
) -> Iterator[Batch]:
    """The batch of a training step, in parts of `part` answers: the next `answers` of this epoch's order,
    `anchors` roots in each.

    Anchors are drawn at random, without replacement as far as an answer has enough of them, and ascend.
    Answers of like length share a part, to save padding.

    share: (i, n) gives every n-th answer of the batch from the i-th on, with the anchors that it has in the
        whole batch.
    reveal: chance of an anchor to have its first slots revealed, see `Batch.revealed`; which anchors there
        are does not depend on it.
    """
    per_epoch = max(1, len(corpus.training) // answers)
    epoch, place = divmod(step, per_epoch)
    order = torch.randperm(len(corpus.training), generator=_generator(seed, epoch, 0))
    chosen = order[place * answers : (place + 1) * answers].tolist()
    entries = sorted((corpus.training[n] for n in chosen), key=lambda entry: entry.length)
    generator = _generator(seed, step, 1)
    drawn = []
    for entry in entries:
        first, count = entry.prompt_len - 1, entry.length - entry.prompt_len
        rounds = -(-anchors // count)
        picks = torch.cat([torch.randperm(count, generator=generator) for _ in range(rounds)])[:anchors]
        drawn.append(first + picks.sort().values)
    shown = [_reveal(e, a, len(weights), reveal, generator) for e, a in zip(entries, drawn, strict=True)]
    own = slice(share[0], None, share[1])
    entries, drawn, shown = entries[own], drawn[own], shown[own]
    for first in range(0, len(entries), part):
        rows = slice(first, first + part)
        revealed = torch.stack(shown[rows]) if reveal else None
        yield make_batch(corpus, entries[rows], torch.stack(drawn[rows]), weights, revealed)


def _reveal(entry: Entry, anchors: Tensor, depth: int, share: float, generator: torch.Generator) -> Tensor:
    """How many slots to reveal behind each anchor [A]: none, or at random 1 .. depth - 1, but never all that
    the answer still has.
    """
    if not share:
        return torch.zeros_like(anchors)
    most = (entry.length - 2 - anchors).clamp(max=depth - 1)
    chosen = torch.rand(anchors.shape, generator=generator) < share
    count = torch.randint(2**31, anchors.shape, generator=generator) % most.clamp(min=1) + 1
    return torch.where(chosen & (most > 0), count, 0)


def _generator(seed: int, number: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + number) * 2 + stream)
