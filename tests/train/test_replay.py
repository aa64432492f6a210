"""Features from text: teacher forcing must give what was recorded while decoding."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from jetspec.errors import DataError
from jetspec.target.target import Target
from jetspec.train import answer_folder
from jetspec.train.answers import Answer, parse_answer, read_answers
from jetspec.train.features import Sample, read_shard, shard_paths
from jetspec.train.replay import expected_rows, replay_answers
from jetspec.train.responses import AnswerOptions, answer_prompts
from tests.draft.tiny import TAPS, tiny_prompts, tiny_target

OPTIONS = AnswerOptions(max_tokens=12, tokens=10**6, batch=5, temperatures=((0.0, 0.5), (1.0, 0.5)))


@pytest.fixture(scope="module")
def target() -> Target:
    """A frozen target that ends some of its answers."""
    target = tiny_target()
    target.transformer.output_matrix[0] *= 3
    return target


@pytest.fixture(scope="module")
def recorded(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answers with the features that were recorded while decoding."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("recorded")
    answer_prompts(target, tiny_prompts(21), folder, TAPS, OPTIONS)
    return folder


def samples(folder: Path) -> dict[int, Sample]:
    """Samples by number."""
    return {sample.prompt: sample for path in shard_paths(folder) for sample in read_shard(path)}


def agree(found: Sample, expected: Sample) -> None:
    """Fail unless two samples are the same but for the last bit of float16 (11 bits)."""
    assert found.tokens.tolist() == expected.tokens.tolist()
    assert (found.prompt_len, found.temperature) == (expected.prompt_len, expected.temperature)
    for one, other in ((found.taps, expected.taps), (found.hidden, expected.hidden)):
        assert one.dtype == torch.float16 and one.shape == other.shape and not one[-1].any()
        assert torch.allclose(one.float(), other.float(), rtol=2e-3, atol=2e-3)
        assert other[:-1].float().abs().mean() > 0.1


@pytest.mark.parametrize("rows", [1024, 40, 7])
def test_features_from_text_are_those_recorded(
    target: Target, recorded: Path, tmp_path: Path, rows: int
) -> None:
    """Guards the two ways to features: same ids (a stop token at the end included), same rows, whether
    answers share a forward, or are so long that one takes several."""
    answers, broken = read_answers(recorded / "answers.jsonl")
    progress = replay_answers(target, answers, tmp_path, TAPS, rows=rows)
    expected, found = samples(recorded), samples(tmp_path)
    assert broken == 0 and len(found) == progress.answered and len(answers) == 21
    assert {answer.finish for answer in answers} == {"stop", "length"}
    for number, answer in enumerate(answers):
        if number in found:
            agree(found[number], expected[answer.number])
        else:
            assert not answer.text.strip()
    assert progress.empty == len(answers) - len(found)
    assert read_answers(tmp_path / "answers.jsonl")[0] == [
        replace(answer, number=n) for n, answer in enumerate(answers) if n in found
    ]


def test_an_interrupted_replay_goes_on(
    target: Target, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards resume: no answer twice, none lost, and other answers are refused."""
    monkeypatch.setattr(answer_folder, "SHARD_SAMPLES", 4)
    answers = read_answers(recorded / "answers.jsonl")[0]

    def stop(progress: object) -> None:
        if progress.answered >= 6:  # type: ignore[attr-defined]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replay_answers(target, answers, tmp_path / "a", TAPS, stop, rows=30)
    first = len(samples(tmp_path / "a"))
    assert 6 <= first < len(answers)
    whole = replay_answers(target, answers, tmp_path / "b", TAPS)
    assert replay_answers(target, answers, tmp_path / "a", TAPS) == whole
    assert samples(tmp_path / "a").keys() == samples(tmp_path / "b").keys()
    assert sum(len(list(read_shard(path))) for path in shard_paths(tmp_path / "a")) == whole.answered
    with pytest.raises(DataError, match="from"):
        replay_answers(target, answers[1:], tmp_path / "a", TAPS)


def test_what_cannot_be_used_is_counted(target: Target, tmp_path: Path) -> None:
    """Guards against silence: empty answers, ids of another vocabulary, conversations beyond the context."""
    user = ({"role": "user", "content": "hello"},)
    good = Answer(0, "a", user, target.tokenizer.decode([5, 6, 7]), "stop", 0.0, 0)
    answers = [good, replace(good, text=" "), replace(good, tokens=(7, 10**6)), replace(good, text="x" * 600)]
    progress = replay_answers(target, answers, tmp_path, TAPS)
    assert (progress.answered, progress.empty, progress.refused, progress.too_long) == (1, 1, 1, 1)
    (sample,) = samples(tmp_path).values()
    assert sample.tokens[sample.prompt_len :].tolist() == [5, 6, 7, 0]
    assert expected_rows(target, [good, good]) == 2 * sample.tokens.shape[0]


def test_lines_survive_the_round_trip() -> None:
    """Guards the file: every field comes back, and fields that are not needed take no room."""
    user = ({"role": "user", "content": "\u00e9\u2028\U0001f600"},)
    plain = Answer(3, "p", user, "text", "length", 0.7, 9)
    full = replace(plain, tokens=(1, 2), raw=True, count=4, thinking=False)
    for answer in (plain, full):
        assert parse_answer(json.loads(answer.to_json()), 1) == answer
        assert "\n" not in answer.to_json()
    assert not {"tokens", "raw", "count", "thinking"} & json.loads(plain.to_json()).keys()


@pytest.mark.parametrize(
    "changes",
    [
        '"number": 1e999',
        '"temperature": 1e999',
        '"temperature": NaN',
        '"seed": 1e999',
        '"tokens": [1e999]',
        '"answer": "\\ud800"',
        '"id": "\\ud800"',
        '"messages": [{"role": "user", "content": "\\ud800"}]',
    ],
)
def test_values_that_cannot_be_kept_are_broken_lines(tmp_path: Path, changes: str) -> None:
    """Guards against OverflowError and UnicodeEncodeError, which --skip-broken did not catch."""
    path = tmp_path / "a.jsonl"
    good = '{"messages": [{"role": "user", "content": "hi"}], "answer": "ho"}'
    path.write_text(good + "\n" + good[:-1] + ", " + changes + "}\n")
    with pytest.raises(DataError, match=r"a\.jsonl line 2: .*--skip-broken"):
        read_answers(path)
    found, broken = read_answers(path, skip_broken=True)
    assert (len(found), broken) == (1, 1)


def test_answers_of_other_tools_are_read(tmp_path: Path) -> None:
    """Guards conversations that end with an answer, which most tools write; and names lines that are not."""
    talk = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"messages": talk}) + "\n{}\n" + json.dumps({"messages": talk[:1]}) + "\n")
    with pytest.raises(DataError, match=r"a.jsonl line 2: expected an object.*--skip-broken"):
        read_answers(path)
    (answer,), broken = read_answers(path, skip_broken=True)
    assert (answer.text, answer.messages, answer.finish, broken) == ("ho", tuple(talk[:1]), "stop", 2)
    path.write_text("")
    with pytest.raises(DataError, match="holds no answers"):
        read_answers(path)
    with pytest.raises(DataError, match="cannot be read"):
        read_answers(tmp_path / "none.jsonl")
