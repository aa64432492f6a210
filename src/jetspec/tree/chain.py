"""One path, the most probable child each time: what a drafter without a tree verifies."""

from __future__ import annotations

import math

from jetspec.tree.proposal import Proposal
from jetspec.tree.tree import Tree, check_budget


def chain(root_token: int, proposal: Proposal, budget: int, *, floor: float = -math.inf) -> Tree:
    """Follow the first child from the root for `budget` steps, or until the proposal ends.

    budget: drafted nodes, root excluded; 0 gives the bare root. Raises OptionError if it is negative.
    floor: log-prob of a path below which no node is wanted.
    """
    check_budget(budget)
    tokens, logps = [root_token], [0.0]
    state = proposal.root_state
    for _ in range(min(budget, proposal.max_depth)):
        children = proposal.expand((state,))[0]
        if not children.tokens or logps[-1] + children.logps[0] < floor:
            break
        tokens.append(children.tokens[0])
        logps.append(logps[-1] + children.logps[0])
        state = children.states[0]
    size = len(tokens)
    return Tree(tuple(tokens), tuple(range(-1, size - 1)), tuple(range(size)), tuple(logps))
