from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jetspec.cli.report import divergence_values
from jetspec.decode.compare import TIE_BELOW, find_divergence, in_turns, plain_scores, tie_below, top_two_gap
from jetspec.decode.engine import Engine
from jetspec.draft.stubs import Random
from jetspec.errors import PromptError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.loading import load_target
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from tests.helpers import CONTEXT, tiny_folder

__all__ = ["tiny_folder"]  # a fixture

PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    """The tiny model."""
    return load_target(str(tiny_folder))


def test_equal_outputs_have_no_divergence(target: Target) -> None:
    """Guards against a false alarm."""
    assert find_divergence(target, PROMPT, [9, 10], [9, 10], Sampling()) is None


@pytest.mark.parametrize(
    ("other", "place", "tokens"),
    [([9, 12, 11], 1, (10, 12)), ([9, 10], 2, (11, None)), ([9, 10, 11, 12], 3, (None, 12))],
)
def test_the_first_difference_is_named(
    target: Target, other: list[int], place: int, tokens: tuple[int | None, int | None]
) -> None:
    """Guards place and tokens, and that an output which merely ends earlier counts as different."""
    first = find_divergence(target, PROMPT, [9, 10, 11], other, Sampling())
    assert first is not None
    assert (first.place, (first.plain, first.other)) == (place, tokens)


def test_the_gap_is_that_of_the_logits_before_the_token(target: Target) -> None:
    """Guards against a gap taken one position off: it is compared with a forward of all tokens at once."""
    tokens = [*PROMPT, 9, 10, 11]
    cache = target.new_cache()
    cache.add(0)
    logits = target.forward(chunk([(0, tokens)], cache, logits=True), cache).logits
    assert logits is not None
    for count in (1, len(PROMPT) + 2, len(tokens)):
        best, second = logits[count - 1].topk(2).values.tolist()
        gap = top_two_gap(plain_scores(target, tokens[:count], len(PROMPT), Sampling()))
        assert gap == pytest.approx(best - second, abs=1e-4)


def test_a_tie_needs_both_tokens_near_the_best(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the verdict on both sides of the bound; a near tie of the top two excuses no third token."""
    monkeypatch.setattr(target.transformer.output, "native", None)
    for low, tie in ((4.9991, True), (4.998, False)):
        scores = torch.zeros(20)
        scores[9], scores[10], scores[11] = 5.0, low, 4.5
        monkeypatch.setattr("jetspec.decode.compare.plain_scores", lambda *_, scores=scores: scores)
        first = find_divergence(target, PROMPT, [9], [10], Sampling())
        assert first is not None and first.tie is tie
        third = find_divergence(target, PROMPT, [9], [11], Sampling())
        assert third is not None and not third.tie
        assert (first.lag, third.lag) == (pytest.approx(5.0 - low, abs=1e-5), pytest.approx(0.5))


def test_nothing_is_excused_where_the_compiled_code_runs(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the README's word: differences on the compiled path were excused below 1e-3, though rows have
    the same bits there and any difference is a bug. Another library's answers have a bound of their own."""
    scores = torch.zeros(20)
    scores[9], scores[10] = 5.0, 4.9999
    monkeypatch.setattr("jetspec.decode.compare.plain_scores", lambda *_: scores)
    for compiled in (True, False):
        monkeypatch.setattr(target.transformer.output, "native", object() if compiled else None)
        monkeypatch.setattr("jetspec.decode.compare.native_suits", lambda *_: True)
        first = find_divergence(target, PROMPT, [9], [10], Sampling())
        outside = find_divergence(target, PROMPT, [9], [10], Sampling(), TIE_BELOW[target.dtype])
        assert first is not None and first.tie is not compiled
        assert outside is not None and outside.tie
    monkeypatch.setattr(target.transformer.output, "native", object())
    monkeypatch.setattr("jetspec.decode.compare.native_suits", lambda *_: False)  # attention in torch
    assert tie_below(target) == TIE_BELOW[target.dtype]


def test_json_has_no_infinity(target: Target) -> None:
    """Guards `--compare --json` and `doctor --json`, which an infinite lag (one output has ended) broke, and
    the infinite gap where one candidate is left."""
    only = Sampling(temperature=1.0, top_k=1)
    for other, sampling, infinite in (([9], Sampling(), {"lag"}), ([9], only, {"gap", "lag"})):
        first = find_divergence(target, PROMPT, [9, 10], other, sampling)
        values = divergence_values(first)
        assert first is not None and values is not None
        assert json.loads(json.dumps(values, allow_nan=False)) == values
        assert {name for name in ("gap", "lag", "place") if values[name] is None} == infinite
        assert (values["place"], values["plain"], values["tie"]) == (1, 10, False)


def test_sampled_gaps_include_the_noise(target: Target) -> None:
    """Guards ties at a temperature: logit plus noise is compared there; top-k 1 leaves no rival."""

    def gap(sampling: Sampling) -> float:
        return top_two_gap(plain_scores(target, PROMPT, len(PROMPT), sampling))

    sampled = {gap(Sampling(temperature=1.0, seed=s)) for s in range(3)}
    assert len(sampled | {gap(Sampling())}) == 4
    assert gap(Sampling(temperature=1.0, top_k=1)) == float("inf")


def test_engines_take_turns_and_warm_up_uncounted(target: Target) -> None:
    """Guards the interleaving: neither side may run ahead of the other by more than one round's tokens."""
    engines = [Engine(target, None, budget=0), Engine(target, Random(0, 30), budget=4)]
    order: list[int] = []
    limits = Limits(max_tokens=12, ignore_eos=True)
    sequences = in_turns(
        engines, PROMPT, Sampling(), limits, lambda engine, _: order.append(engines.index(engine))
    )
    assert sequences[0].emitted == sequences[1].emitted
    assert all(engine.stats.tokens == 12 for engine in engines)
    assert order[:6] == [0, 1, 1, 0, 0, 1]  # no draft of this stub is accepted in these rounds
    assert all(engine.cache.bytes == 0 for engine in engines)


def test_a_failure_frees_every_engine(target: Target) -> None:
    """Guards memory when an exception, such as an interrupt, passes through."""
    engines = [Engine(target, None, budget=0), Engine(target, None, budget=0)]

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        in_turns(engines, PROMPT, Sampling(), Limits(max_tokens=5), interrupt)
    assert all(engine.cache.bytes == 0 and not engine.busy for engine in engines)
    with pytest.raises(PromptError):
        in_turns(engines, [5] * CONTEXT, Sampling(), Limits())
