"""Slow, readable references for the tree tests, and random inputs for them."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import numpy as np
from hypothesis import strategies as st

from jetspec.tree import Children, MarginalProposal, MarkovProposal, Proposal, Tree

# The node order of a path: (cost, depth, token) of the node itself, then the same of its parent, and so on.
Key = tuple[float, int, int, "Key | tuple[()]"]


def all_paths(proposal: Proposal) -> list[tuple[Key, tuple[int, ...]]]:
    """Every path of the proposal, in node order: by log-prob, depth, token id, then the parent's order."""
    found: list[tuple[Key, tuple[int, ...]]] = []
    level: list[tuple[Key | tuple[()], tuple[int, ...], float, object]] = [((), (), 0.0, proposal.root_state)]
    for depth in range(1, proposal.max_depth + 1):
        below = []
        for key, path, logp, state in level:
            for token, own, child_state in zip(*proposal.expand([state])[0], strict=True):
                child_key: Key = (-(logp + own), depth, token, key)
                below.append((child_key, (*path, token), logp + own, child_state))
        found += [(key, path) for key, path, _, _ in below]
        level = below
    return sorted(found)


def paths_of(tree: Tree) -> list[tuple[int, ...]]:
    """The token path of every drafted node, in node order."""
    return [tuple(tree.tokens_of(tree.path_to(node))) for node in range(1, tree.size)]


def first_paths(proposal: Proposal, budget: int) -> list[tuple[int, ...]]:
    """What best-first must draft."""
    return [path for _, path in all_paths(proposal)[:budget]]


def _rows(draw: st.DrawFn, count: int, width: int) -> list[list[float]]:
    """Log-probs, half of the time from a coarse grid on which sums are exact and ties are common."""
    if draw(st.booleans()):
        value = st.sampled_from([0.0, -0.5, -1.0, -1.5, -2.0, -np.inf])
    else:
        value = st.floats(-8.0, -0.015625, width=32)
    return draw(st.lists(st.lists(value, min_size=width, max_size=width), min_size=count, max_size=count))


@st.composite
def marginals(draw: st.DrawFn) -> MarginalProposal:
    """A few depths of a few candidates; unsorted, as a top-k over a permuted vocabulary would be."""
    depth, width = draw(st.integers(0, 4)), draw(st.integers(1, 4))
    tokens = [draw(st.permutations(range(5)))[:width] for _ in range(depth)]
    return MarginalProposal(
        np.array(tokens, dtype=np.int64).reshape(depth, width),
        np.array(_rows(draw, depth, width)).reshape(depth, width),
    )


@st.composite
def markovs(draw: st.DrawFn) -> MarkovProposal:
    """As `marginals`, with transitions that differ from parent to parent."""
    depth, width = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    tokens = [draw(st.permutations(range(5)))[:width] for _ in range(depth)]
    cond = np.array(_rows(draw, (depth - 1) * width, width)).reshape(depth - 1, width, width)
    return MarkovProposal(tokens, _rows(draw, 1, width)[0], cond)


def proposals() -> st.SearchStrategy[Proposal]:
    """Either kind."""
    return st.one_of(marginals(), markovs())


@st.composite
def trees(draw: st.DrawFn, max_size: int = 14) -> Tree:
    """Any valid tree over a small vocabulary, also shapes that no builder would grow."""
    tokens, parents = [draw(st.integers(0, 4))], [-1]
    for _ in range(draw(st.integers(0, max_size - 1))):
        parent, token = draw(st.integers(0, len(tokens) - 1)), draw(st.integers(0, 4))
        if (parent, token) not in set(zip(parents, tokens, strict=True)):
            tokens.append(token)
            parents.append(parent)
    return Tree.of(tokens, parents)


class TableProposal:
    """Children by rule: `rule(path)` gives the {token: log-prob} below a path; the state is the path itself.

    Unlike the arrays of `MarkovProposal` it can depend on the whole path, and it counts its calls.
    """

    def __init__(self, max_depth: int, rule: Callable[[tuple[int, ...]], dict[int, float]]) -> None:
        self.max_depth = max_depth
        self.root_state: tuple[int, ...] = ()
        self.calls = 0
        self.expanded: list[tuple[int, ...]] = []
        self._rule = rule

    def expand(self, states: list[tuple[int, ...]]) -> list[Children]:
        """Sort the rule's answer for each path."""
        self.calls += 1
        self.expanded += states
        answers = []
        for path in states:
            row = sorted(self._rule(path).items(), key=lambda item: (-item[1], item[0]))
            tokens = [token for token, _ in row]
            answers.append(Children(tokens, [logp for _, logp in row], [(*path, t) for t in tokens]))
        return answers


def path_law(path: tuple[int, ...]) -> dict[int, float]:
    """A law over four tokens that depends on the whole path, with near-certain and unlikely steps."""
    rng = np.random.default_rng(list(itertools.chain((7,), path)))
    probs = rng.dirichlet(np.full(4, 0.4))
    return {token: float(np.log(max(p, 1e-6))) for token, p in enumerate(probs)}
