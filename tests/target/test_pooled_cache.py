"""The pooled cache holds what the plain one holds, and attending together is attending one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import invariant

from jetspec.decode.engine import Engine
from jetspec.draft.stubs import Decoy
from jetspec.sequence import Limits
from jetspec.target import pooled_cache
from jetspec.target.pooled_cache import PooledCache, Together
from jetspec.target.target import Target
from tests.decode.tiny import PROMPTS, SAMPLINGS, plain, shared_target, tiny_target
from tests.target.test_cache import DIM, KV_HEADS, LAYERS, CacheMachine, stamp


class PooledMachine(CacheMachine):
    """The same rules; sequences that outgrow a pool of a hundred rows have blocks of their own."""

    def __init__(self) -> None:
        super().__init__()
        pooled_cache.POOL_ROWS = 100
        self.cache: PooledCache = PooledCache(LAYERS, KV_HEADS, DIM, dtype=torch.float64)

    def teardown(self) -> None:
        """Undo the small pool."""
        pooled_cache.POOL_ROWS = 1024

    @invariant()
    def rows_are_those_kept(self) -> None:
        """Committed and pending rows hold what was written, in order, whoever joined, grew or left."""
        assert sorted(self.cache.keys()) == sorted(self.committed)
        for key, committed in self.committed.items():
            rows = [*committed, *self.pending[key]]
            assert self.cache.length(key) == len(committed)
            for layer in range(LAYERS):
                actual = self.cache.rows(key, layer)
                assert actual.shape[2] == len(rows)
                if rows:
                    assert torch.equal(actual, torch.stack([stamp(row, layer) for row in rows], dim=2))
            assert (self.cache.slot(key) is None) == (self.cache.block(key).shape[3] > 100)
        if not self.committed:
            assert self.cache.bytes == 0


TestPooledMachine = PooledMachine.TestCase
TestPooledMachine.settings = settings(max_examples=30, stateful_step_count=20, deadline=None)


def pooled_engine(target: Target, *given: Any, **options: Any) -> Engine:
    """An engine with the cache that CUDA devices have."""
    engine = Engine(target, *given, **options)
    c = target.config
    engine.cache = PooledCache(c.num_layers, c.num_kv_heads, c.head_dim, dtype=target.dtype)
    return engine


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many sequences attended together, call by call."""
    seen: list[int] = []
    attend = Together.attend

    def counted(self: Together, *tensors: Any) -> Any:
        seen.append(len(self.members))
        return attend(self, *tensors)

    monkeypatch.setattr(Together, "attend", counted)
    return seen


@pytest.mark.parametrize(
    "drafter", [None, lambda target: Decoy(target, depth=3, width=3)], ids=["off", "decoy"]
)
def test_same_text_as_one_by_one(calls: list[int], drafter: Callable[[Target], Any] | None) -> None:
    """Guards lengths that differ, slots that are used again, prefill between rounds, and trees whose rows are
    moved: every sequence gets the text that it gets alone in the plain cache."""
    target = shared_target()
    engine = pooled_engine(
        target, None if drafter is None else drafter(target), budget=0 if drafter is None else 2, max_batch=3
    )
    names = list(SAMPLINGS)
    sequences = [
        engine.add(PROMPTS[n % len(PROMPTS)], SAMPLINGS[name], Limits(max_tokens=9 + n))
        for n, name in enumerate(names)
    ]
    for _ in engine.run(sequences):
        pass
    for n, (sequence, name) in enumerate(zip(sequences, names, strict=True)):
        assert tuple(sequence.emitted) == plain(tuple(PROMPTS[n % len(PROMPTS)]), name, 9 + n), name
    assert engine.cache.bytes == 0
    assert max(calls) == 3


def test_a_slot_is_handed_on_clean(calls: list[int]) -> None:
    """Guards a request against what another left in its slot: rows that were not numbers, behind its own and
    seen with weight 0, made it all NaN. The first request is the longest, so those rows are read."""
    target = shared_target()
    engine = pooled_engine(target, budget=0, max_batch=2)
    assert isinstance(engine.cache, PooledCache)
    prompts = sorted(PROMPTS, key=len)
    longest = engine.add(prompts[-1] * 2, None, Limits(max_tokens=20))
    broken = engine.add(prompts[0], None, Limits(max_tokens=20))
    engine.step()
    slot = engine.cache.slot(broken.id)
    engine.cache.block(broken.id).fill_(float("nan"))
    engine.abort(broken)
    after = engine.add(prompts[0], None, Limits(max_tokens=9))
    calls.clear()
    for _ in engine.run([longest, after]):
        assert after.finished is not None or engine.cache.slot(after.id) == slot
    assert tuple(after.emitted) == plain(tuple(prompts[0]), "greedy", 9)
    assert max(calls) == 2


def test_windows_and_growth(calls: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards sliding windows, a pool that grows while sequences are in it, and sequences that outgrow it
    beside others that do not."""
    monkeypatch.setattr(pooled_cache, "POOL_ROWS", 72)
    target = tiny_target(model_type="mistral", sliding_window=5)
    texts = []
    for make in (Engine, pooled_engine):
        engine = make(target, budget=0, max_batch=4)
        sequences = [engine.add(prompt, None, Limits(max_tokens=80)) for prompt in PROMPTS]
        for _ in engine.run(sequences):
            pass
        texts.append([sequence.emitted for sequence in sequences])
    assert texts[0] == texts[1] and {1, 2} <= set(calls)
