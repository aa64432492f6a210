"""The recurrent path scorer: every node has a state of its own, which its ancestors' tokens have shaped.

DSpark's RNN head (arXiv 2607.05147) as a proposal that trees can be grown from. With the row e of the
parent's token, the slot's state h and the parent's recurrent state s (0 at the root),

    g, c, o = split(W [s; e; h] + bias)      s' = sig(g) s + (1 - sig(g)) tanh(c)
    log q(child) = log_softmax( U(child) + W2[child] . tanh(o) )

All children of a node carry s'. Only the candidates of a depth are scored, and only below nodes that a
builder opens; any number of nodes is opened in one batch.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jetspec.draft import path_scorer
from jetspec.draft.checkpoint import Head
from jetspec.draft.path_scorer import expected_rows
from jetspec.draft.shared_noise import Draws, scaled
from jetspec.errors import NAN_LOGPS, HeadError
from jetspec.tree.proposal import NO_CHILDREN, Children, Proposal

Floats: TypeAlias = npt.NDArray[np.float32]
State: TypeAlias = tuple[int, int, Floats]  # depth, candidate, recurrent state [r]


class RecurrentTables(NamedTuple):
    """What a `RecurrentProposal` reads; D depths with K candidates each.

    tokens [D, K] ids; logits [D, K] of the slots for them; cover [D], log of the mass that the candidates
    have; rows [D, K, r], row of each candidate as a parent; child_rows [D, K, r], as a child; slots [D, 3r],
    the part of the product that comes from the slot, with the bias; root_row [r]; weight [3r, 2r], the part
    for [s; e].
    """

    tokens: npt.NDArray[np.int64]
    logits: Floats
    cover: Floats
    rows: Floats
    child_rows: Floats
    slots: Floats
    root_row: Floats
    weight: Floats


class RecurrentProposal:
    """Children that depend on their whole path. Raises HeadError in `expand` if a log-prob is NaN."""

    def __init__(self, tables: RecurrentTables) -> None:
        self._tables = tables
        self.max_depth: int = tables.tokens.shape[0]
        self.root_state: State = (0, 0, np.zeros_like(tables.root_row))

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The candidates [D, K] of every depth."""
        return self._tables.tokens

    def expand(self, states: Many[State]) -> list[Children]:
        """Advance the recurrent state of every node and score its depth's candidates, all in one batch."""
        inner = [n for n, state in enumerate(states) if state[0] < self.max_depth]
        found = [NO_CHILDREN] * len(states)
        if inner:
            for n, children in zip(inner, self._expand([states[n] for n in inner]), strict=True):
                found[n] = children
        return found

    def _expand(self, states: Many[State]) -> list[Children]:
        t = self._tables
        depths = np.array([state[0] for state in states])
        own = [t.rows[depth - 1, candidate] if depth else t.root_row for depth, candidate, _ in states]
        before = np.stack([state[2] for state in states])  # [n, r]
        joined = np.concatenate([before, np.stack(own)], axis=1)  # [n, 2r]
        gate, update, out = np.split(joined @ t.weight.T + t.slots[depths], 3, axis=1)
        keep = 0.5 * (1 + np.tanh(0.5 * gate))  # the logistic function, without overflow
        after = keep * before + (1 - keep) * np.tanh(update)  # [n, r]
        terms = (t.child_rows[depths] @ np.tanh(out)[:, :, None])[:, :, 0]  # [n, K]
        scores = t.logits[depths] + terms
        scores = scores - scores.max(axis=1, keepdims=True)
        logps = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True)) + t.cover[depths][:, None]
        logps = np.minimum(logps, 0.0)
        if np.isnan(logps).any():
            raise HeadError(NAN_LOGPS)
        return [
            self._sorted(int(depth), row, state)
            for depth, row, state in zip(depths, logps, after, strict=True)
        ]

    def _sorted(self, depth: int, logps: Floats, state: Floats) -> Children:
        tokens = self._tables.tokens[depth]
        order = np.lexsort((tokens, -logps))  # by log-prob, then token id
        states = [(depth + 1, candidate, state) for candidate in order.tolist()]
        return Children(tokens[order].tolist(), logps[order].tolist(), states)


class RecurrentScorer:
    """Makes recurrent proposals of a block's states and logits.

    Which tokens of a depth are candidates, and what mass they have together, is judged along the expected
    path: the mean row of likely parents at each depth, fed through the recurrence.
    """

    def __init__(self, head: Head, vocab: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        weights = {
            name.removeprefix("markov_head."): tensor.to(device, dtype)
            for name, tensor in head.weights.items()
            if name.startswith("markov_head.")
        }
        rank = head.config.rank
        self.vocab = vocab
        self.parent_rows = weights["markov_w1.weight"]  # [V, r], by token id
        self.child_rows = weights["markov_w2.weight"][vocab]  # [Vd, r]
        joint = weights["joint_proj.weight"]  # [3r, 2r + H]
        self._path, self._slot = joint[:, : 2 * rank], joint[:, 2 * rank :]
        self._bias = weights["joint_proj.bias"]
        self._path_table = _floats(self._path)

    @torch.inference_mode()
    def proposals(
        self, hidden: Tensor, logits: Tensor, roots: list[int], draws: Draws | None = None
    ) -> list[Proposal]:
        """hidden [B, D, H] and logits [B, D, Vd] to one proposal per sequence."""
        base = logits.float() if draws is None else draws.score(logits.float())
        root_rows = self.parent_rows[torch.tensor(roots, device=logits.device)]  # [B, r]
        slots = hidden @ self._slot.T + self._bias  # [B, D, 3r]
        terms = recurrence(expected_rows(base, root_rows, self.parent_rows, self.vocab), slots, self._path)
        logps = (base + scaled((terms @ self.child_rows.T).float(), draws)).log_softmax(-1)
        top, index = logps.topk(min(path_scorer.CANDIDATES, base.shape[-1]), dim=-1)  # [B, D, K]
        tokens = self.vocab[index]
        columns = {
            "tokens": tokens.cpu().numpy(),
            "logits": _floats(base.gather(-1, index)),
            "cover": _floats(top.logsumexp(-1)),
            "rows": _floats(self.parent_rows[tokens]),
            "child_rows": _floats(scaled(self.child_rows[index], draws)),
            "slots": _floats(slots),
            "root_row": _floats(root_rows),
        }
        return [
            RecurrentProposal(
                RecurrentTables(weight=self._path_table, **{key: x[n] for key, x in columns.items()})
            )
            for n in range(len(roots))
        ]


def recurrence(rows: Tensor, slots: Tensor, weight: Tensor) -> Tensor:
    """tanh(o) of every depth along one known path: rows [..., D, r] of its parents, slots [..., D, 3r], the
    part of the product that comes from the slots, weight [3r, 2r] to [..., D, r].
    """
    rank = rows.shape[-1]
    by_state, by_row = weight[:, :rank], weight[:, rank:]
    given = rows @ by_row.T + slots  # [..., D, 3r]
    state = torch.zeros_like(rows[..., 0, :])
    terms = []
    for depth in range(rows.shape[-2]):
        gate, update, out = (given[..., depth, :] + state @ by_state.T).split(rank, dim=-1)
        keep = gate.sigmoid()
        state = keep * state + (1 - keep) * update.tanh()
        terms.append(out.tanh())
    return torch.stack(terms, dim=-2)


def _floats(x: Tensor) -> Floats:
    values: Floats = x.float().cpu().numpy()
    return values
