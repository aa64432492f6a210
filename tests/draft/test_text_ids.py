"""Ids of a request's own text are drafted as if the draft vocabulary held them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetspec.draft import path_scorer
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.text_ids import TextIds
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.tree.proposal import Proposal
from tests.draft.test_native_scorer import ROOTS, assert_close, case
from tests.draft.tiny import MASK, TAPS, VOCAB, random_head, tiny_target

PART = torch.arange(0, VOCAB, 3)
TEXTS = (
    [3, 4, 9, 10, 7],
    [3, 150, 151, 6, 151, 152],
    [3, 6, 9],
)  # ids that PART lacks: 4 10 7, 150 151 152, none
KINDS: dict[str, dict[str, Any]] = {
    "marginals": {"scorer": "none", "rank": 0},
    "vanilla": {"scorer": "vanilla"},
    "gated": {},
    "rnn": {"scorer": "rnn"},
    "dspark": {"scorer": "vanilla", "alignment": "shifted", "block_size": 4, "confidence": True},
}
SAMPLED = Sampling(temperature=0.8, seed=5, repetition_penalty=1.2, logit_bias={4: 1.5, 151: 0.7})


@pytest.fixture(scope="module", params=[torch.float32, torch.float64], ids=["compiled", "portable"])
def target(request: pytest.FixtureRequest) -> Target:
    """One frozen target per arithmetic; the path scorer is compiled for float32 only."""
    return tiny_target(request.param)


def requests(sampling: Sampling) -> list[Sequence]:
    """A request for each text."""
    return [Sequence(n, list(text), sampling, Limits(), lambda ids: "") for n, text in enumerate(TEXTS)]


def observed(drafter: BlockDrafter, sequences: list[Sequence]) -> BlockDrafter:
    """The drafter after it saw random features of all tokens but the roots."""
    for s in sequences:
        dice = torch.Generator().manual_seed(s.id)
        taps = torch.randn(len(s.tokens) - 1, len(TAPS) * 64, generator=dice)
        drafter.observe(s.id, taps.to(drafter.backbone.mask_row.dtype), None)
    return drafter


def laws(proposal: Proposal, nodes: int = 12) -> list[dict[int, float]]:
    """Log-probs by token below the root and below the best nodes of each depth."""
    found, states = [], [proposal.root_state]
    while states:
        children = proposal.expand(states)
        found += [dict(zip(c.tokens, c.logps, strict=True)) for c in children]
        states = [state for c in children for state in c.states][:nodes]
    return found


def assert_same(one: list[dict[int, float]], other: list[dict[int, float]]) -> None:
    """The same tokens with the same log-probs."""
    assert len(one) == len(other) > 1
    for a, b in zip(one, other, strict=True):
        assert a.keys() == b.keys()
        assert all(a[token] == pytest.approx(b[token], abs=1e-4) for token in a)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_tail_is_as_good_as_a_larger_vocabulary(
    target: Target, kind: str, sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards columns, rows, noise or penalties of the wrong id, and ids of other requests of the batch:
    every request must be drafted as by a head whose own vocabulary has the ids of its text.
    """
    monkeypatch.setattr(path_scorer, "CANDIDATES", VOCAB)
    sequences = requests(sampling)
    together = observed(BlockDrafter(random_head(target, vocab=PART, **KINDS[kind]), target), sequences)
    proposals = together.propose(sequences)
    for s, proposal in zip(sequences, proposals, strict=True):
        wide = torch.tensor(sorted({*PART.tolist(), *s.tokens}))
        alone = BlockDrafter(random_head(target, vocab=wide, **KINDS[kind]), target)
        alone.text_ids = None
        found = laws(proposal)
        for law in found:  # ids of the others have no chance
            assert {token for token, logp in law.items() if logp > -1e4} <= set(wide.tolist())
        (expected,) = observed(alone, [s]).propose([s])
        assert_same([{t: x for t, x in law.items() if x > -1e4} for law in found], laws(expected))


def test_the_tail_follows_the_batch(target: Target) -> None:
    """Guards ids of a request that has left or waits, and a tail that outlives its last request: what a
    request gets must not depend on the rounds before.
    """
    sequences = requests(Sampling())
    drafter = observed(BlockDrafter(random_head(target, vocab=PART), target), sequences)
    drafter.propose(sequences)
    for chosen in ([1], [2], [0, 2], [0]):
        own = [sequences[n] for n in chosen]
        fresh = observed(BlockDrafter(random_head(target, vocab=PART), target), own)
        for a, b in zip(drafter.propose(own), fresh.propose(own), strict=True):
            assert_same(laws(a), laws(b))
    sequences[0].tokens += [77]  # what it has said counts as well
    drafter.observe(0, torch.zeros(1, len(TAPS) * 64, dtype=target.dtype), None)
    (proposal,) = drafter.propose(sequences[:1])
    assert 77 in laws(proposal)[0]


@pytest.mark.parametrize("noise", [False, True], ids=["silent", "noisy"])
@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_the_compiled_scorer_knows_the_tail(kind: str, noise: bool) -> None:
    """Guards panels and vectors that a tail does not fill, an earlier tail that stands behind a shorter one,
    and rows between the two products.
    """
    for width, batch, rank in [(1, 1, 16), (40, 2, 8), (777, 1, 64), (2998, 3, 17)]:
        own = case(kind, width, batch, rank, noise)
        full, tails = own.logits.shape[-1], (5, 33, 1, 300, 0)
        rest = [n for n in range(ROOTS, 3000 + ROOTS) if n not in set(own.scorer.vocab.tolist())]
        dice = torch.Generator().manual_seed(width)
        for count in tails:
            ids = torch.tensor(rest[:count], dtype=torch.int64)
            own.scorer.extend(ids)
            count = len(ids)
            logits = torch.cat(
                [own.logits[..., :full], 3 * torch.randn(batch, own.logits.shape[1], count, generator=dice)],
                -1,
            )
            draws = own.draws
            if draws is not None:
                more = torch.randn(batch, own.logits.shape[1], count, generator=dice)
                draws = draws._replace(added=torch.cat([draws.added[..., :full], more], -1))
            wide = type(own)(own.scorer, own.hidden, logits, own.roots, draws)
            assert_close(wide.tables(native=True), wide.tables(native=False))


def test_ids_in_the_order_of_the_text() -> None:
    """Guards the cap (the newest ids stay), marks that no answer holds, ids read twice, and a number that is
    used again for another request.
    """
    texts = TextIds(torch.tensor([0, 2, 4]), leave=(MASK,))
    s = Sequence(0, [MASK, 2, 9, 7, 9, 4, 5], Sampling(), Limits(), lambda ids: "")
    assert texts.of([s]) == [(9, 7, 5)]
    s.tokens += [7, 11]
    assert texts.of([s]) == [(9, 7, 5, 11)]
    long = Sequence(1, list(range(3, 3000)), Sampling(), Limits(), lambda ids: "")
    assert texts.of([long])[0] == tuple(range(3000 - 256, 3000))
    assert len(texts.of([long] * 16)[0]) == 64
    texts.free(0)
    assert texts.of([s]) == [(9, 7, 5, 11)]
    assert texts.of([Sequence(0, [2, 13], Sampling(), Limits(), lambda ids: "")]) == [(13,)]


def test_a_whole_vocabulary_has_no_tail(target: Target) -> None:
    """Guards work and memory for heads that can draft everything already."""
    drafter = BlockDrafter(random_head(target, vocab=torch.arange(VOCAB)), target)
    assert drafter.text_ids is None
    assert BlockDrafter(random_head(target, vocab=PART), target).text_ids is not None
