"""Sampling: options, processors against transformers, the picker."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.errors import OptionError
from jetspec.sampling import (
    GREEDY_BELOW,
    History,
    Sampling,
    pick_tokens,
    process_logits,
)
from tests.helpers import chi_square_odds


def random_logits(rows: int, vocab: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    """Normal logits [rows, vocab]."""
    return torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * scale


def assert_law(picks: Tensor, law: Tensor) -> None:
    """Chi-square test of picks [n] against probabilities [V]; it fails by chance once in a million."""
    counts = torch.bincount(picks, minlength=len(law)).double()
    expected = law.double() * len(picks)
    assert bool((counts[expected == 0] == 0).all()), "a token of probability zero was picked"
    used = expected > 0
    assert float(expected[used].min()) >= 5, "too few draws for this test"
    statistic = float(((counts - expected)[used] ** 2 / expected[used]).sum())
    assert chi_square_odds(statistic, int(used.sum()) - 1) > 1e-6, (
        f"chi-square {statistic:.1f}: {counts} vs {expected}"
    )


# --- options


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", math.nan),
        ("temperature", math.inf),
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_k", True),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", math.nan),
        ("min_p", -0.01),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", -1.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("seed", -1),
        ("seed", 2**64),
        ("seed", 1.0),
        ("logit_bias", {-1: 1.0}),
        ("logit_bias", {"5": 1.0}),
        ("logit_bias", {5: math.nan}),
        ("logit_bias", {5: -math.inf}),
        ("logit_bias", [5]),
    ],
)
def test_bad_option_is_refused(field: str, value: Any) -> None:
    """Guards against NaN slipping through comparisons, bools taken as numbers, and messages that do not name
    the option."""
    with pytest.raises(OptionError, match=field) as caught:
        Sampling(**{field: value})
    assert "\n" not in str(caught.value)


def test_numpys_integers_are_integers() -> None:
    """Guards a seed, a top-k or an id out of an array: they were refused as no integers."""
    number: Any = np.int64(3)
    sampling = Sampling(top_k=number, seed=number, logit_bias={number: 1.0})
    assert sampling == Sampling(top_k=3, seed=3, logit_bias={3: 1.0})
    assert type(sampling.seed) is type(sampling.top_k) is type(next(iter(sampling.logit_bias))) is int
    with pytest.raises(OptionError, match="seed"):
        Sampling(seed=np.bool_(True))  # type: ignore[arg-type]


def test_numpys_numbers_are_numbers() -> None:
    """Guards a temperature or a bias out of a float32 array: they were refused as no numbers, while those of
    float64 were not."""
    for kind in (np.float16, np.float32, np.float64, np.int64):
        number: Any = kind(1)
        sampling = Sampling(temperature=number, top_p=number, presence_penalty=number, logit_bias={5: number})
        assert sampling == Sampling(temperature=1, top_p=1, presence_penalty=1, logit_bias={5: 1})
        assert type(sampling.temperature) is type(sampling.logit_bias[5]) in (int, float)
    for wrong in (np.float32("nan"), np.float32(-1), np.bool_(True), np.longdouble("1e400")):
        with pytest.raises(OptionError, match="temperature"):
            Sampling(temperature=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("digits", [400, 6000])
def test_messages_stay_short(digits: int) -> None:
    """Guards messages with all digits of a number in them; beyond some thousand of them Python refuses to
    write it, and the message itself failed."""
    huge = 10**digits
    for options in (
        {"temperature": huge},
        {"seed": huge},
        {"logit_bias": {huge: 1}},
        {"logit_bias": {1: huge}},
    ):
        with pytest.raises(OptionError) as caught:
            Sampling(**options)  # type: ignore[arg-type]
        assert len(str(caught.value)) < 250


def test_limits_of_options_are_valid() -> None:
    """Guards against a range check that excludes its own ends."""
    Sampling(
        temperature=0.0, top_p=1.0, min_p=1.0, presence_penalty=-2.0, frequency_penalty=2.0, seed=2**64 - 1
    )
    Sampling(temperature=1, top_p=1e-9, min_p=0)


def test_one_greedy_threshold() -> None:
    """Guards against several "is it greedy" tests: just above the threshold tiny T must not overflow, just
    below it is argmax."""
    logits = random_logits(4, 50)
    below = Sampling(temperature=GREEDY_BELOW * 0.99, seed=3)
    at = Sampling(temperature=GREEDY_BELOW, seed=3)
    assert below.greedy and Sampling().greedy and not at.greedy
    assert bool(torch.isfinite(process_logits(logits * 100, at)).all())
    best = logits.argmax(-1).tolist()
    assert pick_tokens(logits, range(4), below) == pick_tokens(logits, range(4), at) == best


def test_sampling_is_hashable_and_owns_its_bias() -> None:
    """Guards against a caller's later change to its dictionary reaching a running request, and against an
    unhashable option set."""
    bias = {1: 2.0}
    sampling = Sampling(logit_bias=bias)
    bias[1] = -5.0
    assert sampling.logit_bias == {1: 2.0}
    assert hash(sampling) == hash(Sampling(logit_bias={1: 2.0}))
    assert dataclasses.replace(sampling, temperature=1.0).logit_bias == {1: 2.0}


# --- processors


def hf_scores(processors: list[Any], logits: Tensor, ids: Tensor | None = None) -> Tensor:
    """Run transformers' processors one after the other."""
    ids = torch.zeros(len(logits), 1, dtype=torch.int64) if ids is None else ids
    scores = logits.clone()
    for processor in processors:
        scores = processor(ids, scores)
    return scores


def hf_warpers(sampling: Sampling) -> list[Any]:
    """What transformers' generate() would build for these options, in its order."""
    from transformers.generation import logits_process as hf

    built: list[Any] = [hf.TemperatureLogitsWarper(float(sampling.temperature))]
    if sampling.top_k:
        built.append(hf.TopKLogitsWarper(sampling.top_k))
    if sampling.top_p < 1:
        built.append(hf.TopPLogitsWarper(sampling.top_p))
    if sampling.min_p > 0:
        built.append(hf.MinPLogitsWarper(sampling.min_p))
    return built


@pytest.mark.parametrize("vocab", [7, 200, 3000])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7},
        {"top_k": 1},
        {"top_k": 40},
        {"top_k": 100000},
        {"top_p": 0.9},
        {"top_p": 0.999},
        {"top_p": 0.01},
        {"min_p": 0.05},
        {"min_p": 1.0},
        {"temperature": 2.0, "top_k": 50, "top_p": 0.8, "min_p": 0.02},
        {"temperature": 0.3, "top_p": 0.95, "min_p": 0.1},
        {"temperature": 50.0, "top_p": 0.95},
    ],
)
def test_truncation_equals_transformers(options: dict[str, Any], vocab: int) -> None:
    """Guards against another meaning or order of temperature, top-k, top-p, min-p; 3000 at T=50 takes the
    full sort of top-p."""
    sampling = Sampling(**{"temperature": 1.0, **options})
    logits = random_logits(8, vocab, seed=vocab)
    ours = process_logits(logits, sampling)
    theirs = hf_scores(hf_warpers(sampling), logits)
    assert torch.equal(ours.isinf(), theirs.isinf())
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)  # one float32 division


def test_top_k_keeps_ties_like_transformers() -> None:
    """Guards against a tie at the border being broken by the order of topk, which is not defined."""
    from transformers.generation.logits_process import TopKLogitsWarper

    logits = torch.tensor([[1.0, 3.0, 2.0, 2.0, 2.0, 0.0]])
    ours = process_logits(logits, Sampling(temperature=1.0, top_k=2))
    assert torch.equal(ours, hf_scores([TopKLogitsWarper(2)], logits))
    assert ours.isfinite().sum() == 4


def test_top_p_breaks_ties_to_the_lowest_id() -> None:
    """Guards against a nucleus that depends on the undefined order of equal values, or keeps them all."""
    kept = process_logits(torch.zeros(1, 8), Sampling(temperature=1.0, top_p=0.5)).isfinite()
    assert kept.tolist() == [[True] * 4 + [False] * 4]
    logits = torch.tensor([[0.0, 5.0, 0.0, 0.0]])
    kept = process_logits(
        logits, Sampling(temperature=1.0, top_p=float(torch.softmax(logits, -1).max()) + 1e-3)
    ).isfinite()
    assert kept.tolist() == [[True, True, False, False]]


@pytest.mark.parametrize("penalty", [1.3, 0.7])
def test_repetition_penalty_equals_transformers(penalty: float) -> None:
    """Guards against penalizing once per occurrence, or forgetting the prompt or the sign of the logit."""
    from transformers.generation.logits_process import RepetitionPenaltyLogitsProcessor

    logits = random_logits(3, 30)
    ids = torch.randint(0, 30, (3, 12), generator=torch.Generator().manual_seed(1))
    histories = [History(row, prompt_len=5) for row in ids.tolist()]
    ours = process_logits(logits, Sampling(repetition_penalty=penalty), histories)
    theirs = hf_scores([RepetitionPenaltyLogitsProcessor(penalty)], logits, ids)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)


def test_presence_and_frequency_count_generated_tokens_only() -> None:
    """Guards against the prompt being counted, and against presence being applied per occurrence."""
    history = History([4, 4, 1, 2, 2, 2], prompt_len=2)
    sampling = Sampling(presence_penalty=0.5, frequency_penalty=0.25)
    scores = process_logits(torch.zeros(1, 6), sampling, [history])
    assert scores.tolist() == [[0.0, -0.75, -1.25, 0.0, 0.0, 0.0]]
    assert process_logits(torch.zeros(1, 6), sampling, [History([4, 4], 2)]).tolist() == [[0.0] * 6]


def test_each_row_uses_its_own_history() -> None:
    """Guards against all nodes of a tree sharing the history of the root: every node is penalized on its own
    path."""
    logits = torch.tensor([[2.0, 1.0, 0.0]] * 3)
    histories = [History([0], 0), History([0, 1], 0), History([2], 0)]
    assert pick_tokens(
        logits, [1, 2, 1], Sampling(presence_penalty=2.0, frequency_penalty=0.5), histories
    ) == [1, 2, 0]


def test_greedy_applies_penalties_and_bias() -> None:
    """Guards against the fast greedy path skipping what changes the argmax, and against options that only
    matter above T=0."""
    logits = torch.tensor([[5.0, 4.0, 3.0]])
    assert pick_tokens(logits, [0], Sampling(logit_bias={2: 2.5})) == [2]
    assert pick_tokens(logits, [3], Sampling(repetition_penalty=2.0), [History([0, 1], 2)]) == [2]
    assert pick_tokens(logits, [0], Sampling(top_k=1, top_p=0.1, min_p=0.9, seed=9)) == [0]


def test_banned_token_never_appears() -> None:
    """Guards against logit_bias being skipped in verification, at any temperature."""
    logits = torch.zeros(2000, 5)
    for temperature in (0.0, 1.0, 1000.0):
        picks = pick_tokens(
            logits, range(2000), Sampling(temperature=temperature, logit_bias={0: -1e9, 3: -1e9})
        )
        assert {0, 3}.isdisjoint(picks)


def test_bias_outside_the_vocabulary_is_refused() -> None:
    """Guards against an index error from deep inside, or a silent no-op."""
    with pytest.raises(OptionError, match="token 5"):
        pick_tokens(torch.zeros(1, 5), [0], Sampling(logit_bias={5: 1.0}))


@given(
    st.lists(st.floats(-60, 60, width=32), min_size=1, max_size=40),
    st.floats(GREEDY_BELOW, 100),
    st.integers(0, 50),
    st.floats(1e-9, 1),
    st.floats(0, 1),
    st.booleans(),
)
@settings(max_examples=150, deadline=None)
def test_top_token_always_survives(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float, half: bool
) -> None:
    """Guards against a row of only -inf, and against the input being changed."""
    logits = torch.tensor([row]).to(torch.bfloat16 if half else torch.float32)
    before = logits.clone()
    scores = process_logits(logits, Sampling(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p))
    assert torch.equal(logits, before)
    assert scores.dtype == torch.float32
    assert not scores.isnan().any()
    assert scores[0, int(logits[0].argmax())].isfinite()


def test_masked_rows_keep_their_mask() -> None:
    """Guards against NaN where logits arrive with -inf (a grammar mask) and every processor is on."""
    logits = torch.tensor([[-math.inf, 1.0, -math.inf, 0.5]])
    sampling = Sampling(
        temperature=0.8, top_k=3, top_p=0.99, min_p=0.01, repetition_penalty=1.5, presence_penalty=1.0
    )
    scores = process_logits(logits, sampling, [History([0, 1, 2], 0)])
    assert not scores.isnan().any()
    assert scores.isfinite().tolist() == [[False, True, False, True]]


# --- the picker


LAW_LOGITS = torch.tensor([2.0, 1.0, 0.0, -1.0, 1.5, -2.0, 0.3, 0.31])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 2.0},
        {"top_k": 3},
        {"top_p": 0.8},
        {"min_p": 0.2},
        {"logit_bias": {5: 2.0}},
    ],
)
def test_picks_follow_the_softmax_over_positions(options: dict[str, Any]) -> None:
    """Guards against a biased draw along one text: 100 000 positions of one seed; a false alarm once in a
    million."""
    sampling = Sampling(**{"temperature": 1.0, "seed": 1234, **options})
    picks = torch.tensor(pick_tokens(LAW_LOGITS.expand(100_000, -1), range(100_000), sampling))
    assert_law(picks, torch.softmax(process_logits(LAW_LOGITS[None], sampling)[0], -1))


def test_picks_follow_the_softmax_over_seeds() -> None:
    """Guards against seeds that resemble each other: one position, 4000 neighbouring seeds; a false alarm
    once in a million."""
    picks = torch.tensor(
        [pick_tokens(LAW_LOGITS[None], [17], Sampling(temperature=1.0, seed=s))[0] for s in range(4000)]
    )
    assert_law(picks, torch.softmax(LAW_LOGITS, -1))


def test_neighbouring_picks_are_independent() -> None:
    """Guards against correlated tokens: chi-square of pairs (t, t+1) against the product law; a false alarm
    once in a million."""
    picks = torch.tensor(
        pick_tokens(LAW_LOGITS.expand(200_000, -1), range(200_000), Sampling(temperature=1.0, seed=8))
    )
    law = torch.softmax(LAW_LOGITS, -1)
    assert_law(picks[0::2] * 8 + picks[1::2], (law[:, None] * law[None, :]).flatten())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=1.0, seed=5),
        Sampling(temperature=0.8, top_k=20, top_p=0.9, min_p=0.01, seed=5),
        Sampling(
            temperature=1.5,
            top_p=0.95,
            frequency_penalty=0.5,
            repetition_penalty=1.2,
            logit_bias={3: 1.0},
            seed=5,
        ),
    ],
)
def test_pick_does_not_depend_on_the_batch(sampling: Sampling, dtype: torch.dtype) -> None:
    """Guards against a token that changes with the rows around it, their order or a repeated position."""
    logits = random_logits(24, 5000, seed=2).to(dtype)
    positions = [10 + row // 3 for row in range(24)]
    histories = [History(list(range(row)), row // 2) for row in range(24)]
    together = pick_tokens(logits, positions, sampling, histories)
    alone = [
        pick_tokens(logits[i : i + 1], positions[i : i + 1], sampling, histories[i : i + 1])[0]
        for i in range(24)
    ]
    order = torch.randperm(24, generator=torch.Generator().manual_seed(0)).tolist()
    shuffled = pick_tokens(
        logits[order], torch.tensor([positions[i] for i in order]), sampling, [histories[i] for i in order]
    )
    assert together == alone
    assert shuffled == [together[i] for i in order]


def test_equal_logits_go_to_the_lowest_id() -> None:
    """Guards against an argmax that breaks ties by thread or row; half-precision logits tie often."""
    logits = torch.zeros(3, 49152, dtype=torch.bfloat16)
    logits[:, [40000, 123, 9000]] = 7.0
    assert pick_tokens(logits, [0, 1, 2], Sampling()) == [123] * 3


def test_no_rows_no_picks() -> None:
    """Guards against a crash of amax or unique on an empty batch."""
    assert pick_tokens(torch.zeros(0, 10), [], Sampling(temperature=1.0)) == []


def test_picking_leaves_the_logits_alone() -> None:
    """Guards against noise added in place to the logits of the target, which a second pick would then see."""
    logits = random_logits(2, 30)
    before = logits.clone()
    for sampling in (Sampling(), Sampling(temperature=1.0), Sampling(logit_bias={0: 1.0})):
        first = pick_tokens(logits, [4, 5], sampling)
        assert torch.equal(logits, before)
        assert pick_tokens(logits, [4, 5], sampling) == first
