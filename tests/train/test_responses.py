"""Answers: interrupted runs lose and repeat nothing, and what is recorded is what the target computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.errors import DataError, OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.target import Target
from jetspec.train import responses
from jetspec.train.features import Sample, read_shard, shard_paths
from jetspec.train.responses import AnswerOptions, Progress, answer_prompts
from tests.draft.tiny import TAPS, TinyTokenizer, tiny_prompts, tiny_target

PROMPTS = tiny_prompts(23)
OPTIONS = AnswerOptions(max_tokens=7, tokens=10**6, batch=4, temperatures=((0.0, 0.5), (1.0, 0.5)))


class Killed(Exception):
    """Stands for a kill at any moment."""


@pytest.fixture(autouse=True)
def _small_shards(_same_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(responses, "SHARD_SAMPLES", 4)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


def samples(folder: Path) -> list[Sample]:
    """All samples of a folder."""
    return [sample for path in shard_paths(folder) for sample in read_shard(path)]


def by_prompt(folder: Path) -> dict[int, list[int]]:
    """Prompt number -> tokens; each prompt may be there once."""
    found = samples(folder)
    assert len({sample.prompt for sample in found}) == len(found), "a prompt was answered twice"
    return {sample.prompt: sample.tokens.tolist() for sample in found}


def run(target: Target, folder: Path, options: AnswerOptions = OPTIONS, stop: int | None = None) -> Progress:
    """Answer, and be killed after `stop` answers."""
    first: list[int] = []

    def watch(progress: Progress) -> None:
        first.append(progress.answered)
        if stop is not None and progress.answered - first[0] >= stop:
            raise Killed

    return answer_prompts(target, PROMPTS, folder, TAPS, options, watch)


def test_an_interrupted_run_goes_on(target: Target, tmp_path: Path) -> None:
    """Guards resume: killed twice between shards, no prompt is answered twice, none is lost, and the answers
    are those of a run that was not killed."""
    whole = run(target, tmp_path / "whole")
    for stop in (9, 6):
        with pytest.raises(Killed):
            run(target, tmp_path / "killed", stop=stop)
    progress = run(target, tmp_path / "killed")
    assert by_prompt(tmp_path / "killed") == by_prompt(tmp_path / "whole")
    assert progress == whole and progress.answered == len(PROMPTS)
    assert progress.tokens == sum(sample.answer_len for sample in samples(tmp_path / "killed"))


def test_an_interruption_keeps_finished_answers(target: Target, tmp_path: Path) -> None:
    """Guards the answers that wait for their shard to fill up when Ctrl-C comes."""
    with pytest.raises(Killed):
        run(target, tmp_path, stop=6)
    assert [len(list(read_shard(path))) for path in shard_paths(tmp_path)] == [4, 2]


@pytest.mark.parametrize(
    "wrong", [{"tokens": 0}, {"max_tokens": 0}, {"batch": 0}, {"seed": -1}, {"seed": 2**64}], ids=str
)
def test_options_are_checked_before_a_folder_is_made(wrong: dict[str, int]) -> None:
    """Guards the folder: options that cannot work would be recorded in it and refuse the right ones later."""
    with pytest.raises(OptionError, match=next(iter(wrong))):
        AnswerOptions(**wrong)  # type: ignore[arg-type]


def test_a_run_with_enough_tokens_is_left_alone(target: Target, tmp_path: Path) -> None:
    """Guards training that is started again with the same command: one more answer would be other data."""
    options = AnswerOptions(**{**OPTIONS.__dict__, "tokens": 40})
    first = run(target, tmp_path, options)
    assert 40 <= first.tokens < 40 + 7 * 4 and first.answered < len(PROMPTS)
    before = shard_paths(tmp_path)
    assert run(target, tmp_path, options) == first
    assert shard_paths(tmp_path) == before
    more = run(target, tmp_path)
    assert more.answered == len(PROMPTS) == len(by_prompt(tmp_path))


def test_a_deleted_shard_is_answered_again_and_none_overwritten(target: Target, tmp_path: Path) -> None:
    """Guards the advice to delete a damaged shard: the next one may not take the number of another."""
    run(target, tmp_path)
    expected = by_prompt(tmp_path)
    shard_paths(tmp_path)[1].unlink()
    run(target, tmp_path)
    assert by_prompt(tmp_path) == expected


def test_parts_share_the_prompts(target: Target, tmp_path: Path) -> None:
    """Guards several processes on one file: together they answer every prompt once, as one process would."""
    run(target, tmp_path / "whole")
    found: dict[int, list[int]] = {}
    for index in range(3):
        run(target, tmp_path / str(index), AnswerOptions(**{**OPTIONS.__dict__, "part": (index, 3)}))
        part = by_prompt(tmp_path / str(index))
        assert not found.keys() & part.keys()
        found |= part
    assert found == by_prompt(tmp_path / "whole")


def test_other_settings_and_prompts_are_refused(target: Target, tmp_path: Path) -> None:
    """Guards a folder against a mixture: shards know prompts by number only."""
    run(target, tmp_path)
    with pytest.raises(DataError, match="max_tokens"):
        run(target, tmp_path, AnswerOptions(**{**OPTIONS.__dict__, "max_tokens": 8}))
    with pytest.raises(DataError, match="prompts"):
        answer_prompts(target, PROMPTS[1:], tmp_path, TAPS, OPTIONS)
    with pytest.raises(DataError, match="taps"):
        answer_prompts(target, PROMPTS, tmp_path, (0, 1), OPTIONS)
    (tmp_path / "answers.json").write_text("{")
    with pytest.raises(DataError, match=r"answers\.json"):
        run(target, tmp_path)


def test_long_prompts_are_skipped(target: Target, tmp_path: Path) -> None:
    """Guards against one long prompt ending hours of work."""
    progress = run(target, tmp_path, AnswerOptions(**{**OPTIONS.__dict__, "max_prompt": 6}))
    long = [n for n, p in enumerate(PROMPTS) if len(target.tokenizer.chat(list(p.messages))) > 6]
    assert progress.skipped == len(long) > 0
    assert by_prompt(tmp_path).keys() == set(range(len(PROMPTS))) - set(long)


def test_answers_are_plain_decoding_at_their_temperature(target: Target, tmp_path: Path) -> None:
    """Guards what the head learns to predict: text that the target writes at the temperature on record."""
    run(target, tmp_path)
    temperatures = set()
    for sample in samples(tmp_path):
        temperatures.add(sample.temperature)
        tokens = sample.tokens.tolist()
        sampling = Sampling(temperature=sample.temperature, seed=sample.prompt)
        engine = Engine(target)
        (alone,) = engine.generate([tokens[: sample.prompt_len]], sampling, Limits(max_tokens=7))
        assert alone.tokens == tokens
    assert temperatures == {0.0, 1.0}


def test_shares_of_temperatures() -> None:
    """Guards the mixture: shares hold over twenty prompts, and the draw depends on the number alone."""
    options = AnswerOptions()
    drawn = [options.temperature_of(n) for n in range(400)]
    for temperature, share in options.temperatures:
        assert drawn.count(temperature) == round(400 * share)
    assert drawn[:20] == drawn[20:40]


@pytest.mark.parametrize("batch", [1, 5])
def test_recorded_features_are_the_layers_that_they_claim(tmp_path: Path, batch: int) -> None:
    """Guards the layer convention and rows of other sequences: tap n is the OUTPUT of layer n, which is
    transformers' hidden_states[n + 1], and hidden is its last state, behind the final norm.

    float16 keeps 11 bits, so values differ by up to 5e-4 of their size; neighbouring layers differ by 1."""
    from jetspec.target.config import ModelConfig
    from tests.target.tiny import tiny_model

    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_hidden_layers": 5,
        "vocab_size": 200,
        "eos_token_id": None,
    }
    model = tiny_model("llama", **sizes).eval()
    for parameter in model.parameters():
        parameter.data = (
            1.0 + 0.2 * torch.randn_like(parameter) if parameter.ndim == 1 else parameter.data * 9
        )
    config = ModelConfig.from_dict(model.config.to_dict())
    target = Target("tiny", config, model.state_dict(), TinyTokenizer())  # type: ignore[arg-type]
    options = AnswerOptions(max_tokens=5, tokens=10**6, batch=batch, temperatures=((0.0, 1.0),))
    taps = (0, 2, 3)
    answer_prompts(target, PROMPTS[:5], tmp_path, taps, options)
    for sample in samples(tmp_path):
        with torch.no_grad():
            states = model(sample.tokens[None], output_hidden_states=True).hidden_states
        expected = torch.cat([states[n + 1][0] for n in taps], dim=-1)
        assert torch.allclose(sample.taps[:-1].float(), expected[:-1], rtol=1e-3, atol=1e-3)
        assert torch.allclose(sample.hidden[:-1].float(), states[-1][0, :-1], rtol=1e-3, atol=1e-3)
        assert not sample.taps[-1].any() and not sample.hidden[-1].any()
        assert (states[1] - states[2]).abs().max() > 0.5
