"""Which drafted tokens survive: the one acceptance rule for greedy decoding and for sampling."""

from __future__ import annotations

from collections.abc import Callable

from jetspec.tree import Tree


def walk(tree: Tree, pick: Callable[[int], int]) -> tuple[list[int], int]:
    """Follow the target's own tokens down the tree until one was not drafted.

    pick    node -> the token that the target emits after the path to that node; called from the root down,
            once per node of the returned path and for no other node, so it may be lazy and costly
    return  path: node indices from the root (`path[0] == 0`) to the last accepted node; bonus: the target's
            token after it

    The emitted tokens `tree.tokens_of(path) + [bonus]` are picks of the target at the committed prefix and of
    nothing else; the draft's probabilities are not read. Hence the output follows the target's law exactly,
    greedy or sampled, whatever the tree is, provided sibling tokens are unique (sample-match: DFlash, arXiv
    2602.06036; DDTree, arXiv 2604.12989). An end-of-text token is a token like any other here;
    `Sequence.commit` stops at it.
    """
    path = [0]
    while True:
        token = pick(path[-1])
        child = tree.child(path[-1], token)
        if child is None:
            return path, token
        path.append(child)
