"""Confidences are those of the formula, belong to the right parent, and cut where they should."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetspec.draft import path_scorer
from jetspec.draft.confidence import ConfidentProposal
from jetspec.draft.jetspec import BlockDrafter, make_scorer
from jetspec.errors import OptionError
from jetspec.target.target import Target
from jetspec.tree import best_first, chain
from tests.draft.tiny import VOCAB, random_head, tiny_target

DEPTH, HIDDEN = 4, 64
HEADS: dict[str, dict[str, Any]] = {
    "marginal": {"scorer": "none", "rank": 0, "confidence_with_markov": False},
    "without-rows": {"scorer": "vanilla", "confidence_with_markov": False},
    "vanilla": {"scorer": "vanilla"},
    "gated": {"scorer": "gated"},
    "rnn": {"scorer": "rnn"},
}


@pytest.fixture(autouse=True)
def _few_candidates(_same_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_scorer, "CANDIDATES", 6)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


def proposals(target: Target, kind: str, threshold: float) -> tuple[Any, torch.Tensor, list[Any]]:
    """A head with small confidence weights (so that not all are 0 or 1), states, and proposals."""
    head = random_head(target, confidence=True, **HEADS[kind])
    head.weights["confidence_head.proj.weight"].mul_(0.5)
    dice = torch.Generator().manual_seed(8)
    hidden = torch.randn(2, DEPTH, HIDDEN, generator=dice)
    logits = 2 * torch.randn(2, DEPTH, VOCAB, generator=dice)
    scorer = make_scorer(head, torch.arange(VOCAB), torch.float32, torch.device("cpu"), threshold)
    return head, hidden, scorer.proposals(hidden, logits, [17, 150])


@pytest.mark.parametrize("kind", HEADS)
def test_confidences_are_those_of_the_formula(target: Target, kind: str) -> None:
    """Guards confidences that belong to another depth, sequence or parent, or that read the token itself."""
    head, hidden, found = proposals(target, kind, 0.0)
    weight, bias = (head.weights[f"confidence_head.proj.{part}"] for part in ("weight", "bias"))
    for n, root in enumerate((17, 150)):
        proposal = found[n]
        assert isinstance(proposal, ConfidentProposal)
        state, token, stated = proposal.root_state, root, []
        for depth in range(DEPTH):
            parts = [hidden[n, depth]]
            if weight.shape[1] > HIDDEN:
                parts.append(head.weights["markov_head.markov_w1.weight"][token])
            exact = float(torch.sigmoid(weight[0] @ torch.cat(parts) + bias))
            assert proposal.confidence(state) == pytest.approx(exact, abs=1e-5)
            stated.append(exact)
            children = proposal.expand([state])[0]
            state, token = children.states[0], children.tokens[0]
        assert proposal.chain_confidence() == pytest.approx(stated, abs=1e-5)
        assert proposal.confidence(state) == 0.0, "nothing comes behind the deepest node"


@pytest.mark.parametrize("kind", HEADS)
def test_a_chain_ends_before_its_first_doubtful_depth(target: Target, kind: str) -> None:
    """Guards the static cut: depths before the first confidence below the threshold stay, it and all behind
    it go, whatever later confidences are. A tree loses the same below each of its nodes."""
    for n in range(2):
        whole = proposals(target, kind, 0.0)[2][n]
        stated = whole.chain_confidence()
        for threshold in (0.0, min(stated), sorted(stated)[1] + 1e-6, max(stated) + 1e-6, 1.0):
            cut = proposals(target, kind, threshold)[2][n]
            kept = next((k for k, c in enumerate(stated) if c < threshold), DEPTH)
            long, short = chain(5, whole, DEPTH), chain(5, cut, DEPTH)
            assert short.tokens == long.tokens[: kept + 1]
            tree = best_first(5, cut, 30)
            wide = best_first(5, whole, 500)
            places = {tuple(wide.tokens_of(wide.path_to(v))) for v in range(wide.size)}
            assert {tuple(tree.tokens_of(tree.path_to(v))) for v in range(tree.size)} <= places


def test_confidence_does_not_see_the_token(target: Target) -> None:
    """Guards against anticipation: siblings are cut together or not at all."""
    whole = proposals(target, "vanilla", 0.0)[2][0]
    threshold = sorted(whole.chain_confidence())[1] + 1e-6
    cut = proposals(target, "vanilla", threshold)[2][0]
    first = cut.expand([cut.root_state])[0] if whole.confidence(whole.root_state) >= threshold else None
    states = first.states if first is not None else [cut.root_state]
    for state, children in zip(states, cut.expand(list(states)), strict=True):
        assert len(children.tokens) in (0, 6)
        assert bool(children.tokens) == (cut.confidence(state) >= threshold)


def test_thresholds_are_checked(target: Target) -> None:
    """Guards a threshold in percent; a head without a confidence head takes none to heart."""
    head = random_head(target, confidence=True)
    with pytest.raises(OptionError, match="from 0 up to 1"):
        BlockDrafter(head, target, confidence_threshold=30)
    assert BlockDrafter(random_head(target), target, confidence_threshold=0.5).name == "jetspec"
