"""A head can cost time, never text: the engine with a random head emits what plain decoding emits.

float64, so that two ways of adding up cannot swap the two best tokens (odds below 1e-9)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.draft.jetspec import BlockDrafter
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.target import Target
from tests.draft.tiny import MASK, random_head, tiny_target

VOCAB = 24  # small, so that a random head is right often enough to be accepted at several depths
PROMPTS = ([5], [7, 3, 11, 20, 2], [9, 9, 2, 3, 14, 8, 1, 20, 20, 5, 6])
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=4)}
LENGTH = 16
HEADS: dict[str, dict[str, Any]] = {
    "gated": {},
    "marginals": {"scorer": "none", "rank": 0},
    "published": {"scorer": "none", "rank": 0, "direct": False, "slot_embedding": False},
    "recurrent": {"scorer": "rnn"},
    "dspark": {"scorer": "vanilla", "alignment": "shifted", "block_size": 4, "confidence": True},
    "dspark-recurrent": {"scorer": "rnn", "alignment": "shifted", "block_size": 4, "confidence": True},
}


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    torch.set_num_threads(1)


@cache
def shared_target() -> Target:
    """One frozen float64 target whose texts never end by themselves."""
    target = tiny_target(torch.float64, vocab_size=VOCAB)
    target.tokenizer.eos_ids = frozenset()
    return target


@cache
def plain(name: str) -> list[list[int]]:
    """What plain decoding emits for the prompts, one after the other."""
    engine = Engine(shared_target(), max_batch=1)
    sequences = engine.generate(PROMPTS, SAMPLINGS[name], Limits(max_tokens=LENGTH, ignore_eos=True))
    return [sequence.emitted for sequence in sequences]


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("parts", HEADS)
def test_same_text_as_plain_decoding(parts: str, causal: bool, name: str) -> None:
    """Guards losslessness end to end, for every budget and batch; some accepted path must have had a gap, or
    wrong masks and rows could pass by luck. At the end nothing may be left in the draft cache."""
    target = shared_target()
    head = random_head(target, causal=causal, **HEADS[parts])
    drafter = BlockDrafter(head, target, confidence_threshold=0.3 if head.config.confidence else 0.0)
    gaps = 0
    for budget in (1, 4, 16):
        for batch in (1, 3):
            engine = Engine(target, drafter, budget=budget, max_batch=batch)
            limits = Limits(max_tokens=LENGTH, ignore_eos=True)
            sequences = [engine.add(prompt, SAMPLINGS[name], limits) for prompt in PROMPTS]
            while engine.busy:
                for outcome in engine.step():
                    gaps += outcome.path != list(range(len(outcome.path)))
                for s in sequences:
                    if s.id in drafter.backbone.cache.keys():  # noqa: SIM118 (not a dict)
                        waiting = sum(len(part) for part in drafter.backbone._pending.get(s.id, []))
                        assert drafter.backbone.cache.length(s.id) + waiting == s.position or not s.emitted
            assert [s.emitted for s in sequences] == plain(name), (budget, batch)
            assert drafter.backbone.cache.bytes == 0 and not drafter.backbone.cache.keys()
            assert not drafter.backbone._pending and not drafter.backbone._last
    assert gaps > 0


def test_memory_comes_back_after_an_abort() -> None:
    """Guards against draft rows of aborted requests (while prefilling, and while running)."""
    target = shared_target()
    drafter = BlockDrafter(random_head(target), target)
    engine = Engine(target, drafter)
    first, second = (engine.add(prompt, None, Limits(max_tokens=50)) for prompt in PROMPTS[1:])
    engine.step()
    engine.abort(first)
    engine.step()
    third = engine.add(PROMPTS[0], None, Limits(max_tokens=50))
    engine.abort(third)
    engine.abort(second)
    assert not engine.busy
    assert drafter.backbone.cache.bytes == 0 and not drafter.backbone._pending and not drafter.backbone._last


def test_one_head_serves_sequences_that_come_and_go() -> None:
    """Guards keys that are used again: a second request with the id of a finished one starts afresh."""
    target = shared_target()
    drafter = BlockDrafter(random_head(target), target)
    rounds = []
    for _ in range(2):
        engine = Engine(target, drafter, budget=8)
        engine.generate(PROMPTS, None, Limits(max_tokens=20, ignore_eos=True))
        rounds.append(engine.stats.rounds)
    assert rounds[0] == rounds[1]
    assert drafter.name == "jetspec" and drafter.head.config.mask_token_id == MASK
