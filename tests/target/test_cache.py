"""The key-value cache against a list: whatever is extended, kept and freed, the committed rows are the
kept ones."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from jetspec.target.cache import GROWTH_ROWS, KVCache

LAYERS, KV_HEADS, DIM = 2, 3, 4


def stamp(row: int, layer: int) -> torch.Tensor:
    """A value per key/value, head and dimension [2, kv_heads, head_dim] that no other row or layer has."""
    inner = 2 * KV_HEADS * DIM
    return torch.arange(inner, dtype=torch.float64).view(2, KV_HEADS, DIM) + inner * (row * LAYERS + layer)


class CacheMachine(RuleBasedStateMachine):
    """The model: per key a list of row numbers, and those of the last forward."""

    def __init__(self) -> None:
        super().__init__()
        self.cache = KVCache(LAYERS, KV_HEADS, DIM, dtype=torch.float64)
        self.committed: dict[int, list[int]] = {}
        self.pending: dict[int, list[int]] = {}
        self.written = 0

    @initialize()
    def start(self) -> None:
        """Begin with one sequence that has to grow at once."""
        self.add(0, 1)

    @rule(key=st.integers(0, 3), capacity=st.integers(0, 9))
    def add(self, key: int, capacity: int) -> None:
        """A new sequence; adding it twice is a fault of the caller."""
        if key in self.committed:
            with pytest.raises(AssertionError):
                self.cache.add(key)
            return
        self.cache.add(key, capacity)
        self.committed[key], self.pending[key] = [], []

    @precondition(lambda self: self.committed)
    @rule(data=st.data(), count=st.integers(1, 40))
    def forward(self, data: st.DataObject, count: int) -> None:
        """Extend and write, as a forward does. What was pending and not kept is dropped by that."""
        key = data.draw(st.sampled_from(sorted(self.committed)))
        assert self.cache.extend(key, count) == len(self.committed[key])
        rows = list(range(self.written, self.written + count))
        self.written += count
        for layer in range(LAYERS):
            block = self.cache.rows(key, layer)  # [2, kv_heads, S, head_dim]
            assert block.shape == (2, KV_HEADS, len(self.committed[key]) + count, DIM)
            for offset, row in enumerate(rows):
                block[:, :, block.shape[2] - count + offset] = stamp(row, layer)
        self.pending[key] = rows

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        """Commit any increasing choice of the pending rows, none and all included."""
        key = data.draw(st.sampled_from(sorted(self.committed)))
        count = len(self.pending[key])
        path = sorted(data.draw(st.sets(st.integers(0, count - 1)))) if count else []
        self.cache.keep(key, path)
        self.committed[key] += [self.pending[key][node] for node in path]
        self.pending[key] = []

    @precondition(lambda self: self.committed)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        """Forget a sequence; the others stay."""
        key = data.draw(st.sampled_from(sorted(self.committed)))
        self.cache.free(key)
        del self.committed[key], self.pending[key]

    @invariant()
    def rows_are_those_kept(self) -> None:
        """Committed and pending rows hold what was written, in order; memory is what the blocks need, not
        more than a half or one step above."""
        assert sorted(self.cache.keys()) == sorted(self.committed)
        for key, committed in self.committed.items():
            assert self.cache.length(key) == len(committed)
            rows = [*committed, *self.pending[key]]
            for layer in range(LAYERS):
                expected = [stamp(row, layer) for row in rows]
                actual = self.cache.rows(key, layer)
                assert actual.shape[2] == len(rows)
                if rows:
                    assert torch.equal(actual, torch.stack(expected, dim=2))
        assert self.cache.bytes == sum(self.cache.block(key).nbytes for key in self.committed)
        if not self.committed:
            assert self.cache.bytes == 0


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=40, stateful_step_count=20, deadline=None)


def test_growth_is_amortised() -> None:
    """Guards speed and memory of long texts: one row at a time causes few copies and at most half of
    unused room."""
    cache = KVCache(1, 1, 1)
    cache.add(0, capacity=1)
    copies, last = 0, cache.block(0).data_ptr()
    for length in range(1, 3000):
        cache.extend(0, 1)
        cache.keep(0, [0])
        copies += cache.block(0).data_ptr() != last
        last = cache.block(0).data_ptr()
        assert cache.block(0).shape[3] <= max(length + GROWTH_ROWS, 1.5 * length + 1)
    assert copies < 20


@pytest.mark.parametrize("path", [[0, 3], [-1, 0], [1, 1], [2, 1]])
def test_keep_refuses_rows_that_are_not_pending(path: list[int]) -> None:
    """Guards against committing rows of an earlier forward or none at all, which would be garbage without
    an error."""
    cache = KVCache(1, 1, 1)
    cache.add(0)
    cache.extend(0, 3)
    with pytest.raises(AssertionError):
        cache.keep(0, path)


def test_bytes_count_every_block() -> None:
    """Guards the number that admission relies on: layers x (keys, values) x heads x rows x dimension x
    element size."""
    cache = KVCache(5, 3, 8, dtype=torch.float16)
    cache.add(0, capacity=10)
    cache.add(7, capacity=4)
    assert cache.bytes == 5 * 2 * 3 * 14 * 8 * 2
    cache.free(0)
    assert cache.bytes == 5 * 2 * 3 * 4 * 8 * 2
