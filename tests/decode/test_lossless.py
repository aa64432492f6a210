"""Lossless, as a test: with every drafter, builder, budget and batch the engine emits what plain decoding
emits.

Most tests run in float64. A forward over one row and one over twenty rows add up in different orders; in
float64 that moves a logit by 1e-15, so two tokens would have to tie to that degree to be confused (odds
below 1e-9 for this whole file). One test runs in float32, through the packed product, where a difference
is excused (and counted) if the two best tokens are closer than 1e-3."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.decode.round import Outcome
from jetspec.draft.base import Drafter
from jetspec.draft.stubs import Decoy, Echo, Off, Random
from jetspec.sampling import History, Sampling, pick_tokens
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.tree import GROW
from tests.decode.tiny import VOCAB, Recorder, teacher_forced, tiny_target

PROMPTS = ([7, 3, 41, 20, 11], [50], [9, 9, 2, 33, 14, 58, 1, 0, 27, 27, 5])
SAMPLINGS = {
    "greedy": Sampling(),
    "greedy-penalties": Sampling(repetition_penalty=1.4, presence_penalty=0.5, frequency_penalty=0.3),
    "T0.7": Sampling(temperature=0.7, seed=3),
    "T1-filters": Sampling(temperature=1.0, top_k=20, top_p=0.9, min_p=0.02, seed=2**40 + 5),
    "T1-penalties": Sampling(temperature=1.0, repetition_penalty=1.3, frequency_penalty=0.5, seed=8),
    "T0.7-bias": Sampling(temperature=0.7, top_p=0.95, logit_bias={4: 2.0, 20: -1e9}, seed=1),
}
STUBS: dict[str, Callable[[Target], Drafter]] = {
    "off": lambda target: Off(),
    "random": lambda target: Random(seed=5, vocab=VOCAB, depth=3, width=4),
    "echo": lambda target: Echo(target, depth=3),
    "decoy": lambda target: Decoy(target, depth=3, width=3),
    "decoy-last": lambda target: Decoy(target, depth=4, width=2),
}
LENGTH = 14


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    """Threads that wait for each other on a busy machine make such small products a hundred times slower."""
    torch.set_num_threads(1)


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
    dice = torch.Generator().manual_seed(2)
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
def test_float32_with_the_packed_product(stub: str) -> None:
    """Guards float32, where rows of different batch shapes differ in the last bits: a difference is
    allowed only where the two best scores are closer than 1e-3. At most a fifth of the texts may use that
    excuse (expected: none)."""
    target = tiny_target(torch.float32, hidden_size=64, intermediate_size=128, num_hidden_layers=2)
    assert any(layer.mlp.gate_up._packed is not None for layer in target.transformer.layers)
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
    assert excused <= 4


def _gap(logits: torch.Tensor, position: int, sampling: Sampling) -> float:
    """How far the best token is ahead of the next one under the sampler's own scores."""
    from jetspec.sampling import gumbel_noise, process_logits

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


@pytest.mark.parametrize("stub", ["echo", "decoy"])
def test_stop_id_at_every_offset_of_a_block(stub: str) -> None:
    """Guards the end of text inside an accepted block (transformers #47912, sglang #2720): the output ends
    exactly there, and the stop id counts as emitted but is not shown. ignore_eos goes on."""
    target = shared_target()
    prompt, sampling = PROMPTS[0], SAMPLINGS["T0.7"]
    text = plain(tuple(prompt), "T0.7")
    offsets = [at for at, token in enumerate(text[:8]) if token not in text[:at]]
    assert len(offsets) >= 5, "too few places for a stop id"
    for at in offsets:
        drafter = Echo(target, depth=6) if stub == "echo" else Decoy(target, depth=6, width=2)
        engine = Engine(target, drafter, budget=20)
        limits = Limits(max_tokens=LENGTH, stop_ids=frozenset({text[at]}))
        (sequence,) = engine.generate([prompt], sampling, limits)
        assert tuple(sequence.emitted) == text[: at + 1]
        assert sequence.finished == "stop"
        assert sequence.text == target.tokenizer.decode(list(text[:at]))
        assert engine.stats.tokens == at + 1
        assert engine.cache.bytes == 0 and drafter.cache.bytes == 0
        ignoring = Limits(max_tokens=LENGTH, stop_ids=frozenset({text[at]}), ignore_eos=True)
        (sequence,) = engine.generate([prompt], sampling, ignoring)
        assert tuple(sequence.emitted) == text


def test_stop_ids_come_from_tokenizer_and_model_too() -> None:
    """Guards against a request that forgets the target's own end-of-text ids."""
    text = plain(tuple(PROMPTS[0]), "greedy")
    target = tiny_target(eos_token_id=[text[2]])
    (sequence,) = Engine(target, Echo(target)).generate([PROMPTS[0]], limits=Limits(max_tokens=LENGTH))
    assert tuple(sequence.emitted) == text[: text.index(text[2]) + 1]
    target = tiny_target()
    target.tokenizer.eos_ids = frozenset({text[1]})
    (sequence,) = Engine(target, Echo(target)).generate([PROMPTS[0]], limits=Limits(max_tokens=LENGTH))
    assert tuple(sequence.emitted) == text[: text.index(text[1]) + 1]


@pytest.mark.parametrize("limit", range(1, 8))
def test_max_tokens_is_exact(limit: int) -> None:
    """Guards overshooting (transformers PR47195): a drafter that is always accepted, limits of one block
    and less. The last round may not draft deeper than what is left."""
    target = shared_target()
    text = plain(tuple(PROMPTS[2]), "T0.7")
    for drafter in (Echo(target, depth=5), Decoy(target, depth=5, width=2)):
        engine = Engine(target, drafter, budget=24)
        sequence = engine.add(PROMPTS[2], SAMPLINGS["T0.7"], Limits(max_tokens=limit))
        left = limit
        for outcome in steps(engine, [sequence]):
            assert outcome.tree.depth < left or left == 1 == outcome.tree.size
            left -= len(outcome.emissions)
        assert tuple(sequence.emitted) == text[:limit]
        assert sequence.finished == "length"
        assert engine.stats.tokens == limit


@pytest.mark.parametrize("room", [1, 2, 5, 6])
def test_context_limit_is_exact(room: int) -> None:
    """Guards the context's end, set by the request or by the model: never a token beyond it, and none too
    few."""
    prompt = PROMPTS[2]
    text = plain(tuple(prompt), "greedy")
    target = shared_target()
    asked = Limits(max_tokens=LENGTH, max_context=len(prompt) + room)
    (sequence,) = Engine(target, Echo(target, depth=5)).generate([prompt], limits=asked)
    assert (tuple(sequence.emitted), sequence.finished) == (text[:room], "length")
    small = tiny_target(max_position_embeddings=len(prompt) + room)
    (sequence,) = Engine(small, Decoy(small)).generate([prompt], limits=Limits(max_tokens=LENGTH))
    assert (tuple(sequence.emitted), sequence.finished) == (text[:room], "length")


def test_stop_strings_end_text_and_ids_at_the_same_point() -> None:
    """Guards vllm PR47616 and sglang #31599: a stop string that begins and ends inside tokens of an
    accepted block ends ids and text as in plain decoding, also when max_tokens falls into the same
    block."""
    target = shared_target()
    prompt, sampling = PROMPTS[0], SAMPLINGS["T0.7"]
    whole = target.tokenizer.decode(list(plain(tuple(prompt), "T0.7")))
    for start in range(1, 14):
        stop = whole[start : start + 3]
        for max_tokens in (start // 2 + 2, LENGTH):
            limits = Limits(max_tokens=max_tokens, stop_strings=(stop,))
            (expected,) = Engine(target, budget=0).generate([prompt], sampling, limits)
            for drafter in (Echo(target, depth=6), Decoy(target, depth=6, width=2)):
                engine = Engine(target, drafter, budget=20)
                (sequence,) = engine.generate([prompt], sampling, limits)
                assert sequence.emitted == expected.emitted
                assert sequence.text == expected.text == whole[: whole.index(stop)]
                assert sequence.finished == expected.finished == "stop"
                assert engine.cache.bytes == 0 and drafter.cache.bytes == 0


@pytest.mark.parametrize("grow", GROW)
def test_joining_and_leaving(grow: str) -> None:
    """Guards continuous batching (PedroDelano/jetspec: wrong answers with more than one sequence):
    requests that join while others run, end at different times or are aborted leave everybody's text as if
    alone."""
    target = shared_target()
    drafter = Decoy(target)
    engine = Engine(target, drafter, budget=6, grow=grow, max_batch=4)
    limits = Limits(max_tokens=LENGTH)
    requests: list[tuple[Sequence, str, tuple[int, ...]]] = []

    def join(turn: int) -> Sequence:
        name, prompt = list(SAMPLINGS)[turn % len(SAMPLINGS)], PROMPTS[turn % len(PROMPTS)]
        sequence = engine.add(prompt, SAMPLINGS[name], limits)
        requests.append((sequence, name, tuple(prompt)))
        return sequence

    join(0), join(1)
    for turn in range(2, 10):
        engine.step()
        newcomer = join(turn)
        if turn in (3, 6):
            engine.abort(newcomer)  # while it waits
        if turn == 5:
            running = next(s for s, _, _ in requests if s.emitted and s.finished is None)
            engine.abort(running)
            engine.abort(running)  # once more, which must not matter
    for _ in steps(engine, [s for s, _, _ in requests]):
        pass
    aborted = [s for s, _, _ in requests if s.finished == "abort"]
    assert sorted(bool(s.emitted) for s in aborted) == [False, False, True]
    for sequence, name, prompt in requests:
        expected = plain(prompt, name)
        assert tuple(sequence.emitted) == expected[: len(sequence.emitted)]
        assert sequence.finished == "abort" or len(sequence.emitted) == LENGTH
    assert engine.cache.bytes == 0 and drafter.cache.bytes == 0


def test_abort_gives_memory_back_at_every_moment() -> None:
    """Guards leaks (sglang-jax #1147, llama.cpp PR27692): aborted while waiting, prefilling or decoding,
    by hand or by leaving the loop early, nothing stays in the engine's cache or the drafter's."""
    target = shared_target()
    for rounds in range(4):
        drafter = Echo(target)
        engine = Engine(target, drafter, max_batch=2)
        sequences = [engine.add(p, limits=Limits(max_tokens=40)) for p in PROMPTS]
        for _ in range(rounds):
            engine.step()
        assert (engine.cache.bytes > 0) == (rounds > 0)
        for sequence in sequences:
            engine.abort(sequence)
        assert not engine.busy
        assert engine.cache.bytes == 0 and drafter.cache.bytes == 0
        assert all(s.finished == "abort" for s in sequences)

    drafter = Echo(target)
    engine = Engine(target, drafter)
    sequences = [engine.add(p, limits=Limits(max_tokens=40)) for p in PROMPTS]
    running = engine.run(sequences)
    next(running)
    running.close()
    assert engine.cache.bytes == 0 and drafter.cache.bytes == 0 and not engine.busy


def test_abort_of_another_engines_sequence_does_nothing() -> None:
    """Guards requests of engines that share a process: their numbers differ, and an abort acts on the
    engine's own only.
    """
    target = shared_target()
    engine, other = Engine(target, Echo(target)), Engine(target)
    mine = engine.add(PROMPTS[0], limits=Limits(max_tokens=LENGTH))
    foreign = other.add(PROMPTS[1], limits=Limits(max_tokens=LENGTH))
    engine.step()
    assert mine.id != foreign.id
    engine.abort(foreign)
    assert foreign.finished is None
    for _ in engine.run():
        pass
    assert tuple(mine.emitted) == plain(tuple(PROMPTS[0]), "greedy")


@pytest.mark.parametrize("depth", [1, 2, 5])
def test_stats_of_a_perfect_drafter(depth: int) -> None:
    """Guards the numbers that are published: full rounds of Echo give tau = depth + 1 exactly, all depths
    accepted."""
    target = shared_target()
    rounds = 4
    engine = Engine(target, Echo(target, depth=depth), budget=depth)
    engine.generate(PROMPTS, SAMPLINGS["T0.7"], Limits(max_tokens=rounds * (depth + 1)))
    stats = engine.stats
    batch = len(PROMPTS)
    assert stats.tau == depth + 1
    assert stats.rounds == rounds * batch and stats.forwards == rounds
    assert stats.tokens == rounds * (depth + 1) * batch
    assert stats.nodes == stats.accepted == rounds * depth * batch
    assert stats.by_depth == [[rounds * batch, rounds * batch]] * depth


def test_stats_agree_with_what_happened() -> None:
    """Guards by_depth and the counters against a count by hand from the outcomes of every round."""
    target = shared_target()
    engine = Engine(target, Random(seed=1, vocab=VOCAB, depth=4, width=30), budget=40)
    sequences = [engine.add(p, SAMPLINGS["T1-filters"], Limits(max_tokens=40)) for p in PROMPTS]
    outcomes = list(steps(engine, sequences))
    stats = engine.stats
    accepted = [len(o.path) - 1 for o in outcomes]
    assert 0 < sum(accepted) < sum(o.tree.budget for o in outcomes)
    assert stats.rounds == len(outcomes) and stats.accepted == sum(accepted)
    assert stats.tokens == sum(len(s.emitted) for s in sequences) == sum(accepted) + len(outcomes)
    assert stats.tau == pytest.approx(stats.tokens / stats.rounds)
    for level, (drafted, kept) in enumerate(stats.by_depth):
        assert drafted == sum(o.tree.depth > level for o in outcomes)
        assert kept == sum(a > level for a in accepted)
    assert all(seconds > 0 for seconds in stats.seconds.values())


def test_emissions_join_to_the_text() -> None:
    """Guards streaming through the engine: pieces in order give the text, kinds say where tokens came
    from."""
    target = shared_target()
    for budget, kinds in ((0, {"plain"}), (9, {"accepted", "bonus", "plain"})):
        engine = Engine(target, Decoy(target, width=2), budget=budget)
        sequence = engine.add(PROMPTS[0], SAMPLINGS["T0.7"], Limits(max_tokens=LENGTH))
        emissions = [e for o in steps(engine, [sequence]) for e in o.emissions]
        assert [e.token for e in emissions] == sequence.emitted
        assert "".join(e.text for e in emissions) == sequence.text
        assert {e.kind for e in emissions} <= kinds and (
            budget == 0 or "accepted" in {e.kind for e in emissions}
        )
