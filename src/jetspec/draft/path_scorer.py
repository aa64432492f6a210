"""From one forward's logits to a proposal whose children know their parent's token.

The backbone gives every depth one distribution, whatever the parent is. The scorer adds a low-rank term of
the parent's token (DSpark's Markov head, arXiv 2607.05147), evaluated only
between each depth's candidates, so a tree of any shape costs one small batched product. The recurrent form,
which knows the whole path, is in `jetspec.draft.recurrent`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from jetspec.draft.checkpoint import Head
from jetspec.draft.native_scorer import MarkovTables, NativeMarkov
from jetspec.draft.shared_noise import Draws, scaled
from jetspec.target.linear import Linear
from jetspec.tree.proposal import MarginalProposal, MarkovProposal, Proposal

CANDIDATES = 64  # per depth
_PARENTS = 16  # most probable tokens of a depth whose mean bias helps to choose the next depth's candidates


def expected_rows(base: Tensor, root_rows: Tensor, parent_rows: Tensor, vocab: Tensor) -> Tensor:
    """The scorer's row of the parent that each depth can expect: the root's for the first, else the mean over
    likely tokens of the depth before.

    base [B, D, Vd] logits, root_rows [B, r], parent_rows [V, r], vocab [Vd] to [B, D, r].
    """
    likely, place = base[:, :-1].topk(min(_PARENTS, base.shape[-1]), dim=-1)  # [B, D-1, P]
    parents = parent_rows[vocab[place]]  # [B, D-1, P, r]
    shares = likely.softmax(-1).unsqueeze(-1).to(parents.dtype)
    return torch.cat([root_rows.unsqueeze(1), (parents * shares).sum(2)], dim=1)


class Scorer(Protocol):
    """What turns a block's states and logits into proposals."""

    def proposals(
        self, hidden: Tensor, logits: Tensor, roots: list[int], draws: Draws | None = None
    ) -> list[Proposal]:
        """hidden [B, D, H] and logits [B, D, Vd] to one proposal per sequence.

        draws: what is known of the noise that the target will add; log-probs are then chances of being drawn.
        """
        ...


class Marginals:
    """No scorer: children of a depth share one distribution (the published JetSpec and DFlash)."""

    def __init__(self, vocab: Tensor) -> None:
        self.vocab = vocab

    def proposals(
        self, hidden: Tensor, logits: Tensor, roots: list[int], draws: Draws | None = None
    ) -> list[Proposal]:
        """hidden [B, D, H] and logits [B, D, Vd] to one proposal per sequence."""
        base = logits.float() if draws is None else draws.score(logits.float())
        logps, index = base.log_softmax(-1).topk(min(CANDIDATES, logits.shape[-1]), dim=-1)
        tokens = self.vocab[index].cpu().numpy()  # [B, D, K]
        scores = logps.cpu().numpy()
        return [MarginalProposal(t, s) for t, s in zip(tokens, scores, strict=True)]


class MarkovScorer:
    """log q(child | parent): softmax of U_k(child) + W2[child] . (gate * W1[parent]) over the candidates.

    `vanilla` has no gate; `gated` computes it from the slot's state and the parent. The normaliser runs
    over the candidates, times the share of the whole vocabulary that they cover under the expected parent;
    an exact one would need every parent's full row. On the CPU in float32 all of it is one compiled call
    (`native_scorer.py`); `_tables` is the portable form.
    """

    def __init__(self, head: Head, vocab: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        weights = {
            name: tensor.to(device, dtype)
            for name, tensor in head.weights.items()
            if name.startswith("markov_head.")
        }
        self.vocab = vocab
        self.parent_rows = weights["markov_head.markov_w1.weight"]  # [V, r], by token id
        self.child_rows = weights["markov_head.markov_w2.weight"][vocab]  # [Vd, r]
        self.to_children = Linear(self.child_rows)
        self.gate = weights.get("markov_head.gate_proj.weight")  # [r, H + r]
        self.gate_bias = weights.get("markov_head.gate_proj.bias")
        gate = None if self.gate is None else (self.gate, weights["markov_head.gate_proj.bias"])
        packed = self.to_children.native
        self.native = NativeMarkov.build(self.parent_rows, self.child_rows, packed, vocab, gate)

    @torch.inference_mode()
    def proposals(
        self, hidden: Tensor, logits: Tensor, roots: list[int], draws: Draws | None = None
    ) -> list[Proposal]:
        """hidden [B, D, H] and logits [B, D, Vd] to one proposal per sequence."""
        base = logits.float() if draws is None else draws.score(logits.float())
        if self.native is None:
            tables = self._tables(hidden, base, roots, draws)
        else:
            scale = None if draws is None else draws.scale
            tables = self.native.tables(hidden, base, roots, scale, CANDIDATES, _PARENTS)
        return [MarkovProposal(t, f, c) for t, f, c in zip(*tables, strict=True)]

    def _tables(self, hidden: Tensor, base: Tensor, roots: list[int], draws: Draws | None) -> MarkovTables:
        """The portable form of `NativeMarkov.tables`."""
        gates = self._state_gate(hidden)  # [B, D, 1, r] or None
        root_rows = self.parent_rows[torch.tensor(roots, device=base.device)]  # [B, r]
        expected = expected_rows(base, root_rows, self.parent_rows, self.vocab)  # [B, D, r]
        terms = self._gated(expected.unsqueeze(2), gates).squeeze(2)  # [B, D, r]
        marginal = base + scaled(self.to_children(terms.flatten(0, 1)).view_as(base).float(), draws)
        logps = marginal.log_softmax(-1)
        top, index = logps.topk(min(CANDIDATES, base.shape[-1]), dim=-1)  # [B, D, K]
        cover = top.logsumexp(-1)  # [B, D], log of the mass of the candidates
        candidates = self.vocab[index]  # [B, D, K]
        children = self.child_rows[index[:, 1:]]  # [B, D-1, K, r]
        rows = self.parent_rows[candidates[:, :-1]]  # [B, D-1, K, r]
        later_gates = None if gates is None else gates[:, 1:]
        bias = self._gated(rows, later_gates) @ children.transpose(-1, -2)  # [B, D-1, K, K]
        scores = base[:, 1:].gather(-1, index[:, 1:]).unsqueeze(2) + scaled(bias.float(), draws, 1)
        conditional = scores.log_softmax(-1) + cover[:, 1:, None, None]
        return MarkovTables(candidates.cpu().numpy(), top[:, 0].cpu().numpy(), conditional.cpu().numpy())

    def _state_gate(self, hidden: Tensor) -> Tensor | None:
        if self.gate is None:
            return None
        assert self.gate_bias is not None
        return (hidden @ self.gate[:, : hidden.shape[-1]].T + self.gate_bias).unsqueeze(2)

    def _gated(self, rows: Tensor, gates: Tensor | None) -> Tensor:
        """rows [B, D, n, r] times sigmoid of the gate."""
        if gates is None or self.gate is None:
            return rows
        return rows * torch.sigmoid(gates + rows @ self.gate[:, -rows.shape[-1] :].T)
