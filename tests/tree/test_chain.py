from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.errors import OptionError
from jetspec.tree import Proposal, Tree, chain
from tests.tree.oracle import TableProposal, path_law, proposals


@given(proposals(), st.integers(0, 8))
def test_takes_the_first_child_each_time(proposal: Proposal, budget: int) -> None:
    """Guards against a chain of per-depth best tokens where children depend on the parent."""
    tree = chain(1, proposal, budget)
    tree.check()
    assert tree.parents == tuple(range(-1, tree.budget))
    state, logp = proposal.root_state, 0.0
    for node in range(1, tree.size):
        children = proposal.expand([state])[0]
        state, logp = children.states[0], logp + children.logps[0]
        assert tree.tokens[node] == children.tokens[0] and tree.logps[node] == logp
    ended = tree.budget == min(budget, proposal.max_depth) or not proposal.expand([state])[0].tokens
    assert ended, "it may only stop at the budget, at the depth limit or where nothing is offered"


def test_is_not_the_most_probable_path() -> None:
    """Guards the meaning: the chain follows 1 (p .6) although the likeliest path of two starts with 2."""
    law = {(): {1: -0.5, 2: -0.9}, (1,): {3: -2.0}, (2,): {4: -0.1}}
    assert chain(0, TableProposal(2, law.__getitem__), 2).tokens == (0, 1, 3)


def test_limits() -> None:
    """Guards budget 0, the depth limit, and one expansion per drafted node."""
    proposal = TableProposal(3, path_law)
    assert chain(8, proposal, 0) == Tree.root_only(8) and proposal.calls == 0
    assert chain(8, proposal, 2).depth == 2 and proposal.calls == 2
    assert chain(8, proposal, 99).depth == 3
    with pytest.raises(OptionError, match="budget is -1"):
        chain(8, proposal, -1)
