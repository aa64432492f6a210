"""A stack of decoder layers in one compiled call (`native.c`), for the CPU in float32.

It computes what `transformer.Layer` computes, without the host's work between the operations, and with the
same bits for a row whatever the number of rows, the batch and the tree around it are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jetspec.native import library
from jetspec.target.cache import KVCache
from jetspec.target.config import ModelConfig
from jetspec.target.linear import Linear
from jetspec.target.native_attention import NativeSegments, SegmentsStruct, native_suits
from jetspec.target.packed import MatrixStruct
from jetspec.target.plan import Plan

if TYPE_CHECKING:
    from jetspec.target.transformer import Layer


class _LayerStruct(ctypes.Structure):
    _fields_ = (
        ("input_norm", ctypes.c_void_p),
        ("post_norm", ctypes.c_void_p),
        ("q_norm", ctypes.c_void_p),
        ("k_norm", ctypes.c_void_p),
        ("qkv", MatrixStruct),
        ("out", MatrixStruct),
        ("gate_up", MatrixStruct),
        ("down", MatrixStruct),
        ("window", ctypes.c_int64),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("layers", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("heads", ctypes.c_int64),
        ("kv_heads", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("rotary", ctypes.c_int64),
        ("inner", ctypes.c_int64),
        ("eps", ctypes.c_double),
        ("table", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("plan", SegmentsStruct),
        ("x", ctypes.c_void_p),
        ("taps", ctypes.c_void_p),
        ("tap_row", ctypes.c_int64),
        ("stages", ctypes.c_void_p),
    )


# The stages of a layer in the order of native.c's enum.
STAGES = ("norm", "qkv", "rotate and cache", "attention", "attention output", "gate and up", "down", "taps")


class NativeStack:
    """All layers of a decoder (a target's or a draft head's) for the compiled path."""

    def __init__(self, config: ModelConfig, layers: Many[Layer]) -> None:
        self._config, self._layers = config, list(layers)  # keeps the tensors alive
        self._norms = [
            None if norm is None else norm.contiguous()
            for layer in layers
            for norm in (layer.input_norm, layer.post_norm, layer.q_norm, layer.k_norm)
        ]
        entries = []
        for index, layer in enumerate(self._layers):
            norms = self._norms[4 * index : 4 * index + 4]
            matrices = [layer.qkv, layer.out, layer.mlp.gate_up, layer.mlp.down]
            entries.append(
                _LayerStruct(
                    *(None if norm is None else norm.data_ptr() for norm in norms),
                    *(matrix.native.struct for matrix in matrices),  # type: ignore[union-attr]
                    config.windows[layer.index] or 0,
                )
            )
        self._table = (_LayerStruct * len(entries))(*entries)
        self.stages: ctypes.Array[ctypes.c_int64] | None = None

    @contextmanager
    def profiled(self) -> Iterator[dict[str, float]]:
        """Within the block, forwards are timed by stage: seconds under the names of `STAGES`, filled in at
        its end.
        """
        self.stages = (ctypes.c_int64 * len(STAGES))()
        seconds: dict[str, float] = {}
        try:
            yield seconds
        finally:
            seconds.update(zip(STAGES, (1e-9 * n for n in self.stages), strict=True))
            self.stages = None

    @staticmethod
    def build(
        config: ModelConfig, layers: Many[Layer], dtype: torch.dtype, device: torch.device
    ) -> NativeStack | None:
        """The compiled stack, or None where some part of it cannot run here: other dtypes and devices,
        experts, heads of odd size, no compiler.
        """
        if not native_suits(device, dtype, config.head_dim):
            return None
        if not all(isinstance(layer.mlp.gate_up, Linear) for layer in layers):
            return None  # experts hold a list of them
        return NativeStack(config, layers)

    def run(
        self, x: Tensor, plan: Plan, cache: KVCache, rotary: tuple[Tensor, Tensor], taps: tuple[int, ...] = ()
    ) -> Tensor | None:
        """Run a plan; x [M, H] is updated in place. Returns the outputs of the layers `taps` side by side.

        rotary: cosine and sine [M, 1, rotary_dim].
        """
        config, rows = self._config, x.shape[0]
        assert x.is_contiguous() and x.dtype == torch.float32
        hidden = config.hidden_size
        cos, sin = (part.contiguous() for part in rotary)
        segments = NativeSegments(plan, cache)
        tapped = torch.empty(rows, len(taps) * hidden, dtype=torch.float32, device="cpu") if taps else None
        addresses = (ctypes.c_int64 * len(self._layers))()
        for place, index in enumerate(taps):
            assert tapped is not None
            addresses[index] = tapped.data_ptr() + 4 * place * hidden
        job = _Job(
            len(self._layers),
            hidden,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            cos.shape[-1],
            config.intermediate_size,
            config.rms_norm_eps,
            ctypes.addressof(self._table),
            rows,
            cos.data_ptr(),
            sin.data_ptr(),
            segments.struct,
            x.data_ptr(),
            ctypes.addressof(addresses),
            len(taps) * hidden,
            None if self.stages is None else ctypes.addressof(self.stages),
        )
        lib = library()
        assert lib is not None
        if lib.jetspec_layers(ctypes.byref(job)):
            raise MemoryError(f"no memory for a forward of {rows} rows")
        return tapped


def native_output(
    x: Tensor, norm: Tensor, eps: float, output: Linear, rows: Tensor | None, logits: bool = True
) -> tuple[Tensor, Tensor | None]:
    """Final norm and output matrix for the rows [n] of x [M, H], None for all: normed [n, H] and logits
    [n, V].
    """
    lib, matrix = library(), output.native
    assert lib is not None and matrix is not None and x.is_contiguous()
    index = None if rows is None else rows.contiguous()
    count = x.shape[0] if index is None else index.shape[0]
    hidden = torch.empty(count, x.shape[1], dtype=torch.float32, device="cpu")
    result = torch.empty(count, matrix.n, dtype=torch.float32, device="cpu") if logits else None
    lib.jetspec_output(
        norm.data_ptr(),
        eps,
        ctypes.byref(matrix.struct),
        x.data_ptr(),
        None if index is None else index.data_ptr(),
        count,
        hidden.data_ptr(),
        None if result is None else result.data_ptr(),
    )
    return hidden, result


def native_place(
    rows: Tensor, norm: Tensor, eps: float, rotary: tuple[Tensor, Tensor], block: Tensor, start: int
) -> None:
    """Norm and rotate keys of all layers, and write them and their values into a cache block [layers, 2,
    kv_heads, capacity, dim] from row `start` on.

    rows: [n, 2, layers * kv_heads, dim], keys before values, not yet normed; norm: [layers * kv_heads, dim];
    rotary: cosine and sine [n, 1, rotary_dim].
    """
    layers, _, kv_heads, capacity, dim = block.shape
    count = rows.shape[0]
    cos, sin = (part.contiguous() for part in rotary)
    assert all(x.dtype == torch.float32 and x.is_contiguous() for x in (rows, norm, block))
    assert rows.shape == (count, 2, layers * kv_heads, dim) and norm.shape == (layers * kv_heads, dim)
    assert cos.shape[0] == count and start + count <= capacity
    lib = library()
    assert lib is not None
    pointers = (x.data_ptr() for x in (rows, norm, cos, sin, block))
    lib.jetspec_place(*pointers, count, layers, kv_heads, dim, cos.shape[-1], capacity, start, eps)
