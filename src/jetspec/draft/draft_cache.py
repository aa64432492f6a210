"""The cache of a head that drafts depth by depth: committed rows, and behind them the rows of a growing
tree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.target.attention import Visibility
from jetspec.target.cache import KVCache
from jetspec.target.plan import Plan, Segment


class DraftCache(KVCache):
    """A cache whose pending rows may come in several forwards. `keep(key, [])` drops them all."""

    def append(self, key: int, count: int) -> int:
        """Make room for `count` rows behind all others; returns how many drafted rows were there before."""
        block = self._blocks[key]
        drafted = block.pending
        self._reserve(block, block.length + drafted, count)
        block.pending = drafted + count
        return drafted

    def drafted(self, key: int) -> int:
        """Rows behind the committed ones."""
        return self._blocks[key].pending


class DraftVisibility(Visibility):
    """Who sees whom where a segment's rows are the newest of several drafted levels.

    `Segment.mask` is [count, drafted] here, over all drafted rows of the sequence, the segment's own last;
    every row sees the committed rows, as far as a sliding window reaches.
    """

    def __init__(
        self, plan: Plan, cache: DraftCache, groups: int, window: int | None, dtype: torch.dtype
    ) -> None:
        self.native = None  # the compiled kernel knows only masks among the rows of one forward
        self._bias = [self._bias_of(s, cache, plan.positions, groups, window, dtype) for s in plan.segments]

    def prepare(self) -> None:
        """Masks are there from the start."""

    @staticmethod
    def _bias_of(
        segment: Segment,
        cache: DraftCache,
        positions: Tensor,
        groups: int,
        window: int | None,
        dtype: torch.dtype,
    ) -> Tensor:
        assert segment.mask is not None
        visible = segment.mask  # [count, drafted]
        committed = cache.length(segment.key)
        if window is not None:
            # An ancestor lies one position before its child, so with a window its distance is what counts;
            # the rows of a path are the last ones, and only the oldest of them can fall out.
            own = positions[segment.start : segment.start + segment.count]
            rank = visible.flip(1).cumsum(1).flip(1)  # 1 for the row itself, 2 for its parent, ...
            visible = visible & (rank <= window)
            keys = torch.arange(committed, device=visible.device)
            near = own[:, None] - keys[None, :] < window
            visible = torch.cat([near, visible], dim=1)
        bias = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return bias.masked_fill_(~visible, float("-inf")).repeat(groups, 1)  # [groups * count, columns]
