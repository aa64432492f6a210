"""How many of the drafted nodes to verify."""

from __future__ import annotations

from collections.abc import Sequence as Many

import numpy as np
import numpy.typing as npt

from jetspec.tree import Tree

Floats = npt.NDArray[np.float64]


def rank(chances: Many[Many[float]]) -> tuple[Floats, npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """All drafted nodes of a batch, the most probable first: their chances, and of each the number of its
    tree and its node. Nodes of one tree with equal chances keep their order, so that every beginning of the
    ranking holds the parents of its nodes.

    chances: [B][nodes], roots included, never above the parent's.
    """
    flat = np.concatenate([np.asarray(own[1:], dtype=np.float64) for own in chances])
    owner = np.repeat(np.arange(len(chances)), [len(own) - 1 for own in chances])
    node = np.concatenate([np.arange(1, len(own)) for own in chances])
    order = np.argsort(-flat, kind="stable")
    return flat[order], owner[order], node[order]


def best_count(gains: Floats, seconds: Floats, least: float, rate: float | None = None) -> int:
    """How many of the ranked nodes to keep; the smallest of equally good numbers.

    All numbers are compared. Costs may have steps, and then the first number that does not pay is not the
    last one.

    Args:
        gains: [n] chances, descending.
        seconds: [n + 1] cost of the round with 0..n nodes.
        least: tokens that are emitted in any case, one per sequence.
        rate: None maximises tokens per second of this round. A number, tokens per second that the rounds to
            come will earn, maximises tokens - rate * seconds: the choice that is best in the long run, where
            a round of a good draft may be longer than one of a poor draft.
    """
    tokens = least + np.concatenate([[0.0], np.cumsum(gains)])
    worth = tokens / seconds if rate is None else tokens - rate * seconds
    return int(np.argmax(worth))


def keep(tree: Tree, nodes: Many[int]) -> Tree:
    """The tree of the root and `nodes`, which are ascending and hold their parents."""
    count = len(nodes)
    if not count or nodes[-1] == count:  # the first nodes, and nothing left out
        return tree.cut(count)
    place = {0: 0, **{node: number for number, node in enumerate(nodes, start=1)}}
    kept = [0, *nodes]
    return Tree(
        tokens=tuple(tree.tokens[node] for node in kept),
        parents=(-1, *(place[tree.parents[node]] for node in nodes)),
        depths=tuple(tree.depths[node] for node in kept),
        logps=tuple(tree.logps[node] for node in kept),
    )
