"""Matrix products with frozen weights.

Verification multiplies 2 to 64 rows at a time, where the default kernel re-packs the weight on every call.
Packing it once for oneDNN's inner product is measurably faster there (`benchmarks/forward.py` prints the
curve) and stays so up to prefill sizes. One row is computed as two, one of them zero: the packed kernel has
no fast path for a single row, and reading the weights costs the same. Other dtypes and devices use plain
`F.linear`; both give the same product up to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_PACK_FOR_ROWS = 16  # the M that the layout is chosen for; it serves every other M equally well
_SMALLEST_PACKED = 1 << 14  # weights with fewer elements gain nothing


def packing_available() -> bool:
    """Whether this build of torch has oneDNN's packed product."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


class Linear:
    """y = x W^T + b for a frozen weight [N, K]; x [M, K] -> y [M, N]."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, pack: bool = True) -> None:
        self.bias = bias
        self.shape = (weight.shape[0], weight.shape[1])
        self._weight: Tensor | None = None
        self._packed: Tensor | None = None
        suitable = (
            weight.device.type == "cpu"
            and weight.dtype == torch.float32
            and weight.numel() >= _SMALLEST_PACKED
        )
        if pack and suitable and packing_available():
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        else:
            self._weight = weight.contiguous()

    def __call__(self, x: Tensor) -> Tensor:
        if self._packed is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        if x.shape[0] == 1:
            return self._product(torch.cat([x, torch.zeros_like(x)]))[:1]
        return self._product(x)

    def _product(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
