"""Counter-based noise: a number for each (seed, position, token id), the same whoever asks for it and when.

Adding it to a position's log-probs and taking the best is an exact draw (Gumbel-max), and nothing is consumed
by drawing: a tree's nodes, the bonus token and a draft that looks ahead all see the noise that plain decoding
will see (see `jetspec.sampling`).
"""

from __future__ import annotations

import ctypes
import threading
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jetspec.native import library

NOISE_AT_ONCE = 2**25  # numbers of noise made in one piece
_KEPT_BYTES = 2**27  # of rows that are kept on the processor

_LOW32 = 0xFFFFFFFF
_Row: TypeAlias = npt.NDArray[np.float32]
_Words: TypeAlias = npt.NDArray[Any]  # uint32; numpy promises that its products wrap
_Word = TypeVar("_Word", int, Tensor, _Words)


def _mix(word: _Word) -> _Word:
    """A bijection on 32-bit words with good avalanche.

    It is the public-domain finalizer lowbias32 of C. Wellons ("Prospecting for hash functions").

    Takes a Python int, an int64 tensor of values 0..2**32-1 or a uint32 array; the last two are overwritten.
    The second multiplier is 0x846ca68b, for a tensor written modulo 2**32 as a negative number, so that no
    product leaves int64 (signed overflow is not defined on every device).
    """
    word ^= word >> 16
    word *= 0x7FEB352D
    word &= _LOW32
    word ^= word >> 15
    word *= 0x846CA68B - (2**32 if isinstance(word, Tensor) else 0)
    word &= _LOW32
    word ^= word >> 16
    return word


def gumbel_noise(seed: int | Sequence[int], positions: Tensor, vocab: int | Tensor) -> Tensor:
    """Gumbel(0, 1) noise as a pure function of (seed, absolute position, token id): float32 [n, V] or [n, k].

    `seed` is one for all rows, or one for each; `positions` is int64 [n]; `vocab` is the vocabulary size, or
    the ids int64 [k] to compute the noise for. Row i of a call equals the row of any other call with the same
    seed and position, whatever else is asked for.

    Seed and position give two 32-bit keys; two keyed rounds of the hash turn a token id into 32 bits, u =
    (bits + 1/2) / 2**32 lies strictly inside (0, 1), and the noise -log(-log u) lies within -3.14..22.88. The
    integers are exact on any device; the logarithms are taken in float64 and rounded to float32, which hides
    a device's last float64 bit in all but about one value in 2**28.
    """
    assert isinstance(seed, int) or len(seed) == len(positions), "one seed, or one for each position"
    assert isinstance(vocab, int) or vocab.ndim == 1
    device = positions.device
    if device.type == "mps":  # no float64 there
        ids = vocab.cpu() if isinstance(vocab, Tensor) else vocab
        return gumbel_noise(seed, positions.cpu(), ids).to(device)
    where = positions.to(torch.int64)[:, None] & _LOW32  # [n, 1]
    if device.type == "cpu" and (lib := library()) is not None:
        return _compiled(lib, _halves(seed, None), where.numpy().astype(np.uint32), vocab)
    tokens = torch.arange(vocab, device=device) if isinstance(vocab, int) else vocab.to(device)
    if device.type == "cpu":  # half the width, and products may wrap: a seventh of the time for the same bits
        keys = _keys(_halves(seed, None), where.numpy().astype(np.uint32))
        uniform = torch.from_numpy(_bits(keys, tokens.numpy().astype(np.uint32)).astype(np.float64))
    else:
        uniform = _bits(_keys(_halves(seed, device), where), tokens).to(torch.float64)
    return uniform.add_(0.5).mul_(2.0**-32).log_().neg_().log_().neg_().to(torch.float32)


def _halves(seed: int | Sequence[int], device: torch.device | None) -> tuple[Any, Any]:
    """The low and high 32 bits of the seed, or of each row's as words [n, 1] (uint32 arrays without a
    device).
    """
    if isinstance(seed, int):
        return seed & _LOW32, (seed >> 32) & _LOW32
    columns = [[[(s >> shift) & _LOW32] for s in seed] for shift in (0, 32)]
    if device is None:
        return np.array(columns[0], dtype=np.uint32), np.array(columns[1], dtype=np.uint32)
    return torch.tensor(columns[0], device=device), torch.tensor(columns[1], device=device)


def _keys(halves: tuple[Any, Any], where: _Word) -> tuple[_Word, _Word]:
    """Two 32-bit keys for each position [n, 1]."""
    low, high = halves
    first = _mix(low ^ _mix(high ^ 0x9E3779B9))
    second = _mix(high ^ _mix(low ^ 0x3C6EF372))
    key_a = _mix(_mix((where + first) & _LOW32) ^ second)  # for one seed a bijection of the position
    key_b = _mix(_mix(where ^ second) ^ first)
    return key_a, key_b


def _bits(keys: tuple[_Word, _Word], tokens: _Word) -> _Word:
    """32 random bits for each row of keys [n, 1] and token id [k]: [n, k]."""
    key_a, key_b = keys
    # Two keys: with one added key, two rows would be shifted copies of each other when their keys are close.
    return _mix(_mix((tokens + key_a) & _LOW32) ^ key_b)


def _compiled(lib: ctypes.CDLL, halves: tuple[Any, Any], where: _Words, vocab: int | Tensor) -> Tensor:
    """The noise by the compiled kernel (`native_noise.h`), in a third of the time per thread."""
    rows = len(where)
    low, high = (np.full(rows, half, dtype=np.uint32) if isinstance(half, int) else half for half in halves)
    ids = None if isinstance(vocab, int) else vocab.to("cpu", torch.int64).contiguous()
    count = vocab if isinstance(vocab, int) else len(vocab)
    out = torch.empty(rows, count, dtype=torch.float32, device="cpu")
    lib.jetspec_noise(
        low.ctypes.data,
        high.ctypes.data,
        where.ctypes.data,
        rows,
        None if ids is None else ids.data_ptr(),
        count,
        out.data_ptr(),
    )
    return out


class NoiseRows:
    """The newest rows of noise on the processor, by (seed, position, vocabulary size).

    The positions behind a root are asked for again in every round until text covers them: with τ = 2 and
    trees of depth 4 each row is needed two or three times. A row is a pure function of its key, so keeping it
    changes nothing but time.
    """

    def __init__(self, most_bytes: int = _KEPT_BYTES) -> None:
        self._most = most_bytes
        self._rows: OrderedDict[tuple[int, int, int], _Row] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def get(self, seeds: Sequence[int], positions: Sequence[int], vocab: int) -> list[_Row]:
        """The rows [V] of pairs of seed and position; not to be written to."""
        keys = [(seed, position, vocab) for seed, position in zip(seeds, positions, strict=True)]
        found: dict[tuple[int, int, int], _Row] = {}
        with self._lock:
            for key in keys:
                row = self._rows.get(key)
                if row is not None:
                    found[key] = row
                    self._rows.move_to_end(key)
        missing = [key for key in dict.fromkeys(keys) if key not in found]
        if missing:
            made = gumbel_noise(
                [seed for seed, _, _ in missing], torch.tensor([at for _, at, _ in missing]), vocab
            ).numpy()
            # Rows of their own: a view would keep all rows of the call in memory.
            own = {key: row.copy() for key, row in zip(missing, made, strict=True)}
            found |= own
            self._keep(own)
        return [found[key] for key in keys]

    def _keep(self, rows: dict[tuple[int, int, int], _Row]) -> None:
        with self._lock:
            for key, row in rows.items():
                if key not in self._rows:
                    self._rows[key] = row
                    self._bytes += row.nbytes
            while self._bytes > self._most and self._rows:
                self._bytes -= self._rows.popitem(last=False)[1].nbytes


_rows = NoiseRows()


@contextmanager
def keep_rows_in(rows: NoiseRows) -> Iterator[None]:
    """Within the block rows of noise are taken from `rows` and kept there, in all threads.

    For measurements: of decoders that share a process, each makes its own noise as it would do alone, and
    finds again only what it made itself.
    """
    global _rows
    before, _rows = _rows, rows
    try:
        yield
    finally:
        _rows = before


def noise_of(seeds: Sequence[int], positions: Sequence[int], ids: Tensor, vocab: int) -> Tensor:
    """The noise [n, k] of some ids [k] of a vocabulary, for pairs of seed and position [n].

    On the processor it is taken out of rows that are kept, where the call's own float32 rows fill no more
    than half of that room: the target will ask for the same rows.
    """
    if ids.device.type != "cpu" or 4 * len(seeds) * vocab > _KEPT_BYTES // 2:
        return gumbel_noise(seeds, torch.tensor(positions, device=ids.device), ids)
    chosen = ids.numpy()
    found = np.empty((len(seeds), len(chosen)), np.float32)
    for own, row in zip(found, _rows.get(seeds, positions, vocab), strict=True):
        np.take(row, chosen, out=own)
    return torch.from_numpy(found)


def pick_with_noise(
    logits: Tensor, temperature: float, seeds: Sequence[int], positions: Sequence[int]
) -> Tensor | None:
    """argmax(logits / temperature + noise) of each row [n, V] with the noise of its seed and position: int64
    [n], the lowest of equal ones; -1 where the largest is no finite number. None where it is not compiled: on
    other devices, in other types.
    """
    assert len(logits) == len(seeds) == len(positions)
    suits = logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.stride(-1) == 1
    lib = library() if suits else None
    if lib is None:
        return None
    rows = _rows.get(seeds, positions, logits.shape[-1])
    addresses = np.array([row.ctypes.data for row in rows], dtype=np.int64)
    picks = torch.empty(len(rows), dtype=torch.int64, device="cpu")
    lib.jetspec_pick(
        logits.data_ptr(),
        logits.stride(0),
        addresses.ctypes.data,
        temperature,
        len(rows),
        logits.shape[-1],
        picks.data_ptr(),
    )
    return picks


def add_noise(scores: Tensor, seeds: Sequence[int], positions: Sequence[int]) -> None:
    """Add to each row of float32 scores [n, V] the noise of its seed and position, in place."""
    if scores.device.type == "cpu":
        values = scores.numpy()
        for value, row in zip(values, _rows.get(seeds, positions, scores.shape[-1]), strict=True):
            value += row
        return
    pairs = list(zip(seeds, positions, strict=True))
    unique = list(dict.fromkeys(pairs))  # nodes of one depth share their row
    where = torch.tensor([position for _, position in unique], device=scores.device)
    noise = gumbel_noise([seed for seed, _ in unique], where, scores.shape[-1])
    if len(unique) == len(pairs):
        scores += noise
    else:
        place = {pair: n for n, pair in enumerate(unique)}
        scores += noise[torch.tensor([place[pair] for pair in pairs], device=scores.device)]
