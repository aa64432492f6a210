"""The README does what it says: its Python runs, its commands exist, its table is that of the records."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer

import jetspec
from jetspec.cli.app import app, arguments
from tests.target.tiny import save_tokenizer, tiny_model

PROJECT = Path(__file__).resolve().parents[1]
README = (PROJECT / "README.md").read_text("utf-8")
DOCUMENTS = [PROJECT / "README.md", *sorted((PROJECT / "docs").glob("*.md"))]


def blocks(language: str) -> list[str]:
    """The README's code blocks of a language."""
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def commands() -> list[list[str]]:
    """Every command of the README's shell blocks, split, comments left out."""
    lines = [line for block in blocks("sh") for line in block.splitlines()]
    return [words for line in lines if (words := shlex.split(line, comments=True))]


def test_python_runs_as_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the first thing that users copy against renamed names and options. A tiny model stands in for
    the default one, whose weights a test must not fetch; the lines themselves are not changed."""
    model = tiny_model("llama", vocab_size=340, max_position_embeddings=512)
    model.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    monkeypatch.setattr("jetspec.target.loading.cached_default_model", lambda **_: tmp_path)
    monkeypatch.setattr("jetspec.draft.loading.packaged_head", lambda name: None)
    assert len(blocks("python")) == 1
    values: dict[str, object] = {}
    exec(compile(blocks("python")[0], "README.md", "exec"), values)
    assert isinstance(values["result"], jetspec.Result)
    comparison = values["comparison"]
    assert isinstance(comparison, jetspec.Comparison) and comparison.identical
    assert capsys.readouterr().out.rstrip().endswith("×")


def test_commands_exist() -> None:
    """Guards the shell blocks: a verb or option that was renamed, a make target or script that is gone."""
    verbs = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    makefile = (PROJECT / "Makefile").read_text("utf-8")
    seen = set()
    for words in commands():
        seen.add(words[0])
        if words[0] == "jetspec":
            verb, *rest = arguments(words[1:])
            known = {option for parameter in verbs[verb].params for option in parameter.opts}
            used = {word for word in rest if word.startswith("-")}
            assert used <= known, f"{' '.join(words)}: {used - known} is no option of {verb}"
        elif words[0] == "make":
            assert re.search(rf"^{words[1]}:", makefile, flags=re.MULTILINE), words
        elif words[0] == "python" and words[1] != "-m":
            text = (PROJECT / words[1]).read_text("utf-8")
            assert all(f'"{word}"' in text for word in words[2:] if word.startswith("--")), words
    assert {"jetspec", "make", "python"} <= seen


def test_table_is_that_of_the_records() -> None:
    """Guards against numbers typed by hand, and against records that never reached the README."""
    script = PROJECT / "benchmarks" / "table.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_lead_somewhere(document: Path) -> None:
    """Guards links between the documents against moved files."""
    links = re.findall(r"\]\(([^)#]+)\)", document.read_text("utf-8"))
    local = [link for link in links if not link.startswith("http")]
    assert not [link for link in local if not (document.parent / link).exists()]
