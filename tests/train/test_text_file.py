from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from jetspec.bench.prompts import read_file
from jetspec.errors import DataError
from jetspec.train.answers import Answer, read_answers
from jetspec.train.prompt_sources import read_items, source_name

TURNS = '{"turns": ["one"]}\n{"turns": ["two"]}\n'


def packed(path: Path, text: str) -> Path:
    """A packed file."""
    path.write_bytes(gzip.compress(text.encode("utf-8-sig")))
    return path


def test_packed_prompts_are_those_of_the_plain_file(tmp_path: Path) -> None:
    """Guards the answers that come with the project, which are packed: they were refused as "not UTF-8". What
    a file holds is told by the name before `.gz`."""
    plain = tmp_path / "set.jsonl"
    plain.write_text(TURNS, "utf-8")
    found = packed(tmp_path / "set.jsonl.gz", TURNS)
    assert list(read_items(str(found))) == list(read_items(str(plain)))
    assert source_name(str(found)) == source_name(str(plain)) == "set"
    lines = packed(tmp_path / "set.txt.gz", "one\ntwo\n")
    assert [item.record for item in read_items(str(lines))] == [{"turns": ["one"]}, {"turns": ["two"]}]


def test_packed_questions_and_answers(tmp_path: Path) -> None:
    """Guards the other readers of such files."""
    questions = read_file(packed(tmp_path / "own.jsonl.gz", TURNS), 2)
    assert [question.messages[0]["content"] for question in questions] == ["one", "two"]
    assert {question.set for question in questions} == {"own"}
    answer = Answer(0, "x", ({"role": "user", "content": "a"},), "b", "stop", 0.0, 0)
    assert read_answers(packed(tmp_path / "answers.jsonl.gz", answer.to_json() + "\n"))[0] == [answer]


@pytest.mark.parametrize("damage", ["cut", "plain", "empty", "flipped"])
def test_damaged_packed_files_are_one_line(tmp_path: Path, damage: str) -> None:
    """Guards half a download: gzip has four kinds of errors, of three families."""
    data = gzip.compress(TURNS.encode() * 50)
    flipped = data[:20] + bytes([data[20] ^ 255]) + data[21:]
    content = {"cut": data[:-12], "plain": TURNS.encode(), "empty": data[:4], "flipped": flipped}[damage]
    path = tmp_path / "set.jsonl.gz"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"set\.jsonl\.gz (cannot be read|is not UTF-8)") as caught:
        list(read_items(str(path)))
    assert "\n" not in str(caught.value)
