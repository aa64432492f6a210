"""Draft trees: what a drafter proposes, and five ways to grow a tree of a given budget from it.

Nothing here needs a model, transformers or torch; the attention mask of a tree, which does need torch, is in
`jetspec.tree.mask`.
"""

from __future__ import annotations

import math
from typing import Protocol

from jetspec.tree.accum import accum
from jetspec.tree.beam import beam
from jetspec.tree.best_first import best_first
from jetspec.tree.chain import chain
from jetspec.tree.draw import draw_segments, draw_tree
from jetspec.tree.dynamic import dynamic
from jetspec.tree.proposal import Children, EmptyProposal, MarginalProposal, MarkovProposal, Proposal, State
from jetspec.tree.tree import Tree


class Grow(Protocol):
    """A builder: the root's token, what was drafted, how many nodes to draft at most, and the log-prob of a
    path below which none is wanted.
    """

    def __call__(
        self, root_token: int, proposal: Proposal, budget: int, *, floor: float = -math.inf
    ) -> Tree: ...


# The names that users choose from.
GROW: dict[str, Grow] = {
    "best-first": best_first,
    "beam": beam,
    "chain": chain,
    "accum": accum,
    "dynamic": dynamic,
}

__all__ = [
    "GROW",
    "Children",
    "EmptyProposal",
    "Grow",
    "MarginalProposal",
    "MarkovProposal",
    "Proposal",
    "State",
    "Tree",
    "accum",
    "beam",
    "best_first",
    "chain",
    "draw_segments",
    "draw_tree",
    "dynamic",
]
