"""The confidence head: the chance, stated before a token is drafted, that it will be accepted.

    c_k = sig( w . [h_k ; W1[x_(k-1)]] + b )        (DSpark, arXiv 2607.05147)

It reads the parent of the token and never the token itself, so what is cut by it is cut without looking
ahead. A proposal with confidences ends below every node whose children's confidence lies under a threshold: a
chain is cut at its first doubtful depth, a tree at each of its doubtful nodes. The values are there for
budget policies as well.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jetspec.draft.checkpoint import Head
from jetspec.draft.path_scorer import Scorer
from jetspec.draft.recurrent import RecurrentProposal
from jetspec.draft.shared_noise import Draws
from jetspec.sampling import checked_number
from jetspec.tree.proposal import NO_CHILDREN, Children, MarkovProposal, Proposal, State


class ConfidentProposal:
    """A proposal that knows how sure it is of the next token below each of its nodes.

    Args:
        inner: what is proposed; its states are depths, or tuples that begin with (depth, candidate).
        table: [D, K], confidence of depth d + 1 below candidate k of depth d; row 0 is the root's, and one
            column means that confidence depends on the depth only.
        threshold: nodes with a lower confidence get no children; 0 keeps all.
    """

    def __init__(self, inner: Proposal, table: npt.NDArray[np.float32], threshold: float) -> None:
        self._inner, self._table, self._threshold = inner, table, threshold

    @property
    def max_depth(self) -> int:
        """As of the inner proposal."""
        return self._inner.max_depth

    @property
    def root_state(self) -> State:
        """As of the inner proposal."""
        return self._inner.root_state

    def confidence(self, state: State) -> float:
        """The chance that a child of this node is accepted once the node was; 0 at the deepest level."""
        depth, candidate = (state, 0) if isinstance(state, int) else state[:2]
        if depth >= self.max_depth:
            return 0.0
        return float(self._table[depth, candidate if self._table.shape[1] > 1 else 0])

    def chain_confidence(self) -> list[float]:
        """Confidences along the chain of first children, one per depth."""
        found: list[float] = []
        state = self.root_state
        while len(found) < self.max_depth:
            found.append(self.confidence(state))
            children = self._inner.expand((state,))[0]
            if not children.states:
                break
            state = children.states[0]
        return found

    def expand(self, states: Many[State]) -> list[Children]:
        """Children of the nodes that are sure enough, none of the others."""
        if self._threshold <= 0:
            return self._inner.expand(states)
        sure = [self.confidence(state) >= self._threshold for state in states]
        opened = iter(self._inner.expand([state for state, keep in zip(states, sure, strict=True) if keep]))
        return [next(opened) if keep else NO_CHILDREN for keep in sure]


class ConfidentScorer:
    """A path scorer whose proposals bring confidences.

    Raises OptionError if the threshold is not in 0..1.
    """

    def __init__(
        self, head: Head, inner: Scorer, threshold: float, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._inner = inner
        self.threshold = checked_number("the confidence threshold", threshold, 0, 1)
        weight = head.weights["confidence_head.proj.weight"][0].to(device, dtype)  # [H] or [H + r]
        hidden = head.config.model.hidden_size
        self._by_state, self._by_row = weight[:hidden], weight[hidden:]
        self._bias = head.weights["confidence_head.proj.bias"].to(device, dtype)
        rows = head.weights["markov_head.markov_w1.weight"] if len(self._by_row) else None
        self._rows = None if rows is None else rows.to(device, dtype)

    @torch.inference_mode()
    def proposals(
        self, hidden: Tensor, logits: Tensor, roots: list[int], draws: Draws | None = None
    ) -> list[Proposal]:
        """hidden [B, D, H] and logits [B, D, Vd] to one proposal per sequence. Confidences know no draws."""
        inner = self._inner.proposals(hidden, logits, roots, draws)
        by_depth = hidden @ self._by_state + self._bias  # [B, D]
        if self._rows is None:
            tables = by_depth.unsqueeze(-1).float().sigmoid().cpu().numpy()
            return [
                ConfidentProposal(p, table, self.threshold) for p, table in zip(inner, tables, strict=True)
            ]
        found: list[Proposal] = []
        for proposal, own, root in zip(inner, by_depth, roots, strict=True):
            assert isinstance(proposal, MarkovProposal | RecurrentProposal)
            parents = torch.from_numpy(proposal.tokens).to(hidden.device)  # [D, K]
            first = torch.full_like(parents[:1], root)
            parents = torch.cat([first, parents[:-1]])  # [D, K], parents of depths 1..D
            table = own.unsqueeze(-1) + self._rows[parents] @ self._by_row
            found.append(ConfidentProposal(proposal, table.float().sigmoid().cpu().numpy(), self.threshold))
        return found
