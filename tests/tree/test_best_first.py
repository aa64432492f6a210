from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.errors import OptionError
from jetspec.tree import EmptyProposal, Proposal, Tree, best_first
from tests.tree.oracle import TableProposal, all_paths, first_paths, path_law, paths_of, proposals


@given(proposals(), st.integers(0, 40))
def test_drafts_the_most_probable_paths(proposal: Proposal, budget: int) -> None:
    """Guards against a tree that is merely good: compared with all paths sorted, in order, ties included."""
    tree = best_first(1, proposal, budget)
    tree.check()
    assert paths_of(tree) == first_paths(proposal, budget)


@given(proposals(), st.integers(0, 40))
def test_log_probs_are_those_of_the_paths(proposal: Proposal, budget: int) -> None:
    """Guards against a sibling inheriting its predecessor's sum, which a calibrated budget would read."""
    tree = best_first(1, proposal, budget)
    assert tree.logps[1:] == tuple(-key[0] for key, _ in all_paths(proposal)[:budget])
    assert list(tree.logps) == sorted(tree.logps, reverse=True)


@given(proposals(), st.integers(0, 40), st.integers(0, 40))
def test_cutting_equals_growing(proposal: Proposal, large: int, small: int) -> None:
    """Guards the adaptive budget, which grows once and cuts: ties must not fall differently."""
    small, large = sorted((small, large))
    assert best_first(1, proposal, large).cut(small) == best_first(1, proposal, small)


def test_children_may_depend_on_the_whole_path() -> None:
    """Guards against assuming one law per depth or per parent token: here each path has its own."""
    proposal = TableProposal(4, path_law)
    for budget in (1, 2, 7, 30, 340, 1000):
        assert paths_of(best_first(0, proposal, budget)) == first_paths(proposal, budget)


def test_expands_at_most_one_node_per_drafted_node() -> None:
    """Guards the cost where an expansion is a forward: none for the last node or at the depth limit."""
    proposal = TableProposal(3, path_law)
    tree = best_first(0, proposal, 20)
    assert proposal.calls <= 20 and len(set(proposal.expanded)) == len(proposal.expanded)
    assert all(len(path) < 3 for path in proposal.expanded)
    assert set(proposal.expanded) <= {(), *paths_of(tree)}
    deep = TableProposal(9, lambda path: {1: -0.5})
    assert best_first(0, deep, 5).budget == deep.calls == 5, "the root and four nodes, not the fifth"


def test_all_equal_goes_by_depth_and_token() -> None:
    """Guards reproducibility where every path is certain: by depth, then token id, then parent."""
    proposal = TableProposal(2, lambda path: {3: 0.0, 1: 0.0, 2: 0.0})
    tree = best_first(0, proposal, 12)
    assert paths_of(tree) == [
        *((1,), (2,), (3,)),
        *((1, 1), (2, 1), (3, 1), (1, 2), (2, 2), (3, 2), (1, 3), (2, 3), (3, 3)),
    ]  # fmt: skip
    assert all(math.copysign(1.0, logp) == 1.0 for logp in tree.logps), "no -0.0"


def test_budget_zero_does_not_ask_the_proposal() -> None:
    """Guards plain decoding: budget 0 must not cost an expansion."""
    proposal = TableProposal(3, path_law)
    assert best_first(8, proposal, 0) == Tree.root_only(8)
    assert proposal.calls == 0
    assert best_first(8, EmptyProposal(), 16) == Tree.root_only(8)


def test_small_proposals_give_small_trees() -> None:
    """Guards against repeating or inventing nodes once every path is drafted: 2 + 4 paths, then the end."""
    proposal = TableProposal(2, lambda path: {1: -1.0, 2: -1.0})
    assert best_first(0, proposal, 6) == best_first(0, proposal, 100)
    assert best_first(0, proposal, 100).budget == 6


def test_refuses_a_negative_budget() -> None:
    """Guards against budget -1 silently decoding without a draft."""
    with pytest.raises(OptionError, match="budget is -1"):
        best_first(0, EmptyProposal(), -1)
