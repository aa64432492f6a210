from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.errors import OptionError
from jetspec.tree import Proposal, Tree, best_first, chain, dynamic
from tests.tree.oracle import TableProposal, all_paths, path_law, paths_of, proposals


def slow_dynamic(proposal: Proposal, budget: int, width: int) -> list[tuple[int, ...]]:
    """By definition: the `width` best nodes of each depth are expanded, `width` children of each are offered,
    and the best of all that was offered are kept."""
    everything = all_paths(proposal)
    expanded, offered = {()}, set()
    for depth in range(1, proposal.max_depth + 1):
        level = []
        for parent in expanded:
            if len(parent) == depth - 1:
                children = [p for _, p in everything if len(p) == depth and p[:-1] == parent]
                level += sorted(children, key=[p for _, p in everything].index)[:width]
        offered |= set(level)
        best = [path for _, path in everything if path in level]
        expanded |= set(best[:width])
    return [path for _, path in everything if path in offered][:budget]


@given(proposals(), st.integers(0, 25), st.integers(1, 5))
def test_equals_the_definition(proposal: Proposal, budget: int, width: int) -> None:
    """Guards the rerank over the whole pool, and the pruning, which must not change the tree."""
    tree = dynamic(1, proposal, budget, width)
    tree.check()
    assert paths_of(tree) == slow_dynamic(proposal, budget, width)


@given(proposals(), st.integers(1, 25))
def test_wide_trees_are_best_first(proposal: Proposal, budget: int) -> None:
    """Guards the node order: the builders agree on nodes, order and log-probs once width allows."""
    assert dynamic(1, proposal, budget, width=budget) == best_first(1, proposal, budget)


@given(proposals(), st.integers(0, 8), st.integers(0, 25), st.integers(1, 4))
def test_width_one_is_the_chain_and_cutting_equals_growing(
    proposal: Proposal, small: int, large: int, width: int
) -> None:
    """Guards against a special case for chains, and the budget that grows once and cuts."""
    assert dynamic(1, proposal, small, width=1) == chain(1, proposal, small)
    small, large = sorted((small, large))
    assert dynamic(1, proposal, large, width).cut(small) == dynamic(1, proposal, small, width)


def test_a_node_that_is_not_expanded_can_be_drafted() -> None:
    """Guards what tells it from a beam: with two nodes expanded per depth, four of one depth can be nodes."""
    proposal = TableProposal(2, lambda path: {1: -0.1, 2: -0.2})
    tree = dynamic(0, proposal, 6, width=2)
    assert tree.depths.count(2) == 4


def test_one_expansion_per_depth_and_none_for_budget_zero() -> None:
    """Guards what it is for: an autoregressive head runs once per depth, and not at all for plain
    decoding.
    """
    proposal = TableProposal(4, path_law)
    dynamic(0, proposal, budget=64, width=3)
    assert proposal.calls == 4
    proposal = TableProposal(3, path_law)
    assert dynamic(8, proposal, 0) == Tree.root_only(8) and proposal.calls == 0


def test_refuses_bad_options() -> None:
    """Guards against width 0 silently decoding without a draft."""
    with pytest.raises(OptionError, match="width is 0"):
        dynamic(0, TableProposal(3, path_law), 4, width=0)
    with pytest.raises(OptionError, match="budget is -1"):
        dynamic(0, TableProposal(3, path_law), -1)
