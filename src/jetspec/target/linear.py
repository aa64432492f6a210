"""Matrix products with frozen weights.

Verification multiplies 2 to 64 rows at a time, where the default kernel re-packs the weight on every call. So
the weight is packed once, for the first of these that runs here:

- the compiled kernel (`native_product.h`), which reads each weight once whatever the number of rows is, and
  gives every row the same bits in any company;
- oneDNN's packed product, where there is no compiler;
- plain `F.linear` for other dtypes and devices.

All give the same product up to rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.native import native_available
from jetspec.target.packed import PackedMatrix

_PACK_FOR_ROWS = 16  # the M that oneDNN's layout is chosen for; it serves every other M equally well
_SMALLEST_PACKED = 1 << 14  # weights with fewer elements gain nothing from oneDNN


def onednn_available() -> bool:
    """Whether this build of torch has oneDNN's packed product."""
    return bool(torch.backends.mkldnn.is_available()) and hasattr(torch.ops.mkldnn, "_linear_pointwise")


def in_half(weight: Tensor) -> Tensor:
    """The nearest values that half precision holds, for a head's output: the compiled kernel then reads half
    as much of the matrix that is most of what a draft reads, and a draft may be approximate. A weight of
    another type, or out of half precision's range, stays as it is.
    """
    if weight.dtype != torch.float32:
        return weight
    half = weight.half()
    return half.float() if bool(half.isfinite().all()) else weight


class Linear:
    """y = x W^T + b for a frozen weight [N, K]; x [M, K] -> y [M, N].

    With `gated`, W is two matrices on top of each other and y = silu(x W_1^T + b_1) * (x W_2^T + b_2).
    """

    def __init__(
        self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False, pack: bool = True
    ) -> None:
        self.bias, self.gated = bias, gated
        self.shape = (weight.shape[0], weight.shape[1])
        self.native: PackedMatrix | None = None
        self._weight: Tensor | None = None
        self._onednn: Tensor | None = None
        packable = pack and weight.device.type == "cpu" and weight.dtype == torch.float32
        if packable and native_available():
            self.native = PackedMatrix(weight, bias, gated=gated)
        elif packable and weight.numel() >= _SMALLEST_PACKED and onednn_available():
            self._onednn = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACK_FOR_ROWS)
        else:
            self._weight = weight.contiguous()

    @property
    def packed(self) -> bool:
        """Whether the weight lies packed, for either kernel."""
        return self.native is not None or self._onednn is not None

    def __call__(self, x: Tensor) -> Tensor:
        if self.native is not None:
            return self.native.product(x)
        y = self._product(x)
        if not self.gated:
            return y
        gate, up = y.chunk(2, dim=-1)
        return F.silu(gate) * up

    def _product(self, x: Tensor) -> Tensor:
        if self._onednn is None:
            assert self._weight is not None
            return F.linear(x, self._weight, self.bias)
        if x.shape[0] == 1:
            # The packed kernel has no fast path for one row; two cost the same: the weights are read once.
            return self._packed(torch.cat([x, torch.zeros_like(x)]))[:1]
        return self._packed(x)

    def _packed(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._onednn, self.bias, "none", [], "")
