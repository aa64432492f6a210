"""The compiled parts of a draft head's backbone against the portable ones."""

from __future__ import annotations

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.draft.backbone import Backbone
from jetspec.draft.jetspec import BlockDrafter
from jetspec.native import native_available
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from tests.draft.tiny import TAPS, VOCAB, random_head, tiny_target

needs_kernel = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")


@needs_kernel
def test_context_rows_equal_the_portable_path() -> None:
    """Guards keys and values of another layer, head, sequence or row, keys without their norm or with
    another position's rotation: several sequences of several lengths, in two steps.

    Values have size 1 and take some tens of float32 roundings: 1e-5.
    """
    target = tiny_target()
    head = random_head(target)
    backbones = [Backbone(head, target.transformer, torch.arange(VOCAB)) for _ in range(2)]
    assert backbones[0].native is not None
    backbones[1].native = None
    dice = torch.Generator().manual_seed(1)
    for lengths in ([3, 1, 130], [1, 7, 2]):
        taps = [torch.randn(n, len(TAPS) * 64, generator=dice) for n in lengths]
        for backbone in backbones:
            for key, rows in enumerate(taps):
                backbone.observe(key, rows)
            backbone.forward([0, 1, 2], [5, 6, 7])
    fast, slow = (backbone.cache for backbone in backbones)
    for key, length in enumerate([4, 8, 132]):
        assert fast.length(key) == slow.length(key) == length
        one, other = (cache.block(key)[:, :, :, :length] for cache in (fast, slow))
        assert (one - other).abs().max() < 1e-5
        assert one.abs().amax(dim=(1, 4)).min() > 0.1, "rows are missing"


@pytest.mark.parametrize("scorer", ["none", "gated", "rnn"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_shallow_draft_is_the_beginning_of_a_whole_one(scorer: str, temperature: float) -> None:
    """Guards the depths that small budgets pay for: children and their chances are those of a whole block,
    with and without noise in view; a head whose slots see later ones always drafts whole blocks."""
    target = tiny_target()
    for causal in (True, False):
        head = random_head(target, scorer=scorer, rank=0 if scorer == "none" else 8, causal=causal)
        drafter = BlockDrafter(head, target)
        sampling = Sampling(temperature=temperature, seed=3)
        prompts = ([3, 1, 4, 1, 5], [9, 2, 6])
        s = [Sequence(n, list(ids), sampling, Limits(), lambda ids: "") for n, ids in enumerate(prompts)]
        dice = torch.Generator().manual_seed(2)
        for own in s:
            drafter.observe(own.id, torch.randn(own.position, len(TAPS) * 64, generator=dice), None)
        whole = drafter.propose(s)
        for depth in (1, 2, 99):
            for part, all_of_it in zip(drafter.propose(s, depth), whole, strict=True):
                most = min(depth, all_of_it.max_depth) if causal else all_of_it.max_depth
                assert part.max_depth == most
                states = part.root_state, all_of_it.root_state
                for _ in range(most):
                    own, other = part.expand((states[0],))[0], all_of_it.expand((states[1],))[0]
                    assert own.tokens[:5] == other.tokens[:5]
                    assert own.logps[:5] == pytest.approx(other.logps[:5], abs=1e-4)
                    states = own.states[1], other.states[1]


def test_small_budgets_draft_no_deeper_than_they_verify() -> None:
    """Guards the price of a draft: with a budget of 2 no third depth is computed, and no text changes."""
    target = tiny_target()
    drafter = BlockDrafter(random_head(target), target)
    depths, forward = [], drafter.backbone.forward

    def watched(keys: list[int], roots: list[int], depth: int | None = None) -> tuple[torch.Tensor, ...]:
        hidden, logits = forward(keys, roots, depth)
        depths.append(hidden.shape[1])
        return hidden, logits

    drafter.backbone.forward = watched  # type: ignore[method-assign, assignment]
    texts = []
    for budget in (0, 1, 2, 64):
        depths.clear()
        engine = Engine(target, drafter, budget=budget)
        texts.append([s.tokens for s in engine.generate([[3, 1, 4], [1, 5]], limits=Limits(max_tokens=12))])
        whole = drafter.whole_depth or 0
        assert set(depths) == ({min(budget, whole)} if budget else set())
    assert all(text == texts[0] for text in texts)


def test_a_prompt_is_projected_at_once() -> None:
    """Guards the first draft of a batch, which had to catch up with all prompts; the few rows of a round wait
    for the next draft."""
    target = tiny_target()
    backbone = BlockDrafter(random_head(target), target).backbone
    width = len(backbone.config.taps) * target.config.hidden_size
    backbone.observe(3, torch.randn(20, width))
    assert backbone.cache.length(3) == 20 and not backbone._pending
    backbone.observe(3, torch.randn(2, width))
    assert backbone.cache.length(3) == 20 and len(backbone._pending[3]) == 1


def test_a_prompt_waits_where_hardly_any_round_drafts() -> None:
    """Guards large batches: where drafting does not pay, the head's share of a prompt took 1 to 3 % of its
    time and was for nothing. It comes back with drafting."""
    target = tiny_target()
    backbone = BlockDrafter(random_head(target), target).backbone
    width = len(backbone.config.taps) * target.config.hidden_size
    for round in range(200):
        for key in range(4):
            backbone.observe(key, torch.randn(1, width))
        if round % 8 == 0:
            backbone.forward([0], [5])
    backbone.observe(9, torch.randn(20, width))
    assert 9 in backbone._pending
    for _ in range(200):
        backbone.forward([0, 1], [5, 6])
        for key in (0, 1):
            backbone.observe(key, torch.randn(3, width))
    backbone.observe(10, torch.randn(20, width))
    assert 10 not in backbone._pending
