"""Prompt files: every form is read, and what cannot be read is named by its line."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetspec.errors import DataError, OptionError
from jetspec.train import prompt_sources
from jetspec.train.prompts import load_prompts, read_prompts


def written(folder: Path, text: str, name: str = "prompts.jsonl") -> Path:
    """A file with a text."""
    path = folder / name
    path.write_bytes(text.encode())
    return path


def contents(path: Path, skip_broken: bool = False) -> list[str]:
    """The last turn of every prompt, in the order of the file."""
    return [p.messages[-1]["content"] for p in read_prompts(path, seed=None, skip_broken=skip_broken)]


def test_every_form_is_read(tmp_path: Path) -> None:
    """Guards the forms: turns, messages (answers are dropped), ids, duplicates (a conversation that begins
    another one too), CRLF and a byte-order mark."""
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


def test_duplicates_are_found_and_counted(tmp_path: Path) -> None:
    """Guards against paying twice for one answer: case, spacing and composed letters make no difference."""
    lines = ["What is a café?", "  what  IS a cafe\u0301?", "What is a cafe?", "what is a\tcafé?"]
    found = load_prompts([str(written(tmp_path, "\n".join(lines), "a.txt"))], seed=None)
    assert [p.messages[-1]["content"] for p in found.prompts] == [lines[0], lines[2]]
    assert (found.read, found.duplicates) == (4, 2)
    assert found.report() == ["2 prompts of 4 records", "  left out: 2 duplicates"]


def test_sources_are_joined(tmp_path: Path) -> None:
    """Guards several --prompts: one set without duplicates between them, and --limit holds for each."""
    first = written(tmp_path, "one\ntwo\nthree", "a.txt")
    second = written(tmp_path, json.dumps([{"instruction": "two"}, {"instruction": "four"}]), "b.json")
    found = load_prompts([str(first), str(second)], seed=None)
    assert [p.id for p in found.prompts] == ["a-1", "a-2", "a-3", "b-2"]
    limited = load_prompts([str(first), str(second)], seed=None, limit=1)
    assert [p.id for p in limited.prompts] == ["a-1", "b-1"]


def test_broken_lines_are_counted(tmp_path: Path) -> None:
    """Guards --skip-broken against silence."""
    found = load_prompts([str(written(tmp_path, '{"turns": ["a"]}\n{\n[]\n'))], skip_broken=True)
    assert [where.rpartition(" ")[2] for where in found.broken] == ["2", "3"]
    assert "2 broken lines" in found.report()[1]


def test_eval_prompts_are_left_out(tmp_path: Path) -> None:
    """Guards the benchmark: prompts of eval files are not trained on, in no turn, nor behind other words."""
    question = "How many rivers, exactly, flow through the old town?"
    evals = written(tmp_path, json.dumps({"id": "e1", "turns": ["Say hello", question]}) + "\n", "e.jsonl")
    lines = [["fine"], ["how many rivers exactly flow through the OLD town"], [f"Q: {question} Think."]]
    lines += [["fine too", question], ["say hello"], ["Say hello to my friend"]]
    source = str(written(tmp_path, "\n".join(json.dumps({"turns": turns}) for turns in lines)))
    found = load_prompts([source], seed=None, exclude=[evals])
    assert [p.messages[-1]["content"] for p in found.prompts] == ["fine", "Say hello to my friend"]
    assert len(found.excluded) == 4 and found.excluded[0] == f"{source} line 2 = e1"
    with pytest.raises(DataError, match=r"4 prompts are eval prompts .*line 2 = e1.*--strict"):
        load_prompts([source], exclude=[evals], strict=True)
    with pytest.raises(DataError, match=r"holds no prompts \(1 were left out\)"):
        load_prompts([str(written(tmp_path, question, "only.txt"))], exclude=[evals])


def test_data_sets_of_the_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the call: name, config and split reach the library, rows are streamed, and the default limit is
    said."""
    calls: list[tuple[object, ...]] = []

    def load(*given: object, **named: object) -> list[dict[str, object]]:
        calls.append((*given, *named.values()))
        return [
            {"instruction": "a", "input": ""},
            {"messages": [{"role": "user", "content": "b"}]},
            {"prompt": "c"},
        ]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    monkeypatch.setattr(prompt_sources, "HUB_LIMIT", 2)
    monkeypatch.setattr("jetspec.train.prompts.HUB_LIMIT", 2)
    found = load_prompts(["hf:org/name", "hf:org/name/main:test"], seed=None)
    assert calls == [("org/name", None, "train", True), ("org/name", "main", "test", True)]
    assert [p.id for p in found.prompts] == ["org-name-1", "org-name-2"] and found.duplicates == 2
    assert "only the first 2 records" in found.report()[-1]
    assert len(load_prompts(["hf:org/name"], limit=9).prompts) == 3


def test_what_the_hub_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against the traceback of another library, and names the command that installs it."""

    def load(*_: object, **__: object) -> None:
        raise ConnectionError("no\nnetwork")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load))
    with pytest.raises(DataError, match="hf:org/name cannot be read: no network"):
        load_prompts(["hf:org/name"])
    with pytest.raises(OptionError, match="names no data set"):
        load_prompts(["hf:name"])

    def stop(*_: object, **__: object) -> Iterator[dict[str, object]]:
        yield {"prompt": "a"}
        raise ConnectionError("cut")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=stop))
    with pytest.raises(DataError, match="hf:org/name cannot be read behind record 1: cut"):
        load_prompts(["hf:org/name"])
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        load_prompts(["hf:org/name"])
