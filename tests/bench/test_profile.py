"""The profile: its parts add up to the round, and its floors are those of the shapes."""

from __future__ import annotations

from pathlib import Path

import pytest

from jetspec.bench.profile import Ceilings, operator_costs, profile
from jetspec.draft.stubs import Off, Random
from jetspec.errors import OptionError
from jetspec.native import native_available
from jetspec.target.loading import load_target
from tests.helpers import jetspec, tiny_folder  # noqa: F401

pytestmark = pytest.mark.skipif(
    not native_available(), reason="no C compiler, so there is nothing to profile"
)
CEILINGS = Ceilings(read=1e10, product=1e11)


def test_parts_add_up(tiny_folder: Path) -> None:  # noqa: F811
    """Guards an operator that is counted twice or lost: all lines together are the time of a round."""
    target = load_target(str(tiny_folder))
    prompts = [[5, 6, 7, 8], [9, 10]]
    guesses = Random(seed=1, vocab=target.config.vocab_size, depth=3, width=3)
    for drafter, budget in ((Off(), 0), (guesses, 6)):
        one = profile(
            target, drafter, prompts, CEILINGS, method="m", budget=budget, grow="best-first", tokens=24
        )
        assert sum(o.seconds for o in one.operators) == pytest.approx(one.seconds, rel=1e-6)
        assert all(o.seconds >= 0 for o in one.operators)
        assert 0 < one.host < 1
        assert one.tau >= 1 if budget else one.tau == 1
        assert one.rows == 1 if not budget else 1 < one.rows <= 7
        assert {o.phase for o in one.operators} == {"draft", "build", "verify", "commit", "engine"}


def test_costs_are_those_of_the_shapes(tiny_folder: Path) -> None:  # noqa: F811
    """Guards the roofline column: bytes of packed weights, and 2 N K operations per row."""
    target = load_target(str(tiny_folder))
    config = target.config
    costs = operator_costs(target.transformer, rows=3, context=10)
    inner, hidden, layers = config.intermediate_size, config.hidden_size, config.num_layers
    assert costs["down"][1] == 2 * 3 * inner * hidden * layers
    assert costs["output matrix"][1] == 2 * 3 * config.vocab_size * hidden
    padded = -(-hidden // 32) * 32  # whole panels
    assert costs["down"][0] == 4 * padded * inner * layers
    assert costs["attention"][0] == 2 * config.num_kv_heads * config.head_dim * 4 * 13 * layers


def test_without_the_compiled_decoder(tiny_folder: Path) -> None:  # noqa: F811
    """Guards the error for float64, where there is no clock per operator."""
    target = load_target(str(tiny_folder), dtype="float64")
    with pytest.raises(OptionError, match="a C compiler, float32"):
        profile(target, Off(), [[1, 2]], CEILINGS, method="m", budget=0, grow="chain", tokens=16)


def test_the_verb(tiny_folder: Path) -> None:  # noqa: F811
    """Guards `jetspec bench profile` as people and as machines read it."""
    options = ("--head", "random", "--prompts", 1, "--tokens", 16)
    arguments = ("bench", "profile", "--model", tiny_folder, *options)
    done = jetspec(*arguments)
    assert done.code == 0 and "gate and up" in done.out and "GB/s read" in done.out
    record = jetspec(*arguments, "--json").json
    assert [p["method"] for p in record["profiles"]] == ["plain", "random best-first"]
    assert record["ceilings"]["read"] > 0 and record["run"]["arguments"]["tokens"] == 16


def test_the_option_is_the_verb(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards `jetspec bench --profile`, which must not start a benchmark."""
    calls: list[object] = []
    monkeypatch.setattr("jetspec.cli.bench.profile", lambda model, **options: calls.append(model))
    assert jetspec("bench", "--profile", "--model", "some-model").code == 0
    assert calls == ["some-model"]
