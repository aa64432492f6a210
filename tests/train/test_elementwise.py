"""The compiled norm and gate against torch's, value and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.native import native_available
from jetspec.train import elementwise
from jetspec.train.elementwise import rms_norm, silu_gate

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")
EPS = 1e-5
# Against float64: sums of up to 300 rows of about 10 in float32, so some 300 roundings of 6e-8.
NORM = 2e-5
GATE = 2e-6  # single products of numbers up to 20, and an exp that is right to 3e-7
Operation = Callable[[Tensor, Tensor], Tensor]


def torch_norm(x: Tensor, weight: Tensor) -> Tensor:
    """The norm by torch's operators."""
    return F.rms_norm(x, (x.shape[-1],), weight, EPS)


def torch_gate(gate: Tensor, up: Tensor) -> Tensor:
    """The gate by torch's operators."""
    return F.silu(gate) * up


def learn(operation: Operation, one: Tensor, other: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    """Value and both gradients."""
    leaves = [x.detach().clone().requires_grad_() for x in (one, other)]
    y = operation(*leaves)
    y.backward(dy)
    return (y.detach(), *(x.grad for x in leaves))  # type: ignore[arg-type]


def used(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """A list that gets longer whenever the compiled function is called."""
    calls: list[int] = []
    apply = getattr(elementwise, name).apply

    def counted(*args: object) -> object:
        calls.append(1)
        return apply(*args)

    monkeypatch.setattr(getattr(elementwise, name), "apply", counted)
    return calls


@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 48), (300, 64), (2, 129, 4, 32), (0, 16)])
def test_the_norm_is_torchs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards value and gradients, at the borders of the parts that threads share as well."""
    calls = used(monkeypatch, "_Norm")
    torch.manual_seed(0)
    x, dy, weight = torch.randn(shape) * 3, torch.randn(shape), torch.rand(shape[-1]) + 0.5
    found = learn(lambda x, w: rms_norm(x, w, EPS), x, weight, dy)
    wanted = learn(torch_norm, x.double(), weight.double(), dy.double())
    assert calls
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other.float(), rtol=NORM, atol=NORM)


@pytest.mark.parametrize("shape", [(1,), (17,), (3, 5, 7), (9000,), (0, 4)])
def test_the_gate_is_torchs(shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards value and gradients where the last vector is not full, and at gates that overflow exp."""
    calls = used(monkeypatch, "_Gate")
    torch.manual_seed(1)
    gate, up, dy = torch.randn(shape) * 4, torch.randn(shape), torch.randn(shape)
    if gate.numel() > 2:
        gate.view(-1)[:3] = torch.tensor([-120.0, 120.0, 0.0])
    found = learn(silu_gate, gate, up, dy)
    wanted = learn(torch_gate, gate.double(), up.double(), dy.double())
    assert calls
    for own, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(own, other.float(), rtol=GATE, atol=GATE)


@pytest.mark.parametrize("operation", [lambda x, w: rms_norm(x, w[0], EPS), silu_gate])
def test_bits_do_not_depend_on_the_number_of_threads(operation: Operation) -> None:
    """Guards the promise of a resumed training: sums are added in one order."""
    torch.manual_seed(2)
    one, other, dy = torch.randn(3, 1000, 64).unbind()
    threads = torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        found.append(learn(operation, one, other, dy))
    torch.set_num_threads(threads)
    for later in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], later, strict=True))


def test_layouts_and_types_that_the_kernel_lacks() -> None:
    """Guards strided input, expanded gradients, and what must go torch's way."""
    x = torch.randn(32, 5).T.requires_grad_()
    weight = torch.rand(32, requires_grad=True)
    rms_norm(x, weight, EPS).sum().backward()  # sum: a gradient whose strides are 0
    wide = x.detach().double().requires_grad_()
    assert rms_norm(wide, weight.detach().double(), EPS).dtype == torch.float64
    torch_norm(wide, weight.detach().double()).sum().backward()
    torch.testing.assert_close(x.grad, wide.grad.float(), rtol=NORM, atol=NORM)  # type: ignore[union-attr]
    odd = torch.randn(3, 7)
    torch.testing.assert_close(rms_norm(odd, torch.ones(7), EPS), torch_norm(odd, torch.ones(7)))
    gate = torch.randn(4, 6)[:, ::2]
    torch.testing.assert_close(silu_gate(gate, gate + 1), torch_gate(gate, gate + 1))


def test_a_frozen_input_gets_no_gradient() -> None:
    """Guards the norm of features: only its weight learns."""
    weight = torch.ones(16, requires_grad=True)
    x = torch.randn(4, 16)
    rms_norm(x, weight, EPS).backward(torch.ones(4, 16))
    torch.testing.assert_close(weight.grad, (torch_norm(x, torch.ones(16))).sum(0))
