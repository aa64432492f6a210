"""What a drafter hands to the tree builders: for any node, its candidate children with log-probs.

A builder walks through opaque states. `root_state` stands for the root; `expand` turns states into children,
each of which brings its own state. What a state holds is the proposal's affair: a depth where all nodes of a
depth share one distribution, the chosen candidate where it depends on the parent's token, a cache row where a
head has to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from jetspec.errors import NAN_LOGPS, HeadError

State: TypeAlias = Any  # opaque to the builders


class Children(NamedTuple):
    """Candidate children of one node, the most probable first; equal log-probs are ordered by token id.

    tokens  [k] unique token ids
    logps   [k] log q(child | its path), finite, <= 0, descending; not cumulative
    states  [k] what `Proposal.expand` wants to see for that child
    """

    tokens: Sequence[int]
    logps: Sequence[float]
    states: Sequence[State]


NO_CHILDREN = Children((), (), ())


class Proposal(Protocol):
    """One drafted block of one sequence, from which a tree of any budget can be grown.

    Log-probs <= 0 in descending order are what makes best-first exact, see `best_first`.
    """

    @property
    def max_depth(self) -> int:
        """No node lies deeper; builders do not expand nodes of this depth."""
        ...

    @property
    def root_state(self) -> State:
        """The state of the root."""
        ...

    def expand(self, states: Sequence[State]) -> list[Children]:
        """Children of many nodes at once, in the order of `states`; a head runs one forward for them."""
        ...


class EmptyProposal:
    """Nothing drafted: every builder returns the bare root, and the round is plain decoding."""

    max_depth = 0
    root_state: State = None

    def expand(self, states: Sequence[State]) -> list[Children]:
        """No children for anybody."""
        return [NO_CHILDREN for _ in states]


class MarginalProposal:
    """One distribution per depth, shared by all nodes of that depth whatever their parent is.

    This is what one forward of a block drafter gives (DFlash, JetSpec as released; DDTree, arXiv
    2604.12989).

    tokens  [D, K] candidate ids, unique within a depth
    logps   [D, K] log-probs, normalised over the whole vocabulary, in any order; values above 0 (rounding)
            count as 0, and -inf marks a candidate that must not be drafted

    The state of a node is its depth. Raises HeadError if a log-prob is NaN.
    """

    root_state: State = 0

    def __init__(self, tokens: npt.ArrayLike, logps: npt.ArrayLike) -> None:
        ids = np.asarray(tokens, dtype=np.int64)  # [D, K]
        scores = np.minimum(np.asarray(logps), 0.0)  # [D, K]
        assert ids.ndim == 2 and ids.shape == scores.shape, f"not [D, K]: {ids.shape}, {scores.shape}"
        order = np.lexsort((ids, -scores), axis=-1)  # [D, K], by log-prob, then token id
        rows = np.arange(ids.shape[0])[:, None]  # [D, 1]
        self.max_depth: int = ids.shape[0]
        self._by_depth = [
            _children(row_ids, row_logps, [depth] * len(row_ids))
            for depth, (row_ids, row_logps) in enumerate(
                zip(ids[rows, order].tolist(), scores[rows, order].tolist(), strict=True), start=1
            )
        ]
        self._by_depth.append(NO_CHILDREN)  # below max_depth

    def expand(self, states: Sequence[State]) -> list[Children]:
        """Look up one depth per state."""
        return [self._by_depth[depth] for depth in states]


class MarkovProposal:
    """Children depend on the parent's token: first-order transitions between candidates of adjacent depths.

    tokens      [D, K] candidate ids, unique within a depth
    root_logps  [K] log q(tokens[0, b] | context)
    cond_logps  [D-1, K, K]; cond_logps[d, a, b] = log q(tokens[d+1, b] | tokens[d, a], context)

    As in `MarginalProposal` values above 0 count as 0 and -inf is never drafted. Only the rows of visited
    parents are sorted, because a tree of n nodes sees at most n of the (D-1)*K rows. The state of a node is
    (depth, candidate index). `expand` raises HeadError if a visited row holds a NaN.
    """

    root_state: State = (0, 0)

    def __init__(self, tokens: npt.ArrayLike, root_logps: npt.ArrayLike, cond_logps: npt.ArrayLike) -> None:
        # Copies, because rows are read later and drafters reuse their buffers.
        self._tokens = np.array(tokens, dtype=np.int64)  # [D, K]
        self._root = np.minimum(np.asarray(root_logps), 0.0)  # [K]
        self._cond = np.minimum(np.asarray(cond_logps), 0.0)  # [D-1, K, K]
        assert self._tokens.ndim == 2, f"tokens {self._tokens.shape} must be [D, K]"
        depth, width = self._tokens.shape
        assert self._root.shape == (width,), f"root_logps {self._root.shape} must be [{width}]"
        assert depth <= 1 or self._cond.shape == (depth - 1, width, width), (
            f"cond_logps {self._cond.shape} must be [{depth - 1}, {width}, {width}]"
        )
        self.max_depth: int = depth
        self._by_id = self._tokens.argsort(axis=-1)  # [D, K]; a stable sort after it breaks ties by token id
        self._sorted: dict[tuple[int, int], Children] = {}  # many paths can lead to one (depth, candidate)

    @property
    def tokens(self) -> npt.NDArray[np.int64]:
        """The candidates [D, K] of every depth, as they were given."""
        return self._tokens

    def expand(self, states: Sequence[State]) -> list[Children]:
        """Sort the rows that are seen for the first time and look up the others."""
        known = self._sorted
        return [known[state] if state in known else self._sort_row(state) for state in states]

    def _sort_row(self, state: tuple[int, int]) -> Children:
        depth, candidate = state
        if depth == self.max_depth:
            return NO_CHILDREN
        row = self._cond[depth - 1, candidate] if depth else self._root  # [K]
        by_id = self._by_id[depth]  # [K]
        order = by_id[(-row[by_id]).argsort(kind="stable")]  # [K], by log-prob, then token id
        states = list(zip(repeat(depth + 1), order.tolist(), strict=False))
        children = _children(self._tokens[depth][order].tolist(), row[order].tolist(), states)
        self._sorted[state] = children
        return children


def _children(tokens: list[int], logps: list[float], states: list[State]) -> Children:
    """Children from sorted lists, less the candidates of probability zero; -inf sorts last, NaN after it."""
    if logps and logps[-1] != logps[-1]:
        raise HeadError(NAN_LOGPS)
    if logps and logps[-1] == -np.inf:
        count = logps.index(-np.inf)
        tokens, logps, states = tokens[:count], logps[:count], states[:count]
    return Children(tokens, logps, states)
