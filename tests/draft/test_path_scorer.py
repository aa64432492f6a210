"""The path scorer against a slow reference: one parent, one child at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.draft import path_scorer as module
from jetspec.draft.checkpoint import Head
from jetspec.draft.path_scorer import Marginals, MarkovScorer
from jetspec.target.target import Target
from jetspec.tree.proposal import MarginalProposal, Proposal
from tests.draft.tiny import VOCAB, random_head, tiny_target

DEPTH, HIDDEN = 4, 64


@pytest.fixture(autouse=True)
def _few_candidates(_same_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(module, "CANDIDATES", 6)
    monkeypatch.setattr(module, "_PARENTS", 3)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


def scored(
    target: Target, kind: str, vocab: Tensor, roots: list[int]
) -> tuple[Head, Tensor, Tensor, list[Any]]:
    """A head, random states and logits, and the proposals made of them."""
    head = random_head(target, scorer=kind, vocab=vocab)
    dice = torch.Generator().manual_seed(8)
    hidden = torch.randn(len(roots), DEPTH, HIDDEN, generator=dice)
    logits = 2 * torch.randn(len(roots), DEPTH, len(vocab), generator=dice)
    scorer = MarkovScorer(head, vocab, torch.float32, torch.device("cpu"))
    return head, hidden, logits, scorer.proposals(hidden, logits, roots)


def law(head: Head, state: Tensor, logits: Tensor, parent: Tensor, vocab: Tensor) -> Tensor:
    """log softmax over the draft vocabulary [Vd] below a parent whose row [r] is given."""
    w, row = head.weights, parent
    if head.config.scorer == "gated":
        joined = torch.cat([state, row])
        gate = w["markov_head.gate_proj.weight"] @ joined + w["markov_head.gate_proj.bias"]
        row = row * torch.sigmoid(gate)
    scores = torch.stack(
        [logits[i] + w["markov_head.markov_w2.weight"][token] @ row for i, token in enumerate(vocab.tolist())]
    )
    return scores.log_softmax(-1)


def children(proposal: Proposal, state: Any) -> dict[int, float]:
    """Token -> log-prob of the children of a state."""
    (found,) = proposal.expand([state])
    assert list(found.logps) == sorted(found.logps, reverse=True)
    return dict(zip(found.tokens, found.logps, strict=True))


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
@pytest.mark.parametrize("reduced", [False, True], ids=["all-ids", "draft-vocabulary"])
def test_conditional_table_equals_a_slow_reference(target: Target, kind: str, reduced: bool) -> None:
    """Guards rows of the wrong parent, depth or sequence, ids taken for indices, and a root row of another
    token: depth 1 is the exact law below the true root; below it, each parent's law over the candidates,
    times their share under the expected parent."""
    vocab = torch.arange(3, VOCAB, 4) if reduced else torch.arange(VOCAB)
    roots = [17, 150]
    head, hidden, logits, proposals = scored(target, kind, vocab, roots)
    w1 = head.weights["markov_head.markov_w1.weight"]
    for n, root in enumerate(roots):
        exact = law(head, hidden[n, 0], logits[n, 0], w1[root], vocab)
        best = exact.topk(6).indices
        assert children(proposals[n], proposals[n].root_state) == pytest.approx(
            {int(vocab[i]): float(exact[i]) for i in best}, abs=1e-4
        )
        candidates = best
        for depth in range(1, DEPTH):
            likely, place = logits[n, depth - 1].topk(3)
            expected = (likely.softmax(-1).unsqueeze(-1) * w1[vocab[place]]).sum(0)
            marginal = law(head, hidden[n, depth], logits[n, depth], expected, vocab)
            chosen = marginal.topk(6).indices
            cover = marginal[chosen].logsumexp(-1)
            for a, parent in enumerate(candidates.tolist()):
                row = law(head, hidden[n, depth], logits[n, depth], w1[vocab[parent]], vocab)[chosen]
                row = row.log_softmax(-1) + cover
                assert children(proposals[n], (depth, a)) == pytest.approx(
                    {int(vocab[i]): float(x) for i, x in zip(chosen, row, strict=True)}, abs=1e-4
                )
            candidates = chosen


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_children_depend_on_the_parent(target: Target, kind: str) -> None:
    """Guards the claim that paths are scored: log-probs change with the parent's token at every
    depth, are at most 0 and never add up to more than 1."""
    _, _, _, (proposal,) = scored(target, kind, torch.arange(VOCAB), [9])
    assert proposal.max_depth == DEPTH
    for depth in range(1, DEPTH):
        laws = [children(proposal, (depth, a)) for a in range(6)]
        for row in laws:
            assert max(row.values()) <= 0.0
            assert sum(map(math.exp, row.values())) <= 1.0 + 1e-5
        assert max(abs(laws[0][token] - laws[1][token]) for token in laws[0]) > 0.1
    other = scored(target, kind, torch.arange(VOCAB), [10])[3][0]
    assert children(proposal, (0, 0)) != children(other, (0, 0)), "the root's token has no effect"


def test_without_a_scorer_a_depth_has_one_law(target: Target) -> None:
    """Guards the published form: children of a depth are the best ids of that depth's own logits."""
    vocab = torch.arange(5, VOCAB, 3)
    logits = 2 * torch.randn(2, DEPTH, len(vocab))
    proposals = Marginals(vocab).proposals(torch.empty(2, DEPTH, HIDDEN), logits, [1, 2])
    for n, proposal in enumerate(proposals):
        assert isinstance(proposal, MarginalProposal)
        for depth in range(DEPTH):
            best = logits[n, depth].log_softmax(-1).topk(6)
            expected = {int(vocab[i]): float(x) for x, i in zip(best.values, best.indices, strict=True)}
            assert children(proposal, depth) == pytest.approx(expected, abs=1e-5)


def test_vocabulary_smaller_than_the_candidates(target: Target) -> None:
    """Guards tiny draft vocabularies: fewer ids than candidates or parents are all taken."""
    _, _, _, (proposal,) = scored(target, "gated", torch.tensor([4, 90]), [9])
    assert set(children(proposal, (0, 0))) == {4, 90}
