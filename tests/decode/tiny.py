"""A tiny random target without files, a tokenizer stand-in, and a drafter that keeps what it was told."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from jetspec.decode.engine import Engine
from jetspec.decode.round import Outcome
from jetspec.draft.base import Drafter
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.config import ModelConfig
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.target.tokenizer import Tokenizer
from jetspec.target.weights import expected_tensors
from jetspec.tree.proposal import Proposal

VOCAB = 60
TAPS = (0, 1)
_CONFIG: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 32,
    "vocab_size": VOCAB,
    "max_position_embeddings": 128,
}


class TinyTokenizer:
    """Every id is a syllable, so a stop string can begin and end inside tokens."""

    eos_ids: frozenset[int] = frozenset()
    vocab_size = VOCAB

    def decode(self, ids: Many[int]) -> str:
        """The syllables, joined."""
        return "".join("bdfghklmnprs"[i // 5] + "aeiou"[i % 5] for i in ids)


def tiny_target(dtype: torch.dtype = torch.float64, **changes: Any) -> Target:
    """A random decoder. Its output varies: weights are of order one, so attention and the root both
    matter."""
    config = ModelConfig.from_dict({**_CONFIG, **changes})
    dice = torch.Generator().manual_seed(11)
    weights: dict[str, Tensor] = {}
    for name, shape in expected_tensors(config).items():
        noise = torch.randn(shape, generator=dice)
        if "norm" in name:
            weights[name] = 1.0 + 0.3 * noise
        elif len(shape) == 1 or "embed" in name:
            weights[name] = noise
        else:
            weights[name] = noise * (1.5 / shape[-1] ** 0.5)
    return Target("tiny", config, weights, cast(Tokenizer, TinyTokenizer()), dtype)


class Recorder:
    """Passes everything on to a drafter, asks for taps and hidden states, and keeps every observed row."""

    name = "recorder"
    taps = TAPS
    needs_hidden = True

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.observed: dict[int, list[tuple[Tensor, Tensor]]] = {}
        self.freed: list[int] = []

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Keep copies: views of a forward's output may be overwritten or freed."""
        assert taps is not None and hidden is not None and len(taps) == len(hidden)
        self.observed.setdefault(key, []).append((taps.clone(), hidden.clone()))

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """What the wrapped drafter proposes, after a check that all rows before each root have been
        observed."""
        for s in sequences:
            assert self.rows(s.id) == s.position, "rows before the root are missing or too many"
        return self.inner.propose(sequences)

    def free(self, key: int) -> None:
        """Note the end of a sequence; its rows stay for the test to look at."""
        self.freed.append(key)
        self.inner.free(key)

    def rows(self, key: int) -> int:
        """How many rows of a sequence were observed."""
        return sum(len(taps) for taps, _ in self.observed.get(key, []))


def teacher_forced(target: Target, ids: Many[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits [n, V], taps [n, 2 * H] and hidden [n, H] of all tokens in one causal forward."""
    cache = target.new_cache()
    cache.add(0)
    output = target.forward(chunk([(0, list(ids))], cache, logits=True), cache, TAPS, hidden=True)
    assert output.logits is not None and output.taps is not None and output.hidden is not None
    return output.logits, output.taps, output.hidden


PROMPTS = ([7, 3, 41, 20, 11], [50], [9, 9, 2, 33, 14, 58, 1, 0, 27, 27, 5])
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy-penalties": Sampling(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "T0.7": Sampling(temperature=0.7, seed=3),
    "T1-filters": Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=2**40 + 5),
    "T1-penalties": Sampling(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=8),
    "T0.7-bias": Sampling(temperature=0.7, top_p=0.95, logit_bias={4: 2.0, 20: -1e9}, seed=1),
}
LENGTH = 14


@cache
def shared_target() -> Target:
    """One float64 target for all tests; targets are frozen."""
    return tiny_target()


@cache
def plain(prompt: tuple[int, ...], name: str, length: int = LENGTH) -> tuple[int, ...]:
    """What budget 0 without a drafter emits, alone in its engine."""
    engine = Engine(shared_target(), budget=0)
    (sequence,) = engine.generate([prompt], SAMPLINGS[name], Limits(max_tokens=length))
    return tuple(sequence.emitted)


def steps(engine: Engine, sequences: list[Sequence]) -> Iterator[Outcome]:
    """Run to the end and check after every round that exactly the committed tokens less the root are
    cached."""
    while engine.busy:
        yield from engine.step()
        for s in sequences:
            if s.id in engine.cache.keys() and s.emitted:  # noqa: SIM118 (not a dict)
                assert s.finished is None, "a finished sequence still holds memory"
                assert engine.cache.length(s.id) == len(s.tokens) - 1
