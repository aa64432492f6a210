"""The compiled pick of a tempered request against the readable one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec import sampling
from jetspec.errors import ModelError
from jetspec.native import native_available
from jetspec.noise import NoiseRows, gumbel_noise, keep_rows_in, pick_with_noise
from jetspec.sampling import History, Sampling, pick_each, pick_tokens

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")


def readable(
    logits: Tensor, positions: Sequence[int], options: Sampling, histories: Sequence[History] | None = None
) -> list[int]:
    """The picks without the kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sampling, "pick_with_noise", lambda *args: None)
        return pick_tokens(logits, positions, options, histories)


@given(
    st.integers(1, 70),
    st.integers(1, 5),
    st.floats(1e-4, 1e3),
    st.integers(0, 2**64 - 1),
    st.sampled_from([0.0, 0.1, 5.0, 1e4]),
)
@settings(max_examples=150, deadline=None)
def test_the_kernel_picks_what_the_readable_code_picks(
    vocab: int, rows: int, temperature: float, seed: int, spread: float
) -> None:
    """Guards vectors that are not full, equal logits, and every temperature."""
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * spread
    options, positions = Sampling(temperature=temperature, seed=seed), list(range(7, 7 + rows))
    assert options.tempered
    assert pick_tokens(logits, positions, options) == readable(logits, positions, options)
    strided = torch.zeros(rows, vocab + 3)
    strided[:, :vocab] = logits
    assert pick_tokens(strided[:, :vocab], positions, options) == readable(logits, positions, options)


def picks_of(logits: Tensor) -> list[int]:
    """Picks of the kernel, with noise of seed 1 at positions 0, 1, ..."""
    picks = pick_with_noise(logits, 1.0, [1] * len(logits), list(range(len(logits))))
    assert picks is not None
    return [int(pick) for pick in picks]


def test_rows_without_a_pick() -> None:
    """Guards NaN in any lane and infinities: -1, as `best_ids` says. Banned tokens (-inf) are no fault."""
    for width in (16, 33):
        for place in (0, 15, width - 1):
            sick = torch.zeros(3, width)
            sick[1, place] = math.nan
            assert [pick < 0 for pick in picks_of(sick)] == [False, True, False]
            sick[1, place] = math.inf
            assert [pick < 0 for pick in picks_of(sick)] == [False, True, False]
            alone = torch.full((1, width), -math.inf)
            assert picks_of(alone) == [-1]
            alone[0, place] = -1e30
            assert picks_of(alone) == [place]
    with pytest.raises(ModelError, match="not finite"):
        pick_tokens(torch.full((1, 20), math.nan), [0], Sampling(temperature=1.0))


def test_equal_scores_go_to_the_lowest_id() -> None:
    """Guards the order among lanes: the noise vanishes beside such logits."""
    logits = torch.zeros(1, 100)
    for places in ([99, 3], [40, 17, 33], [16, 15], [64, 80, 96]):
        logits[:] = 0
        logits[0, places] = 1e30
        assert picks_of(logits) == [min(places)]


def test_requests_of_one_batch_keep_their_seeds() -> None:
    """Guards `pick_each`: every row has its own noise, also between rows of other kinds."""
    logits = torch.randn(6, 50)
    options = [Sampling(temperature=t, seed=n) for n, t in enumerate((1.0, 0.0, 0.5, 1.0, 0.5, 1.0))]
    with keep_rows_in(NoiseRows()):
        found = pick_each(logits, list(range(6)), options)
    for row, (pick, option) in enumerate(zip(found, options, strict=True)):
        scores = logits[row] / option.temperature if option.temperature else logits[row]
        if option.temperature:
            scores = scores + gumbel_noise(option.seed, torch.tensor([row]), 50)[0]
        assert pick == int(scores.argmax())


OTHERS: list[dict[str, Any]] = [
    *({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}, {"logit_bias": {1: 2.0, 4: -1e9}}),
    *({"presence_penalty": 2.0}, {"repetition_penalty": 1.5, "top_p": 0.8}, {"temperature": 0.0}),
]


@pytest.mark.parametrize("more", OTHERS, ids=lambda more: next(iter(more)))
def test_with_other_options_too(more: dict[str, Any]) -> None:
    """Guards what precedes the kernel then: scores are divided by the temperature once, and no option is
    forgotten.
    """
    options = Sampling(**{"temperature": 0.6, "seed": 5, **more})
    assert not options.tempered
    logits, positions = torch.randn(40, 60) * 2, list(range(40))
    likely = [[0, *row.topk(5).indices.tolist()] for row in logits]
    histories = [History(tokens, 1) for tokens in likely] if options.needs_history else None
    found = pick_tokens(logits, positions, options, histories)
    assert found == readable(logits, positions, options, histories)
    assert found != pick_tokens(logits, positions, Sampling(temperature=0.6, seed=5))
