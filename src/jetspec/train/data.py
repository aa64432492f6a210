"""Batches for training: which answers, which anchors, and what each slot is to learn.

A batch is a pure function of (data, seed, step), so a resumed run sees exactly what an uninterrupted one
would have seen.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from jetspec.errors import DataError
from jetspec.train.features import shard_columns, shard_paths, shard_taps


@dataclass(frozen=True)
class Entry:
    """Where one answered prompt lies: rows [start, start + length) of a shard."""

    path: Path
    start: int
    length: int
    prompt_len: int
    temperature: float


class Corpus:
    """All answers in some folders, indexed; features are read from memory-mapped shards when a batch needs
    them.

    Every `holdout`-th answer is kept for validation, by its place in the data, so the split does not depend
    on a seed.

    shards: how many shards of each folder to take, None for all. A run that goes on takes what it began
    with, though more have been written since.

    Raises DataError if there are no answers, if shards hold different taps, or if a shard is damaged or gone.
    """

    def __init__(self, folders: Many[Path], holdout: int = 40, shards: Many[int] | None = None) -> None:
        found = [shard_paths(folder) for folder in folders]
        if shards is not None:
            if len(shards) != len(found) or any(
                len(have) < count for have, count in zip(found, shards, strict=True)
            ):
                raise DataError(
                    "answers that the run began with are gone; give the same folders, or start in another one"
                )
            found = [have[:count] for have, count in zip(found, shards, strict=True)]
        self.shards = [len(have) for have in found]
        paths = [path for have in found for path in have]
        if not paths:
            raise DataError(f"no answers in {', '.join(map(str, folders))}; run `jetspec answers` first")
        self.taps = shard_taps(paths[0])
        if any(shard_taps(path) != self.taps for path in paths):
            raise DataError(
                "the answer folders hold different taps; train from folders made with the same ones"
            )
        entries = [entry for path in paths for entry in _index(path)]
        usable = [entry for entry in entries if entry.length - entry.prompt_len >= 2]
        self.training = [entry for n, entry in enumerate(usable) if n % holdout]
        self.held_out = [entry for n, entry in enumerate(usable) if n % holdout == 0]
        if not self.training:
            raise DataError("all answers are shorter than 2 tokens, nothing can be learnt from them")

    @property
    def answer_tokens(self) -> int:
        """Answer tokens for training."""
        return sum(entry.length - entry.prompt_len for entry in self.training)

    def frequent_ids(self, count: int, vocab: int) -> Tensor:
        """The `count` most frequent ids of the answers, ascending int64 [Vd]; rare ties go to lower ids."""
        counts: Counter[int] = Counter()
        for entry in self.training:
            counts.update(self.tokens(entry)[entry.prompt_len :].tolist())
        ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
        return torch.tensor(sorted(ranked[:count]))

    def tokens(self, entry: Entry) -> Tensor:
        """Token ids [length] int64."""
        return _rows(entry, "tokens").long()

    def taps_of(self, entry: Entry) -> Tensor:
        """Taps [length, taps * H] float32."""
        return _rows(entry, "taps").float()

    def hidden_of(self, entry: Entry) -> Tensor:
        """Final normed states [length, H] float32; row t gives the law of token t + 1."""
        return _rows(entry, "hidden").float()


def _index(path: Path) -> list[Entry]:
    names = ("lengths", "prompt_lens", "temperatures")
    lengths, prompt_lens, temperatures = (column.tolist() for column in shard_columns(path, *names))
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return [Entry(path, *row) for row in zip(starts, lengths, prompt_lens, temperatures, strict=True)]


_files: dict[Path, object] = {}  # open memory maps; reading a slice touches only its pages


def _rows(entry: Entry, name: str) -> Tensor:
    if entry.path not in _files:
        _files[entry.path] = safe_open(entry.path, framework="pt").__enter__()
    return _files[entry.path].get_slice(name)[entry.start : entry.start + entry.length]  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Batch:
    """n answers with A anchors each; D slots per anchor are supervised.

    An anchor a is the position of a root: context is every row before it, slot k stands at a + k and learns
    token a + k.

    taps [n, T, taps * H], zero-padded; anchors [n, A]; roots [n, A]; last_taps [n, A, taps * H], row a - 1;
    parents [n, A, D], token a + k - 1; teacher [U, H], states that give the laws to learn; teacher_row [n,
    A, D] into it; weight [n, A, D], 0 where the answer has ended.
    """

    taps: Tensor
    anchors: Tensor
    roots: Tensor
    last_taps: Tensor
    parents: Tensor
    teacher: Tensor
    teacher_row: Tensor
    weight: Tensor


def make_batch(corpus: Corpus, entries: Many[Entry], anchors: Tensor, weights: Tensor) -> Batch:
    """Assemble a batch.

    Args:
        anchors: [n, A] positions of roots, each from prompt_len - 1 to length - 2.
        weights: [D], the weight of each depth.
    """
    depth = weights.shape[0]
    taps = [corpus.taps_of(entry) for entry in entries]
    longest = max(tap.shape[0] for tap in taps)
    padded = taps[0].new_zeros(len(entries), longest, taps[0].shape[1])
    for row, tap in zip(padded, taps, strict=True):
        row[: tap.shape[0]] = tap
    ids = torch.zeros(len(entries), longest + depth, dtype=torch.long)
    lengths = torch.tensor([entry.length for entry in entries])
    for row, entry in zip(ids, entries, strict=True):
        row[: entry.length] = corpus.tokens(entry)
    hidden = [corpus.hidden_of(entry) for entry in entries]
    offsets = torch.tensor([0, *(h.shape[0] for h in hidden)])[:-1].cumsum(0)  # [n]
    slots = anchors.unsqueeze(-1) + torch.arange(depth)  # [n, A, D]: position a + k - 1 of slot k's parent
    present = slots + 1 < lengths[:, None, None]  # token a + k exists
    which = torch.arange(len(entries))[:, None]
    last = torch.where((anchors > 0).unsqueeze(-1), padded[which, (anchors - 1).clamp(min=0)], 0.0)
    return Batch(
        taps=padded,
        anchors=anchors,
        roots=ids[which, anchors],
        last_taps=last,
        parents=ids[which.unsqueeze(-1), slots],
        teacher=torch.cat(hidden),
        teacher_row=(offsets[:, None, None] + slots.minimum(lengths[:, None, None] - 1)),
        weight=present * weights,
    )


def batches_at(
    corpus: Corpus, step: int, *, seed: int, answers: int, anchors: int, weights: Tensor, part: int
) -> Iterator[Batch]:
    """The batch of a training step, in parts of `part` answers: the next `answers` of this epoch's order,
    `anchors` roots in each.

    Anchors are drawn at random, without replacement as far as an answer has enough of them. Answers of like
    length share a part, to save padding.
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
        drawn.append(first + picks)
    for first in range(0, len(entries), part):
        rows = slice(first, first + part)
        yield make_batch(corpus, entries[rows], torch.stack(drawn[rows]), weights)


def _generator(seed: int, number: int, stream: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 1_000_003 + number) * 2 + stream)
