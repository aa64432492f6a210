"""Attention of a packed plan: segment by segment against the cache, without padding.

Query heads that share a key head are laid out as rows of one matrix, so grouped-query attention is a plain
batched product and keys are never repeated.
"""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.target.cache import KVCache
from jetspec.target.native_attention import native_segments
from jetspec.target.plan import Plan, Segment
from jetspec.target.pooled_cache import Together


class Visibility:
    """The additive masks of a plan, computed once per forward and reused by every layer with the same window.

    Args:
        window: a row sees at most the `window` latest positions, itself included; None = no limit.
    """

    together: Together | None = None

    def __init__(
        self, plan: Plan, cache: KVCache, groups: int, window: int | None, dtype: torch.dtype
    ) -> None:
        self.window = window
        self._groups, self._dtype = groups, dtype
        self._plan, self._cache = plan, cache
        self._bias: list[Tensor | None] | None = None
        self.native = native_segments(plan, cache)
        self.together = None if self.native is not None else Together.of(plan, cache, window)

    def prepare(self) -> None:
        """Build the masks; not needed where the native kernel runs."""
        if self._bias is None:
            self._bias = [self._segment(s, self._cache, self._plan.positions) for s in self._plan.segments]

    def add_to(self, index: int, scores: Tensor) -> Tensor:
        """Hide in scores [kv_heads, groups * m, S] what the rows of segment `index` may not see. Works in
        place.
        """
        assert self._bias is not None
        bias = self._bias[index]
        if bias is not None:
            scores[:, :, -bias.shape[1] :] += bias
        return scores

    def _segment(self, segment: Segment, cache: KVCache, positions: Tensor) -> Tensor | None:
        count, device = segment.count, cache.device
        committed = cache.length(segment.key)
        window = self.window
        if window is not None and committed + count <= window:
            window = None  # wide enough for every row
        if count == 1 and window is None:
            return None
        if segment.mask is None:
            visible = torch.ones(count, count, dtype=torch.bool, device=device).tril()
        else:
            visible = segment.mask.to(device)
        if window is not None:
            own = positions[segment.start : segment.start + count]
            keys = torch.cat([torch.arange(committed, device=device), own])
            seen = torch.cat([torch.ones(count, committed, dtype=torch.bool, device=device), visible], dim=1)
            visible = seen & (own[:, None] - keys[None, :] < window)
        bias = torch.zeros(visible.shape, dtype=self._dtype, device=device).masked_fill_(
            ~visible, float("-inf")
        )
        return bias.repeat(self._groups, 1)  # [groups * m, visible columns]


def attend(
    q: Tensor, k: Tensor, v: Tensor, plan: Plan, cache: KVCache, layer: int, visibility: Visibility
) -> Tensor:
    """Write the plan's keys and values into the cache and attend. Rotation has been applied already.

    Args:
        q: [M, heads, head_dim]; k, v: [M, kv_heads, head_dim].
    Returns:
        [M, heads * head_dim].
    """
    if visibility.native is not None:
        return visibility.native.attend(q, k, v, layer, visibility.window)
    together = visibility.together
    if together is not None and len(together.members) == len(plan.segments):
        return together.attend(q, k, v, layer)
    visibility.prepare()
    total, heads, dim = q.shape
    kv_heads = k.shape[1]
    groups = heads // kv_heads
    scale = dim**-0.5
    out = torch.empty(total, heads, dim, dtype=q.dtype, device=q.device)
    if together is not None:
        rows = together.rows
        out[rows] = together.attend(q[rows], k[rows], v[rows], layer).view(-1, heads, dim)
    for index, segment in enumerate(plan.segments):
        if together is not None and index in together.members:
            continue
        start, count = segment.start, segment.count
        cached = cache.rows(segment.key, layer)  # [2, kv_heads, S, head_dim]
        keys, values = cached[0], cached[1]
        keys[:, -count:] = k[start : start + count].transpose(0, 1)
        values[:, -count:] = v[start : start + count].transpose(0, 1)
        part = q[start : start + count].view(count, kv_heads, groups, dim)
        query = part.permute(1, 2, 0, 3).reshape(kv_heads, groups * count, dim)
        scores = torch.bmm(query * scale, keys.transpose(1, 2))  # [kv_heads, groups * m, S]
        weights = visibility.add_to(index, scores).softmax(-1)
        mixed = torch.bmm(weights, values).view(kv_heads, groups, count, dim)
        out[start : start + count] = mixed.permute(2, 0, 1, 3).reshape(count, heads, dim)
    return out.view(total, heads * dim)
