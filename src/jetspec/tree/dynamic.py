"""The dynamic tree of EAGLE-2 and EAGLE-3 (arXiv 2406.16858, section 4): expand the best nodes of each level,
then rerank everything that was offered.
"""

from __future__ import annotations

import math

from jetspec.tree.beam import grow_levels
from jetspec.tree.proposal import Proposal
from jetspec.tree.tree import Tree

WIDTH = 10  # of the published trees: nodes expanded per level, and children of each


def dynamic(
    root_token: int, proposal: Proposal, budget: int, width: int = WIDTH, *, floor: float = -math.inf
) -> Tree:
    """Expand the best `width` nodes of each depth in one call, and keep the best `budget` of ALL their
    children.

    `beam` keeps at most `width` nodes per depth; here a child that is not expanded itself can still become a
    node, as in the published code (a pool of `width` + `width`^2 per further level). With `width >= budget`
    the result is the best-first tree.

    budget: drafted nodes, root excluded. Raises OptionError if `budget` is negative or `width` is below 1.
    floor: log-prob of a path below which no node is wanted.
    """
    return grow_levels(root_token, proposal, budget, width, rerank=True, floor=floor)
