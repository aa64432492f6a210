"""The fused loss is the readable one, in value and gradients, without its memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from jetspec.train import loss as loss_module
from jetspec.train.loss import depth_weights, fused_kl, reference_kl

ROWS, TEACHERS, HIDDEN, RANK, WIDTH = 37, 11, 12, 5, 29


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    torch.set_num_threads(1)


def inputs(dtype: torch.dtype, scorer: bool, zero_rows: bool = True) -> dict[str, Any]:
    """Random arguments of a loss; every third row has weight 0 if wanted."""
    weight = torch.rand(ROWS, dtype=dtype) + 0.1
    if zero_rows:
        weight[::3] = 0.0
    return {
        "hidden": torch.randn(ROWS, HIDDEN, dtype=dtype, requires_grad=True),
        "terms": torch.randn(ROWS, RANK, dtype=dtype, requires_grad=True) if scorer else None,
        "child_rows": torch.randn(WIDTH, RANK, dtype=dtype, requires_grad=True) if scorer else None,
        "output": torch.randn(WIDTH, HIDDEN, dtype=dtype),
        "teacher": torch.randn(TEACHERS, HIDDEN, dtype=dtype),
        "teacher_row": torch.randint(0, TEACHERS, (ROWS,)),
        "weight": weight,
    }


def gradients(loss: Tensor, given: dict[str, Any]) -> list[Tensor]:
    """Of everything that is trained."""
    leaves = [given[name] for name in ("hidden", "terms", "child_rows") if given[name] is not None]
    return list(torch.autograd.grad(loss * 1.7, leaves))  # a factor, as a later operation would bring


@pytest.mark.parametrize("zero_rows", [True, False], ids=["zero-weights", "all-weights"])
@pytest.mark.parametrize("scorer", [True, False], ids=["scorer", "plain"])
@pytest.mark.parametrize("chunk", [1, 5, 512])
def test_fused_equals_reference(
    chunk: int, scorer: bool, zero_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the hand-written gradient: its sign, its scale, rows of weight 0 and chunk boundaries."""
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    given = inputs(torch.float64, scorer, zero_rows)
    slow, fast = reference_kl(**given), fused_kl(**given)
    assert torch.allclose(slow.loss, fast.loss, rtol=1e-12)
    counted = given["weight"] > 0
    assert torch.allclose(slow.per_row[counted], fast.per_row[counted], rtol=1e-10)
    assert torch.equal(slow.agree[counted], fast.agree[counted])
    assert not fast.per_row[~counted].any() and not fast.agree[~counted].any()
    for a, b in zip(gradients(slow.loss, given), gradients(fast.loss, given), strict=True):
        assert a.abs().max() > 1e-4
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)


def test_float32_is_as_good_as_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cancellation in the closed form: compared with float64, the error stays within a few
    hundred units in the last place (1e-7) of the largest gradient, as sums of 29 to 37 terms allow."""
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", 8)
    single = inputs(torch.float32, True)
    double = {
        name: x.detach().double().requires_grad_(x.requires_grad) if x.is_floating_point() else x
        for name, x in single.items()
    }
    exact, found = reference_kl(**double), fused_kl(**single)
    assert abs(exact.loss.item() - found.loss.item()) < 1e-5 * exact.loss.item()
    for a, b in zip(gradients(exact.loss, double), gradients(found.loss, single), strict=True):
        assert (a - b.double()).abs().max() < 3e-5 * a.abs().max()


def test_parts_add_up_to_the_whole() -> None:
    """Guards gradient accumulation: parts divided by the weight of the whole batch, not by their own."""
    given = inputs(torch.float64, True)
    whole = fused_kl(**given)
    total = float(given["weight"].sum())
    losses = []
    for rows in (slice(0, 10), slice(10, ROWS)):
        part = {
            k: v[rows] if k in ("hidden", "terms", "teacher_row", "weight") else v for k, v in given.items()
        }
        losses.append(fused_kl(**part, total=total).loss)
    assert torch.allclose(sum(losses, torch.zeros(())), whole.loss, rtol=1e-12)
    parts = gradients(losses[0] + losses[1], given)
    for a, b in zip(gradients(whole.loss, given), parts, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-13)


class _Largest(TorchDispatchMode):
    """Notes the size of the largest tensor that any operation makes."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


def test_memory_does_not_grow_with_rows_times_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the reason for the fused loss: neither the head's logits nor the teacher's exist as a whole."""
    rows, width, chunk = 800, 300, 16
    monkeypatch.setattr(loss_module, "CHUNK_ROWS", chunk)
    hidden = torch.randn(rows, 4, requires_grad=True)
    teacher, output = torch.randn(rows, 4), torch.randn(width, 4)
    arguments = (hidden, None, None, output, teacher, torch.randperm(rows), torch.ones(rows))
    with _Largest() as fused:
        fused_kl(*arguments).loss.backward()
    assert fused.numel <= chunk * width, fused.numel
    with _Largest() as dense:
        reference_kl(*arguments).loss.backward()
    assert dense.numel >= rows * width


def test_depth_weights() -> None:
    """Guards the meaning of `decay`: 1 for the first slot, falling by e every `decay` slots, or uniform."""
    weights = depth_weights(5, 4.0)
    assert weights[0] == 1.0 and torch.allclose(weights[4], torch.tensor(-1.0).exp())
    assert depth_weights(3, 0).tolist() == [1.0, 1.0, 1.0]
