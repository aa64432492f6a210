"""Answers: interrupted runs lose and repeat nothing, and what is recorded is what the target computed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.errors import DataError, OptionError, PromptError, StorageError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.target import Target
from jetspec.train import answer_folder, responses
from jetspec.train.answers import Answer, read_answers
from jetspec.train.features import Sample, read_shard, shard_paths
from jetspec.train.pace import Pace
from jetspec.train.prompts import Prompt
from jetspec.train.replay import replay_answers
from jetspec.train.responses import AnswerOptions, Progress, answer_prompts, expected_tokens
from tests.draft.tiny import TAPS, TinyTokenizer, tiny_prompts, tiny_target

PROMPTS = tiny_prompts(23)
OPTIONS = AnswerOptions(max_tokens=7, tokens=10**6, batch=4, temperatures=((0.0, 0.5), (1.0, 0.5)))


class Killed(Exception):
    """Stands for a kill at any moment."""


@pytest.fixture(autouse=True)
def _small_shards(_same_start: None, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.set_num_threads(1)
    monkeypatch.setattr(answer_folder, "SHARD_SAMPLES", 4)


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


def test_answers_under_way_are_seen(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the progress bar, which stood at 0 until the first answer was finished. What is under way is not
    done: it counts nowhere else, and nothing of it is left at the end."""
    seen: list[tuple[int, int, int, int]] = []

    def watch(progress: Progress) -> None:
        seen.append((progress.answered, progress.tokens, progress.begun, progress.written))

    monkeypatch.setattr(responses, "Pace", lambda: Pace(0.0))
    options = AnswerOptions(**{**OPTIONS.__dict__, "tokens": 40})
    done = answer_prompts(target, PROMPTS, tmp_path / "watched", TAPS, options, watch)
    assert seen[1] == (0, 0, 4, 4) and seen[2] == (0, 0, 4, 8)
    moves = [tokens + written for _, tokens, _, written in seen]
    assert moves == sorted(moves)
    assert (done.begun, done.written) == (0, 0)
    monkeypatch.setattr(responses, "Pace", lambda: Pace(1e9))
    assert done == answer_prompts(target, PROMPTS, tmp_path / "plain", TAPS, options)
    assert by_prompt(tmp_path / "plain") == by_prompt(tmp_path / "watched")


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": 0},
        {"max_tokens": 0},
        {"batch": 0},
        {"max_prompt": 0},
        {"seed": -1},
        {"seed": 2**64},
        {"temperatures": ((0.0, 0.5), (1.0, 0.6))},
        {"temperatures": ((-1.0, 1.0),)},
    ],
    ids=str,
)
def test_options_are_checked_before_a_folder_is_made(wrong: dict[str, Any]) -> None:
    """Guards the folder: options that cannot work would be recorded in it and refuse the right ones later."""
    with pytest.raises(OptionError, match=next(iter(wrong)).removesuffix("s")):
        AnswerOptions(**wrong)


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


@pytest.mark.parametrize(("first", "step"), [(0, 1), (0, 2), (1, 2), (3, 4), (0, 20)])
def test_shares_of_temperatures(first: int, step: int) -> None:
    """Guards the mixture in every part of the prompts: dealt by the number modulo something, a part of every
    n-th prompt got other shares. The bound is 4 standard deviations of an honest draw; the draw is fixed."""
    options = AnswerOptions(seed=3)
    numbers = range(first, 40_000, step)
    drawn = [options.temperature_of(n) for n in numbers]
    for temperature, share in options.temperatures:
        expected = len(drawn) * share
        assert abs(drawn.count(temperature) - expected) < 4 * (expected * (1 - share)) ** 0.5
    assert drawn == [options.temperature_of(n) for n in numbers]
    assert drawn != [AnswerOptions(seed=4).temperature_of(n) for n in numbers]


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


LONG = AnswerOptions(**{**OPTIONS.__dict__, "max_tokens": 40})


def talks(count: int) -> list[Prompt]:
    """Conversations of one to three user turns."""
    more = ("and then", "why so")
    return [Prompt(p.id, p.messages, more[: n % 3]) for n, p in enumerate(tiny_prompts(count))]


def texts(folder: Path) -> dict[int, Answer]:
    """Answer lines by number; each may be there once."""
    found = read_answers(folder / "answers.jsonl")[0]
    assert len({answer.number for answer in found}) == len(found), "an answer was written twice"
    return {answer.number: answer for answer in found}


def ending_target() -> Target:
    """A target that often ends its answers: conversations go on only then."""
    target = tiny_target()
    target.transformer.output_matrix[0] *= 3
    return target


@pytest.fixture(scope="module")
def ending() -> Target:
    """One such target for all tests."""
    return ending_target()


def test_conversations_go_on_behind_the_targets_own_answers(ending: Target, tmp_path: Path) -> None:
    """Guards multi-turn prompts: the second turn stands behind what the target itself said, and nothing
    follows an answer that was cut or is empty."""
    prompts = talks(30)
    progress = answer_prompts(ending, prompts, tmp_path, TAPS, LONG)
    found, rows = texts(tmp_path), by_prompt(tmp_path)
    assert found.keys() == rows.keys() and progress.answered == len(found)
    number, later, cut = 0, 0, 0
    for prompt in prompts:
        for turn in range(1 + len(prompt.later)):
            answer = found.get(number + turn)
            before = found.get(number + turn - 1)
            if turn == 0:
                assert answer is not None and answer.messages == prompt.messages
            elif before is not None and before.finish == "stop" and before.text.strip():
                assert answer is not None
                said = [*before.messages, {"role": "assistant", "content": before.text}]
                assert list(answer.messages) == [*said, {"role": "user", "content": prompt.later[turn - 1]}]
                assert rows[number + turn][: len(ids := ending.tokenizer.chat(answer.messages))] == ids
                later += 1
            else:
                assert answer is None
                cut += before is not None
        number += 1 + len(prompt.later)
    assert later >= 3 and progress.cut == cut >= 3


@pytest.mark.parametrize("stop", [1, 5, 11])
def test_interrupted_conversations_go_on(ending: Target, tmp_path: Path, stop: int) -> None:
    """Guards resume between two turns: the first answer is read back and the second one is the same."""

    def run_talks(folder: Path, kill: int | None) -> Progress:
        first: list[int] = []

        def watch(progress: Progress) -> None:
            first.append(progress.answered)
            if kill is not None and progress.answered - first[0] >= kill:
                raise Killed

        return answer_prompts(ending, talks(14), folder, TAPS, LONG, watch)

    whole = run_talks(tmp_path / "whole", None)
    with pytest.raises(Killed):
        run_talks(tmp_path / "killed", stop)
    assert run_talks(tmp_path / "killed", None) == whole
    assert by_prompt(tmp_path / "killed") == by_prompt(tmp_path / "whole")
    assert texts(tmp_path / "killed") == texts(tmp_path / "whole")


def test_the_lines_of_shards_are_mended(target: Target, tmp_path: Path) -> None:
    """Guards the pair of shard and text: lines that a kill, a full disk or an older version left out, or cut
    in the middle, are written by the next run."""
    run(target, tmp_path)
    expected = texts(tmp_path)
    path = tmp_path / "answers.jsonl"
    whole = path.read_bytes()
    for damaged in (None, whole[:-30], whole[: len(whole) // 2], b""):
        path.unlink() if damaged is None else path.write_bytes(damaged)
        run(target, tmp_path)
        assert texts(tmp_path) == expected


def test_text_alone(target: Target, tmp_path: Path) -> None:
    """Guards --text-only: the same answers without shards, resumed from the text, and not mixed with a folder
    that has features."""
    options = AnswerOptions(**{**OPTIONS.__dict__, "features": False})
    whole = run(target, tmp_path / "features")
    with pytest.raises(Killed):
        run(target, tmp_path / "text", options, stop=7)
    with (tmp_path / "text" / "answers.jsonl").open("a") as file:
        file.write('{"number": 3, "mess')
    assert run(target, tmp_path / "text", options) == whole
    assert texts(tmp_path / "text") == texts(tmp_path / "features")
    assert not shard_paths(tmp_path / "text")
    for folder, other in (("text", OPTIONS), ("features", options)):
        with pytest.raises(DataError, match="taps"):
            run(target, tmp_path / folder, other)


def test_a_full_disk_loses_nothing(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a shard that does not fit: one line, no half file, and the next run goes on."""
    run(target, tmp_path / "whole")
    save = answer_folder.write_shard.__globals__["save_file"]
    calls: list[int] = []

    def full(tensors: dict[str, Any], path: Path, **named: Any) -> None:
        calls.append(1)
        if len(calls) > 2:
            path.write_bytes(b"half")
            raise OSError(28, "No space left on device")
        save(tensors, path, **named)

    monkeypatch.setitem(answer_folder.write_shard.__globals__, "save_file", full)
    with pytest.raises(StorageError, match="No space left") as caught:
        run(target, tmp_path / "full")
    assert "\n" not in str(caught.value)
    assert len(by_prompt(tmp_path / "full")) == 8 == len(texts(tmp_path / "full"))
    monkeypatch.setitem(answer_folder.write_shard.__globals__, "save_file", save)
    run(target, tmp_path / "full")
    assert by_prompt(tmp_path / "full") == by_prompt(tmp_path / "whole")


def test_a_target_without_template(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards base models: refused in one line before any work, answered as they are with `raw`."""
    monkeypatch.setattr(TinyTokenizer, "has_template", False)
    with pytest.raises(PromptError, match=r"tiny has no chat template.*--raw"):
        run(target, tmp_path / "chat")
    assert not (tmp_path / "chat").exists()
    run(target, tmp_path / "raw", AnswerOptions(**{**OPTIONS.__dict__, "raw": True}))
    for number, tokens in by_prompt(tmp_path / "raw").items():
        ids = target.tokenizer.encode(PROMPTS[number].messages[0]["content"])
        assert tokens[: len(ids)] == ids
    assert all(answer.raw for answer in texts(tmp_path / "raw").values())


def test_prompts_that_the_template_refuses_are_counted(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against one system message ending hours of work."""
    chat = TinyTokenizer.chat

    def strict(self: TinyTokenizer, messages: Any) -> list[int]:
        if messages[0]["content"] == PROMPTS[2].messages[0]["content"]:
            raise PromptError("no system role")
        return chat(self, messages)

    monkeypatch.setattr(TinyTokenizer, "chat", strict)
    progress = run(target, tmp_path)
    assert progress.refused == progress.skipped == 1 and 2 not in by_prompt(tmp_path)


def test_the_report_fits_a_terminal(target: Target, tmp_path: Path) -> None:
    """Guards the summary: every count that is not zero is said, in lines of 80 columns."""
    most = Progress(10**7, 10**9, 10**6, 10**6, 10**6, 10**6, 10**6, True)
    lines = most.report(10**9)
    assert max(map(len, lines)) <= 80
    assert all(
        word in "".join(lines)
        for word in ("long", "refused", "failed", "empty", "early", "all prompts are asked")
    )
    done = run(target, tmp_path)
    assert done.report(10**6)[-2:] == [
        f"  all prompts are answered: {done.tokens} of the 1000000 tokens asked for",
        "  for more tokens give more prompts, or allow longer answers (--max-tokens)",
    ]
    assert len(Progress(5, 50).report(50)) == 1


def test_expected_tokens(target: Target, tmp_path: Path) -> None:
    """Guards the size that is said before writing: within a factor of two of what is written."""
    options = AnswerOptions(**{**OPTIONS.__dict__, "part": (0, 2)})
    run(target, tmp_path, options)
    written = sum(len(tokens) for tokens in by_prompt(tmp_path).values())
    assert written / 2 < expected_tokens(target, PROMPTS, options) < written * 2
    few = AnswerOptions(**{**OPTIONS.__dict__, "tokens": 14})
    assert expected_tokens(target, PROMPTS, few) < 14 * 4


def test_thinking_reaches_the_template(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards models that reason by default: answers and the features made of their text later have the same
    prompt."""
    chat = TinyTokenizer.chat

    def thinking_chat(self: TinyTokenizer, messages: Any, thinking: bool | None = None) -> list[int]:
        return [*chat(self, messages), *([77] if thinking is False else [])]

    monkeypatch.setattr(TinyTokenizer, "chat", thinking_chat)
    run(target, tmp_path / "a", AnswerOptions(**{**OPTIONS.__dict__, "thinking": False}))
    assert all(sample.tokens[sample.prompt_len - 1] == 77 for sample in samples(tmp_path / "a"))
    replay_answers(target, read_answers(tmp_path / "a" / "answers.jsonl")[0], tmp_path / "b", TAPS)
    assert all(sample.tokens[sample.prompt_len - 1] == 77 for sample in samples(tmp_path / "b"))
    with pytest.raises(DataError, match="thinking"):
        run(target, tmp_path / "a")
