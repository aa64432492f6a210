"""Keys and values of committed tokens, one growing block per sequence.

A forward writes its rows behind the committed ones; `keep(path)` then moves the accepted rows to the end of
the committed part and gives everything else back. Rotary embedding was applied at position = start + depth,
and each accepted node's depth is its final offset, so a moved row needs no new
rotation.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

GROWTH_ROWS = 64  # smallest step by which a sequence's block grows


class _Block:
    """Rows of one sequence: [layers, 2, kv_heads, capacity, head_dim]; index 0 of the second axis is keys,
    1 is values.
    """

    __slots__ = ("length", "pending", "rows")

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows
        self.length = 0  # committed rows
        self.pending = 0  # rows of the last forward, not committed yet


class KVCache:
    """Keys and values of any number of sequences, addressed by an integer key.

    Args:
        layers, kv_heads, head_dim: shape of the model that writes here.
        dtype, device: of the stored rows.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.kv_heads, self.head_dim = layers, kv_heads, head_dim
        self.dtype, self.device = dtype, torch.device(device)
        self._blocks: dict[int, _Block] = {}

    def add(self, key: int, capacity: int = GROWTH_ROWS) -> None:
        """Start an empty sequence. `capacity` rows are reserved at once; the block grows as needed."""
        assert key not in self._blocks, f"sequence {key} is already cached"
        self._blocks[key] = _Block(self._empty(max(1, capacity)))

    def length(self, key: int) -> int:
        """Committed rows of a sequence."""
        return self._blocks[key].length

    def __contains__(self, key: int) -> bool:
        """Whether a sequence is cached."""
        return key in self._blocks

    def keys(self) -> list[int]:
        """All cached sequences."""
        return list(self._blocks)

    def extend(self, key: int, count: int) -> int:
        """Make room for `count` rows behind the committed ones; returns the slot of the first."""
        block = self._blocks[key]
        self._reserve(block, block.length, count)
        block.pending = count
        return block.length

    def rows(self, key: int, layer: int) -> Tensor:
        """All rows of one layer, committed and pending, as a view: [2, kv_heads, S, head_dim]."""
        block = self._blocks[key]
        return block.rows[layer, :, :, : block.length + block.pending]

    def block(self, key: int) -> Tensor:
        """The whole block [layers, 2, kv_heads, capacity, head_dim], for kernels that address it
        themselves.
        """
        return self._blocks[key].rows

    def keep(self, key: int, path: Sequence[int]) -> None:
        """Commit the rows of the last forward named by `path`, in that order, and give the others back.

        `path` holds strictly increasing indices into the rows of the last forward; an empty path drops them
        all.
        """
        block = self._blocks[key]
        count = len(path)
        assert all(a < b for a, b in pairwise(path)), path
        assert not count or (path[0] >= 0 and path[-1] < block.pending), (path, block.pending)
        if count and path[-1] != count - 1:  # not already in place
            gap = next(i for i, node in enumerate(path) if node != i)
            source = torch.tensor(path[gap:], device=self.device) + block.length
            start = block.length + gap
            block.rows[:, :, :, start : start + count - gap] = block.rows.index_select(3, source)
        block.length += count
        block.pending = 0

    def free(self, key: int) -> None:
        """Forget a sequence and release its memory."""
        del self._blocks[key]

    @property
    def lazy(self) -> bool:
        """Whether rows that are reserved take no memory before they are written."""
        return self.device.type == "cpu"

    @property
    def bytes(self) -> int:
        """Memory reserved for all sequences, in bytes."""
        return sum(block.rows.numel() * block.rows.element_size() for block in self._blocks.values())

    def _reserve(self, block: _Block, used: int, count: int) -> None:
        """Make room for `count` rows behind the `used` first ones, which are kept."""
        capacity = block.rows.shape[3]
        if used + count > capacity:
            grown = self._empty(max(used + count, capacity + GROWTH_ROWS, capacity * 3 // 2))
            grown[:, :, :, :used] = block.rows[:, :, :, :used]
            block.rows = grown

    def _empty(self, capacity: int) -> Tensor:
        # Not zeroed: rows are written before they are read; see `lazy`.
        shape = (self.layers, 2, self.kv_heads, capacity, self.head_dim)
        return torch.empty(shape, dtype=self.dtype, device=self.device)
