from __future__ import annotations

from collections.abc import Sequence as Many

import pytest
from torch import Tensor

from jetspec import noise
from jetspec.bench.clock import PHASES, EngineRunner, Measured, take_turns, warm_up
from jetspec.bench.methods import METHODS, PLAIN, Heads, make_engine
from jetspec.decode.stats import Stats
from jetspec.errors import PromptError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from tests.bench.tiny import tiny_target

PROMPTS = [[7, 3, 41, 20, 11], [50, 2], [9, 9, 2, 33, 14, 58, 1]]


class Scripted:
    """Emits given numbers of tokens, step by step, and writes its name down."""

    def __init__(self, name: str, sizes: list[int], log: list[str]) -> None:
        self.name, self.sizes, self.log, self.emitted = name, sizes, log, 0
        self.aborted = False

    def start(self, prompts: Many[Many[int]], sampling: Sampling, limits: Limits) -> None:
        self.left = list(self.sizes)

    @property
    def running(self) -> bool:
        return bool(self.left)

    def step(self) -> None:
        self.emitted += self.left.pop(0)
        self.log.append(self.name)

    def finish(self) -> tuple[Measured, list[list[int]]]:
        return Measured([self.emitted], [1], ["length"], 1.0, 1, 0.0, 1, 1.0), [[]]

    def abort(self) -> None:
        self.aborted = True


def test_turns_keep_everybody_level() -> None:
    """Guards the interleaving: the one with the fewest tokens goes next, and of two that are level the last
    one goes again (ABBA), so that a disturbance hits all alike."""
    log: list[str] = []
    slow, fast = Scripted("s", [1] * 6, log), Scripted("f", [3, 3], log)
    take_turns([slow, fast], [[1]], Sampling(), Limits())
    assert "".join(log) == "sfsssfss"
    log.clear()
    take_turns([Scripted("a", [1] * 3, log), Scripted("b", [1] * 3, log)], [[1]], Sampling(), Limits())
    assert "".join(log) == "abbaab"


def test_everything_is_given_up_on_an_error() -> None:
    """Guards Ctrl-C: the engines are empty afterwards, so that the next group can start."""
    runners = [Scripted("a", [1], []), Scripted("b", [1], [])]

    def interrupt() -> None:
        raise KeyboardInterrupt

    runners[1].step = interrupt  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        take_turns(runners, [[1]], Sampling(), Limits())
    assert all(runner.aborted for runner in runners)
    target = tiny_target()
    runner = EngineRunner(make_engine(target, METHODS[PLAIN], 0, Heads(target), 4))
    with pytest.raises(PromptError):
        take_turns([runner], [[1, 2], []], Sampling(), Limits())
    assert not runner.engine.busy or not runner.engine.cache.keys()


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, seed=3)], ids=["T0", "T1"])
def test_measured_adds_up(sampling: Sampling) -> None:
    """Guards every number of a record against the engine's own count of the same prompts."""
    target = tiny_target()
    heads = Heads(target, {"jetspec": "decoy"})
    limits = Limits(max_tokens=9, ignore_eos=True)
    method = METHODS["jetspec-tree"]
    runner = EngineRunner(make_engine(target, method, 8, heads, 3))
    warm_up(runner, PROMPTS, sampling, limits)
    ((measured, outputs),) = take_turns([runner], PROMPTS, sampling, limits)
    engine = make_engine(target, method, 8, heads, 3)
    sequences = [engine.add(ids, sampling, limits) for ids in PROMPTS]
    engine.prefill()
    forwards = 0
    while engine.busy:
        engine.step()
        forwards += 1
    assert outputs == [sequence.emitted for sequence in sequences]
    assert measured.tokens == [9, 9, 9] and measured.clocked == 27 and measured.finish == ["length"] * 3
    assert measured.steps == forwards and sum(measured.rounds) == engine.stats.rounds
    for name in ("accepted", "nodes", "by_depth"):
        assert getattr(measured, name) == getattr(engine.stats, name)
    assert set(measured.split) == set(measured.split_ms) == set(PHASES)
    assert 0.0 < sum(measured.split.values()) <= measured.seconds
    assert measured.prefill > 0.0 and measured.cache_bytes is not None and measured.cache_bytes > 0
    assert not runner.engine.cache.keys()


def test_a_group_is_prefilled_before_its_first_round() -> None:
    """Guards batches: with prefill in pieces between rounds, the first prompts of a large group would be
    finished before the last ones join, and no round would see the whole batch. 40 prompts of 20 tokens need
    several pieces."""
    target = tiny_target()
    runner = EngineRunner(make_engine(target, METHODS[PLAIN], 0, Heads(target), 40))
    prompts = [[n % 60] * 20 for n in range(40)]
    ((measured, _),) = take_turns([runner], prompts, Sampling(), Limits(max_tokens=3, ignore_eos=True))
    assert measured.steps == 3 and measured.rounds == [3] * 40


def test_counts_start_anew() -> None:
    """Guards against the warm-up, or the group before, leaking into a record."""
    target = tiny_target()
    runner = EngineRunner(make_engine(target, METHODS[PLAIN], 0, Heads(target), 1))
    for _ in range(2):
        ((measured, _),) = take_turns(
            [runner], PROMPTS[:1], Sampling(), Limits(max_tokens=4, ignore_eos=True)
        )
        assert measured.steps == 4 and measured.rounds == [4]
    assert isinstance(runner.engine.stats, Stats)


def test_each_runner_makes_its_own_noise(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the clock at T > 0: rows of noise were kept for the whole process, so that whoever came first
    made them for all other methods, and later prompts found them made."""
    made: list[int] = []
    gumbel = noise.gumbel_noise

    def counted(seeds: Many[int], positions: Tensor, vocab: int) -> Tensor:
        made.append(len(positions))
        return gumbel(seeds, positions, vocab)

    monkeypatch.setattr(noise, "gumbel_noise", counted)
    target, limits = tiny_target(), Limits(max_tokens=5, ignore_eos=True)
    runners = [EngineRunner(make_engine(target, METHODS[PLAIN], 0, Heads(target), 1)) for _ in range(3)]
    for _ in range(2):
        take_turns(runners, PROMPTS[:1], Sampling(temperature=1.0, seed=9), limits)
    assert sum(made) == 2 * 3 * 5
