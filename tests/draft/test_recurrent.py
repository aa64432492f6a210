"""The recurrent scorer against a slow reference that walks one path at a time."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.draft import path_scorer
from jetspec.draft.checkpoint import Head
from jetspec.draft.recurrent import RecurrentProposal, RecurrentScorer
from jetspec.target.target import Target
from jetspec.tree import best_first
from tests.draft.tiny import VOCAB, random_head, tiny_target

DEPTH, HIDDEN = 4, 64


@pytest.fixture(autouse=True)
def _few_candidates(_same_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(path_scorer, "CANDIDATES", 6)
    monkeypatch.setattr(path_scorer, "_PARENTS", 3)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


def scored(target: Target, vocab: Tensor, roots: list[int]) -> tuple[Head, Tensor, Tensor, list[Any]]:
    """A head, random states and logits, and the proposals made of them."""
    head = random_head(target, scorer="rnn", vocab=vocab)
    dice = torch.Generator().manual_seed(8)
    hidden = torch.randn(len(roots), DEPTH, HIDDEN, generator=dice)
    logits = 2 * torch.randn(len(roots), DEPTH, len(vocab), generator=dice)
    scorer = RecurrentScorer(head, vocab, torch.float32, torch.device("cpu"))
    return head, hidden, logits, scorer.proposals(hidden, logits, roots)


def advance(head: Head, state: Tensor, row: Tensor, slot: Tensor) -> tuple[Tensor, Tensor]:
    """One step of the recurrence, as the paper writes it: the new state, and what child rows are multiplied
    with."""
    w = head.weights
    joined = torch.cat([state, row, slot])
    gate, update, out = (
        w["markov_head.joint_proj.weight"] @ joined + w["markov_head.joint_proj.bias"]
    ).chunk(3)
    keep = torch.sigmoid(gate)
    return keep * state + (1 - keep) * torch.tanh(update), torch.tanh(out)


@pytest.mark.parametrize("reduced", [False, True], ids=["all-ids", "draft-vocabulary"])
def test_children_equal_a_slow_reference(target: Target, reduced: bool) -> None:
    """Guards states that are mixed up between nodes, depths or sequences, a wrong order of [s; e; h] or of
    the three parts, and ids taken for indices. Depth 1 is the exact law over the whole vocabulary; below it,
    each path's law over its depth's candidates, up to a constant that is the same for all paths of a depth.

    Nodes of different depths and sequences are opened in one batch each."""
    vocab = torch.arange(3, VOCAB, 4) if reduced else torch.arange(VOCAB)
    roots = [17, 150]
    head, hidden, logits, proposals = scored(target, vocab, roots)
    w1, w2 = (head.weights[f"markov_head.markov_w{n}.weight"] for n in (1, 2))
    rank = head.config.rank
    for n, root in enumerate(roots):
        # (state to expand, recurrent state, token) of a few paths, opened together with the next level
        level = [(proposals[n].root_state, torch.zeros(rank), root)]
        for depth in range(DEPTH):
            opened = proposals[n].expand([state for state, _, _ in level])
            covers, following = [], []
            for (_, state, token), children in zip(level, opened, strict=True):
                new, terms = advance(head, state, w1[token], hidden[n, depth])
                law = logits[n, depth] + w2[vocab] @ terms
                places = torch.searchsorted(vocab, torch.tensor(children.tokens))
                chosen = law[places].log_softmax(-1)
                found = torch.tensor(children.logps)
                shift = found - chosen
                assert (shift - shift[0]).abs().max() < 1e-4
                covers.append(float(shift[0]))
                if depth == 0:
                    exact = law.log_softmax(-1)
                    assert set(children.tokens) == set(vocab[exact.topk(6).indices].tolist())
                    assert torch.allclose(found, exact[places], atol=1e-4)
                assert list(children.logps) == sorted(children.logps, reverse=True)
                for place in (0, 4):
                    following.append((children.states[place], new, children.tokens[place]))
            assert max(covers) - min(covers) < 1e-4 and max(covers) <= 1e-6
            level = following
        assert not proposals[n].expand([level[0][0]])[0].tokens, "deeper than the block"


def test_grandparents_matter(target: Target) -> None:
    """Guards the claim that a path is known as a whole: with the same parent token, another grandparent gives
    another law. A Markov scorer cannot pass this."""
    proposal = scored(target, torch.arange(VOCAB), [9])[3][0]
    first = proposal.expand([proposal.root_state])[0]
    below = proposal.expand([first.states[0], first.states[1]])
    token = next(t for t in below[0].tokens if t in below[1].tokens)
    states = [children.states[children.tokens.index(token)] for children in below]
    laws = [dict(zip(c.tokens, c.logps, strict=True)) for c in proposal.expand(states)]
    assert laws[0].keys() == laws[1].keys()
    assert max(abs(laws[0][t] - laws[1][t]) for t in laws[0]) > 0.05
    for law in laws:
        assert sum(map(math.exp, law.values())) <= 1 + 1e-5


def test_a_batch_of_nodes_equals_one_by_one(target: Target) -> None:
    """Guards the batch over a frontier: its order, nodes of mixed depth, and nodes that have no children."""
    proposal = scored(target, torch.arange(VOCAB), [9])[3][0]
    assert isinstance(proposal, RecurrentProposal)
    states = [proposal.root_state]
    for _ in range(DEPTH):
        children = proposal.expand([states[-1]])[0]
        states += [children.states[2], children.states[0]]
    states.reverse()
    together = proposal.expand(states)
    for state, children in zip(states, together, strict=True):
        alone = proposal.expand([state])[0]
        assert children.tokens == alone.tokens
        assert children.logps == pytest.approx(alone.logps, abs=1e-5)
    assert together[0].tokens == () and together[-1].tokens


def test_best_first_finds_the_most_probable_paths(target: Target) -> None:
    """Guards exactness with states per node: the tree is the top of all 6 + 6^2 + 6^3 + 6^4 paths."""
    proposal = scored(target, torch.arange(VOCAB), [9])[3][0]
    paths: list[tuple[float, tuple[int, ...]]] = []
    level = [((), 0.0, proposal.root_state)]
    for _ in range(DEPTH):
        following = []
        for path, logp, state in level:
            children = proposal.expand([state])[0]
            for token, own, below in zip(*children, strict=True):
                following.append(((*path, token), logp + own, below))
        paths += [(logp, path) for path, logp, _ in following]
        level = following
    paths.sort(key=lambda item: -item[0])
    tree = best_first(9, proposal, 40)
    grown = {tuple(tree.tokens_of(tree.path_to(node))) for node in range(1, tree.size)}
    assert grown == {path for _, path in paths[:40]}
