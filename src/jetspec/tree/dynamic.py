"""The dynamic tree of EAGLE-2 and EAGLE-3 (arXiv 2406.16858, section 4): expand the best nodes of each level,
then rerank everything that was offered.
"""

from __future__ import annotations

from heapq import nsmallest
from itertools import count, islice

from jetspec.errors import OptionError
from jetspec.tree.proposal import Proposal, State
from jetspec.tree.tree import Tree, check_budget

WIDTH = 10  # of the published trees: nodes expanded per level, and children of each

# (cost = -log-prob of the path, depth, token, rank of the parent in its level, number of the parent, own
# number, state): the number is unique, so states are not compared.
_Entry = tuple[float, int, int, int, int, int, State]


def dynamic(root_token: int, proposal: Proposal, budget: int, width: int = WIDTH) -> Tree:
    """Expand the best `width` nodes of each depth in one call, and keep the best `budget` of ALL their
    children.

    `beam` keeps at most `width` nodes per depth; here a child that is not expanded itself can still become a
    node, as in the published code (a pool of `width` + `width`^2 per further level). A node that misses the
    best `budget` so far is not expanded, since none of its descendants could be among them. With
    `width >= budget` the result is the best-first tree.

    budget: drafted nodes, root excluded. Raises OptionError if `budget` is negative or `width` is below 1.
    """
    check_budget(budget)
    if width < 1:
        raise OptionError(f"width is {width}; give the number of nodes expanded per depth, 1 or more")
    kept: list[_Entry] = []  # the best nodes so far, at most `budget`, in node order
    frontier: list[_Entry] = [(0.0, 0, root_token, -1, -1, 0, proposal.root_state)]
    numbers = count(1)
    for depth in range(1, proposal.max_depth + 1):
        if not frontier or not budget:
            break
        level: list[_Entry] = []
        expanded = proposal.expand([entry[-1] for entry in frontier])
        for rank, (parent, children) in enumerate(zip(frontier, expanded, strict=True)):
            for token, logp, state in islice(zip(*children, strict=True), width):
                level.append((parent[0] - logp, depth, token, rank, parent[5], next(numbers), state))
        kept = nsmallest(budget, kept + level)
        frontier = [entry for entry in nsmallest(width, level) if entry <= kept[-1]]
    node_of = {entry[5]: node for node, entry in enumerate(kept, start=1)}
    node_of[0] = 0
    return Tree(
        tokens=(root_token, *(entry[2] for entry in kept)),
        parents=(-1, *(node_of[entry[4]] for entry in kept)),
        depths=(0, *(entry[1] for entry in kept)),
        logps=(0.0, *(0.0 - entry[0] for entry in kept)),
    )
