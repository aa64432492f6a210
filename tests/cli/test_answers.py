"""`jetspec prompts` and `jetspec answers`: what a user sees, and that every fault is one line."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from jetspec.cli import progress
from jetspec.cli.answers import parse_mix, parse_taps
from jetspec.errors import OptionError
from jetspec.train.answers import read_answers
from jetspec.train.features import read_shard, shard_paths
from tests.helpers import Finished, changed_model, jetspec, tiny_folder

__all__ = ["tiny_folder"]  # a fixture

LINES = [
    {"turns": ["Hello there"]},
    {"turns": ["Count to ten"]},
    {"turns": ["hello  THERE"]},
    {"turns": ["Why?"]},
]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """A small prompt file with a duplicate."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in LINES))
    return path


def answers(tiny: Path, *given: object) -> Finished:
    """Run `jetspec answers` with short answers."""
    return jetspec("answers", "--model", tiny, "--max-tokens", 6, *given)


def test_answers_then_features_from_text(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards the whole way: counts and size are said, text lies beside the shards, and --from rebuilds the
    same features from the text."""
    done = answers(tiny_folder, "--prompts", prompts, "--out", tmp_path / "a")
    assert (done.code, done.out) == (0, "")
    assert "3 prompts of 4 records\n  left out: 1 duplicates\nfeatures: about" in done.err
    assert (
        "3 turns answered, 18 tokens" in done.err
        and "all prompts are answered: 18 of the 650000 tokens" in done.err
    )
    again = jetspec(
        "answers", "--model", tiny_folder, "--from", tmp_path / "a" / "answers.jsonl", "-o", tmp_path / "b"
    )
    assert again.code == 0 and "3 answers\n" in again.err
    one, other = (
        {s.prompt: s for path in shard_paths(tmp_path / name) for s in read_shard(path)} for name in "ab"
    )
    by_text = [answer.number for answer in read_answers(tmp_path / "a" / "answers.jsonl")[0]]
    assert len(one) == 3
    for place, number in enumerate(by_text):
        assert one[number].tokens.tolist() == other[place].tokens.tolist()
        assert torch.allclose(one[number].hidden.float(), other[place].hidden.float(), rtol=2e-3, atol=2e-2)


def test_answers_that_exist_are_chosen_too(tiny_folder: Path, tmp_path: Path) -> None:
    """Guards --from against options that it silently dropped: processes that shared a file with --part all
    did all of it, and answers to evaluation prompts were trained on."""
    texts, held, out = tmp_path / "t.jsonl", tmp_path / "eval.txt", tmp_path / "out"
    asked = [[{"role": "user", "content": f"Tell me about number {n} now"}] for n in range(5)]
    texts.write_text("".join(json.dumps({"messages": said, "answer": "ok"}) + "\n" for said in asked))
    held.write_text("tell me about number 2 now\n")
    given = ["answers", "--model", tiny_folder, "--from", texts, "--exclude", held, "-o", out]
    assert "1 answers are to eval prompts" in jetspec(*given, "--strict").err.splitlines()[-1]
    done = jetspec(*given, "--limit", 4, "--part", "0/2")
    assert done.code == 0 and "2 answers, 1 answers to eval prompts left out\n" in done.err
    turns = [answer.user_turns[0] for answer in read_answers(out / "answers.jsonl")[0]]
    assert turns == ["Tell me about number 0 now", "Tell me about number 3 now"]
    assert "holds no answers for this" in jetspec(*given, "--part", "8/9").err.splitlines()[-1]
    for option in ["--text-only"], ["--tokens", 5]:
        assert f"so {option[0]} cannot go with it" in jetspec(*given, *option).error


def test_text_only_and_raw(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards the small output: no shards, no question about size; and prompts as they are."""
    done = answers(tiny_folder, "--prompts", prompts, "-o", tmp_path / "a", "--text-only", "--raw")
    assert done.code == 0 and "features" not in done.err
    found, _ = read_answers(tmp_path / "a" / "answers.jsonl")
    assert len(found) == 3 and all(answer.raw for answer in found) and not shard_paths(tmp_path / "a")


def test_an_endpoint_needs_no_model(prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a machine without the weights: nothing is loaded, and the way to the features is named."""
    client = httpx.AsyncClient

    def server(request: httpx.Request) -> httpx.Response:
        choice = {"message": {"content": "ok"}, "finish_reason": "stop"}
        return httpx.Response(200, json={"choices": [choice], "usage": {"completion_tokens": 2}})

    def mocked(**given: Any) -> httpx.AsyncClient:
        return client(**{**given, "transport": httpx.MockTransport(server)})

    monkeypatch.setattr(httpx, "AsyncClient", mocked)
    out = tmp_path / "a"
    given = ["--prompts", prompts, "-o", out, "--endpoint", "http://host:1", "--model", "nowhere"]
    done = jetspec("answers", *given, "--endpoint-model", "m")
    assert done.code == 0 and f"jetspec answers --from {out}/answers.jsonl" in done.err
    assert "3 turns answered, 6 tokens" in done.err
    assert "--endpoint-model" in jetspec("answers", *given).error


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "no prompts: give --prompts"),
        (["--prompts", "PROMPTS", "--from", "x"], "makes none, so --prompts, --max-tokens cannot go with it"),
        (["--prompts", "PROMPTS", "--api-key-env", "X"], "need --endpoint"),
        (["--prompts", "PROMPTS", "--endpoint", "host", "--endpoint-model", "m"], "give a URL"),
        (["--from", "x", "--temperatures", "0:0.6,0.7:0.15,1:0.25"], "--max-tokens, --temperatures cannot"),
        (["--prompts", "none.jsonl"], "none.jsonl cannot be read"),
        (["--prompts", "hf:x"], "names no data set"),
        (["--prompts", "PROMPTS", "--part", "2/2"], "--part is '2/2'"),
        (["--prompts", "PROMPTS", "--limit", "0"], "--limit must be at least 1"),
        (["--prompts", "PROMPTS", "--temperatures", "warm"], "--temperatures is 'warm'"),
        (["--prompts", "PROMPTS", "--temperatures", "0:0.5,1:0.6"], "must sum to 1"),
        (["--prompts", "PROMPTS", "--tokens", "0"], "tokens must be"),
        (["--prompts", "PROMPTS", "--exclude", "PROMPTS"], "holds no prompts (3 were left out)"),
        (["--prompts", "PROMPTS", "--exclude", "PROMPTS", "--strict"], "3 prompts are eval prompts"),
        (["--prompts", "PROMPTS", "--exclude", "none.jsonl"], "none.jsonl cannot be read"),
    ],
)
def test_faults_are_one_line(
    tiny_folder: Path, prompts: Path, tmp_path: Path, given: list[str], message: str
) -> None:
    """Guards every fault of the input: code 2, one line, and no folder is made."""
    replaced = [str(prompts) if word == "PROMPTS" else word for word in given]
    assert message in answers(tiny_folder, "-o", tmp_path / "out", *replaced).error
    assert not (tmp_path / "out").exists()


def test_missing_answers_are_one_line(tiny_folder: Path, tmp_path: Path) -> None:
    """Guards --from against a traceback, and against a folder that nothing will be in."""
    given = ["--from", tmp_path / "none.jsonl", "-o", tmp_path / "out"]
    assert "none.jsonl cannot be read" in jetspec("answers", "--model", tiny_folder, *given).error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("line", ["{", "[1]", '{"turns": [""]}'])
def test_a_broken_line(tiny_folder: Path, prompts: Path, tmp_path: Path, line: str) -> None:
    """Guards the bar: the line is named; with --skip-broken the rest is answered and the loss is said."""
    prompts.write_text(prompts.read_text() + line + "\n")
    given = ["--prompts", prompts, "-o", tmp_path / "out"]
    assert f"{prompts} line 5: " in answers(tiny_folder, *given).error
    done = answers(tiny_folder, *given, "--skip-broken")
    assert done.code == 0 and f"1 broken lines, first {prompts} line 5" in done.err


def test_empty_files_and_long_prompts(tiny_folder: Path, tmp_path: Path) -> None:
    """Guards the bar: an empty file is an error, a prompt beyond the context is skipped and counted."""
    path = tmp_path / "p.txt"
    path.write_text("\n \n")
    given = ["--prompts", path, "-o", tmp_path / "out"]
    assert "holds no prompts" in answers(tiny_folder, *given).error
    path.write_text("short\n" + "long " * 400 + "\n")
    done = answers(tiny_folder, *given, "--max-prompt", 10**6)
    assert done.code == 0 and "1 turns answered" in done.err and "skipped: 1 too long" in done.err


def test_a_target_without_template(tiny_folder: Path, prompts: Path, tmp_path: Path) -> None:
    """Guards base models: --raw is named, for text and features alike."""
    base = changed_model(tiny_folder, tmp_path / "base")
    (base / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((base / "tokenizer_config.json").read_text())
    settings.pop("chat_template", None)
    (base / "tokenizer_config.json").write_text(json.dumps(settings))
    given = ["--prompts", prompts, "-o", tmp_path / "out"]
    assert "has no chat template" in answers(base, *given).err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert answers(base, *given, "--raw").code == 0
    assert "no chat template" in jetspec("prompts", "--model", base, "-o", tmp_path / "p.jsonl").error


def test_features_that_do_not_fit(
    tiny_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the disk: too large is refused before any work, and --yes tries all the same."""
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=100))
    given = ["--prompts", prompts, "-o", tmp_path / "out"]
    done = answers(tiny_folder, *given)
    assert done.code == 2 and "do not fit into 0.0 MB" in done.err.splitlines()[-1]
    assert not (tmp_path / "out").exists()
    assert answers(tiny_folder, *given, "--yes").code == 0


def test_size_is_confirmed_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the question: it comes above the limit only, names the size, and no means no."""
    import typer

    from jetspec.target.config import ModelConfig
    from tests.draft.tiny import tiny_target

    config: ModelConfig = tiny_target().config
    asked: list[str] = []

    class Terminal:
        def isatty(self) -> bool:
            return True

    def confirm(text: str, **_: object) -> None:
        asked.append(text)
        raise typer.Abort

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(typer, "confirm", confirm)
    progress.confirm_size(config, (0, 1), 1000, tmp_path, yes=False)
    assert not asked
    monkeypatch.setattr(progress, "ASK_ABOVE", 300_000)
    with pytest.raises(typer.Abort):
        progress.confirm_size(config, (0, 1), 1000, tmp_path, yes=False)
    assert asked == [f"write about 0.4 MB to {tmp_path}?"]
    progress.confirm_size(config, (0, 1), 1000, tmp_path, yes=True)
    assert len(asked) == 1


@pytest.mark.parametrize(
    ("place", "given"),
    [
        ("responses.answer_prompts", ["answers", "--prompts"]),
        ("replay.replay_answers", ["answers", "--from"]),
        ("self_instruct.write_prompts", ["prompts", "--exclude"]),
    ],
)
def test_an_interruption_says_how_to_go_on(
    place: str, given: list[str], tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards Ctrl-C while answering: nothing said that the answers so far are kept, as training does."""

    def interrupted(*args: Any, **more: Any) -> None:
        raise KeyboardInterrupt

    texts = tmp_path / "texts.jsonl"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello there"}]
    texts.write_text(json.dumps({"messages": messages}) + "\n")
    monkeypatch.setattr(f"jetspec.train.{place}", interrupted)
    done = jetspec(*given, texts, "--model", tiny_folder, "--out", tmp_path / "out")
    assert done.code == 130
    assert done.err.splitlines()[-1] == (
        "jetspec: interrupted; what is finished is kept, and the same command goes on from there"
    )


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "no answer was finished, so none is kept; the same command begins again"),
        (1, "1 finished answer is kept, and the same command goes on from there"),
        (3, "3 finished answers are kept, and the same command goes on from there"),
    ],
)
def test_an_interruption_says_how_many_are_kept(
    count: int, text: str, tiny_folder: Path, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the closing line: it said that what is finished is kept where nothing was. The next run finds as
    many answers as it says."""
    show = progress.AnswerBar.show

    def interrupted(bar: progress.AnswerBar, where: progress.Count) -> None:
        show(bar, where)
        if where.answered == count and (where.begun or count):
            raise KeyboardInterrupt

    monkeypatch.setattr(progress.AnswerBar, "show", interrupted)
    done = answers(tiny_folder, "--prompts", prompts, "-o", tmp_path / "a")
    assert (done.code, done.err.splitlines()[-1]) == (130, f"jetspec: interrupted; {text}")
    kept = sum(len(list(read_shard(path))) for path in shard_paths(tmp_path / "a"))
    assert kept == count


def test_mix_and_taps() -> None:
    """Guards the two small languages of options."""
    assert parse_mix("0.7") == ((0.7, 1.0),)
    assert parse_mix("0:0.6,1:0.4") == ((0.0, 0.6), (1.0, 0.4))
    assert parse_taps("0,2", 3) == (0, 2)
    for wrong in ("3", "-1", "2,1", "1,1", "a", ""):
        with pytest.raises(OptionError, match="--taps"):
            parse_taps(wrong, 3)
    for wrong in ("", "1:2:3", "0:0.5,1"):
        with pytest.raises(OptionError, match="--temperatures"):
            parse_mix(wrong)
