"""The tree of JetSpec's released code, for comparison: one pop buys all children of a node."""

from __future__ import annotations

import math
from heapq import heappop, heappush
from itertools import islice

from jetspec.errors import OptionError
from jetspec.tree.proposal import Proposal, State
from jetspec.tree.tree import Tree, check_budget

WIDTH = 7  # of the published runs


def accum(
    root_token: int, proposal: Proposal, budget: int, width: int = WIDTH, *, floor: float = -math.inf
) -> Tree:
    """Pop the node with the best accumulated log-prob, attach its `width` best children, until the budget
    is full (JetSpec, arXiv 2606.18394, algorithm 1, `accum_logp`).

    Not the n most probable paths, even for a law that it is exact about: the last children of a likely node
    take the place of better nodes further down. `best_first` does without that; this one is here to be
    compared with it. The published budget counts the root, this one does not.

    Nodes stand in the order in which they were attached, which is not that of their log-probs. Growing n
    equals cutting a larger tree to n. Equal log-probs are popped by (depth, token id, node).

    budget: drafted nodes, root excluded. Raises OptionError if `budget` is negative or `width` is below 1.
    floor: log-prob of a path below which no node is wanted.
    """
    check_budget(budget)
    if width < 1:
        raise OptionError(f"width is {width}; give the number of children attached at once, 1 or more")
    tokens, parents, depths, logps = [root_token], [-1], [0], [0.0]
    # (cost = -log-prob of the path, depth, token, node, state): node is unique, so states are not compared.
    heap: list[tuple[float, int, int, int, State]] = [(0.0, 0, root_token, 0, proposal.root_state)]
    while heap and len(tokens) <= budget:
        cost, depth, _, node, state = heappop(heap)
        if depth == proposal.max_depth:
            continue
        children = proposal.expand((state,))[0]
        for token, logp, own_state in islice(
            zip(*children, strict=True), min(width, budget + 1 - len(tokens))
        ):
            if cost - logp > -floor:
                break
            heappush(heap, (cost - logp, depth + 1, token, len(tokens), own_state))
            tokens.append(token)
            parents.append(node)
            depths.append(depth + 1)
            logps.append(0.0 - (cost - logp))
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple(logps))
