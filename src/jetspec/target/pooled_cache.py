"""A cache whose sequences lie side by side in one tensor, so that one product serves many of them.

Attending segment by segment costs a device with its own queue (CUDA) a dozen launches for every sequence and
layer, far more than the arithmetic. Here the rows of a round, trees of any size or single ones, attend at
once (`Together`).
"""

from __future__ import annotations

from itertools import accumulate

import torch
from torch import Tensor

from jetspec.target.cache import GROWTH_ROWS, KVCache, _Block
from jetspec.target.plan import Plan, Segment

POOL_ROWS = 1024  # a longer sequence has a block of its own, lest it make all others as long
MOST_TOGETHER = 64  # rows of a segment; larger ones are worth launches of their own


class PooledCache(KVCache):
    """A `KVCache` that keeps sequences of up to `POOL_ROWS` rows in one tensor
    [slots, layers, 2, kv_heads, capacity, head_dim].
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
        super().__init__(layers, kv_heads, head_dim, dtype=dtype, device=device)
        self._slots: dict[int, int] = {}  # by key
        self._free: list[int] = []
        self.pool = self._pool_of(0, GROWTH_ROWS)

    def add(self, key: int, capacity: int = GROWTH_ROWS) -> None:
        """Start an empty sequence, in the pool if it is not reserved for too many rows."""
        if capacity > POOL_ROWS:
            super().add(key, capacity)
            return
        assert key not in self._blocks, f"sequence {key} is already cached"
        slots, rows = self.pool.shape[0], self.pool.shape[4]
        if not self._free:
            self._resize(max(4, 2 * slots), rows)
        if capacity > rows:
            self._resize(self.pool.shape[0], capacity)
        self._slots[key] = self._free.pop()
        self._blocks[key] = _Block(self.pool[self._slots[key]])

    def extend(self, key: int, count: int) -> int:
        """As in `KVCache`; a sequence that outgrows the pool moves to a block of its own."""
        needed, rows = self._blocks[key].length + count, self.pool.shape[4]
        if key in self._slots and needed > rows:
            if needed <= POOL_ROWS:
                self._resize(self.pool.shape[0], min(POOL_ROWS, max(needed, 2 * rows)))
            else:
                block = self._blocks[key]
                super().extend(key, count)  # copies what is committed
                assert self._blocks[key] is block
                self._give_back(key)
                return block.length
        return super().extend(key, count)

    def free(self, key: int) -> None:
        """Forget a sequence; with the last one the pool's memory is released."""
        super().free(key)
        if key in self._slots:
            self._give_back(key)

    def slot(self, key: int) -> int | None:
        """Where a sequence is in the pool; None if it has a block of its own."""
        return self._slots.get(key)

    @property
    def lazy(self) -> bool:
        """Rows of the pool are there for all."""
        return False

    @property
    def bytes(self) -> int:
        """Memory held, in bytes, free slots included."""
        own = sum(block.rows.numel() for key, block in self._blocks.items() if key not in self._slots)
        return (own + self.pool.numel()) * self.pool.element_size()

    def _give_back(self, key: int) -> None:
        slot = self._slots.pop(key)
        if not self._slots:
            self.pool, self._free = self._pool_of(0, GROWTH_ROWS), []
            return
        self._free.append(slot)

    def _resize(self, slots: int, rows: int) -> None:
        old = self.pool
        self.pool = self._pool_of(slots, rows)
        self.pool[: old.shape[0], :, :, :, : old.shape[4]] = old
        self._free.extend(range(old.shape[0], slots))
        for key, slot in self._slots.items():
            self._blocks[key].rows = self.pool[slot]

    def _pool_of(self, slots: int, rows: int) -> Tensor:
        shape = (slots, self.layers, 2, self.kv_heads, rows, self.head_dim)
        return torch.zeros(shape, dtype=self.dtype, device=self.device)


def new_cache(
    layers: int, kv_heads: int, head_dim: int, *, dtype: torch.dtype, device: torch.device
) -> KVCache:
    """The kind of cache that suits a device."""
    kind = PooledCache if device.type == "cuda" else KVCache
    return kind(layers, kv_heads, head_dim, dtype=dtype, device=device)


class Together:
    """The segments of a plan that attend at once: those in the pool, but for long pieces of prompts. Prepared
    once per forward, with a number of launches and copies that does not depend on how many they are; in every
    layer the same holds for `attend`.

    Shorter segments are filled up to the longest one with copies of their first row, whose results nobody
    reads. Trees have tens of rows, which a device that waits for memory takes for the price of one.

    Args:
        window: a row sees at most the `window` latest positions, itself included; None = no limit.
    """

    def __init__(self, plan: Plan, cache: PooledCache, members: list[int], window: int | None) -> None:
        self._pool, self.members = cache.pool, frozenset(members)
        segments = [plan.segments[index] for index in members]
        committed = [cache.length(segment.key) for segment in segments]
        slots = [slot for s in segments if (slot := cache.slot(s.key)) is not None]
        counts = [segment.count for segment in segments]
        self._height = height = max(counts)
        self._longest = max(length + count for length, count in zip(committed, counts, strict=True))
        before = list(accumulate(counts, initial=0))[:-1]  # rows of the segments before each one
        # One copy to the device for all numbers: per sequence, per row, and per row as they are filled up.
        lists: list[list[int]] = [
            slots,
            committed,
            [length + count for length, count in zip(committed, counts, strict=True)],
            [row for s in segments for row in range(s.start, s.start + s.count)],
            [slot for slot, count in zip(slots, counts, strict=True) for _ in range(count)],
            [first + n for first, count in zip(committed, counts, strict=True) for n in range(count)],
            [n * height + row for n, count in enumerate(counts) for row in range(count)],
            [
                first + (row if row < count else 0)
                for first, count in zip(before, counts, strict=True)
                for row in range(height)
            ],
        ]
        numbers = torch.tensor([n for own in lists for n in own]).to(cache.device)
        parts = numbers.split([len(own) for own in lists])
        self._slots, first, ends, packed, self._row_slots, self._row_places, self._back, filled = parts
        self.rows: slice | Tensor = slice(None) if len(packed) == plan.size else packed
        self._filled = None if len(packed) == len(filled) else filled  # None where all have the same height
        own = plan.positions[self.rows][filled].view(len(segments), height)
        self._hidden = self._mask(segments, own, first, window)
        # Rows behind a sequence's own have weight 0, but a round that failed, or a request before it, may
        # have left NaN there, and 0 * NaN is NaN.
        self._stale = (torch.arange(self._longest, device=cache.device) >= ends[:, None])[:, None, :, None]

    def _mask(self, segments: list[Segment], own: Tensor, first: Tensor, window: int | None) -> Tensor:
        """What rows may not see, bool [b, 1, 1, height, S]. own: their positions [b, height]; first: places
        [b] of the segments' first rows.
        """
        height, device = self._height, first.device
        inside = torch.zeros(len(segments), height, height, dtype=torch.bool)
        causal = torch.ones(height, height, dtype=torch.bool).tril_()
        for seen, segment in zip(inside, segments, strict=True):
            count = segment.count
            seen[:count, :count] = causal[:count, :count] if segment.mask is None else segment.mask
            seen[count:] = seen[0]
        places = torch.arange(self._longest, device=device)
        node = places - first[:, None]  # [b, S], below 0 for committed rows
        index = node.clamp(0, height - 1)
        shape = (len(segments), height, self._longest)
        seen = inside.to(device).gather(2, index[:, None].expand(shape))
        seen &= (node < height)[:, None]
        seen |= (node < 0)[:, None]
        if window is not None:
            keys = torch.where(node < 0, places, own.gather(1, index))  # positions [b, S]
            seen &= own[:, :, None] - keys[:, None] < window
        return ~seen[:, None, None]

    @staticmethod
    def of(plan: Plan, cache: KVCache, window: int | None) -> Together | None:
        """None where there are no such segments."""
        if not isinstance(cache, PooledCache):
            return None
        fitting = [
            index
            for index, segment in enumerate(plan.segments)
            if segment.count <= MOST_TOGETHER and cache.slot(segment.key) is not None
        ]
        return Together(plan, cache, fitting, window) if fitting else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """As `attention.attend`: q [n, heads, head_dim] of the `rows`; k, v [n, kv_heads, head_dim]; result
        [n, heads * head_dim].

        Keys and values of all sequences are copied side by side: they are read once more than need be, but
        with few launches.
        """
        heads, dim = q.shape[1:]
        kv_heads, size, height = k.shape[1], len(self.members), self._height
        own = self._pool[:, layer]  # [slots, 2, kv_heads, capacity, head_dim]
        own[self._row_slots, 0, :, self._row_places] = k
        own[self._row_slots, 1, :, self._row_places] = v
        keys = own[:, 0, :, : self._longest].index_select(0, self._slots)  # [b, kv_heads, S, head_dim]
        values = own[:, 1, :, : self._longest].index_select(0, self._slots)
        values.masked_fill_(self._stale, 0.0)
        query = (q if self._filled is None else q[self._filled]).view(size, height, kv_heads, -1, dim)
        query = query.permute(0, 2, 3, 1, 4)
        query = query.reshape(size, kv_heads, -1, dim) * dim**-0.5  # [b, kv_heads, groups * height, head_dim]
        scores = (query @ keys.transpose(2, 3)).view(size, kv_heads, -1, height, self._longest)
        scores.masked_fill_(self._hidden, float("-inf"))
        mixed = scores.softmax(-1).flatten(2, 3) @ values
        mixed = mixed.view(size, kv_heads, -1, height, dim).permute(0, 3, 1, 2, 4)
        mixed = mixed.reshape(size * height, heads * dim)
        return mixed if self._filled is None else mixed[self._back]
