"""The optimal tree under the draft's own law: the n most probable paths."""

from __future__ import annotations

import math
from heapq import heappop, heappush, heapreplace

from jetspec.tree.proposal import Children, Proposal
from jetspec.tree.tree import Tree, check_budget


def best_first(root_token: int, proposal: Proposal, budget: int, *, floor: float = -math.inf) -> Tree:
    """Grow the `budget` most probable paths of `proposal`, fewer only if it has no more.

    The heap holds one entry per opened list of siblings: the best child that is not a node yet. Popping an
    entry makes it a node, then its next sibling and its own first child enter the heap. Both score no higher
    than the popped entry because log-probs are <= 0 and each list is sorted, so nodes are popped in the order
    of (log-prob descending, depth, token id, parent) over ALL paths: the result is exact and prefix closed,
    and growing n equals cutting a larger tree to n. It takes one expansion per node and O(n log n) heap steps
    (DDTree, arXiv 2604.12989, with siblings opened lazily; the argument needs no factorised law, so it holds
    for children that depend on their path as well).

    budget: drafted nodes, root excluded; 0 gives the bare root. Raises OptionError if it is negative.
    floor: log-prob of a path below which no node is wanted.
    """
    check_budget(budget)
    tokens, parents, depths, logps = [root_token], [-1], [0], [0.0]
    max_depth, expand = proposal.max_depth, proposal.expand
    # (cost = -log-prob of the path, depth, token, parent node, rank among the siblings, the siblings): the
    # first five never agree on all, so siblings are not compared. Costs start at 0.0 and grow, which keeps
    # -0.0 out of the tree.
    heap: list[tuple[float, int, int, int, int, Children]] = []
    if budget and max_depth:
        siblings = expand((proposal.root_state,))[0]
        if siblings.tokens:
            heap.append((0.0 - siblings.logps[0], 1, siblings.tokens[0], 0, 0, siblings))
    node, most = 0, -floor
    while heap and node < budget:
        cost, depth, token, parent, rank, siblings = heap[0]
        if cost > most:
            break
        node += 1
        tokens.append(token)
        parents.append(parent)
        depths.append(depth)
        logps.append(0.0 - cost)
        if node == budget:
            break
        own_state = siblings.states[rank]
        rank += 1
        if rank < len(siblings.tokens):
            # From the parent's log-prob, not from `cost` and a difference: every path is summed from the root
            # downwards, so that ties stay ties and the other builders arrive at the same sums.
            next_cost = 0.0 - logps[parent] - siblings.logps[rank]
            heapreplace(heap, (next_cost, depth, siblings.tokens[rank], parent, rank, siblings))
        else:
            heappop(heap)
        if depth < max_depth:
            own = expand((own_state,))[0]
            if own.tokens:
                heappush(heap, (cost - own.logps[0], depth + 1, own.tokens[0], node, 0, own))
    return Tree(tuple(tokens), tuple(parents), tuple(depths), tuple(logps))
