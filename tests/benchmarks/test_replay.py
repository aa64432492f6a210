"""Replayed rounds are the rounds of decoding."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from jetspec.sampling import Sampling
from jetspec.target.target import Target
from tests.benchmarks.tiny import decoded_rounds, drafter, script, texts
from tests.draft.tiny import TAPS, tiny_target

replay, conditional, shared_noise = (script(name) for name in ("replay", "conditional", "shared_noise"))
second_pass = script("second_pass")


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    torch.set_num_threads(1)
    return tiny_target()


HEADS: dict[str, dict[str, Any]] = {
    "marginal": {"scorer": "none", "rank": 0},
    "gated": {"scorer": "gated"},
    "recurrent": {"scorer": "rnn"},
    "bidirectional": {"causal": False, "scorer": "none", "rank": 0},
}


@pytest.mark.parametrize("kind", HEADS)
def test_replay_takes_the_rounds_of_decoding(target: Target, kind: str) -> None:
    """Guards tau against a replay that shows a head other rows, roots or trees than decoding does, at every
    budget of one walk; budgets must not share their roots."""
    answers, head = texts(target), drafter(target, **HEADS[kind])
    tally = conditional.measure(conditional.Arm(head), answers, (3, 60), 3)
    found = {budget: [row[1] for row in rows] for budget, rows in tally.rounds.items()}
    assert found == {budget: decoded_rounds(target, head, answers, budget) for budget in (3, 60)}
    assert found[3] != found[60] and sum(found[60]) < sum(len(a.tokens) - a.prompt_len for a in answers)
    assert [row[0] for row in tally.rounds[3]] == [len(a.tokens) - a.prompt_len for a in answers]


@pytest.mark.parametrize("kind", ["marginal", "gated", "recurrent"])
def test_a_second_pass_decodes_the_same_text_in_the_replayed_rounds(target: Target, kind: str) -> None:
    """Guards the second pass against rows that stay in the draft cache (later rounds would differ, or fail),
    and the replay of it."""
    answers, head = texts(target), drafter(target, **HEADS[kind])
    again = second_pass.SecondPass(head)
    tally = conditional.measure(conditional.Arm(head, again), answers, (5, 60), 60)
    for budget in (5, 60):
        again.nodes = budget
        rounds = decoded_rounds(target, again, answers, budget)
        assert [row[1] for row in tally.rounds[budget]] == rounds


def test_sampled_replay_takes_the_rounds_of_decoding(target: Target) -> None:
    """Guards shared_noise.py: positions, and so the noise that a drafter looks at, are those of decoding."""
    answers, head = texts(target, Sampling(temperature=1.0, seed=11)), drafter(target)
    rows = shared_noise.follow(head, answers, 40)
    assert [row.rounds for row in rows] == decoded_rounds(target, head, answers, 40)
    assert [row.accepted + row.rounds for row in rows] == [row.tokens for row in rows]
    head.shared_noise = False
    assert [row.rounds for row in shared_noise.follow(head, answers, 40)] != [row.rounds for row in rows]


def test_heads_may_read_some_of_the_recorded_layers(target: Target) -> None:
    """Guards runs with several heads, whose taps are recorded together."""
    answers = texts(target)
    few = drafter(target, taps=(TAPS[0], TAPS[2]))
    (own,) = replay.record(target, few.taps, [answers[0].tokens[:4]], [Sampling()], 20)
    assert own.tokens == answers[0].tokens and torch.equal(own.taps, answers[0].taps_of(few.taps))
    assert torch.equal(answers[0].taps_of(TAPS), answers[0].taps)


def test_ratios_are_paired() -> None:
    """Guards the interval against unpaired draws: where every answer gains the same, it has no width, however
    much answers differ."""
    base = [(60, 30), (60, 6), (60, 12), (20, 18)]
    better = [(60, 15), (60, 3), (60, 6), (20, 9)]
    assert replay.tau(better) == pytest.approx(200 / 33)
    assert replay.ratio_interval(base, better) == pytest.approx((2.0, 2.0))
    low, high = replay.ratio_interval(base, [(60, 30), (60, 3), (60, 12), (20, 9)])
    assert 1.0 <= low < high <= 2.0
