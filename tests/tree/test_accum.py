from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.errors import OptionError
from jetspec.tree import MarginalProposal, Proposal, Tree, accum, best_first, chain
from tests.tree.oracle import TableProposal, path_law, paths_of, proposals


def reference(proposal: Proposal, budget: int, width: int) -> list[tuple[int, ...]]:
    """The published loop over plain lists: look for the best open path, attach its children, all or as many
    as fit."""
    found: list[tuple[int, ...]] = []
    opened = [(0.0, 0, 0, 0, (), proposal.root_state)]  # cost, depth, token, number, path, state
    while opened and len(found) < budget:
        best = min(opened, key=lambda entry: entry[:4])
        opened.remove(best)
        cost, depth, _, _, path, state = best
        if depth >= proposal.max_depth:
            continue
        children = proposal.expand([state])[0]
        for token, logp, own in list(zip(*children, strict=True))[:width]:
            if len(found) < budget:
                found.append((*path, token))
                opened.append((cost - logp, depth + 1, token, len(found), (*path, token), own))
    return found


@given(proposals(), st.integers(0, 25), st.integers(1, 4))
def test_is_the_published_loop(proposal: Proposal, budget: int, width: int) -> None:
    """Guards the comparison: nodes, their order and the cut at the budget are those of the readable loop."""
    tree = accum(1, proposal, budget, width)
    tree.check()
    assert paths_of(tree) == reference(proposal, budget, width)


@given(proposals(), st.integers(0, 12), st.integers(0, 12))
def test_cutting_equals_growing_less(proposal: Proposal, small: int, more: int) -> None:
    """Guards budget policies, which grow once and cut."""
    assert accum(1, proposal, small + more).cut(small) == accum(1, proposal, small)


@given(proposals(), st.integers(0, 12))
def test_never_better_than_best_first(proposal: Proposal, budget: int) -> None:
    """Guards the claim of the docstring: under the draft's own law no tree expects more accepted tokens than
    the best-first one."""
    ours, best = (sum(map(math.exp, tree.logps[1:])) for tree in (
        accum(1, proposal, budget, 2), best_first(1, proposal, budget)))  # fmt: skip
    assert ours <= best + 1e-9


def test_one_pop_buys_all_children() -> None:
    """Guards what sets this tree apart: 3 unlikely siblings come before the likely second token of the
    spine, which best-first would draft at once."""
    law = [[0.94, 0.02, 0.02, 0.02], [0.94, 0.02, 0.02, 0.02]]
    proposal = MarginalProposal(
        [[10, 11, 12, 13], [20, 21, 22, 23]], [[math.log(p) for p in row] for row in law]
    )
    assert paths_of(accum(1, proposal, 5)) == [(10,), (11,), (12,), (13,), (10, 20)]
    assert paths_of(best_first(1, proposal, 2)) == [(10,), (10, 20)]


def test_limits() -> None:
    """Guards budget 0, width 1 (the chain), the depth limit, and the names of wrong values."""
    assert accum(8, TableProposal(3, path_law), 0) == Tree.root_only(8)
    assert accum(8, TableProposal(3, path_law), 9, width=1) == chain(8, TableProposal(3, path_law), 9)
    assert accum(8, TableProposal(2, path_law), 99).budget == 4 + 16
    with pytest.raises(OptionError, match="budget is -1"):
        accum(8, TableProposal(3, path_law), -1)
    with pytest.raises(OptionError, match="width is 0"):
        accum(8, TableProposal(3, path_law), 4, width=0)
