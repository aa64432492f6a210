"""What a head is trained on: the target's taps and last states at every token of its own answers.

Features are recorded while the target writes the answers, so no second pass over the text is needed. They
are kept as float16 shards: one row per token, about 7 kB for the default target.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from jetspec.errors import DataError, StorageError
from jetspec.sequence import Sequence
from jetspec.storage import follow_umask
from jetspec.tree.proposal import EmptyProposal, Proposal

SHARD_PREFIX = "features-"


@dataclass(frozen=True)
class Sample:
    """One prompt with the target's answer. Row t of taps and hidden belongs to token t; the last row is
    zero (never computed).

    tokens [n] int64; taps [n, taps * H] and hidden [n, H] float16; hidden[t], after the final norm, gives
    the target's law of token t + 1.
    """

    prompt: int  # number of the prompt in its file
    prompt_len: int
    temperature: float  # the answer was sampled at
    tokens: Tensor
    taps: Tensor
    hidden: Tensor

    @property
    def answer_len(self) -> int:
        """Tokens that the target wrote."""
        return self.tokens.shape[0] - self.prompt_len


class Recorder:
    """A drafter that proposes nothing and remembers every committed row; `take` hands the rows of a
    finished sequence over.
    """

    name = "recorder"
    needs_hidden = True

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self._rows: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self._done: dict[int, list[tuple[Tensor, Tensor]]] = {}

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Keep float16 copies of newly committed rows, where they are: a device is not waited for here."""
        assert taps is not None and hidden is not None
        self._rows.setdefault(key, []).append((_half(taps), _half(hidden)))

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """Nothing: the target decodes plainly."""
        return [EmptyProposal() for _ in sequences]

    def free(self, key: int) -> None:
        """The sequence has ended; its rows wait for `take`."""
        if key in self._rows:
            self._done[key] = self._rows.pop(key)

    def take(self, key: int, count: int) -> tuple[Tensor, Tensor]:
        """Taps and hidden states of the first `count` tokens, the missing last row as zeros."""
        parts = self._done.pop(key)
        taps = torch.cat([part[0] for part in parts])[:count].cpu()
        hidden = torch.cat([part[1] for part in parts])[:count].cpu()
        missing = count - taps.shape[0]
        return _padded(taps, missing), _padded(hidden, missing)


def _half(x: Tensor) -> Tensor:
    limit = torch.finfo(torch.float16).max  # bfloat16 does not have this number, and would round it up
    return x.float().clamp(-limit, limit).to(torch.float16)


def _padded(x: Tensor, rows: int) -> Tensor:
    return x if rows <= 0 else torch.cat([x, x.new_zeros(rows, x.shape[1])])


def write_shard(folder: Path, number: int, samples: Many[Sample], taps: tuple[int, ...]) -> Path:
    """Write samples as one shard. The file appears whole or not at all."""
    path = folder / f"{SHARD_PREFIX}{number:05d}.safetensors"
    lengths = [sample.tokens.shape[0] for sample in samples]
    tensors = {
        "lengths": torch.tensor(lengths),
        "prompts": torch.tensor([sample.prompt for sample in samples]),
        "prompt_lens": torch.tensor([sample.prompt_len for sample in samples]),
        "temperatures": torch.tensor([sample.temperature for sample in samples]),
        "tokens": torch.cat([sample.tokens for sample in samples]).to(torch.int32),
        "taps": torch.cat([sample.taps for sample in samples]),
        "hidden": torch.cat([sample.hidden for sample in samples]),
    }
    temporary = path.with_suffix(".tmp")
    try:
        save_file(tensors, temporary, metadata={"taps": json.dumps(taps)})
        follow_umask(temporary)
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"answers cannot be written to {folder} ({error}); free space, then run again"
        ) from None
    return path


def shard_paths(folder: Path) -> list[Path]:
    """All shards of a folder, in the order in which they were written."""
    return sorted(folder.glob(SHARD_PREFIX + "*.safetensors"))


def next_shard(folder: Path) -> int:
    """A number behind all shards of a folder; one that was deleted is not filled, lest another be
    overwritten.
    """
    numbers = [path.stem.removeprefix(SHARD_PREFIX) for path in shard_paths(folder)]
    return max((int(number) for number in numbers if number.isdecimal()), default=-1) + 1


def shard_prompts(path: Path) -> list[int]:
    """Which prompts a shard answers, without reading its features."""
    return [int(n) for n in shard_columns(path, "prompts")[0]]


def shard_columns(path: Path, *names: str) -> list[Tensor]:
    """Some tensors of a shard. Raises DataError if it lacks one."""
    with open_shard(path) as file:
        try:
            return [file.get_tensor(name) for name in names]
        except SafetensorError as error:
            raise DataError(f"{path} is not a feature shard ({error}); delete it and run again") from None


def read_shard(path: Path) -> Iterator[Sample]:
    """The samples of a shard; tensors are views of memory-mapped data.

    Raises DataError if the file is truncated or not a shard.
    """
    with open_shard(path) as file:
        try:
            columns = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
            start = 0
            for index, length in enumerate(columns["lengths"].tolist()):
                rows = slice(start, start + length)
                start += length
                yield Sample(
                    prompt=int(columns["prompts"][index]),
                    prompt_len=int(columns["prompt_lens"][index]),
                    temperature=float(columns["temperatures"][index]),
                    tokens=columns["tokens"][rows].long(),
                    taps=columns["taps"][rows],
                    hidden=columns["hidden"][rows],
                )
        except KeyError as error:
            raise DataError(
                f"{path} is not a feature shard: {error} is missing; delete it and run again"
            ) from None


def shard_taps(path: Path) -> tuple[int, ...]:
    """The target layers whose outputs a shard holds. Raises DataError."""
    with open_shard(path) as file:
        stated = (file.metadata() or {}).get("taps", "[]")
    try:
        taps = json.loads(stated)
    except (ValueError, RecursionError):
        taps = None
    if not isinstance(taps, list) or any(type(layer) is not int or layer < 0 for layer in taps):
        raise DataError(
            f"{path} is not a feature shard (its taps are {stated[:40]!r}, not a list of layers); delete "
            "it and run again"
        )
    return tuple(taps)


def open_shard(path: Path) -> Any:
    """The file of a shard, for `with`. Raises DataError if it cannot be read."""
    try:
        return safe_open(path, framework="pt")
    except Exception as error:
        raise DataError(f"{path} cannot be read ({error}); delete it and run again") from None
