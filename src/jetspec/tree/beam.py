"""Level-by-level growth: one call of `expand` per depth instead of one per node, for heads that run there."""

from __future__ import annotations

import math
from heapq import nsmallest
from itertools import count, islice

from jetspec.errors import OptionError
from jetspec.tree.proposal import Proposal, State
from jetspec.tree.tree import Tree, check_budget

# (cost = -log-prob of the path, depth, token, rank of the parent within its level, number of the parent, own
# number, state): the number is unique, so states are not compared; the fields before it are the node order of
# `Tree`.
_Entry = tuple[float, int, int, int, int, int, State]


def beam(
    root_token: int, proposal: Proposal, budget: int, width: int = 4, *, floor: float = -math.inf
) -> Tree:
    """Keep the best `width` nodes of each depth, then the best `budget` of all that were kept.

    The whole frontier is expanded in one call. With `width >= budget` the result is the best-first tree;
    `width` 1 gives the chain. Growing n equals cutting a larger tree to n, because a node that misses the
    best n so far cannot have a descendant among them.

    budget: drafted nodes, root excluded. Raises OptionError if `budget` is negative or `width` is below 1.
    floor: log-prob of a path below which no node is wanted.
    """
    return grow_levels(root_token, proposal, budget, width, rerank=False, floor=floor)


def grow_levels(
    root_token: int, proposal: Proposal, budget: int, width: int, *, rerank: bool, floor: float = -math.inf
) -> Tree:
    """Expand the best `width` nodes of each depth, and keep the best `budget` of those nodes, or, with
    `rerank`, of all children that were offered.
    """
    check_budget(budget)
    if width < 1:
        raise OptionError(f"width is {width}; give the number of nodes expanded per depth, 1 or more")
    kept: list[_Entry] = []  # the best nodes so far, at most `budget`, in node order
    # The nodes of one depth that are worth expanding, in node order.
    frontier: list[_Entry] = [(0.0, 0, root_token, -1, -1, 0, proposal.root_state)]
    numbers = count(1)
    for depth in range(1, proposal.max_depth + 1):
        if not frontier or not budget:
            break
        level: list[_Entry] = []
        expanded = proposal.expand([entry[-1] for entry in frontier])
        for rank, (parent, children) in enumerate(zip(frontier, expanded, strict=True)):
            # A parent's children beyond the first `width` cannot be among the best `width` of the level.
            for token, logp, state in islice(zip(*children, strict=True), width):
                if parent[0] - logp > -floor:
                    break
                level.append((parent[0] - logp, depth, token, rank, parent[5], next(numbers), state))
        best = nsmallest(width, level)
        kept = nsmallest(budget, kept + (level if rerank else best))
        frontier = [entry for entry in best if entry <= kept[-1]]
    return _number(root_token, kept)


def _number(root_token: int, kept: list[_Entry]) -> Tree:
    """A tree from entries in node order; parents come first since they cost no more and lie higher."""
    node_of = {entry[5]: node for node, entry in enumerate(kept, start=1)}
    node_of[0] = 0
    return Tree(
        tokens=(root_token, *(entry[2] for entry in kept)),
        parents=(-1, *(node_of[entry[4]] for entry in kept)),
        depths=(0, *(entry[1] for entry in kept)),
        logps=(0.0, *(0.0 - entry[0] for entry in kept)),
    )
