"""The compiled product against `F.linear` in float64, and its promise that a row does not depend on its
company.

Tolerance of the parity tests: a float32 sum of K products of values near 1 has an error near sqrt(K) * 2^-24,
about 3e-6 for the largest K here; the bound is 3e-5. A wrong panel, tail or row moves a result by about 1.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from jetspec.native import bindings, build, native_available
from jetspec.target import packed
from jetspec.target.linear import Linear
from jetspec.target.packed import PackedMatrix, narrowest

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")
SHAPES = [(32, 16), (33, 7), (1, 1), (576, 576), (100, 1536), (95, 130)]
ROWS = [1, 2, 3, 4, 5, 7, 8, 11, 12, 13, 16, 23, 24, 25, 32, 47, 64, 130]


def _reference(weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, gated: bool) -> torch.Tensor:
    y = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    if not gated:
        return y
    gate, up = y.chunk(2, dim=-1)
    return F.silu(gate) * up


@pytest.fixture(params=["this machine", "AVX2"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The library as built for this machine, and as an older processor would get it."""
    if request.param == "AVX2":
        compiler = shutil.which("cc")
        if compiler is None or "avx2" not in Path("/proc/cpuinfo").read_text():
            pytest.skip("no AVX2 here")
        flags = tuple("-march=x86-64-v3" if f == "-march=native" else f for f in build.FLAGS)
        monkeypatch.setattr(build, "FLAGS", flags)
        library = bindings.library.__wrapped__.__globals__["load_library"].__wrapped__("native")
        assert library is not None
        monkeypatch.setattr(bindings, "load_library", lambda name: library)
        declared = bindings.library.__wrapped__()
        monkeypatch.setattr(packed, "library", lambda: declared)
    yield request.param


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [False, True])
def test_equals_linear_in_float64(kernels: str, dtype: torch.dtype, gated: bool) -> None:
    """Guards panels, tails of N, K and M, biases, and the widening of 16-bit weights."""
    torch.manual_seed(0)
    for n, k in SHAPES:
        if gated:
            n *= 2
        weight = torch.randn(n, k).to(dtype)
        bias = torch.randn(n) if k % 2 else None
        matrix = PackedMatrix(weight, bias, gated=gated)
        for rows in ROWS:
            x = torch.randn(rows, k)
            got, wanted = matrix.product(x), _reference(weight, bias, x, gated)
            scale = wanted.abs().max().clamp(min=1.0)
            assert ((got.double() - wanted).abs().max() / scale) < 3e-5, (n, k, rows)


@pytest.mark.parametrize("gated", [False, True])
def test_a_row_has_the_same_bits_whatever_m_is(kernels: str, gated: bool) -> None:
    """Guards row invariance, on which exact losslessness rests: every M from 1 to 64, every place."""
    torch.manual_seed(1)
    for n, k in ((576, 576), (96, 1536), (38, 130)):
        matrix = PackedMatrix(torch.randn(n, k), torch.randn(n), gated=gated)
        x = torch.randn(64, k)
        alone = torch.cat([matrix.product(row.unsqueeze(0)) for row in x])
        for rows in range(2, 65):
            start = (64 - rows) // 2
            assert torch.equal(matrix.product(x[start : start + rows]), alone[start : start + rows])


def test_threads_do_not_change_bits() -> None:
    """Guards a split of sums over threads: another number of cores must not change a text."""
    torch.manual_seed(2)
    matrix, x = PackedMatrix(torch.randn(300, 257)), torch.randn(9, 257)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            results.append(matrix.product(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_weights_give_the_bits_of_wide_ones(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the saving of memory traffic: a model must not change because its weights fit 16 bits."""
    torch.manual_seed(3)
    weight, x = torch.randn(70, 90).to(dtype).float(), torch.randn(5, 90)
    narrow = PackedMatrix(weight)
    assert narrow.data.dtype == dtype
    monkeypatch.setattr(packed, "narrowest", lambda w: w)
    wide = PackedMatrix(weight)
    assert wide.data.dtype == torch.float32
    assert torch.equal(narrow.product(x), wide.product(x))


def test_weights_that_need_float32_stay() -> None:
    """Guards a lossy saving: one value that 16 bits cannot hold, at the end, where a sample would miss it."""
    weight = torch.ones(100, 100)
    weight[-1, -1] = 1.0 + 2.0**-20
    assert narrowest(weight).dtype == torch.float32
    weight[-1, -1] = 1e-30  # underflows in float16, but is no bfloat16 value either
    assert narrowest(weight).dtype == torch.float32
    weight[-1, -1] = 70000.0  # float16 overflows; bfloat16 has too few digits
    assert narrowest(weight).dtype == torch.float32


def test_strided_rows() -> None:
    """Guards views: rows of a wider tensor, and columns that are not next to each other."""
    torch.manual_seed(4)
    matrix = PackedMatrix(torch.randn(40, 20))
    wide = torch.randn(6, 50)
    assert torch.equal(matrix.product(wide[:, 10:30]), matrix.product(wide[:, 10:30].contiguous()))
    turned = torch.randn(20, 6)
    assert torch.equal(matrix.product(turned.T), matrix.product(turned.T.contiguous()))


def test_values_that_are_no_numbers_show() -> None:
    """Guards a damaged model: NaN and infinity must reach the result and not be lost in the vector code."""
    weight = torch.ones(33, 8)
    weight[32, 3] = float("nan")
    assert PackedMatrix(weight).product(torch.ones(1, 8)).isnan().tolist() == [[False] * 32 + [True]]
    weight[32, 3] = float("inf")
    assert PackedMatrix(weight).product(torch.ones(1, 8))[0, 32] == float("inf")


def test_large_gates_do_not_overflow() -> None:
    """Guards exp in silu: far to the left it is -0, far to the right the identity, never NaN."""
    weight = torch.tensor([[1000.0], [-1000.0], [1.0], [1.0]])  # gates, then ups
    got = PackedMatrix(weight, gated=True).product(torch.tensor([[1.0]]))
    assert got[0, 0] == 1000.0 and abs(got[0, 1]) < 1e-30


def test_linear_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the fallbacks: oneDNN's packed product and plain torch, gated or not, give the same values."""
    torch.manual_seed(5)
    weight, bias, x = torch.randn(256, 128), torch.randn(256), torch.randn(3, 128)
    for gated in (False, True):
        wanted = _reference(weight, bias, x, gated)
        compiled = Linear(weight, bias, gated=gated)
        assert compiled.native is not None
        monkeypatch.setattr("jetspec.target.linear.native_available", lambda: False)
        onednn, plain = Linear(weight, bias, gated=gated), Linear(weight, bias, gated=gated, pack=False)
        assert onednn.native is None and not plain.packed
        for linear in (compiled, onednn, plain):
            assert (linear(x).double() - wanted).abs().max() < 3e-4
            assert (linear(x[:1]).double() - wanted[:1]).abs().max() < 3e-4
        monkeypatch.undo()


def test_builds_without_warnings(tmp_path: Path) -> None:
    """Guards the C code against what a compiler can see: -Wall -Wextra -Wconversion of its own sums."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc")
    source = Path(build.__file__).with_name("native.c")
    command = [
        compiler,
        *build.FLAGS,
        "-Wall",
        "-Wextra",
        "-c",
        str(source),
        "-o",
        str(tmp_path / "native.o"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stderr == "", done.stderr
