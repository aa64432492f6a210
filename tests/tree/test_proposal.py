from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.errors import HeadError
from jetspec.tree import EmptyProposal, MarginalProposal, MarkovProposal, Proposal, best_first
from tests.tree.oracle import proposals

INF = float("inf")


@given(proposals())
def test_children_are_sorted_everywhere(proposal: Proposal) -> None:
    """Guards what best-first rests on: log-probs <= 0, descending, ties by token id, unique and finite."""
    frontier = [proposal.root_state]
    for _ in range(proposal.max_depth):
        answers = proposal.expand(frontier)
        assert len(answers) == len(frontier)
        for tokens, logps, states in answers:
            assert len(tokens) == len(logps) == len(states) == len(set(tokens))
            assert all(-INF < logp <= 0.0 for logp in logps)
            order = sorted(range(len(tokens)), key=lambda i: (-logps[i], tokens[i]))
            assert order == list(range(len(tokens)))
        frontier = [state for answer in answers for state in answer.states]
    assert all(not answer.tokens for answer in proposal.expand(frontier))


def test_marginal_children_depend_on_the_depth_only() -> None:
    """Guards against an off-by-one of the depth: the root's children are row 0, theirs are row 1."""
    proposal = MarginalProposal([[7, 8], [3, 4]], [[-2.0, -0.5], [-0.1, -3.0]])
    first = proposal.expand([proposal.root_state])[0]
    assert (first.tokens, first.logps) == ([8, 7], [-0.5, -2.0])
    for second in proposal.expand(first.states):
        assert (second.tokens, second.logps) == ([3, 4], [-0.1, -3.0])


def test_markov_children_follow_the_parents_candidate() -> None:
    """Guards against indexing the transitions by rank instead of by candidate, or with the axes swapped."""
    proposal = MarkovProposal(
        tokens=[[7, 8], [3, 4]],
        root_logps=[-2.0, -0.5],  # token 8, candidate 1, is the first child
        cond_logps=[[[-0.1, -3.0], [-4.0, -0.2]]],
    )
    first = proposal.expand([proposal.root_state])[0]
    assert first.tokens == [8, 7]
    below_8, below_7 = proposal.expand(first.states)
    assert (below_8.tokens, below_8.logps) == ([4, 3], [-0.2, -4.0])
    assert (below_7.tokens, below_7.logps) == ([3, 4], [-0.1, -3.0])


@given(st.integers(0, 2**32 - 1))
def test_markov_with_equal_rows_is_marginal(seed: int) -> None:
    """Guards against two meanings of one law: transitions that ignore the parent give the marginal tree."""
    rng = np.random.default_rng(seed)
    tokens = np.stack([rng.permutation(9)[:4] for _ in range(3)])
    logps = np.log(rng.dirichlet(np.ones(4), size=3))
    markov = MarkovProposal(tokens, logps[0], np.repeat(logps[1:, None, :], 4, axis=1))
    assert best_first(0, markov, 30) == best_first(0, MarginalProposal(tokens, logps), 30)


def test_markov_sorts_only_visited_rows() -> None:
    """Guards the build time: one row per expanded node, although the table has (D-1)*K."""
    rng = np.random.default_rng(0)
    tokens = np.stack([rng.permutation(99)[:32] for _ in range(7)])
    proposal = MarkovProposal(tokens, -rng.random(32), -rng.random((6, 32, 32)))
    best_first(0, proposal, 16)
    assert 1 < len(proposal._sorted) <= 16


def test_rounding_above_zero_and_probability_zero() -> None:
    """Guards against a log-prob of +1e-7 (float32 softmax) breaking the order, and against drafting -inf."""
    marginal = MarginalProposal([[5, 6, 4]], [[1e-7, -INF, 2e-7]])
    markov = MarkovProposal([[5, 6, 4]], [1e-7, -INF, 2e-7], np.zeros((0, 3, 3)))
    for proposal in (marginal, markov):
        children = proposal.expand([proposal.root_state])[0]
        assert (children.tokens, children.logps, len(children.states)) == ([4, 5], [0.0, 0.0], 2)


def test_nan_is_reported() -> None:
    """Guards against a broken head drafting nonsense for ever: NaN compares false and would sort anywhere."""
    with pytest.raises(HeadError, match="NaN"):
        MarginalProposal([[5, 6]], [[float("nan"), -1.0]])
    proposal = MarkovProposal([[5, 6], [5, 6]], [-1.0, -2.0], [[[float("nan"), -1.0], [-1.0, -1.0]]])
    with pytest.raises(HeadError, match="NaN"):
        best_first(0, proposal, 2)


def test_later_changes_of_the_arrays_do_not_reach_the_proposal() -> None:
    """Guards against aliasing a buffer that the drafter reuses next round, while rows are sorted lazily."""
    tokens, root, cond = np.array([[5, 6], [7, 8]]), np.array([-1.0, -2.0]), np.full((1, 2, 2), -1.0)
    proposal = MarkovProposal(tokens, root, cond)
    root[:], cond[:], tokens[:] = -9.0, -9.0, 0
    tree = best_first(0, proposal, 2)
    assert tree.tokens == (0, 5, 6) and tree.logps == (0.0, -1.0, -2.0)


def test_empty_proposal_has_no_children() -> None:
    """Guards plain decoding: a drafter that is off must not make builders fail."""
    proposal = EmptyProposal()
    assert [list(children.tokens) for children in proposal.expand([None, None])] == [[], []]
    assert best_first(4, proposal, 8).budget == 0
