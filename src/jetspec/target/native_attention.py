"""The compiled attention of a packed plan: one call per layer for all segments, straight on the cache."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from jetspec.native import library
from jetspec.target.cache import KVCache
from jetspec.target.plan import Plan

_LANES = 16


class SegmentsStruct(ctypes.Structure):
    """`segments` of native_attention.h."""

    _fields_ = (
        ("count", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("counts", ctypes.c_void_p),
        ("committed", ctypes.c_void_p),
        ("capacity", ctypes.c_void_p),
        ("blocks", ctypes.c_void_p),
        ("masks", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("longest", ctypes.c_int64),
    )


class NativeSegments:
    """A plan's segments as the kernel wants them: prepared once per forward."""

    def __init__(self, plan: Plan, cache: KVCache) -> None:
        segments = plan.segments
        self._kv_heads, self._dim = cache.kv_heads, cache.head_dim
        blocks = [cache.block(s.key) for s in segments]
        masks = [None if s.mask is None else s.mask.to(torch.uint8).contiguous() for s in segments]
        committed = [cache.length(s.key) for s in segments]
        table = torch.tensor(
            [
                [s.start for s in segments],
                [s.count for s in segments],
                committed,
                [block.shape[3] for block in blocks],
                [block.data_ptr() for block in blocks],
                [0 if mask is None else mask.data_ptr() for mask in masks],
            ],
            dtype=torch.int64,
            device="cpu",
        )
        positions = plan.positions.contiguous()
        self._alive = (blocks, masks, table, positions)  # the struct holds their addresses
        row = table.stride(0) * 8
        columns = [table.data_ptr() + n * row for n in range(6)]
        longest = max(n + s.count for n, s in zip(committed, segments, strict=True))
        self.struct = SegmentsStruct(len(segments), *columns, positions.data_ptr(), longest)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, layer: int, window: int | None) -> Tensor:
        """As `attention.attend`; a row sees at most the `window` latest positions."""
        total, heads, dim = q.shape
        q, k, v = (x if x.stride(2) == 1 and x.stride(1) == dim else x.contiguous() for x in (q, k, v))
        out = torch.empty(total, heads * dim, dtype=torch.float32, device="cpu")
        lib = library()
        assert lib is not None
        failed = lib.jetspec_attend(
            ctypes.byref(self.struct),
            layer,
            heads,
            self._kv_heads,
            dim,
            window or 0,
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            out.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for attention weights")
        return out


def native_suits(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether the compiled attention can run: on the CPU, in float32, with whole vectors per head, and
    built.
    """
    return (
        device.type == "cpu" and dtype == torch.float32 and head_dim % _LANES == 0 and library() is not None
    )


def native_segments(plan: Plan, cache: KVCache) -> NativeSegments | None:
    """The plan prepared for the kernel, or None where it cannot run."""
    return NativeSegments(plan, cache) if native_suits(cache.device, cache.dtype, cache.head_dim) else None
