"""The scripts of benchmarks/ as modules, and tiny random heads with texts to replay."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence as Many
from pathlib import Path
from types import ModuleType
from typing import Any

from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.draft.jetspec import BlockDrafter
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.target import Target
from tests.draft.tiny import TAPS, random_head

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
PROMPTS = ([1, 9, 4, 30], [1], [1, 7, 7, 12, 3, 22, 5, 6, 2])


def script(name: str) -> ModuleType:
    """A module of benchmarks/, which is no package: its scripts find each other as Python starts them."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCHMARKS))


def drafter(target: Target, **options: Any) -> BlockDrafter:
    """A random head at work; its guesses are right now and then where trees are wide."""
    return BlockDrafter(random_head(target, **options), target)


def texts(target: Target, sampling: Sampling | None = None, tokens: int = 20) -> list[Any]:
    """Recorded plain answers to PROMPTS."""
    samplings = [sampling or Sampling()] * len(PROMPTS)
    found: list[Any] = script("replay").record(target, TAPS, PROMPTS, samplings, tokens)
    return found


def decoded_rounds(target: Target, drafting: Drafter, answers: Many[Any], budget: int) -> list[int]:
    """Rounds that decoding takes for the same prompts; its texts are compared with the recorded ones."""
    engine = Engine(target, drafting, budget=budget)
    limits = Limits(max_tokens=20)
    sequences = [engine.add(prompt, a.sampling, limits) for prompt, a in zip(PROMPTS, answers, strict=True)]
    rounds = dict.fromkeys((s.id for s in sequences), 0)
    for outcome in engine.run(sequences):
        rounds[outcome.sequence.id] += 1
    assert [s.tokens for s in sequences] == [a.tokens for a in answers]
    return list(rounds.values())
