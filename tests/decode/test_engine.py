"""One request among others: where it stops, when it joins and leaves, what memory it holds, what is counted.

All of it on stub drafters in float64; see `test_lossless.py` for why.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
from torch import Tensor

from jetspec.decode.engine import Engine
from jetspec.draft.stubs import Decoy, Echo, Random
from jetspec.errors import ModelError, OptionError, PromptError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
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
    tiny_target,
)
from tests.target.test_pooled_cache import pooled_engine


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


def test_an_answer_finds_its_memory_reserved() -> None:
    """Guards the rounds in which a cache grew: each copied the whole context, for a batch of long prompts as
    long as several rounds. Where memory is taken at once, only a tree's room is reserved."""
    target = shared_target()
    engine = Engine(target, Echo(target, depth=6), budget=20)
    sequences = [engine.add(prompt, None, Limits(max_tokens=100, ignore_eos=True)) for prompt in PROMPTS]
    places: dict[int, set[int]] = {s.id: set() for s in sequences}
    while engine.busy:
        engine.step()
        for s in sequences:
            if s.id in engine.cache:
                places[s.id].add(engine.cache.block(s.id).data_ptr())
    assert all(len(s.emitted) == 100 for s in sequences)
    assert all(len(found) == 1 for found in places.values())
    pooled = pooled_engine(target, budget=0)
    waiting = pooled.add(PROMPTS[0], None, Limits(max_tokens=100))
    pooled.step()
    assert pooled.cache.block(waiting.id).shape[3] < 100


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


def test_a_request_without_memory_still_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards admission when the cache has no memory left (CUDA): the request vanished, in no group, never
    finished, and `abort` ignored it."""
    engine = Engine(shared_target(), budget=0)
    first, second = (engine.add(PROMPTS[0], limits=Limits(max_tokens=LENGTH)) for _ in range(2))

    def full(key: int, capacity: int) -> None:
        raise MemoryError("no memory left")

    with monkeypatch.context() as patch:
        patch.setattr(engine.cache, "add", full)
        with pytest.raises(MemoryError):
            engine.step()
    assert engine.busy
    engine.abort(second)
    assert second.finished == "abort"
    for _ in engine.run([first]):
        pass
    assert tuple(first.emitted) == plain(tuple(PROMPTS[0]), "greedy")
    assert engine.cache.bytes == 0


@pytest.mark.parametrize("failure", [MemoryError, RuntimeError])
def test_a_request_without_memory_does_not_hold_up_the_others(
    monkeypatch: pytest.MonkeyPatch, failure: type[Exception]
) -> None:
    """Guards running requests when the next one finds no memory: every step failed before its round, and
    `run` aborted them all. It waits until one of them has left; torch raises a RuntimeError of its own."""
    engine = Engine(shared_target(), Echo(shared_target()))
    add, tried = engine.cache.add, list[int]()

    def narrow(key: int, capacity: int) -> None:
        tried.append(key)
        if engine.cache.keys():
            raise failure("no memory left")
        add(key, capacity)

    monkeypatch.setattr(engine.cache, "add", narrow)
    sequences = engine.generate(PROMPTS, limits=Limits(max_tokens=LENGTH))
    assert [tuple(s.emitted) for s in sequences] == [plain(tuple(p), "greedy") for p in PROMPTS]
    assert len(tried) <= 2 * len(PROMPTS), "asked again in every round, which costs a GPU its spare blocks"


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


@pytest.mark.parametrize("batch", [16, 40])
def test_observed_rows_do_not_hold_those_of_others(batch: int) -> None:
    """Guards memory: heads keep what they observe for hundreds of rounds, and one request's view kept every
    row of its large forwards, batch mates and rejected nodes included. In a small forward views stay: a copy
    per request and round would cost more than it frees."""
    held: list[float] = []  # rows kept in memory for each one observed

    class Keeper(Recorder):
        def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
            for rows in (taps, hidden):
                assert rows is not None
                held.append(rows.untyped_storage().nbytes() / (rows.numel() * rows.element_size()))
            super().observe(key, taps, hidden)

    limits = Limits(max_tokens=3)
    plainly = Engine(shared_target(), Keeper(Decoy(shared_target())), budget=0)
    plainly.generate([[token] for token in range(batch)], limits=limits)
    assert set(held) == {16.0 if batch == 16 else 1.0}
    held.clear()
    tree = Engine(shared_target(), Keeper(Random(seed=1, vocab=VOCAB, depth=4, width=30)), budget=batch)
    tree.generate([[n, 5] for n in range(3)], limits=limits)
    assert held and max(held) <= 16.0
    held.clear()
    prefilled = Engine(shared_target(), Keeper(Decoy(shared_target())), budget=0)
    for n in range(batch):
        prefilled.add([n, 5], limits=limits)
    prefilled.prefill()
    assert len(held) == 2 * batch and max(held) <= 16.0


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


def test_a_prompt_is_read_in_smaller_pieces_while_others_decode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards running requests against a long prompt, for whose pieces they wait; alone it is read at once,
    and the texts are the same."""
    target = tiny_target()
    sizes: list[int] = []
    forward = target.forward

    def counting(plan: Any, *args: Any) -> Any:
        sizes.append(plan.size)
        return forward(plan, *args)

    monkeypatch.setattr(target, "forward", counting)
    long = [n % VOCAB for n in range(60)]
    engine = Engine(target, None, budget=0, prefill_rows=16)
    engine.add(long, limits=Limits(max_tokens=1))
    engine.step()
    assert sizes == [59, 1]
    first = engine.add(PROMPTS[0], limits=Limits(max_tokens=LENGTH))
    engine.step()
    sizes.clear()
    second = engine.add(long, limits=Limits(max_tokens=4))
    while engine.busy:
        engine.step()
    assert sizes[:8] == [16, 1, 16, 1, 16, 1, 11, 2]
    assert tuple(first.emitted) == plain(tuple(PROMPTS[0]), "greedy")
    assert tuple(second.emitted) == plain(tuple(long), "greedy", 4)
    for wrong in (0, -1, 1.5, True):
        with pytest.raises(OptionError, match="prefill_rows must be an integer of at least 1"):
            Engine(target, None, budget=0, prefill_rows=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("most", [0, -1, 1.5, True, None, "x"])
def test_a_bad_batch_is_refused(most: Any) -> None:
    """Guards the documented error for max_batch: Python's own came through, and 1.5 and True were taken."""
    with pytest.raises(OptionError, match="max_batch must be an integer of at least 1"):
        Engine(shared_target(), None, budget=0, max_batch=most)
    with pytest.raises(OptionError, match=r"unknown tree builder .*; valid: best-first"):
        Engine(shared_target(), None, budget=0, grow=[most])  # type: ignore[arg-type]


def test_a_bad_request_is_refused_before_it_joins_the_others() -> None:
    """Guards all requests of an engine against one: ids that the target does not have were met in the round,
    which then failed for everybody until the bad request was aborted."""
    target = shared_target()
    engine = Engine(target, Echo(target))
    good = engine.add(PROMPTS[0], limits=Limits(max_tokens=LENGTH))
    with pytest.raises(OptionError, match=f"token {VOCAB + 100}, but ids .* 0 to {VOCAB - 1}"):
        engine.add([5, 6, 7], Sampling(logit_bias={3: 1.0, VOCAB + 100: 1.0}))
    for prompt in ([1, VOCAB], [-1], [1.5], ["a"], "text", []):
        with pytest.raises(PromptError):
            engine.add(prompt)  # type: ignore[arg-type]
    list(engine.run([good]))
    assert tuple(good.emitted) == plain(tuple(PROMPTS[0]), "greedy")


SICK = VOCAB - 1  # the id whose embedding is damaged
HEALTHY = Sampling(logit_bias={SICK: -1e9})


def damaged_target() -> Target:
    """A target of whose embeddings one is NaN: requests that hold its id cannot go on, all others can."""
    target = tiny_target()
    target.transformer.embedding[SICK] = math.nan
    return target


@pytest.mark.parametrize("stub", ["off", "echo", "decoy", "pooled"])
def test_a_request_that_cannot_go_on_does_not_hold_up_the_others(stub: str) -> None:
    """Guards healthy requests against one whose logits are not finite: every step failed, the error did not
    say for whom, and nobody got another token. In a pool the rows that it left made the next ones sick."""
    target = damaged_target()
    drafters: dict[str, Any] = {"echo": Echo(target), "decoy": Decoy(target, width=2)}
    make = pooled_engine if stub == "pooled" else Engine
    engine = make(target, drafters.get(stub), budget=6 if stub in drafters else 0, max_batch=2)
    limits = Limits(max_tokens=LENGTH)
    alone = [Engine(target, budget=0).generate([p], HEALTHY, limits)[0].emitted for p in PROMPTS]
    sick = engine.add([4, 5, SICK, *range(20), 6], limits=limits)
    healthy = [engine.add(prompt, HEALTHY, limits) for prompt in PROMPTS]
    with pytest.raises(ModelError, match=f"request {sick.id}: the target's logits are not finite") as caught:
        for _ in engine.run():
            pass
    assert caught.value.sequences == (sick,) and sick.finished == "abort"
    assert all(s.finished is None for s in healthy)
    for _ in steps(engine, healthy):
        pass
    assert [s.emitted for s in healthy] == alone
    assert engine.cache.bytes == 0


def test_a_sick_draft_does_not_end_a_request() -> None:
    """Guards text that never meets the damage: a drafted id that does spoiled the whole tree's logits, and
    the round failed for ever."""
    target = damaged_target()
    limits = Limits(max_tokens=LENGTH)
    drafter = Random(seed=1, vocab=VOCAB, depth=3, width=VOCAB)
    for prompt in PROMPTS:
        (expected,) = Engine(target, budget=0).generate([prompt], HEALTHY, limits)
        engine = Engine(target, drafter, budget=VOCAB)
        (sequence,) = engine.generate([prompt], HEALTHY, limits)
        assert sequence.emitted == expected.emitted and sequence.finished == "length"


def test_a_sick_draft_does_not_end_requests_of_a_pool() -> None:
    """Guards text where trees attend at once: rows of a failed tree stay in a sequence's slot, where a longer
    neighbour makes them part of the product with weight 0, and 0 * NaN ended the request."""
    target = damaged_target()
    limits, prompts = Limits(max_tokens=LENGTH), [[1, 2, 3, 4, 5] * 12, *PROMPTS]
    expected = [Engine(target, budget=0).generate([p], HEALTHY, limits)[0].emitted for p in prompts]
    for budget in (6, VOCAB):
        drafter = Random(seed=1, vocab=VOCAB, depth=3, width=VOCAB)
        engine = pooled_engine(target, drafter, budget=budget, max_batch=len(prompts))
        assert [s.emitted for s in engine.generate(prompts, HEALTHY, limits)] == expected
