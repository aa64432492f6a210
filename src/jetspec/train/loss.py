"""What a slot is to learn, over the draft vocabulary, without ever holding the logits of all slots.

`reference_loss` says what is computed; `fused_loss` computes the same value and gradients chunk by chunk with
gradients in closed form, so memory is chunk x Vd whatever the batch is.

With p the target's law and q the head's, both over the draft vocabulary, a slot costs

    kl * T^2 * KL(p_T || q_T)  +  ce * -log q(y)  +  l1 * sum_v |p - q|

T softens both laws of the first term only; y is the token that the target really wrote. The sum is JetSpec's
forward KL (arXiv 2606.18394) with kl alone, DFlash's cross-entropy (arXiv 2602.06036, appendix A) with ce
alone, and DSpark's (arXiv 2607.05147) with 0.1 ce + 0.9 l1. Twice the total variation distance is the L1
distance, and 1 - TV = sum_v min(p, q) is the chance that rejection sampling accepts a token drawn from q.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.train.native_loss import Learned, native_learn
from jetspec.train.weighting import LossOptions

CHUNK_ROWS = 512  # a chunk's logits stay in the processor's cache with a reduced vocabulary
_CHUNK_LOGITS = 2**24  # and take no more than 64 MB with a whole one
_PART_LOGITS = 2**17  # of a few rows of a chunk: 512 kB stay in a core's own cache

Pairs: TypeAlias = Many[tuple[Tensor, Tensor]]


class LossResult(NamedTuple):
    """loss: weighted mean over rows; per_row [R]: the loss of each row; agree [R]: same top token in both
    laws; overlap [R]: sum_v min(p, q) = 1 - TV at temperature 1; where it was not asked for
    it may be NaN.

    `fused_loss` leaves rows of weight 0 out: their per_row and overlap are 0 and agree is False.
    """

    loss: Tensor
    per_row: Tensor
    agree: Tensor
    overlap: Tensor


def reference_loss(
    pairs: Pairs,
    teacher: Tensor,
    output: Tensor,
    teacher_row: Tensor,
    weight: Tensor,
    options: LossOptions,
    labels: Tensor | None = None,
) -> LossResult:
    """The readable version.

    Args:
        pairs: the head's logits [R, Vd] are the sum of x @ w.T over pairs of x [R, d] and w [Vd, d]: slots'
            states with the output matrix, a path scorer's terms with its child rows.
        teacher: [U, H] normed states of the target; output [Vd, H], rows of its output matrix for the draft
            vocabulary; teacher_row [R] says which state row i learns from.
        weight: [R], not all zero.
        labels: [R], index of the written token in the draft vocabulary, -1 if it is not in it (such a row
            has no cross-entropy); needed if `options.ce` is not 0.
    """
    logits = torch.stack([x @ w.T for x, w in pairs]).sum(0)
    target = (teacher @ output.T)[teacher_row]
    soft = options.temperature
    log_p, log_q = (target / soft).log_softmax(-1), (logits / soft).log_softmax(-1)
    per_row = options.kl * soft**2 * (log_p.exp() * (log_p - log_q)).sum(-1)
    if options.ce:
        assert labels is not None
        entropy = F.cross_entropy(logits, labels.clamp(min=0), reduction="none")
        per_row = per_row + options.ce * entropy * (labels >= 0)
    distance = (target.softmax(-1) - logits.softmax(-1)).abs().sum(-1)
    per_row = per_row + options.l1 * distance
    loss = (weight * per_row).sum() / weight.sum()
    agree = logits.argmax(-1) == target.argmax(-1)
    return LossResult(loss, per_row.detach(), agree, 1 - distance.detach() / 2)


def fused_loss(
    pairs: Pairs,
    teacher: Tensor,
    output: Tensor,
    teacher_row: Tensor,
    weight: Tensor,
    options: LossOptions,
    labels: Tensor | None = None,
    *,
    total: float | None = None,
    overlap: bool = False,
) -> LossResult:
    """The same value and gradients as `reference_loss`, chunked. Gradients go to every tensor of `pairs` that
    requires one. Arguments as there, and

    total: divide by this instead of the sum of `weight`, so that the parts of a batch add up to the loss of
    the whole. overlap: compute it too.
    """
    share = weight / (weight.sum() if total is None else total)
    flat = [tensor for pair in _as_weights(pairs) for tensor in pair]
    with torch.autocast(weight.device.type, enabled=False):
        loss, per_row, agree, found = _Fused.apply(  # type: ignore[no-untyped-call]
            options, overlap, teacher, output, teacher_row, labels, share, *flat
        )
    return LossResult(loss, per_row, agree, found)


@torch.no_grad()
def fused_overlap(
    pairs: Pairs, teacher: Tensor, output: Tensor, teacher_row: Tensor, weight: Tensor
) -> Tensor:
    """sum_v min(p, q) of each row [R], chunked; 0 for rows of weight 0. Arguments as in `fused_loss`."""
    found = torch.zeros_like(weight)
    with torch.autocast(weight.device.type, enabled=False):
        for chunk in _chunks(_as_weights(pairs), teacher, output, teacher_row, weight):
            distance = (chunk.logits.softmax(-1) - chunk.target.softmax(-1)[chunk.place]).abs_().sum(-1)
            found[chunk.rows] = (1 - distance / 2).to(found.dtype)
    return found


def _as_weights(pairs: Pairs) -> Pairs:
    """Mixed precision ends here: states take the type of the matrices that they meet, since logits in
    bfloat16 would be off by hundredths.
    """
    return [(x.to(w.dtype), w) for x, w in pairs]


def confidence_loss(logits: Tensor, overlap: Tensor, weight: Tensor, total: float) -> Tensor:
    """Binary cross-entropy of the confidence head [R] against the chance of acceptance, `overlap` [R], a
    soft label without gradient (DSpark, arXiv 2607.05147): sum(w * bce) / total.
    """
    entropy = F.binary_cross_entropy_with_logits(logits, overlap.detach().to(logits.dtype), reduction="none")
    return (weight * entropy).sum() / total


class _Chunk(NamedTuple):
    """Some rows [c], their logits [c, Vd], the teachers' logits [u, Vd], and which of these each row has."""

    rows: Tensor
    logits: Tensor
    target: Tensor
    place: Tensor

    def parts(self) -> Iterator[_Chunk]:
        """A few rows after the other, as views: what is computed element by element of them stays in a core's
        own cache. Places ascend, so a part's teachers are neighbours.
        """
        size = len(self.rows) if self.logits.is_cuda else _PART_LOGITS // self.logits.shape[-1]
        size = max(1, size)  # where no row has weight there is one chunk without rows
        for first in range(0, len(self.rows), size):
            own = slice(first, first + size)
            place = self.place[own]
            low, high = int(place[0]), int(place[-1]) + 1
            yield _Chunk(self.rows[own], self.logits[own], self.target[low:high], place - low)


def _chunks(
    pairs: Pairs, teacher: Tensor, output: Tensor, teacher_row: Tensor, weight: Tensor
) -> Iterator[_Chunk]:
    """Rows of weight 0 (behind the end of an answer) cost nothing; rows with the same teacher come together,
    so that each law is computed about once without keeping them all.
    """
    kept = weight.nonzero().squeeze(-1)
    kept = kept[teacher_row[kept].argsort(stable=True)]
    rows, most = (32 * CHUNK_ROWS, 4 * _CHUNK_LOGITS) if weight.is_cuda else (CHUNK_ROWS, _CHUNK_LOGITS)
    size = min(rows, max(1, most // len(output)))
    for rows in kept.split(size):
        used, place = teacher_row[rows].unique(return_inverse=True)
        (x, w), *more = pairs
        logits = x[rows] @ w.T
        for x, w in more:
            logits.addmm_(x[rows], w.T)
        yield _Chunk(rows, _wide(logits), _wide(teacher[used] @ output.T), place)


def _wide(x: Tensor) -> Tensor:
    """Laws are computed in float32 at least."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def _learn(
    chunk: _Chunk, options: LossOptions, labels: Tensor | None, overlap: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [c], its gradient with respect to the logits [c, Vd], and overlap [c] of a chunk."""
    logits, target, place = chunk.logits, chunk.target, chunk.place
    soft = options.temperature
    value = logits.new_zeros(len(logits))
    found = torch.full_like(value, torch.nan)
    grad: Tensor | None = None
    if options.kl:
        log_p = (target if soft == 1 else target / soft).log_softmax(-1)[place]
        log_q = (logits if soft == 1 else logits / soft).log_softmax(-1)
        p = log_p.exp()
        value += options.kl * soft**2 * (p * log_p.sub_(log_q)).sum(-1)
        grad = log_q.exp_().sub_(p)
        if options.kl * soft != 1:
            grad.mul_(options.kl * soft)
    if options.ce or options.l1 or overlap:
        log_q = logits.log_softmax(-1)
        q = log_q.exp()
        if options.ce:
            assert labels is not None, "cross-entropy needs labels"
            own = labels[chunk.rows]
            known = (own >= 0).to(q.dtype)
            at = own.clamp(min=0).unsqueeze(-1)
            value -= options.ce * known * log_q.gather(-1, at).squeeze(-1)
            step = q * (options.ce * known).unsqueeze(-1)
            step.scatter_add_(-1, at, -(options.ce * known).unsqueeze(-1))
            grad = step if grad is None else grad.add_(step)
        if options.l1 or overlap:
            gap = q - target.softmax(-1)[place]
            distance = gap.abs().sum(-1)
            found = 1 - distance / 2
            if options.l1:
                value += options.l1 * distance
                sign = gap.sign_()
                step = q.mul_(sign - (q * sign).sum(-1, keepdim=True)).mul_(options.l1)
                grad = step if grad is None else grad.add_(step)
    assert grad is not None, "a loss needs a term"
    return value, grad, found


def _learn_in_parts(chunk: _Chunk, options: LossOptions, labels: Tensor | None, overlap: bool) -> Learned:
    """What `native_learn` does, for any device and type."""
    value, found = chunk.logits.new_empty(2, len(chunk.rows))
    agree = torch.empty(len(chunk.rows), dtype=torch.bool, device=value.device)
    first = 0
    for part in chunk.parts():
        own = slice(first, first + len(part.rows))
        agree[own] = part.logits.argmax(-1) == part.target.argmax(-1)[part.place]
        value[own], step, found[own] = _learn(part, options, labels, overlap)
        part.logits.copy_(step)
        first = own.stop
    return Learned(value, agree, found)


class _Fused(torch.autograd.Function):
    """Gradients are computed in the forward pass, while a chunk's logits are at hand, and only scaled in
    the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        options: LossOptions,
        overlap: bool,
        teacher: Tensor,
        output: Tensor,
        teacher_row: Tensor,
        labels: Tensor | None,
        share: Tensor,
        *flat: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        pairs = list(zip(flat[::2], flat[1::2], strict=True))
        per_row = share.new_zeros(len(share))
        found = share.new_zeros(len(share))
        agree = torch.zeros(len(share), dtype=torch.bool, device=share.device)
        wanted = ctx.needs_input_grad[7:]
        grads = [torch.zeros_like(x) if want else None for x, want in zip(flat, wanted, strict=True)]
        for chunk in _chunks(pairs, teacher, output, teacher_row, share):
            rows, grad = chunk.rows, chunk.logits  # d per_row / d logits takes the place of the logits
            known = None if labels is None else labels[rows]
            learned = native_learn(grad, chunk.target, chunk.place, known, options)
            learned = learned or _learn_in_parts(chunk, options, labels, overlap)
            per_row[rows], agree[rows] = learned.value.to(per_row.dtype), learned.agree
            found[rows] = learned.overlap.to(found.dtype)
            own = share[rows, None]  # weighs rows of states, which are narrower than those of logits
            for n, (x, w) in enumerate(pairs):
                for_x, for_w = grads[2 * n], grads[2 * n + 1]
                if for_x is not None:
                    for_x[rows] = ((grad.to(w.dtype) @ w) * own).to(x.dtype)
                if for_w is not None:
                    for_w.addmm_(grad.T.to(x.dtype), (x[rows] * own).to(x.dtype))
        ctx.save_for_backward(*grads)
        ctx.mark_non_differentiable(per_row, agree, found)
        return (share * per_row).sum(), per_row, agree, found

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grad_loss for grad in ctx.saved_tensors]
        return (*(None,) * 7, *scaled)
