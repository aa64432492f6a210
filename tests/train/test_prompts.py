"""Prompt files: every form is read, and what cannot be read is named by its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from jetspec.errors import DataError
from jetspec.train.prompts import read_prompts


def written(folder: Path, text: str, name: str = "prompts.jsonl") -> Path:
    """A file with a text."""
    path = folder / name
    path.write_bytes(text.encode())
    return path


def contents(path: Path, skip_broken: bool = False) -> list[str]:
    """The last turn of every prompt, in the order of the file."""
    return [p.messages[-1]["content"] for p in read_prompts(path, seed=None, skip_broken=skip_broken)]


def test_every_form_is_read(tmp_path: Path) -> None:
    """Guards the forms: turns (the first), messages (an answer at the end is dropped), ids, duplicates, CRLF
    and a byte-order mark."""
    system = {"role": "system", "content": "be brief"}
    lines = [
        {"turns": ["one", "later"]},
        {"id": "x", "messages": [system, {"role": "user", "content": "two"}]},
        {"messages": [{"role": "user", "content": "three"}, {"role": "assistant", "content": "an answer"}]},
        {"turns": ["one"]},
    ]
    path = written(tmp_path, "\ufeff" + "\r\n\r\n".join(map(json.dumps, lines)) + "\r\n")
    prompts = read_prompts(path, seed=None)
    assert contents(path) == ["one", "two", "three"]
    assert prompts[0].id == "prompts-1" and prompts[1].id == "x"
    assert prompts[1].messages[0] == system
    assert contents(written(tmp_path, " one \n\ntwo\n", "prompts.txt")) == ["one", "two"]


def test_line_separators_inside_json_do_not_split(tmp_path: Path) -> None:
    """Guards against splitlines, which cuts a JSON string at U+2028, U+0085 or a form feed."""
    text = "before\u2028after\u0085end"
    path = written(tmp_path, json.dumps({"turns": [text]}, ensure_ascii=False) + "\n")
    assert contents(path) == [text]


def test_the_order_is_shuffled_by_the_seed(tmp_path: Path) -> None:
    """Guards resume: the number of a prompt must mean the same in every run."""
    path = written(tmp_path, "\n".join(f"prompt {n}" for n in range(50)), "a.txt")
    orders = [[p.id for p in read_prompts(path, seed=seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"turns": ["a"', "line 2.*--skip-broken"),
        ("[1]", "line 2.*object"),
        ('{"text": "a"}', "line 2.*turns"),
        ('{"turns": "abc"}', "line 2.*must be a list"),
        ('{"turns": []}', "line 2.*empty"),
        ('{"turns": [" "]}', "line 2.*empty"),
        ('{"turns": [7]}', "line 2.*text"),
        ('{"messages": [{"role": "user"}]}', "line 2.*content"),
        ('{"messages": [{"role": "user", "content": null}]}', "line 2.*content"),
        ('{"messages": ["hello"]}', "line 2.*content"),
        ('{"turns": ["half \\ud800"]}', "line 2.*surrogate"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "line 2.*empty"),
    ],
)
def test_broken_lines(tmp_path: Path, line: str, message: str) -> None:
    """Guards against a prompt of one letter, of the text "None", or a traceback; --skip-broken goes on."""
    path = written(tmp_path, f'{{"turns": ["good"]}}\n{line}\n{{"turns": ["also"]}}\n')
    with pytest.raises(DataError, match=message) as caught:
        read_prompts(path)
    assert "\n" not in str(caught.value)
    assert contents(path, skip_broken=True) == ["good", "also"]


def test_files_without_prompts(tmp_path: Path) -> None:
    """Guards the message for a missing, empty or binary file."""
    with pytest.raises(DataError, match="cannot be read"):
        read_prompts(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(written(tmp_path, "\n\n"))
    with pytest.raises(DataError, match="holds no prompts"):
        read_prompts(written(tmp_path, "nonsense\n"), skip_broken=True)
    path = tmp_path / "latin.txt"
    path.write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(DataError, match="UTF-8"):
        read_prompts(path)
