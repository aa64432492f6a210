"""The packed plan: which tokens of which sequences go through one forward, and who sees whom.

Tokens of all sequences lie end to end, so linear layers see one [M, H] matrix and nothing is padded. Trees
and prefill chunks are the same thing: a segment of rows of one sequence with a visibility among themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from jetspec.target.cache import KVCache
from jetspec.tree import Tree
from jetspec.tree.mask import ancestor_mask


@dataclass(frozen=True, slots=True)
class Segment:
    """Rows [start, start + count) of a plan, all of one sequence.

    Every row sees all committed rows of its sequence, and of its own segment what `mask` [count, count], on
    the CPU, allows (True = visible; None = causal, row i sees rows 0..i).
    """

    key: int
    start: int
    count: int
    mask: Tensor | None
    logits: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """One forward: token ids [M], absolute positions [M], the segments that they belong to, and the largest
    position: asking a device for it would wait for all that is queued there.
    """

    ids: Tensor
    positions: Tensor
    segments: tuple[Segment, ...]
    last: int

    @staticmethod
    def of(ids: Tensor, positions: list[int], segments: Iterable[Segment], device: torch.device) -> Plan:
        """A plan on a device, of at least one row."""
        return Plan(ids, torch.tensor(positions, device=device), tuple(segments), max(positions))

    @property
    def size(self) -> int:
        """M, the number of packed tokens."""
        return self.ids.shape[0]

    def logit_rows(self) -> slice | Tensor | None:
        """Rows whose logits are wanted: all (a slice), some (indices) or none (None)."""
        wanted = [segment for segment in self.segments if segment.logits]
        if not wanted:
            return None
        if len(wanted) == len(self.segments):
            return slice(None)
        rows = [torch.arange(s.start, s.start + s.count) for s in wanted]
        return torch.cat(rows).to(self.ids.device)


def pack(trees: Iterable[tuple[int, Tree]], cache: KVCache) -> Plan:
    """Plan the verification of one tree per sequence. Room in the cache is reserved here.

    Node i of a tree stands at position length + depth(i), because the root is the first token that is not
    cached.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for key, tree in trees:
        base = cache.extend(key, tree.size)
        chain = all(parent == node - 1 for node, parent in enumerate(tree.parents))
        mask = None if chain else ancestor_mask(tree)
        segments.append(Segment(key, len(ids), tree.size, mask, logits=True))
        ids.extend(tree.tokens)
        positions.extend(base + depth for depth in tree.depths)
    return _plan(ids, positions, segments, cache)


def chunk(parts: Iterable[tuple[int, Sequence[int]]], cache: KVCache, *, logits: bool = False) -> Plan:
    """Plan a causal run of tokens per sequence: one piece of prefill, or teacher forcing where `logits` is
    set.
    """
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    for key, tokens in parts:
        base = cache.extend(key, len(tokens))
        segments.append(Segment(key, len(ids), len(tokens), None, logits))
        ids.extend(tokens)
        positions.extend(range(base, base + len(tokens)))
    return _plan(ids, positions, segments, cache)


def _plan(ids: list[int], positions: list[int], segments: list[Segment], cache: KVCache) -> Plan:
    assert len({segment.key for segment in segments}) == len(segments), "a sequence may appear once in a plan"
    assert all(segment.count for segment in segments), "a segment needs at least one row"
    return Plan.of(torch.tensor(ids, device=cache.device), positions, segments, cache.device)
