"""Norms and gates of a draft head in training. On the CPU in float32 they are compiled, forward and backward.

Torch puts a norm's gradient together from a dozen operators, each of which reads and writes all rows; with
`native_train.h` it is one walk. Same values up to rounding, and the same bits for any number of threads.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from jetspec.native import library

_LANES = 16


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight, the mean over the last axis: [..., width]."""
    if not _suits(x, weight) or x.shape[-1] % _LANES:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    normed: Tensor = _Norm.apply(x, weight, eps)  # type: ignore[no-untyped-call]
    return normed


def silu_gate(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, of one shape."""
    if not _suits(gate, up):
        return F.silu(gate) * up
    gated: Tensor = _Gate.apply(gate, up)  # type: ignore[no-untyped-call]
    return gated


def _suits(*tensors: Tensor) -> bool:
    on_cpu = all(x.device.type == "cpu" and x.dtype == torch.float32 for x in tensors)
    return on_cpu and library() is not None


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        width = x.shape[-1]
        y, inverse = torch.empty_like(x), x.new_empty(x.numel() // width)
        lib = library()
        assert lib is not None
        lib.jetspec_norm(
            x.data_ptr(), weight.data_ptr(), eps, len(inverse), width, y.data_ptr(), inverse.data_ptr()
        )
        ctx.save_for_backward(x, weight, inverse)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, inverse = ctx.saved_tensors
        dy = dy.contiguous()
        dx = torch.empty_like(x) if ctx.needs_input_grad[0] else None
        weight_grad = torch.empty_like(weight)
        lib = library()
        assert lib is not None
        failed = lib.jetspec_norm_back(
            dy.data_ptr(),
            x.data_ptr(),
            weight.data_ptr(),
            inverse.data_ptr(),
            len(inverse),
            x.shape[-1],
            None if dx is None else dx.data_ptr(),
            weight_grad.data_ptr(),
        )
        if failed:
            raise MemoryError("no memory for the gradient of a norm")
        return dx, weight_grad, None


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        assert gate.shape == up.shape
        y = torch.empty_like(gate)
        lib = library()
        assert lib is not None
        lib.jetspec_gate(gate.data_ptr(), up.data_ptr(), gate.numel(), y.data_ptr())
        ctx.save_for_backward(gate, up)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        dy = dy.contiguous()
        d_gate, d_up = torch.empty_like(gate), torch.empty_like(up)
        lib = library()
        assert lib is not None
        lib.jetspec_gate_back(
            dy.data_ptr(), gate.data_ptr(), up.data_ptr(), gate.numel(), d_gate.data_ptr(), d_up.data_ptr()
        )
        return d_gate, d_up
