"""The kernels of sampling and training as an older processor gets them, beside those of this machine."""

from __future__ import annotations

import ctypes
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from jetspec import cuts, noise
from jetspec.native import bindings, build, native_available
from jetspec.train import elementwise

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")
SIZES = (1, 15, 16, 33, 5000)


@pytest.fixture(params=["x86-64-v3", "x86-64"])
def older(request: pytest.FixtureRequest) -> Iterator[ctypes.CDLL]:
    """A build without AVX-512, or without any AVX."""
    if shutil.which("cc") is None or "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("no x86-64-v3 here")
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple(f"-march={request.param}" if f == "-march=native" else f for f in build.FLAGS)
        patch.setattr(build, "FLAGS", flags)
        loaded = build.load_library.__wrapped__("native")
        assert loaded is not None
        patch.setattr(bindings, "load_library", lambda name: loaded)
        declared = bindings.library.__wrapped__()
        assert declared is not None
        yield declared


def both(operation: Callable[[], Tensor], lib: ctypes.CDLL) -> tuple[Tensor, Tensor]:
    """What this machine's build makes, and what the older one makes."""
    own = operation()
    with pytest.MonkeyPatch.context() as patch:
        for module in (noise, cuts, elementwise):
            patch.setattr(module, "library", lambda: lib)
        return own, operation()


def test_noise_and_picks(older: ctypes.CDLL) -> None:
    """Guards integers and float64 logarithms without the wide instructions."""
    for size in SIZES:
        own, other = both(lambda size=size: noise.gumbel_noise([3, 4], torch.tensor([5, 6]), size), older)
        assert torch.equal(own, other)
        logits = torch.randn(2, size)

        def pick(logits: Tensor = logits) -> Tensor:
            found = noise.pick_with_noise(logits, 0.7, [3, 4], [5, 6])
            assert found is not None
            return found

        assert torch.equal(*both(pick, older))


@pytest.mark.parametrize("options", [(3, 1.0, 0.0), (0, 0.8, 0.0), (0, 1.0, 0.05), (40, 0.9, 0.01)])
def test_cuts(older: ctypes.CDLL, options: tuple[int, float, float]) -> None:
    """Guards selection, the sort, and float64 masses."""
    for size in SIZES:
        scores = torch.randn(3, size) * 2

        def cut(scores: Tensor = scores) -> Tensor:
            left = scores.clone()
            cuts.keep_likely(left, *options)
            return left

        assert torch.equal(*both(cut, older))


def test_norms_and_gates(older: ctypes.CDLL) -> None:
    """Guards the gradients; without fused products they differ in the last bits."""
    x, weight = torch.randn(300, 48, requires_grad=True), torch.rand(48, requires_grad=True)

    def learn() -> Tensor:
        x.grad = weight.grad = None
        y = elementwise.silu_gate(elementwise.rms_norm(x, weight, 1e-5), x)
        (y * y).sum().backward()
        assert x.grad is not None and weight.grad is not None
        return torch.cat([y.detach(), x.grad, weight.grad[None]])

    own, other = both(learn, older)
    torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)  # sums of 300 rows of up to 100
