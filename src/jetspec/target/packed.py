"""A frozen matrix packed for the compiled product (`native_product.h`).

Weights that are exact in 16 bits are kept in 16 bits: they widen to the same float32 values while they are
read, so results do not change and a product moves half the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import statistics
import threading
import time
from typing import ClassVar

import torch
from torch import Tensor

from jetspec.native import library

_PANEL = 32
_ALIGNMENT = 64  # bytes
_KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
STORE, ADD, GATE = 0, 1, 2


class MatrixStruct(ctypes.Structure):
    """`matrix` of native_product.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("kind", ctypes.c_int64),
        ("gated", ctypes.c_int64),
    )


class PackedMatrix:
    """y = x W^T + b for W [N, K], bias [N]; with `gated`, y = silu(x W_1^T) * (x W_2^T) for the halves of W.

    Requires `native_available()`; W on the CPU, float32 or a 16-bit type that the machine can read.
    """

    # While a profile runs: seconds by name of the matrix, for those that are called one by one.
    clock: ClassVar[dict[str, float] | None] = None

    def __init__(self, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> None:
        lib = _library()
        self.n, self.k, self.gated = weight.shape[0], weight.shape[1], gated
        self.name = f"{self.n} x {self.k}"
        weight = narrowest(weight).contiguous()
        self.struct = MatrixStruct(None, None, self.n, self.k, _KINDS[weight.dtype], int(gated))
        count = int(lib.jetspec_packed_elements(ctypes.byref(self.struct)))
        self.data = _arena.take(count, weight.dtype)
        lib.jetspec_pack(ctypes.byref(self.struct), weight.data_ptr(), self.data.data_ptr())
        self.struct.data = self.data.data_ptr()
        self.bias = None if bias is None else self._packed_bias(bias)
        if self.bias is not None:
            self.struct.bias = self.bias.data_ptr()

    @property
    def bytes(self) -> int:
        """What one product reads of the weight."""
        return self.data.numel() * self.data.element_size()

    @property
    def width(self) -> int:
        """Columns of the result."""
        return self.n // 2 if self.gated else self.n

    def product(self, x: Tensor) -> Tensor:
        """x [M, K] float32 -> [M, N], or [M, N / 2] if gated."""
        assert x.dtype == torch.float32 and x.ndim == 2 and x.shape[1] == self.k, (x.dtype, x.shape, self.k)
        if x.stride(1) != 1:
            x = x.contiguous()
        out = torch.empty(x.shape[0], self.width, dtype=torch.float32, device="cpu")
        mode = GATE if self.gated else STORE
        start = time.perf_counter() if PackedMatrix.clock is not None else 0.0
        _library().jetspec_product(
            ctypes.byref(self.struct), x.data_ptr(), x.stride(0), x.shape[0], mode, out.data_ptr(), self.width
        )
        if PackedMatrix.clock is not None:
            spent = PackedMatrix.clock
            spent[self.name] = spent.get(self.name, 0.0) + time.perf_counter() - start
        return out

    def _packed_bias(self, bias: Tensor) -> Tensor:
        """[panels * 32], in the order of the packed outputs."""
        bias = bias.float()
        if self.gated:
            half = self.n // 2
            padding = -half % (_PANEL // 2)
            halves = torch.nn.functional.pad(bias.view(2, half), (0, padding))
            return halves.view(2, -1, _PANEL // 2).transpose(0, 1).reshape(-1).contiguous()
        return torch.nn.functional.pad(bias, (0, -self.n % _PANEL)).contiguous()


def narrowest(weight: Tensor) -> Tensor:
    """The weight in 16 bits where that changes no value and the machine can read it; else as it is."""
    if weight.dtype != torch.float32:
        return weight
    readable = _library().jetspec_kinds()
    for bit, dtype in ((2, torch.bfloat16), (4, torch.float16)):
        if readable & bit and _exact_in(weight.flatten()[:4096], dtype) and _exact_in(weight, dtype):
            return weight.to(dtype)
    return weight


def _exact_in(weight: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(weight.to(dtype).float(), weight)


class _Arena:
    """Memory for packed weights in large pieces, on huge pages where the system has them: a product then
    spends no time on address translation. A piece is given back when the last tensor in it is gone.
    """

    PIECE = 1 << 26

    def __init__(self) -> None:
        self._piece: mmap.mmap | None = None
        self._used = 0
        self._lock = threading.Lock()

    def take(self, count: int, dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor [count] that begins at a multiple of 64 bytes. Raises MemoryError."""
        size = max(1, count) * torch.empty(0, dtype=dtype).element_size()
        with self._lock:
            if self._piece is None or self._used + size > len(self._piece):
                self._piece, self._used = _mapping(max(size, self.PIECE)), 0
            start = self._used
            self._used += size + -size % _ALIGNMENT
            return torch.frombuffer(self._piece, dtype=dtype, count=count, offset=start)

    def close_piece(self) -> None:
        """What comes next begins a piece of its own."""
        with self._lock:
            self._piece = None


def _mapping(size: int) -> mmap.mmap:
    try:
        mapping = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for weights of {size} bytes") from error
    with contextlib.suppress(OSError, AttributeError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return mapping


_arena = _Arena()


class ReadProbe:
    """Measures how fast all threads together read memory that no cache holds.

    Take medians of several reads, spread over the time of what they are compared with: the speed of a shared
    machine's memory comes and goes.
    """

    def __init__(self, megabytes: int = 512) -> None:
        self._block = _arena.take(megabytes << 18, torch.float32)
        self._block.fill_(1.0)

    def read(self) -> float:
        """Bytes per second of one read of the block."""
        start = time.perf_counter()
        _library().jetspec_read(self._block.data_ptr(), self._block.numel())
        return self._block.numel() * 4 / (time.perf_counter() - start)


def product_speed(rows: int = 252, repeats: int = 9) -> float:
    """Floating-point operations per second of a large product: the median of some runs."""
    matrix, x = PackedMatrix(torch.rand(3072, 576) + 0.1), torch.rand(rows, 576)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        matrix.product(x)
        seconds.append(time.perf_counter() - start)
    return 2 * rows * 3072 * 576 / statistics.median(seconds)


def own_memory() -> None:
    """Call before a model's first matrix and behind its last: its memory then goes with it, and does not
    hang on a neighbour's.
    """
    _arena.close_piece()


def _library() -> ctypes.CDLL:
    found = library()
    assert found is not None, "ask native_available() first"
    return found
