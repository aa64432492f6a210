"""Lossless, as a test: with every drafter, builder, budget and batch the engine emits what plain decoding
emits.

Most tests run in float64. A forward over one row and one over twenty rows add up in different orders; in
float64 that moves a logit by 1e-15, so two tokens would have to tie to that degree to be confused (odds
below 1e-9 for this whole file). One test runs in float32: through the compiled path, where the bits of a
row do not depend on its company and nothing is excused, and through the portable one."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.draft.stubs import Decoy, Echo, Off, Random
from jetspec.native import native_available
from jetspec.sampling import History, Sampling, pick_tokens
from jetspec.sequence import Limits, Sequence
from jetspec.target import linear, native_attention, native_decoder
from jetspec.target.target import Target
from jetspec.tree import GROW
from tests.decode.tiny import (
    LENGTH,
    PROMPTS,
    SAMPLINGS,
    VOCAB,
    Recorder,
    plain,
    shared_target,
    steps,
    teacher_forced,
    tiny_target,
)

STUBS: dict[str, Callable[[Target], Drafter]] = {
    "off": lambda target: Off(),
    "random": lambda target: Random(seed=5, vocab=VOCAB, depth=3, width=4),
    "echo": lambda target: Echo(target, depth=3),
    "decoy": lambda target: Decoy(target, depth=3, width=3),
    "decoy-last": lambda target: Decoy(target, depth=4, width=2),
}


def has_gap(path: list[int]) -> bool:
    """Whether the accepted rows are not simply the first ones, so that rows must be moved."""
    return path != list(range(len(path)))


@pytest.mark.parametrize("budget", [0, 1, 4, 16])
@pytest.mark.parametrize("grow", GROW)
@pytest.mark.parametrize("stub", STUBS)
def test_same_tokens_as_plain_decoding(stub: str, grow: str, budget: int) -> None:
    """Guards the promise itself: any drafter, builder, budget and batch, greedy and sampled with every
    processor.

    The decoys must have been accepted with gaps where their trees allow it; otherwise wrong masks,
    positions and compaction could pass by luck."""
    target = shared_target()
    gaps = accepted = 0
    names = list(SAMPLINGS)
    drafter = STUBS[stub](target)
    for batch in (1, 3):
        engine = Engine(target, drafter, budget=budget, grow=grow, max_batch=batch)
        wanted: list[tuple[int, ...]] = []
        sequences: list[Sequence] = []
        for turn, name in enumerate(names):
            prompt = PROMPTS[turn % len(PROMPTS)]
            sequences.append(engine.add(prompt, SAMPLINGS[name], Limits(max_tokens=LENGTH)))
            wanted.append(plain(tuple(prompt), name))
        for outcome in steps(engine, sequences):
            gaps += has_gap(outcome.path)
            accepted += len(outcome.path) - 1
        for sequence, name, expected in zip(sequences, names, wanted, strict=True):
            assert tuple(sequence.emitted) == expected, f"batch {batch}, {name}"
            assert sequence.finished == "length"
        assert engine.cache.bytes == 0
        if isinstance(drafter, Echo):
            assert drafter.cache.bytes == 0
    if budget == 0 or stub == "off" or (stub.startswith("decoy") and grow == "chain"):
        assert accepted == 0
    if stub == "echo" and budget:
        assert accepted > 0 and gaps == 0
    if stub.startswith("decoy") and grow != "chain" and budget >= 4:
        assert gaps > 0, "no accepted path had a gap: this run proves little"


@pytest.mark.parametrize("name", SAMPLINGS)
def test_plain_decoding_is_the_samplers_pick_on_one_causal_forward(name: str) -> None:
    """Guards the baseline itself (a fault that plain decoding shares with drafting cancels out above):
    every token is the sampler's pick on logits from one forward over the whole text, at its absolute
    position and history."""
    prompt = PROMPTS[2]
    emitted = plain(tuple(prompt), name)
    tokens = [*prompt, *emitted]
    logits, _, _ = teacher_forced(shared_target(), tokens)
    for at in range(len(prompt), len(tokens)):
        history = [History(tokens[:at], len(prompt))]
        assert pick_tokens(logits[at - 1 : at], [at], SAMPLINGS[name], history) == [tokens[at]]
    assert len(set(emitted)) > 3, "text of one or two tokens proves little"


@pytest.mark.parametrize("grow", GROW)
def test_same_tokens_as_transformers(grow: str) -> None:
    """Guards against a shared fault of plain decoding and drafting: greedy text equals transformers' own
    loop."""
    from jetspec.target.config import ModelConfig
    from tests.decode.tiny import TinyTokenizer
    from tests.target.tiny import tiny_model

    model = tiny_model("llama", vocab_size=VOCAB, eos_token_id=None, pad_token_id=0).eval().double()
    dice = torch.Generator().manual_seed(6)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=dice, dtype=torch.float64)
        parameter.data = 1.0 + 0.3 * noise if parameter.ndim == 1 else noise * 0.4
    config = ModelConfig.from_dict(model.config.to_dict())
    target = Target("tiny", config, model.state_dict(), TinyTokenizer(), torch.float64)  # type: ignore[arg-type]
    engine = Engine(target, Decoy(target), grow=grow)
    sequences = engine.generate(PROMPTS, limits=Limits(max_tokens=20))
    for prompt, sequence in zip(PROMPTS, sequences, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, do_sample=False, max_new_tokens=20, attention_mask=torch.ones_like(ids)
        )
        assert sequence.tokens == expected[0].tolist()
        assert len(set(sequence.emitted)) > 3, "text of one or two tokens proves little"


@pytest.mark.parametrize("stub", ["random", "echo", "decoy"])
@pytest.mark.parametrize("path", ["compiled", "portable"])
def test_float32(path: str, stub: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards float32. The compiled path gives a row the same bits in any company, so every text is equal. On
    the portable path rows of different batch shapes differ in the last bits: there a difference is allowed
    where the two best scores are closer than 1e-3, in at most a fifth of the texts (expected: none)."""
    if path == "compiled" and not native_available():
        pytest.skip("no C compiler")
    if path == "portable":
        monkeypatch.setattr(linear, "native_available", lambda: False)
        monkeypatch.setattr(native_decoder, "native_suits", lambda *facts: False)
        monkeypatch.setattr(native_attention, "native_suits", lambda *facts: False)
    target = tiny_target(
        torch.float32, hidden_size=64, head_dim=16, intermediate_size=128, num_hidden_layers=2
    )
    assert (target.transformer.native is not None) == (path == "compiled")
    excused = 0
    prompts = [[seed, 7 * seed % VOCAB, 13] for seed in range(10)]
    for sampling in (SAMPLINGS["greedy"], SAMPLINGS["T0.7"]):
        limits = Limits(max_tokens=20)
        wanted = Engine(target, budget=0, max_batch=1).generate(prompts, sampling, limits)
        got = Engine(target, STUBS[stub](target), budget=12).generate(prompts, sampling, limits)
        for a, b in zip(wanted, got, strict=True):
            if a.emitted == b.emitted:
                continue
            at = next(i for i, (x, y) in enumerate(zip(a.tokens, b.tokens, strict=True)) if x != y)
            logits, _, _ = teacher_forced(target, a.tokens[:at])
            assert _gap(logits[-1:], at, sampling) < 1e-3, f"not a tie at token {at}"
            excused += 1
    assert excused <= (0 if path == "compiled" else 4)


def _gap(logits: torch.Tensor, position: int, sampling: Sampling) -> float:
    """How far the best token is ahead of the next one under the sampler's own scores."""
    from jetspec.noise import gumbel_noise
    from jetspec.sampling import process_logits

    scores = process_logits(logits, sampling)
    if not sampling.greedy:
        scores = scores + gumbel_noise(sampling.seed, torch.tensor([position]), scores.shape[-1])
    best, second = scores[0].topk(2).values.tolist()
    return best - second


@pytest.mark.parametrize("stub", ["random", "echo", "decoy"])
def test_observed_rows_are_those_of_plain_decoding(stub: str) -> None:
    """Guards what heads live on: taps and hidden states of the kept path, in order, one row per committed
    token less the root, however many prefill pieces and gaps there were."""
    target = shared_target()
    recorder = Recorder(STUBS[stub](target))
    engine = Engine(target, recorder, budget=16)
    sequences = [engine.add(p, Sampling(temperature=0.7, seed=4), Limits(max_tokens=LENGTH)) for p in PROMPTS]
    for _ in steps(engine, sequences):
        for s in sequences:
            if s.finished is None and s.emitted:
                assert recorder.rows(s.id) == s.position
    assert sorted(recorder.freed) == [s.id for s in sequences]
    for s in sequences:
        taps = torch.cat([taps for taps, _ in recorder.observed[s.id]])
        hidden = torch.cat([hidden for _, hidden in recorder.observed[s.id]])
        _, expected_taps, expected_hidden = teacher_forced(target, s.tokens)
        rows = len(s.tokens) - 1
        torch.testing.assert_close(taps[:rows], expected_taps[:rows], rtol=0, atol=1e-9)
        torch.testing.assert_close(hidden[:rows], expected_hidden[:rows], rtol=0, atol=1e-9)


def test_long_prompts_are_prefilled_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards chunked prefill: prompts longer than a piece, several at once, some of them decoding already."""
    monkeypatch.setattr("jetspec.decode.engine.PREFILL_ROWS", 7)
    target = shared_target()
    prompts = [
        [i * k % VOCAB for i in range(n)] for n, k in ((30, 7), (3, 11), (1, 1), (19, 13), (8, 17), (7, 3))
    ]
    recorder = Recorder(Decoy(target))
    engine = Engine(target, recorder, budget=8)
    sequences = [engine.add(p, SAMPLINGS["T0.7"], Limits(max_tokens=LENGTH)) for p in prompts]
    for _ in steps(engine, sequences):
        pass
    for prompt, sequence in zip(prompts, sequences, strict=True):
        assert tuple(sequence.emitted) == plain(tuple(prompt), "T0.7")
