"""The packed plan: ids, positions, visibility and wanted rows, against a spelled-out description."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from jetspec.target.cache import KVCache
from jetspec.target.plan import Plan, chunk, pack
from jetspec.tree import Tree


def new_cache(lengths: dict[int, int]) -> KVCache:
    """A cache whose sequences have the given committed lengths."""
    cache = KVCache(1, 1, 1)
    for key, length in lengths.items():
        cache.add(key)
        if length:
            cache.extend(key, length)
            cache.keep(key, range(length))
    return cache


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Any tree of up to 12 nodes; tokens are the node numbers, so siblings differ."""
    size = draw(st.integers(1, 12))
    parents = [-1] + [draw(st.integers(0, node - 1)) for node in range(1, size)]
    return Tree.of(list(range(100, 100 + size)), parents)


@given(st.lists(st.tuples(trees(), st.integers(0, 80)), min_size=1, max_size=4))
def test_pack_places_every_node(items: list[tuple[Tree, int]]) -> None:
    """Guards positions (length + depth, never the row number), visibility (ancestors and itself, nothing
    else), the order of segments, and that room is made in the cache."""
    keys = [10 * (index + 1) for index in range(len(items))]
    cache = new_cache({key: length for key, (_, length) in zip(keys, items, strict=True)})
    plan = pack([(key, tree) for key, (tree, _) in zip(keys, items, strict=True)], cache)
    assert plan.size == sum(tree.size for tree, _ in items)
    assert plan.logit_rows() == slice(None)
    row = 0
    for key, (tree, length), segment in zip(keys, items, plan.segments, strict=True):
        assert (segment.key, segment.start, segment.count, segment.logits) == (key, row, tree.size, True)
        rows = slice(row, row + tree.size)
        assert plan.ids[rows].tolist() == list(tree.tokens)
        assert plan.positions[rows].tolist() == [length + len(tree.path_to(n)) - 1 for n in range(tree.size)]
        seen = torch.ones(tree.size, tree.size).tril().bool() if segment.mask is None else segment.mask
        for node in range(tree.size):
            assert seen[node].nonzero().flatten().tolist() == tree.path_to(node)
        assert cache.rows(key, 0).shape[2] == length + tree.size
        assert cache.length(key) == length, "nothing is committed before keep"
        row += tree.size


def test_chunk_continues_where_the_cache_ends() -> None:
    """Guards prefill in pieces: positions go on from the committed length of each sequence; no logits by
    default."""
    cache = new_cache({1: 0, 2: 5})
    plan = chunk([(2, [7, 8]), (1, [4, 5, 6])], cache)
    assert plan.ids.tolist() == [7, 8, 4, 5, 6]
    assert plan.positions.tolist() == [5, 6, 0, 1, 2]
    assert [(s.key, s.start, s.count, s.mask, s.logits) for s in plan.segments] == [
        (2, 0, 2, None, False),
        (1, 2, 3, None, False),
    ]
    assert plan.logit_rows() is None
    assert chunk([(1, [4])], cache, logits=True).logit_rows() == slice(None)


def test_logit_rows_of_a_mixed_plan() -> None:
    """Guards prefill next to verification: only the rows of segments that want logits, in their order."""
    cache = new_cache({1: 0, 2: 5, 3: 2})
    first = chunk([(1, [4, 5, 6])], cache)
    second = chunk([(2, [7, 8])], cache, logits=True)
    third = chunk([(3, [9])], cache)
    parts = [(first, 0), (second, 3), (third, 5)]
    segments = [
        type(s)(s.key, s.start + at, s.count, s.mask, s.logits) for p, at in parts for s in p.segments
    ]
    ids, positions = (torch.cat([getattr(p, name) for p, _ in parts]) for name in ("ids", "positions"))
    rows = Plan(ids, positions, tuple(segments), max(p.last for p, _ in parts)).logit_rows()
    assert isinstance(rows, torch.Tensor)
    assert rows.tolist() == [3, 4]


def test_plans_that_cannot_be_run_are_refused() -> None:
    """Guards against a sequence twice in a plan (its second part would overwrite the first one's rows),
    and against a segment without rows (the last zero rows of a block are the whole block)."""
    cache = new_cache({1: 3})
    with pytest.raises(AssertionError, match="once"):
        chunk([(1, [4]), (1, [5])], cache)
    with pytest.raises(AssertionError, match="at least one row"):
        chunk([(1, [])], cache)
