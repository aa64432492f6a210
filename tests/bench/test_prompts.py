from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from jetspec.bench.prompts import BUILTIN, builtin, digest, find_data, read_file, read_questions
from jetspec.errors import DataError, OptionError


def test_questions_are_spread_over_the_file(tmp_path: Path) -> None:
    """Guards the stated rule of choosing prompts: sets are sorted by topic, so the first n would be a
    biased sample; and U+2028 inside a JSON string is no line end."""
    lines = [
        json.dumps({"id": f"q{n}", "turns": [f"a\u2028{n}", "later"]}, ensure_ascii=False) for n in range(10)
    ]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(lines) + "\n", "utf-8")
    assert [q.id for q in read_questions(tmp_path, ["gsm8k"], 4)] == ["q0", "q2", "q5", "q7"]
    found = read_file(tmp_path / "gsm8k.jsonl", 99)
    assert [q.messages[-1]["content"] for q in found] == [f"a\u2028{n}" for n in range(10)]
    assert {q.set for q in found} == {"gsm8k"}


def test_own_files(tmp_path: Path) -> None:
    """Guards prompts of one's own: conversations keep their turns up to the last user turn, and plain text is
    one prompt a line, even where a line looks like JSON."""
    talk = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"},
            {"role": "assistant", "content": "a"}]  # fmt: skip
    (tmp_path / "mine.jsonl").write_text(json.dumps({"messages": talk}), "utf-8")
    (question,) = read_file(tmp_path / "mine.jsonl", 3)
    assert question.messages == tuple(talk[:2]) and question.id == "mine-0"
    (tmp_path / "mine.txt").write_text('one\n\n{"two": 2}\n', "utf-8")
    assert [q.messages[0]["content"] for q in read_file(tmp_path / "mine.txt", 9)] == ["one", '{"two": 2}']


@pytest.mark.parametrize(
    ("content", "message"),
    [("", "holds no prompts"), ('{"turns": []}', "line 1"), ('{"messages": []}', "line 1"), ("{", "line 1")],
)
def test_broken_files(tmp_path: Path, content: str, message: str) -> None:
    """Guards the messages: which file, which line, instead of a traceback or a silent gap."""
    (tmp_path / "x.jsonl").write_text(content, "utf-8")
    with pytest.raises(DataError, match=message):
        read_file(tmp_path / "x.jsonl", 1)


def test_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards missing data: named with the options that help, a wrong --data is refused, and the package's own
    prompts need no file at all."""
    with pytest.raises(DataError, match="--data, or a file of your own with --prompt-file"):
        read_questions(tmp_path, ["gsm8k"], 1)
    with pytest.raises(OptionError, match="at least 1"):
        read_file(tmp_path / "x.jsonl", 0)
    with pytest.raises(DataError, match="is no folder"):
        find_data(str(tmp_path / "none"))
    work = tmp_path / "work"
    work.mkdir()
    (tmp_path / "shared" / "data" / "eval").mkdir(parents=True)
    monkeypatch.chdir(work)
    assert find_data(None) == tmp_path / "shared" / "data" / "eval"
    assert [q.messages[0]["content"] for q in builtin(99)] == list(BUILTIN)


def test_digest_tells_texts_apart() -> None:
    """Guards resuming: another text under the same id must not count as done."""
    assert len({digest([[1, 2]]), digest([[1], [2]]), digest([[12]]), digest([[2, 1]])}) == 4


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"turns": "Why?"}, "`turns` must be a list"),
        ({"turns": [None]}, "a turn must be a text, got NoneType"),
        ({"turns": [""]}, "the prompt is empty"),
        ({"messages": [{"role": "user", "content": None}]}, "`content` must be a text, got NoneType"),
        ({"messages": [{"role": "user", "content": " "}]}, "the prompt is empty"),
        ({"messages": [{"role": "system", "content": "s"}]}, "no turn of the user"),
        ({"turns": ["x"], "id": [1]}, "`id` must be a text or a number, got list"),
        (["x"], "expected an object"),
    ],
)
def test_wrong_types_are_no_prompts(tmp_path: Path, record: object, message: str) -> None:
    """Guards what is measured: a text as `turns` became its first letter, and null the word None. The line
    that is named is that of the file, blank ones counted."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"turns": ["one"]}\n\n\n' + json.dumps(record), "utf-8")
    with pytest.raises(DataError, match=r"x.jsonl line 4 is no prompt \(.*" + re.escape(message)):
        read_file(path, 2)


def test_layouts_of_training_prompts_are_read(tmp_path: Path) -> None:
    """Guards users who measure on what they train on: both read the same files."""
    path = tmp_path / "x.jsonl"
    path.write_text('{"prompt": "one"}\n{"conversations": [{"from": "human", "value": "two"}]}', "utf-8")
    assert [q.messages[-1]["content"] for q in read_file(path, 2)] == ["one", "two"]


def test_an_id_stands_for_one_prompt(tmp_path: Path) -> None:
    """Guards records: prompts of one id could not be told apart, and all but one vanished. A missing id is
    none, even as null."""
    path = tmp_path / "x.jsonl"
    path.write_text('\n{"id": "a", "turns": ["one"]}\n\n{"id": "a", "turns": ["two"]}', "utf-8")
    with pytest.raises(DataError, match=r"x.jsonl has the id 'a' in line 2 and in line 4; give each"):
        read_file(path, 2)
    path.write_text('{"id": null, "turns": ["one"]}\n{"id": null, "turns": ["two"]}', "utf-8")
    assert [q.id for q in read_file(path, 2)] == ["x-0", "x-1"]
