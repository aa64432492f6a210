"""The compiled attention of a packed plan: one call per layer for all segments, straight on the cache."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from jetspec.target.cache import KVCache
from jetspec.target.native import load_library
from jetspec.target.plan import Plan

_LANES = 16


@cache
def _kernel():  # type: ignore[no-untyped-def]
    """The compiled function, or None where it could not be built."""
    library = load_library("attention")
    if library is None or not hasattr(library, "jetspec_attend"):  # a compiler may write anything
        return None
    function = library.jetspec_attend
    integer, pointer = ctypes.c_int64, ctypes.c_void_p
    function.argtypes = (
        [integer] + [pointer] * 6 + [integer] * 4 + [pointer, integer] * 3 + [pointer, integer]
    )
    function.restype = ctypes.c_int
    return function


def native_attention_available() -> bool:
    """Whether the compiled kernel runs on this machine."""
    return _kernel() is not None


class NativeSegments:
    """A plan's segments as the kernel wants them: prepared once per forward."""

    def __init__(self, plan: Plan, cache: KVCache) -> None:
        segments = plan.segments
        self._kv_heads, self._dim = cache.kv_heads, cache.head_dim
        blocks = [cache.block(s.key) for s in segments]
        masks = [None if s.mask is None else s.mask.to(torch.uint8).contiguous() for s in segments]
        self._alive = (blocks, masks)  # the table below holds their addresses
        committed = [cache.length(s.key) for s in segments]
        self._longest = max(n + s.count for n, s in zip(committed, segments, strict=True))
        self._table = torch.tensor(
            [
                [s.start for s in segments],
                [s.count for s in segments],
                committed,
                [block.shape[3] for block in blocks],
                [block.data_ptr() for block in blocks],
                [0 if mask is None else mask.data_ptr() for mask in masks],
            ]
        )
        row = self._table.stride(0) * 8
        first = self._table.data_ptr()
        self._columns = [first + n * row for n in range(6)]
        self._count = len(segments)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int) -> Tensor:
        """As `attention.attend`."""
        total, heads, dim = q.shape
        q, k, v = (x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous() for x in (q, k, v))
        out = torch.empty(total, heads * dim)
        failed = _kernel()(
            self._count,
            *self._columns,
            layer,
            heads,
            self._kv_heads,
            dim,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
            self._longest,
        )
        if failed:
            raise MemoryError("no memory for attention weights")
        return out


def native_segments(plan: Plan, cache: KVCache) -> NativeSegments | None:
    """The plan prepared for the kernel, or None where it cannot run: not on the CPU, not float32, or not
    built.
    """
    suitable = cache.device.type == "cpu" and cache.dtype == torch.float32 and cache.head_dim % _LANES == 0
    return NativeSegments(plan, cache) if suitable and _kernel() is not None else None
