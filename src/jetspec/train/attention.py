"""Attention of a block's slots over the context before their anchor and over the block itself, for training.

Put together from torch's operators, the scores of context and block are joined and split again, masked, and
their gradients padded with zeros, each time in a new tensor of megabytes. Here one answer's scores (or those
of some of its anchors) are worked on in place, forward and backward, and context behind the last anchor is
not looked at. On a GPU, where each operation costs a launch and sizes hardly matter, that is done for many
answers at once.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_SCORES, _SCORES_CUDA = 2**22, 2**27  # of the anchors that are computed at a time; 16 MB in float32


class Anchors(NamedTuple):
    """Positions of roots, on the device [n, A] and off it: asking a GPU for them in every layer would stop
    it. Ascending ones are fastest.
    """

    device: Tensor
    host: list[list[int]]

    @staticmethod
    def of(positions: Tensor) -> Anchors:
        """Both, from [n, A]."""
        return Anchors(positions, positions.tolist())


def block_attention(
    q: Tensor, context_k: Tensor, context_v: Tensor, k: Tensor, v: Tensor, anchors: Anchors, causal: bool
) -> Tensor:
    """What each slot reads: [n, A, slots, heads, dim].

    Args:
        q: [n, A, slots, heads, dim] of the last slots of the block, not scaled yet.
        context_k, context_v: [n, T, kv, dim]; a block sees the rows before its anchor.
        k, v: [n, A, block, kv, dim], of the block itself.
        causal: whether slots see earlier slots and themselves only, instead of their whole block.

    In mixed precision products are in the type of autocast, softmax in float32.
    """
    kind = q.device.type
    tensors = _Tensors(q, context_k, context_v, k, v)
    if torch.is_autocast_enabled(kind):
        tensors = _Tensors(*(x.to(torch.get_autocast_dtype(kind)) for x in tensors))
    learns = torch.is_grad_enabled() and any(x.requires_grad for x in tensors)
    with torch.autocast(kind, enabled=False):
        mixed: Tensor = _BlockAttention.apply(  # type: ignore[no-untyped-call]
            anchors, causal, learns, *tensors
        )
    return mixed


class _Tensors(NamedTuple):
    """What attention reads, see `block_attention`, or the gradients of it."""

    q: Tensor
    context_k: Tensor
    context_v: Tensor
    k: Tensor
    v: Tensor


class _Chunk(NamedTuple):
    """n answers, c anchors of each, and the length of the longest context that they see."""

    answers: slice
    anchors: slice
    length: int

    def of(self, x: Tensor) -> Tensor:
        """Their part of what has anchors: [answers, anchors, ...] to [n, c, ...]."""
        return x[self.answers, self.anchors]

    def seen(self, x: Tensor) -> Tensor:
        """Their part of a context: [answers, T, ...] to [n, length, ...]."""
        return x[self.answers, : self.length]


class _Kept(NamedTuple):
    """What the gradients of a chunk need; heads that share keys are rows.

    q     [n, kv, c * rows, dim], scaled
    far   [n, kv, c * rows, L], near [n * kv * c, rows, block]: exp(score - the row's greatest)
    total [n, kv, c * rows, 1], their sum
    """

    q: Tensor
    far: Tensor
    near: Tensor
    total: Tensor


def _chunks(q: Tensor, anchors: Anchors, length: int) -> Iterator[_Chunk]:
    """All anchors of all answers, no more scores at a time than there is room for."""
    gpu = _launches(q)
    most = _SCORES_CUDA if gpu else _SCORES
    each = q.shape[2] * q.shape[3] * max(1, length)  # scores of an anchor
    total = len(anchors.host)
    at_once = max(1, min(total, most // (each * max(1, q.shape[1])))) if gpu else 1
    count = max(1, most // each)
    for answer in range(0, total, at_once):
        rows = anchors.host[answer : answer + at_once]
        for first in range(0, q.shape[1], count):
            own = slice(first, first + count)
            seen = max(max(row[own]) for row in rows)
            yield _Chunk(slice(answer, answer + len(rows)), own, min(length, seen))


def _launches(x: Tensor) -> bool:
    """Whether an operation costs a launch."""
    return x.is_cuda


class _BlockAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchors: Anchors, causal: bool, learns: bool, *tensors: Tensor) -> Tensor:
        x = _Tensors(*tensors)
        ctx.kept = kept = list[tuple[_Chunk, _Kept]]()
        mixed = torch.empty_like(x.q)
        later = None
        if causal:
            slots, block = x.q.shape[2], x.k.shape[2]
            later = torch.ones(slots, block, dtype=torch.bool, device=x.q.device).triu_(1 + block - slots)
            later = later.repeat_interleave(x.q.shape[3] // x.k.shape[3], 0)  # [rows, block]
        for chunk in _chunks(x.q, anchors, x.context_k.shape[1]):
            own, out = _mix(chunk, x, anchors, later)
            _place(chunk.of(mixed), out)
            if learns:
                kept.append((chunk, own))
        if learns:
            ctx.save_for_backward(*x, mixed)
        return mixed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *tensors, mixed = ctx.saved_tensors
        x = _Tensors(*tensors)
        grads = _Tensors(
            torch.empty_like(x.q),
            torch.zeros_like(x.context_k),
            torch.zeros_like(x.context_v),
            torch.empty_like(x.k),
            torch.empty_like(x.v),
        )
        for chunk, own in ctx.kept:
            _unmix(chunk, own, grad, mixed, x, grads)
        return None, None, None, *grads


def _rows(x: Tensor, kv: int) -> Tensor:
    """[n, c, slots, heads, dim] as [n, kv, c * rows, dim], a copy."""
    n, c, slots, heads, dim = x.shape
    grouped = x.view(n, c, slots, kv, heads // kv, dim).permute(0, 3, 1, 2, 4, 5)
    return grouped.clone(memory_format=torch.contiguous_format).view(n, kv, -1, dim)


def _place(to: Tensor, rows: Tensor) -> None:
    """The way back from `_rows`."""
    n, c, slots, heads, dim = to.shape
    kv = rows.shape[1]
    to.view(n, c, slots, kv, heads // kv, dim).copy_(
        rows.view(n, kv, c, slots, heads // kv, dim).permute(0, 2, 3, 1, 4, 5)
    )


def _blocks(x: Tensor) -> Tensor:
    """Keys or values [n, c, block, kv, dim] as [n * kv * c, block, dim]."""
    return x.permute(0, 3, 1, 2, 4).flatten(0, 2)


def _mix(chunk: _Chunk, x: _Tensors, anchors: Anchors, later: Tensor | None) -> tuple[_Kept, Tensor]:
    """What a chunk's slots read [n, kv, c * rows, dim]."""
    kv, dim = x.k.shape[-2:]
    rows = _rows(chunk.of(x.q), kv).mul_(dim**-0.5)
    own_k, own_v = _blocks(chunk.of(x.k)), _blocks(chunk.of(x.v))
    far = _wide(rows @ chunk.seen(x.context_k).permute(0, 2, 3, 1))
    near = _wide(rows.view(len(own_k), -1, dim) @ own_k.transpose(1, 2))
    behind = torch.arange(chunk.length, device=x.q.device) >= chunk.of(anchors.device).unsqueeze(-1)
    c = behind.shape[1]  # of [n, c, L]
    far.unflatten(2, (c, -1)).masked_fill_(behind[:, None, :, None], -math.inf)
    if later is not None:
        near.masked_fill_(later, -math.inf)
    flat = near.view(*rows.shape[:3], near.shape[-1])
    greatest = flat.amax(-1, keepdim=True)
    if chunk.length:
        greatest = torch.maximum(greatest, far.amax(-1, keepdim=True))
    far.sub_(greatest).exp_()
    flat.sub_(greatest).exp_()
    total = far.sum(-1, keepdim=True) + flat.sum(-1, keepdim=True)
    far, near = far.to(rows.dtype), near.to(rows.dtype)
    mixed = far @ chunk.seen(x.context_v).transpose(1, 2)
    mixed += (near @ own_v).view_as(mixed)
    return _Kept(rows, far, near, total), mixed.div_(total)


def _unmix(chunk: _Chunk, kept: _Kept, grad: Tensor, mixed: Tensor, x: _Tensors, to: _Tensors) -> None:
    """Gradients of a chunk. With P = exp / total: dV = P' dO, dS = P (dO V' - rowsum(dO O))."""
    kv, dim = x.k.shape[-2:]
    rows, far, near, total = kept
    own_k, own_v = _blocks(chunk.of(x.k)), _blocks(chunk.of(x.v))
    wide = _wide(_rows(chunk.of(grad), kv)).div_(total)
    down = (wide * _rows(chunk.of(mixed), kv)).sum(-1, keepdim=True)
    out = wide.to(rows.dtype)
    out_blocks = out.view(len(own_k), -1, dim)

    chunk.seen(to.context_v).add_((far.transpose(2, 3) @ out).transpose(1, 2))
    step = _wide(out @ chunk.seen(x.context_v).permute(0, 2, 3, 1))
    step = step.sub_(down).mul_(far).to(rows.dtype)
    chunk.seen(to.context_k).add_((step.transpose(2, 3) @ rows).transpose(1, 2))
    for_q = step @ chunk.seen(x.context_k).transpose(1, 2)

    _from_blocks(chunk.of(to.v), near.transpose(1, 2) @ out_blocks)
    step = _wide(out_blocks @ own_v.transpose(1, 2))
    step = step.sub_(down.view(len(own_k), -1, 1)).mul_(near).to(rows.dtype)
    _from_blocks(chunk.of(to.k), step.transpose(1, 2) @ rows.view(len(own_k), -1, dim))
    for_q += (step @ own_k).view_as(for_q)
    _place(chunk.of(to.q), for_q.mul_(dim**-0.5))


def _from_blocks(to: Tensor, blocks: Tensor) -> None:
    """[n * kv * c, block, dim] to keys or values [n, c, block, kv, dim]."""
    n, c, block, kv, dim = to.shape
    to.copy_(blocks.view(n, kv, c, block, dim).permute(0, 2, 3, 1, 4))


def _wide(x: Tensor) -> Tensor:
    """Sums of many and differences of equals are computed in float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
