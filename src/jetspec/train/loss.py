"""Forward KL from the target's law to the head's, over the draft vocabulary, without ever holding all logits.

`reference_kl` says what is computed; `fused_kl` computes the same value and gradients chunk by chunk with
the closed-form gradient q - p, so memory is chunk x Vd whatever the batch is. The objective is JetSpec's
(arXiv 2606.18394).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

CHUNK_ROWS = 256  # a chunk's logits stay in the processor's cache


class KLResult(NamedTuple):
    """loss: weighted mean over rows; per_row [R]: KL of each row in nats; agree [R]: same top token in both
    laws.

    `fused_kl` leaves rows of weight 0 out: their per_row is 0 and agree False.
    """

    loss: Tensor
    per_row: Tensor
    agree: Tensor


def reference_kl(
    hidden: Tensor,
    terms: Tensor | None,
    child_rows: Tensor | None,
    output: Tensor,
    teacher: Tensor,
    teacher_row: Tensor,
    weight: Tensor,
) -> KLResult:
    """The readable version.

    Args:
        hidden: [R, H] states of the head's slots.
        terms, child_rows: [R, r] and [Vd, r] of the path scorer, or None.
        output: [Vd, H], rows of the target's output matrix for the draft vocabulary.
        teacher: [U, H] normed states of the target; teacher_row [R] says which of them row i learns from.
        weight: [R], not all zero.
    """
    logits = hidden @ output.T
    if terms is not None and child_rows is not None:
        logits = logits + terms @ child_rows.T
    log_q = logits.log_softmax(-1)
    log_p = (teacher @ output.T).log_softmax(-1)[teacher_row]
    per_row = (log_p.exp() * (log_p - log_q)).sum(-1)
    loss = (weight * per_row).sum() / weight.sum()
    return KLResult(loss, per_row.detach(), log_q.argmax(-1) == log_p.argmax(-1))


def fused_kl(
    hidden: Tensor,
    terms: Tensor | None,
    child_rows: Tensor | None,
    output: Tensor,
    teacher: Tensor,
    teacher_row: Tensor,
    weight: Tensor,
    total: float | None = None,
) -> KLResult:
    """The same value and gradients as `reference_kl`, chunked. Arguments as there.

    total: divide by this instead of the sum of `weight`, so that the parts of a batch add up to the loss of
    the whole.
    """
    share = weight / (weight.sum() if total is None else total)
    loss, per_row, agree = _FusedKL.apply(  # type: ignore[no-untyped-call]
        hidden, terms, child_rows, output, teacher, teacher_row, share
    )
    return KLResult(loss, per_row, agree)


class _FusedKL(torch.autograd.Function):
    """Gradients are computed in the forward pass, while a chunk's logits are at hand, and only scaled in
    the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        terms: Tensor | None,
        child_rows: Tensor | None,
        output: Tensor,
        teacher: Tensor,
        teacher_row: Tensor,
        share: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        per_row = hidden.new_zeros(len(hidden))
        agree = torch.zeros(len(hidden), dtype=torch.bool, device=hidden.device)
        grad_hidden = torch.zeros_like(hidden)
        grad_terms = None if terms is None else torch.zeros_like(terms)
        grad_rows = None if child_rows is None else torch.zeros_like(child_rows)
        kept = share.nonzero().squeeze(-1)  # rows behind the end of an answer cost nothing
        # Rows with the same teacher come together, so each law is computed once without keeping them all.
        kept = kept[teacher_row[kept].argsort(stable=True)]
        for rows in kept.split(CHUNK_ROWS):
            used, place = teacher_row[rows].unique(return_inverse=True)
            log_p = (teacher[used] @ output.T).log_softmax(-1)[place]
            logits = hidden[rows] @ output.T
            if terms is not None and child_rows is not None:
                logits.addmm_(terms[rows], child_rows.T)
            agree[rows] = logits.argmax(-1) == log_p.argmax(-1)
            log_q = logits.log_softmax(-1)
            p = log_p.exp()
            per_row[rows] = (p * log_p.sub_(log_q)).sum(-1)
            grad = log_q.exp_().sub_(p).mul_(share[rows, None])  # d loss / d logits
            grad_hidden[rows] = grad @ output
            if grad_terms is not None and grad_rows is not None:
                assert terms is not None and child_rows is not None
                grad_terms[rows] = grad @ child_rows
                grad_rows.addmm_(grad.T, terms[rows])
        ctx.save_for_backward(grad_hidden, grad_terms, grad_rows)
        ctx.mark_non_differentiable(per_row, agree)
        return (share * per_row).sum(), per_row, agree

    @staticmethod
    def backward(ctx: Any, grad_loss: Tensor, *unused: Any) -> tuple[Tensor | None, ...]:
        scaled = [None if grad is None else grad * grad_loss for grad in ctx.saved_tensors]
        return (*scaled, None, None, None, None)


def depth_weights(depth: int, decay: float) -> Tensor:
    """Weights [D] of the slots: exp(-(k - 1) / decay), or uniform with decay 0 (DFlash, arXiv 2602.06036,
    appendix A; JetSpec, arXiv 2606.18394).
    """
    if decay == 0:
        return torch.ones(depth)
    return torch.exp(-torch.arange(depth, dtype=torch.float32) / decay)
