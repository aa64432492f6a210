from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.errors import OptionError
from jetspec.tree import Proposal, Tree, beam, best_first, chain
from tests.tree.oracle import TableProposal, all_paths, path_law, paths_of, proposals


def slow_beam(proposal: Proposal, budget: int, width: int) -> list[tuple[int, ...]]:
    """By definition: of all paths keep those among the `width` best of their depth with a kept parent."""
    everything = all_paths(proposal)
    kept = {()}
    for depth in range(1, proposal.max_depth + 1):
        level = [path for _, path in everything if len(path) == depth and path[:-1] in kept]
        kept |= set(level[:width])
    return [path for _, path in everything if path in kept][:budget]


@given(proposals(), st.integers(0, 25), st.integers(1, 6))
def test_equals_the_definition(proposal: Proposal, budget: int, width: int) -> None:
    """Guards the pruning of hopeless nodes, which must save work without changing the tree."""
    tree = beam(1, proposal, budget, width)
    tree.check()
    assert paths_of(tree) == slow_beam(proposal, budget, width)
    assert max((tree.depths.count(depth) for depth in range(1, tree.depth + 1)), default=0) <= width


@given(proposals(), st.integers(1, 25))
def test_wide_beams_are_best_first(proposal: Proposal, budget: int) -> None:
    """Guards the node order: the two builders must agree on nodes, order and log-probs once width allows."""
    assert beam(1, proposal, budget, width=budget) == best_first(1, proposal, budget)


@given(proposals(), st.integers(0, 8))
def test_width_one_is_the_chain(proposal: Proposal, budget: int) -> None:
    """Guards against a special case for chains: one node per depth must give the same nodes and sums."""
    assert beam(1, proposal, budget, width=1) == chain(1, proposal, budget)


@given(proposals(), st.integers(0, 25), st.integers(0, 25), st.integers(1, 6))
def test_cutting_equals_growing(proposal: Proposal, large: int, small: int, width: int) -> None:
    """Guards the adaptive budget, which grows once and cuts, for this builder as well."""
    small, large = sorted((small, large))
    assert beam(1, proposal, large, width).cut(small) == beam(1, proposal, small, width)


def test_one_expansion_per_depth() -> None:
    """Guards what a beam is for: an autoregressive head runs once per depth, for at most `width` nodes."""
    proposal = TableProposal(4, path_law)
    beam(0, proposal, budget=64, width=3)
    assert proposal.calls == 4
    assert [sum(len(path) == depth for path in proposal.expanded) for depth in range(5)] == [1, 3, 3, 3, 0]


def test_stops_when_nothing_deeper_can_enter() -> None:
    """Guards against forwards whose nodes are thrown away: two certain children fill the budget of two."""
    proposal = TableProposal(9, lambda path: {1: 0.0, 2: 0.0} if not path else {1: -5.0})
    assert paths_of(beam(0, proposal, budget=2, width=2)) == [(1,), (2,)]
    assert proposal.calls <= 2


def test_budget_zero_does_not_ask_the_proposal() -> None:
    """Guards plain decoding: budget 0 must not cost a draft forward."""
    proposal = TableProposal(3, path_law)
    assert beam(8, proposal, 0) == Tree.root_only(8)
    assert proposal.calls == 0


def test_refuses_bad_options() -> None:
    """Guards against width 0 silently decoding without a draft."""
    proposal = TableProposal(3, path_law)
    with pytest.raises(OptionError, match="width is 0"):
        beam(0, proposal, 4, width=0)
    with pytest.raises(OptionError, match="budget is -1"):
        beam(0, proposal, -1)
