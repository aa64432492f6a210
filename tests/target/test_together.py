"""Attending at once, as on CUDA, is attending one by one, in as many calls whatever the batch."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.decode import round as rounds
from jetspec.decode.engine import Engine
from jetspec.draft import backbone
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.stubs import Decoy, Echo, Random
from jetspec.sequence import Limits
from jetspec.target.attention import Visibility, attend
from jetspec.target.cache import KVCache
from jetspec.target.plan import Plan, pack
from jetspec.target.pooled_cache import MOST_TOGETHER, PooledCache
from jetspec.tree import Tree
from tests.decode.tiny import PROMPTS, SAMPLINGS, plain, shared_target, tiny_target
from tests.draft.tiny import random_head
from tests.draft.tiny import tiny_target as draft_target
from tests.helpers import CountedCalls
from tests.target.test_pooled_cache import pooled_engine

DIM, LAYER = 8, 1


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[Tree]]:
    """Committed rows of some sequences, and a tree for each, now and then a large one."""
    count = draw(st.integers(1, 5))
    committed = draw(st.lists(st.integers(0, 40), min_size=count, max_size=count))
    sizes = st.one_of(st.just(1), st.integers(1, 9), st.sampled_from([MOST_TOGETHER, MOST_TOGETHER + 1]))
    trees = []
    for size in draw(st.lists(sizes, min_size=count, max_size=count)):
        parents = [-1, *(draw(st.integers(0, node - 1)) for node in range(1, size))]
        trees.append(Tree.of(list(range(size)), parents))
    return committed, trees


def filled(kind: type[KVCache], kv_heads: int, committed: Many[int]) -> KVCache:
    """A cache with so many made-up rows per sequence, the same for every kind. What lies behind them is not
    zero: trees that were rejected have left it."""
    cache, dice = kind(2, kv_heads, DIM, dtype=torch.float64), torch.Generator().manual_seed(1)
    for key, length in enumerate(committed):
        cache.add(key, 60)
        cache.extend(key, 60)
        cache.block(key)[:, :, :, :60] = torch.randn(2, 2, kv_heads, 60, DIM, generator=dice).double()
        cache.keep(key, range(length))
    return cache


def attended(cache: KVCache, trees: Many[Tree], heads: int, window: int | None) -> tuple[Tensor, Plan]:
    """What a layer reads for one tree per sequence, with made-up queries, keys and values."""
    plan = pack(list(enumerate(trees)), cache)
    dice = torch.Generator().manual_seed(2)
    q, k, v = (
        torch.randn(plan.size, n, DIM, generator=dice, dtype=torch.float64)
        for n in (heads, cache.kv_heads, cache.kv_heads)
    )
    visibility = Visibility(plan, cache, heads // cache.kv_heads, window, torch.float64)
    visibility.native = None
    return attend(q, k, v, plan, cache, LAYER, visibility), plan


@settings(max_examples=150, deadline=None)
@given(batches(), st.sampled_from([(2, 1), (4, 2), (3, 3)]), st.sampled_from([None, 1, 4, 30]))
def test_at_once_is_one_by_one(
    batch: tuple[list[int], list[Tree]], heads: tuple[int, int], window: int | None
) -> None:
    """Guards masks, windows, places in the pool, trees of different heights beside each other and beside one
    that is too large, and shared key heads. 1e-12 is some hundreds of float64 roundings of values near 1."""
    committed, trees = batch
    alone, plan = attended(filled(KVCache, heads[1], committed), trees, heads[0], window)
    cache = filled(PooledCache, heads[1], committed)
    at_once, _ = attended(cache, trees, heads[0], window)
    assert (alone - at_once).abs().max() < 1e-12
    one = filled(KVCache, heads[1], committed)
    attended(one, trees, heads[0], window)
    for segment in plan.segments:
        assert torch.equal(one.rows(segment.key, LAYER), cache.rows(segment.key, LAYER))


def test_a_layer_has_as_many_calls_whatever_the_batch() -> None:
    """Guards a device with a queue: a dozen launches for every tree and layer took it longer than the rest of
    the forward. Nothing is asked of the device meanwhile, which would wait for its queue."""
    counts = []
    for size in (2, 9):
        tree = Tree.of([1, 2, 3, 4], [-1, 0, 0, 1])
        cache = filled(PooledCache, 2, [5 + n for n in range(size)])
        plan = pack([(n, tree if n % 2 else Tree.root_only(1)) for n in range(size)], cache)
        q, k = torch.randn(plan.size, 4, DIM).double(), torch.randn(plan.size, 2, DIM).double()
        visibility = Visibility(plan, cache, 2, None, torch.float64)
        visibility.native = None
        with CountedCalls() as counted:
            attend(q, k, k, plan, cache, LAYER, visibility)
        counts.append(counted.calls)
    assert counts[0] == counts[1] and 0 < counts[0].total() < 60
    assert not counts[0].keys() & {"_local_scalar_dense", "nonzero", "item"}


STUBS = {
    "echo": lambda target: Echo(target, depth=3),
    "decoy": lambda target: Decoy(target, depth=3, width=3),
    "random": lambda target: Random(seed=5, vocab=target.config.vocab_size, depth=3, width=4),
}


@pytest.mark.parametrize("far", [False, True], ids=["near", "far"])
@pytest.mark.parametrize("stub", STUBS)
@pytest.mark.parametrize("budget", [1, 4, 17])
def test_lossless_with_walks_at_once(
    stub: str, budget: int, far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the text where trees attend at once and, as on a device that is far away, all tokens of a round
    are picked with one call: greedy and sampled requests side by side, and those that need a history."""
    monkeypatch.setattr(rounds, "_is_far", lambda logits: far)
    target = shared_target()
    for names in (list(SAMPLINGS), [name for name in SAMPLINGS if "penalties" not in name]):
        engine = pooled_engine(target, STUBS[stub](target), budget=budget, max_batch=3)
        sequences = [
            engine.add(PROMPTS[n % len(PROMPTS)], SAMPLINGS[name], Limits(max_tokens=7 + n))
            for n, name in enumerate(names)
        ]
        for _ in engine.run(sequences):
            pass
        for n, (sequence, name) in enumerate(zip(sequences, names, strict=True)):
            assert tuple(sequence.emitted) == plain(tuple(PROMPTS[n % len(PROMPTS)]), name, 7 + n), name
        assert engine.cache.bytes == 0


@pytest.mark.parametrize("method", ["jetspec", "dflash"])
def test_blocks_are_drafted_at_once(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the head's own cache on CUDA: with sequences side by side in a pool it proposes the trees that
    it proposes for each alone, causal or not, while requests come and go."""
    target = draft_target()
    head = random_head(target, causal=method == "jetspec")
    trees: list[list[Any]] = []
    for kind in (KVCache, PooledCache):
        monkeypatch.setattr(backbone, "new_cache", lambda *shape, _kind=kind, **where: _kind(*shape, **where))
        drafter = BlockDrafter(head, target)
        drafter.backbone.native = None
        engine = Engine(target, drafter, budget=5, max_batch=3)
        prompts = [[3, 1, 4], [1, 5], [9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2], [6], [2, 7]]
        sequences = [engine.add(p, None, Limits(max_tokens=9 + n)) for n, p in enumerate(prompts)]
        first = sequences[0].id
        trees.append([(o.sequence.id - first, o.tree.tokens, o.path) for o in engine.run(sequences)])
        assert drafter.backbone.cache.bytes == 0
    assert trees[0] == trees[1] and any(len(tokens) > 3 for _, tokens, _ in trees[0])


def test_windows_of_trees() -> None:
    """Guards sliding windows through a whole forward: a node's own ancestors are near, whatever their row."""
    target = tiny_target(model_type="mistral", sliding_window=3)
    texts = []
    for make in (Engine, pooled_engine):
        engine = make(target, Decoy(target, depth=4, width=2), budget=9, max_batch=4)
        sequences = [engine.add(prompt, None, Limits(max_tokens=20)) for prompt in PROMPTS]
        for _ in engine.run(sequences):
            pass
        texts.append([sequence.emitted for sequence in sequences])
    assert texts[0] == texts[1]
