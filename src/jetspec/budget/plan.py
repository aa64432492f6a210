"""How many of the drafted nodes to verify."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import NamedTuple

from jetspec.tree import Tree


class Ranking(NamedTuple):
    """All drafted nodes of a batch, the most probable first: their chances, and of each the number of its
    tree and its node.
    """

    gains: list[float]
    owners: list[int]
    nodes: list[int]


def rank(chances: Many[Many[float]]) -> Ranking:
    """Nodes of one tree with equal chances keep their order, so that every beginning of the ranking holds the
    parents of its nodes.

    chances: [B][nodes], roots included, never above the parent's.
    """
    if len(chances) == 1:
        own = chances[0]
        alone = sorted(range(1, len(own)), key=own.__getitem__, reverse=True)  # stable in reverse as well
        return Ranking([own[node] for node in alone], [0] * len(alone), alone)
    flat: list[float] = []
    owners: list[int] = []
    nodes: list[int] = []
    for owner, own in enumerate(chances):
        flat += own[1:]
        owners += [owner] * (len(own) - 1)
        nodes += range(1, len(own))
    order = sorted(range(len(flat)), key=flat.__getitem__, reverse=True)
    return Ranking([flat[n] for n in order], [owners[n] for n in order], [nodes[n] for n in order])


def best_count(gains: Many[float], seconds: Many[float], least: float, rate: float | None = None) -> int:
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
    best, tokens = 0, least
    if rate is None:
        most = least / seconds[0]
        for count, gain in enumerate(gains, start=1):
            tokens += gain
            if tokens / seconds[count] > most:
                best, most = count, tokens / seconds[count]
        return best
    most = least - rate * seconds[0]
    for count, gain in enumerate(gains, start=1):
        tokens += gain
        worth = tokens - rate * seconds[count]
        if worth > most:
            best, most = count, worth
    return best


def keep(tree: Tree, nodes: Many[int]) -> Tree:
    """The tree of the root and `nodes`, which are ascending and hold their parents."""
    count = len(nodes)
    if not count or nodes[-1] == count:  # the first nodes, and nothing left out
        return tree.cut(count)
    place = {0: 0, **{node: number for number, node in enumerate(nodes, start=1)}}
    kept = [0, *nodes]
    return Tree(
        tokens=tuple([tree.tokens[node] for node in kept]),
        parents=(-1, *[place[tree.parents[node]] for node in nodes]),
        depths=tuple([tree.depths[node] for node in kept]),
        logps=tuple([tree.logps[node] for node in kept]),
    )
