"""The draft cache: rows of several levels behind the committed ones."""

from __future__ import annotations

import torch

from jetspec.draft.draft_cache import DraftCache


def test_levels_survive_growth_and_are_dropped_together() -> None:
    """Guards against drafted rows that are lost when the block grows in the middle of a round, and against
    rows of one round that reach the next."""
    cache = DraftCache(2, 1, 4)
    cache.add(7, capacity=3)
    assert cache.extend(7, 2) == 0
    cache.rows(7, 1)[:] = 1.0
    cache.keep(7, [0, 1])
    assert cache.append(7, 1) == 0
    cache.rows(7, 1)[:, :, -1:] = 2.0
    assert cache.append(7, 200) == 1 and cache.drafted(7) == 201
    rows = cache.rows(7, 1)
    assert rows.shape[2] == 203
    assert torch.equal(rows[0, 0, :3, 0], torch.tensor([1.0, 1.0, 2.0]))
    cache.keep(7, [])
    assert cache.drafted(7) == 0 and cache.length(7) == 2
    assert cache.append(7, 1) == 0
