"""Prompts that the target writes itself: the same for the same seed, whole, usable, and none twice."""

from __future__ import annotations

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from jetspec.errors import DataError, OptionError, PromptError, StorageError
from jetspec.sampling import Sampling
from jetspec.target.loading import load_target
from jetspec.target.target import Target
from jetspec.target.tokenizer import Tokenizer
from jetspec.train import self_instruct
from jetspec.train.exclusion import Exclusion, words_of
from jetspec.train.folder_lock import locked_file
from jetspec.train.pace import Pace
from jetspec.train.prompts import read_prompts
from jetspec.train.self_instruct import OPENINGS, SelfCounts, SelfOptions, write_prompts
from jetspec.train.turns import answer_end, user_frame
from tests.helpers import tiny_folder

__all__ = ["tiny_folder"]  # a fixture

OPTIONS = SelfOptions(count=12, max_tokens=60, batch=5)


@pytest.fixture(scope="module")
def target(tiny_folder: Path) -> Target:
    """A random target with a real tokenizer."""
    return load_target(str(tiny_folder))


@pytest.fixture(autouse=True)
def _letters(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the random target write letters and blanks, and end a turn now and then; else all is garbled."""
    tokenizer = target.tokenizer
    bias = dict.fromkeys(range(tokenizer.vocab_size), -1e9)
    for letter in string.ascii_lowercase:
        bias[tokenizer.encode(letter, special=False)[0]] = 0.0
    bias[tokenizer.encode(" ", special=False)[0]] = 4.0
    bias |= dict.fromkeys(tokenizer.eos_ids, 4.0)

    def biased(**given: Any) -> Sampling:
        return Sampling(**{**given, "temperature": 4 * given["temperature"]}, logit_bias=bias)

    monkeypatch.setattr(self_instruct, "Sampling", biased)


def turns(path: Path) -> list[str]:
    """What the users say."""
    return [json.loads(line)["turns"][0] for line in path.read_text().splitlines()]


def test_prompts_are_reproducible(target: Target, tmp_path: Path) -> None:
    """Guards the seed: the file depends on it, and not on how many turns are written at once or on what an
    earlier run had finished."""
    counts = write_prompts(target, tmp_path / "a.jsonl", OPTIONS)
    whole = (tmp_path / "a.jsonl").read_bytes()
    assert counts.kept == 12 == len(turns(tmp_path / "a.jsonl"))
    write_prompts(target, tmp_path / "b.jsonl", replace(OPTIONS, batch=1))
    assert (tmp_path / "b.jsonl").read_bytes() == whole
    write_prompts(target, tmp_path / "c.jsonl", replace(OPTIONS, count=5))
    with (tmp_path / "c.jsonl").open("a") as file:
        file.write('{"id": "self-')  # killed here
    write_prompts(target, tmp_path / "c.jsonl", OPTIONS)
    assert (tmp_path / "c.jsonl").read_bytes() == whole
    write_prompts(target, tmp_path / "d.jsonl", replace(OPTIONS, seed=1))
    assert not set(turns(tmp_path / "d.jsonl")) & set(turns(tmp_path / "a.jsonl"))


def test_turns_under_way_are_seen(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the progress bar, in which nothing moved until the first turn was finished."""
    seen: list[tuple[int, int, int]] = []
    monkeypatch.setattr(self_instruct, "Pace", lambda: Pace(0.0))
    write_prompts(
        target,
        tmp_path / "a.jsonl",
        OPTIONS,
        on_progress=lambda counts: seen.append((counts.kept, counts.dropped, counts.tokens)),
    )
    tokens = [count for _, _, count in seen]
    assert tokens[0] == 0 and tokens == sorted(tokens)
    assert len({count for kept, _, count in seen if not kept}) > 3


def test_prompts_are_usable(target: Target, tmp_path: Path) -> None:
    """Guards what is kept: turns that ended, of three words or more, without marks of the template, each
    once; some begin with given words and some do not."""
    path = tmp_path / "a.jsonl"
    counts = write_prompts(target, path, replace(OPTIONS, count=40, max_tokens=20))
    assert counts.unfinished > 0 and counts.short > 0
    found = turns(path)
    assert len({words_of(text) for text in found}) == 40
    assert all(len(words_of(text)) >= 3 and "<|" not in text for text in found)
    given = sum(text.startswith(OPENINGS) for text in found)
    assert 8 <= given < 40
    assert [p.messages[0]["content"] for p in read_prompts(path, seed=None)] == found


def test_a_turn_is_written_where_a_users_turn_stands(target: Target, tmp_path: Path) -> None:
    """Guards the frame: a kept turn, put into the template, is preceded by what it was written behind."""
    before, after = user_frame(target.tokenizer)
    for text in ("hello", "a b"):
        rendered = target.tokenizer.render([{"role": "user", "content": text}])
        assert rendered == before + text + after
    assert answer_end(target.tokenizer) in target.tokenizer.eos_ids


def test_eval_prompts_and_repetitions_are_dropped(target: Target, tmp_path: Path) -> None:
    """Guards the benchmark against a target that knows it by heart, and against one prompt for ever."""
    write_prompts(target, tmp_path / "a.jsonl", OPTIONS)
    known = turns(tmp_path / "a.jsonl")[3]
    counts = write_prompts(target, tmp_path / "b.jsonl", OPTIONS, Exclusion([("e", known)]))
    assert counts.excluded == 1 and known not in turns(tmp_path / "b.jsonl")


def test_a_target_that_repeats_itself_is_given_up(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against an endless run, and says why; what was written stays."""
    monkeypatch.setattr(self_instruct, "words_of", lambda text: ("always", "the", "same"))
    with pytest.raises(DataError, match=r"only 1 of 3 prompts after 64 tries \(dropped: .* duplicates\)"):
        write_prompts(target, tmp_path / "a.jsonl", replace(OPTIONS, count=3))
    assert len(turns(tmp_path / "a.jsonl")) == 1


def test_topics_stand_in_the_system_message(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards --seed-topics: other frames, other prompts; a template that drops them is refused."""
    before, _ = user_frame(target.tokenizer, "The topic is tea.")
    assert "The topic is tea." in before
    write_prompts(target, tmp_path / "a.jsonl", OPTIONS)
    write_prompts(target, tmp_path / "b.jsonl", replace(OPTIONS, topics=("tea", "coffee")))
    assert turns(tmp_path / "a.jsonl") != turns(tmp_path / "b.jsonl")
    monkeypatch.setattr(self_instruct, "user_frame", lambda tokenizer, system=None: user_frame(tokenizer))
    with pytest.raises(OptionError, match="drops system messages"):
        write_prompts(target, tmp_path / "c.jsonl", replace(OPTIONS, topics=("tea",)))


def test_other_files_are_left_alone(target: Target, tmp_path: Path) -> None:
    """Guards the user's own file, and prompts of other options, against being mixed."""
    path = tmp_path / "a.jsonl"
    write_prompts(target, path, replace(OPTIONS, count=2))
    for other in (replace(OPTIONS, seed=5), replace(OPTIONS, temperature=0.9)):
        with pytest.raises(DataError, match="other prompts"):
            write_prompts(target, path, other)
    for content in ('{"turns": ["mine"]}\n', "text\n", '["a"]\n'):
        path.write_text(content)
        with pytest.raises(DataError, match="other prompts"):
            write_prompts(target, path, OPTIONS)
        assert path.read_text() == content


@pytest.mark.parametrize("content", ['{"turns": ["mine"]}', "text", "text\nmore"])
def test_the_last_line_of_other_files_is_kept(target: Target, tmp_path: Path, content: str) -> None:
    """Guards the user's own file without a line feed at its end: its last line was taken for one cut off."""
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(DataError, match="other prompts"):
        write_prompts(target, tmp_path / "a.jsonl", OPTIONS)
    assert (tmp_path / "a.jsonl").read_text() == content


def test_a_line_cut_inside_a_letter(target: Target, tmp_path: Path) -> None:
    """Guards resuming behind a kill between two bytes of one letter, which was said to be other prompts."""
    path = tmp_path / "a.jsonl"
    write_prompts(target, path, replace(OPTIONS, count=3))
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]) + lines[2][:-6] + "é".encode()[:1])
    assert write_prompts(target, path, replace(OPTIONS, count=3)).kept == 3
    assert path.read_bytes() == whole


def test_only_one_process_writes(target: Target, tmp_path: Path) -> None:
    """Guards against two processes on one file, which wrote every prompt twice."""
    path = tmp_path / "new" / "a.jsonl"
    with locked_file(path), pytest.raises(StorageError, match=r"another process is writing to .*a\.jsonl"):
        write_prompts(target, path, OPTIONS)
    assert path.read_bytes() == b""
    assert write_prompts(target, path, replace(OPTIONS, count=2)).kept == 2


def test_prompts_are_counted_once(target: Target, tmp_path: Path) -> None:
    """Guards the count of a file that two processes filled: half of it are repetitions."""
    path = tmp_path / "a.jsonl"
    write_prompts(target, path, replace(OPTIONS, count=3))
    path.write_bytes(path.read_bytes() * 2)
    assert write_prompts(target, path, replace(OPTIONS, count=5)).kept == 5
    assert len(set(turns(path))) == 5


def test_targets_without_template(target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards base models: they have no user's turn to write, and --raw does not give them one."""
    monkeypatch.setattr(Tokenizer, "has_template", False)
    with pytest.raises(PromptError, match=r"no chat template.*: --prompts FILE --raw"):
        write_prompts(target, tmp_path / "a.jsonl", OPTIONS)


@pytest.mark.parametrize(
    "wrong", [{"count": 0}, {"max_tokens": 0}, {"batch": 0}, {"seed": -1}, {"temperature": 0.0}], ids=str
)
def test_bad_options(wrong: dict[str, Any]) -> None:
    """Guards against a run that cannot end: at temperature 0 every prompt is the same."""
    with pytest.raises(OptionError, match=next(iter(wrong))):
        SelfOptions(**wrong)


def test_the_report_fits_a_terminal() -> None:
    """Guards the summary: every reason with its count."""
    lines = SelfCounts(10**6, 99999, 9999, 9999, 9999, 9999).report()
    assert max(map(len, lines)) <= 80 and all(word in " ".join(lines) for word in ("ended", "eval prompts"))
    assert len(SelfCounts(5).report()) == 1
