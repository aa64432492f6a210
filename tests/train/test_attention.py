"""Attention of blocks in training, against the plain formula."""

from __future__ import annotations

import math
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.train import attention
from jetspec.train.attention import Anchors, block_attention
from tests.helpers import CountedCalls

KV, DIM, BLOCK, LENGTH = 2, 4, 3, 11


def _plain(
    q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor, anchors: Tensor, causal: bool
) -> Tensor:
    """One slot and one head after the other."""
    out = torch.zeros_like(q)
    groups = q.shape[3] // k.shape[3]
    for n, row in enumerate(anchors.tolist()):
        for a, anchor in enumerate(row):
            for slot in range(q.shape[2]):
                seen = slot + 1 + k.shape[2] - q.shape[2] if causal else k.shape[2]
                for head in range(q.shape[3]):
                    own = head // groups
                    keys = torch.cat([context_k[n, :anchor, own], k[n, a, :seen, own]])
                    values = torch.cat([context_v[n, :anchor, own], v[n, a, :seen, own]])
                    law = (keys @ q[n, a, slot, head] / math.sqrt(q.shape[4])).softmax(0)
                    out[n, a, slot, head] = law @ values
    return out


def _inputs(groups: int, slots: int = BLOCK, size: float = 1.0) -> list[Tensor]:
    torch.manual_seed(0)
    anchors = 5
    shapes = [
        (2, anchors, slots, KV * groups, DIM),
        *[(2, LENGTH, KV, DIM)] * 2,
        *[(2, anchors, BLOCK, KV, DIM)] * 2,
    ]
    return [(size * torch.randn(*s, dtype=torch.float64)).requires_grad_() for s in shapes]


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("groups, slots", [(1, BLOCK), (3, BLOCK), (3, BLOCK - 1)])
@pytest.mark.parametrize("chunk", [1, 400, 1000, 2**22])
@pytest.mark.parametrize("launches", [False, True], ids=["cpu", "gpu"])
def test_value_and_gradients_are_those_of_the_formula(
    monkeypatch: pytest.MonkeyPatch, causal: bool, groups: int, slots: int, chunk: int, launches: bool
) -> None:
    """A wrong order of heads, a mask off by one where the first slots are left out, a gradient that a chunk
    overwrites instead of adding, or answers that are mixed up where several go at once."""
    for name in ("_SCORES", "_SCORES_CUDA"):
        monkeypatch.setattr(attention, name, chunk)
    monkeypatch.setattr(attention, "_launches", lambda x: launches)
    inputs = _inputs(groups, slots)
    anchors = torch.tensor([[0, 3, 3, 7, 10], [9, 1, 4, 0, 2]])  # also no context, and not ascending
    weights = torch.randn_like(inputs[0])
    found = []
    for value in (_plain(*inputs, anchors, causal), block_attention(*inputs, Anchors.of(anchors), causal)):
        found.append([value, *torch.autograd.grad((value * weights).sum(), inputs)])
    for plain, fused in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=1e-10, atol=1e-12)


def test_a_gpu_is_called_as_often_whatever_the_number_of_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards launches: answer by answer they took a GPU longer than the arithmetic. Nothing is asked of it
    meanwhile, which would wait for its queue."""
    monkeypatch.setattr(attention, "_launches", lambda x: True)
    counts = []
    for answers in (2, 6):
        inputs = [
            x.detach().repeat(answers // 2, 1, *[1] * (x.ndim - 2)).requires_grad_() for x in _inputs(3)
        ]
        anchors = Anchors.of(torch.tensor([[0, 3, 3, 7, 10], [9, 1, 4, 0, 2]] * (answers // 2)))
        with CountedCalls() as counted:
            block_attention(*inputs, anchors, True).sum().backward()
        counts.append(counted.calls)
    assert counts[0] == counts[1]
    assert not counts[0].keys() & {"_local_scalar_dense", "nonzero", "item"}


def test_large_scores_do_not_overflow() -> None:
    """exp of a score without its row's greatest taken off is infinite from 89 on in float32."""
    inputs = [x.detach().float().requires_grad_() for x in _inputs(1, size=30.0)]
    value = block_attention(*inputs, Anchors.of(torch.tensor([[2, 4, 6, 8, 10]] * 2)), True)
    value.sum().backward()
    assert value.isfinite().all() and all(x.grad.isfinite().all() for x in inputs)


def test_what_lies_behind_an_anchor_is_neither_seen_nor_learned_from() -> None:
    """Rows from the anchor on hold the answer: a block that saw them would draft by copying."""
    inputs = _inputs(1)
    anchors = Anchors.of(torch.tensor([[2, 3, 4, 5, 6]] * 2))
    value = block_attention(*inputs, anchors, True)
    grads = torch.autograd.grad(value.sum(), inputs[1:3])
    assert all((grad[:, 6:] == 0).all() and (grad[:, :6] != 0).any() for grad in grads)
    with torch.no_grad():
        for context in inputs[1:3]:
            context[:, 6:] = torch.nan
    assert torch.equal(block_attention(*inputs, anchors, True), value)


def test_mixed_precision_keeps_to_its_type() -> None:
    """Under autocast products are in bfloat16; an output in float32 would make the layer's next ones wide."""
    inputs = [x.detach().float().requires_grad_() for x in _inputs(3)]
    anchors = Anchors.of(torch.tensor([[2, 3, 4, 5, 6]] * 2))
    exact = block_attention(*inputs, anchors, True)
    with torch.autocast("cpu", torch.bfloat16):
        rounded = block_attention(*inputs, anchors, True)
    assert rounded.dtype == torch.bfloat16
    torch.testing.assert_close(rounded.float(), exact, rtol=0.05, atol=0.05)
    rounded.float().sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in inputs)


def test_without_gradients_no_chunk_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A validation looks at all roots of an answer at once: kept scores of them all took memory that grows
    with the square of the answer's length."""
    monkeypatch.setattr(attention, "_SCORES", 1)
    seen, left = [], []
    mix = attention._mix

    def watched(*args: Any) -> Any:
        left.append(sum(own() is not None for own in seen))
        found = mix(*args)
        seen.append(weakref.ref(found[0].far))
        return found

    monkeypatch.setattr(attention, "_mix", watched)
    inputs, anchors = _inputs(1), Anchors.of(torch.tensor([[2, 3, 4, 5, 6]] * 2))
    with torch.no_grad():
        block_attention(*inputs, anchors, True)
    assert len(left) == 10 and max(left) <= 1
    block_attention(*inputs, anchors, True)
    assert max(left) == 9, "gradients need them"


def test_half_precision_loses_no_gradient_to_a_sure_softmax() -> None:
    """Where one score outweighs all others, gradients are differences of nearly equal numbers: taken in
    bfloat16, 0.002 came out as 0.4."""
    inputs = [x.detach().float() for x in _inputs(1)]
    inputs[0] *= 10.0
    exact = [x.double().requires_grad_() for x in inputs]
    rounded = [x.requires_grad_() for x in inputs]
    anchors, weights = Anchors.of(torch.tensor([[2, 3, 4, 5, 6]] * 2)), torch.randn_like(inputs[0])
    (block_attention(*exact, anchors, True) * weights).sum().backward()
    with torch.autocast("cpu", torch.bfloat16):
        (block_attention(*rounded, anchors, True) * weights).sum().backward()
    for own, other in zip(rounded, exact, strict=True):
        assert (own.grad - other.grad).norm() < 0.03 * other.grad.norm()
