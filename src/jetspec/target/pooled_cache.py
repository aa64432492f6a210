"""A cache whose sequences lie side by side in one tensor, so that one product serves many of them.

Attending segment by segment costs a device with its own queue (CUDA) a dozen launches for every sequence and
layer, far more than the arithmetic. Sequences with one new row each, as in plain decoding, can attend at once
(`Together`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.target.cache import GROWTH_ROWS, KVCache, _Block
from jetspec.target.plan import Plan

POOL_ROWS = 1024  # a longer sequence has a block of its own, lest it make all others as long


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
        # Rows behind a sequence's own are attended with weight 0, and 0 * NaN is NaN. One launch per request.
        self.pool[slot].zero_()
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


class Together:
    """The segments of a plan that attend at once: of one row each, in the pool. Prepared once per forward.

    Args:
        window: a row sees at most the `window` latest positions, itself included; None = no limit.
    """

    def __init__(self, plan: Plan, cache: PooledCache, members: list[int], window: int | None) -> None:
        device, self._pool = cache.device, cache.pool
        self.members = frozenset(members)
        segments = [plan.segments[index] for index in members]
        starts = [segment.start for segment in segments]
        self.rows = slice(None) if len(starts) == plan.size else torch.tensor(starts, device=device)
        committed = [cache.length(segment.key) for segment in segments]
        self._longest = max(committed) + 1
        self._slots = torch.tensor([cache.slot(segment.key) for segment in segments], device=device)
        self._places = torch.tensor(committed, device=device)
        places = torch.arange(self._longest, device=device)
        hidden = places > self._places[:, None]  # [b, S]
        if window is not None:
            hidden = hidden | (self._places[:, None] - places >= window)
        self._hidden = hidden[:, None, None]

    @staticmethod
    def of(plan: Plan, cache: KVCache, window: int | None) -> Together | None:
        """None where there are no such segments."""
        if not isinstance(cache, PooledCache):
            return None
        fitting = [
            index
            for index, segment in enumerate(plan.segments)
            if segment.count == 1 and cache.slot(segment.key) is not None
        ]
        return Together(plan, cache, fitting, window) if fitting else None

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """As `attention.attend`: q [b, heads, head_dim]; k, v [b, kv_heads, head_dim]; result
        [b, heads * head_dim].

        Keys and values of all sequences are copied side by side: they are read once more than need be, but
        with few launches.
        """
        count, heads, dim = q.shape
        kv_heads = k.shape[1]
        own = self._pool[:, layer]  # [slots, 2, kv_heads, capacity, head_dim]
        own[self._slots, 0, :, self._places] = k
        own[self._slots, 1, :, self._places] = v
        keys = own[:, 0, :, : self._longest].index_select(0, self._slots)  # [b, kv_heads, S, head_dim]
        values = own[:, 1, :, : self._longest].index_select(0, self._slots)
        query = q.view(count, kv_heads, heads // kv_heads, dim) * dim**-0.5
        scores = (query @ keys.transpose(2, 3)).masked_fill_(self._hidden, float("-inf"))
        return (scores.softmax(-1) @ values).view(count, heads * dim)
