from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import jetspec as package
from jetspec.cli import checks, options
from jetspec.cli.app import app, command, verbs
from jetspec.cli.demo import PROMPTS
from jetspec.decode.compare import tie_below
from jetspec.draft.stubs import Decoy
from jetspec.sequence import Limits
from jetspec.target.cache import KVCache
from jetspec.target.default_model import DEFAULT_MODEL
from jetspec.target.loading import load_target
from jetspec.target.target import Target
from tests.decode.tiny import tiny_target
from tests.helpers import jetspec, tiny_folder

__all__ = ["tiny_folder"]  # a fixture


def test_help_lists_the_verbs() -> None:
    """Guards discovery: `jetspec --help` names every verb and one line about it, uncut."""
    done = jetspec("--help")
    assert (done.code, done.err) == (0, "")
    for verb in verbs():
        line = next(line for line in done.out.splitlines() if line.split()[:1] == [verb])
        assert len(line.split()) > 3 and line.endswith(").") | line.endswith(".") and "..." not in line


@pytest.mark.parametrize("verb", verbs())
def test_every_help_page_names_every_option(verb: str) -> None:
    """Guards the help pages: each option with a sentence of its own."""
    found = typer.main.get_command(app).commands[verb]  # type: ignore[attr-defined]
    page = jetspec(verb, "--help")
    assert (page.code, page.err) == (0, "")
    for parameter in found.params:
        for name in parameter.opts if parameter.param_type_name == "option" else ():
            assert name in page.out
        assert getattr(parameter, "help", None), parameter.name


def _pages(found: Any, *names: str) -> Iterator[tuple[str, ...]]:
    yield names
    for name, below in getattr(found, "commands", {}).items():
        yield from _pages(below, *names, name)


def test_help_speaks_no_python() -> None:
    """Guards readers who do not know Python against `<list[Path]>` and doubled brackets on the help pages."""
    for names in _pages(command()):
        page = jetspec(*names, "--help").out
        assert not re.search(r"<\w+(\[\w+\])?>|\[\[|\.\.\.\]\.\.\.", page), (names, page)


def test_help_and_version_load_no_torch() -> None:
    """Guards start-up: help must come at once, torch takes more than a second."""
    code = (
        "import sys; from jetspec.cli.main import main; main(['generate', '--help']);"
        " main(['--version']); assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


def test_version() -> None:
    """Guards `jetspec --version`."""
    assert jetspec("--version").out == f"jetspec {package.__version__}\n"


def test_the_default_model_has_one_name() -> None:
    """Guards the copy of the name that keeps the help page light."""
    assert options.DEFAULT_MODEL == DEFAULT_MODEL


def test_tree_draws_one_round(tiny_folder: Path) -> None:
    """Guards the drawing: accepted and rejected nodes, the bonus, percentages, a legend."""
    done = jetspec("tree", "Hello", "--model", tiny_folder, "--head", "decoy", "--budget", 10, "--round", 2)
    assert done.code == 0
    lines = done.out.splitlines()
    assert any(line.startswith("round 2: 10 nodes drafted, ") for line in lines)
    assert any(line.endswith("% ✓") for line in lines) and any(line.endswith(" bonus") for line in lines)
    assert any(line.endswith("%") for line in lines)
    assert any(line.startswith("accepted ✓ · bonus") and "without a mark: rejected" in line for line in lines)


def test_tree_as_json_fits_the_text(tiny_folder: Path) -> None:
    """Guards the values: the drawn round emits exactly what plain decoding emits at that place."""
    given = ["Hello", "--model", tiny_folder, "--head", "decoy", "--json"]
    plain = [token["id"] for token in jetspec(*given, "--budget", 0, "-n", 60).json["tokens"]]
    emitted: list[int] = []
    for number in (1, 2, 3):
        values = jetspec("tree", *given, "--budget", 10, "--round", number).json
        nodes = values["nodes"]
        assert values["round"] == number and len(nodes) == 11
        accepted = [nodes[index]["token"] for index in values["path"][1:]]
        assert all(nodes[index]["state"] == "accepted" for index in values["path"][1:])
        assert all(0 < node["probability"] <= nodes[max(0, node["parent"])]["probability"] for node in nodes)
        emitted += [*accepted, values["bonus"]["token"]]
    assert emitted == plain[: len(emitted)]


def test_tree_shows_the_last_round_of_a_short_text(tiny_folder: Path) -> None:
    """Guards --round beyond the end: it says so, and plain decoding draws a bare root."""
    done = jetspec("tree", "Hello", "--model", tiny_folder, "--head", "echo", "--round", 10**6)
    assert done.code == 0 and "the text ended after round" in done.err
    bare = jetspec("tree", "Hello", "--model", tiny_folder, "--head", "off", "--round", 1)
    assert "0 nodes drafted, 0 accepted, 1 emitted" in bare.out


def test_doctor_passes_a_sound_model(tiny_folder: Path) -> None:
    """Guards the whole check: every stub and builder, gaps were met, logits agree with transformers."""
    values = jetspec("doctor", "--model", tiny_folder, "-n", 8, "--json").json
    assert values["passed"] and values["lossless"] and values["ties"] == 0
    runs = values["runs"]
    assert {run["drafter"] for run in runs} == {"random", "echo", "decoy"}
    assert {run["grow"] for run in runs} == {"best-first", "beam", "chain", "accum", "dynamic"}
    assert {run["sampling"] for run in runs} == {"greedy", "sampled"}
    assert sum(run["gaps"] for run in runs if run["drafter"] == "decoy") > 0
    assert values["comparisons"] == 3 * len(runs)
    assert values["reference"]["agree"] and values["reference"]["same_best"] == values["reference"]["rows"]
    assert values["model"]["layers"] == 3 and values["head"] is None


def test_doctors_acceptance_by_depth_is_of_all_rounds(tiny_folder: Path) -> None:
    """Guards the word, which has one sense (docs/definitions.md): the shares were of the rounds that drafted
    so deep, so that they did not add up to tau."""
    target = load_target(str(tiny_folder))
    limits = Limits(max_tokens=11, ignore_eos=True)
    facts = checks.head_facts(target, Decoy(target, depth=4, width=2), [[5, 17, 9], [8, 3]], limits)
    assert facts["tau"] > 1.2
    assert facts["tau"] == pytest.approx(1.0 + sum(facts["accepted_by_depth"]))


@pytest.mark.parametrize(
    ("dtype", "head_dim"), [(torch.float32, 8), (torch.float32, 16), (torch.float64, 16)]
)
def test_doctor_and_ties_agree(dtype: torch.dtype, head_dim: int) -> None:
    """Guards doctor's word: with heads of odd size it said that attention is compiled and rows have the same
    bits in any company, while the bound of ties knew that they have not."""
    target = tiny_target(dtype, head_dim=head_dim)
    assert ("not row-invariant" in checks._kernel(target)) == (tie_below(target) > 0.0)


def test_doctor_says_each_check_as_it_ends(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a minute of silence on a pipe: the model's lines are out before the first run, a
    drafter's line before the next drafter's first."""
    seen: list[tuple[str, str]] = []
    run_case = checks.run_case

    def watched(target: Target, case: checks.Case, *rest: Any) -> checks.Run:
        seen.append((case[0].name, sys.stdout.buffer.getvalue().decode()))  # type: ignore[attr-defined]
        return run_case(target, case, *rest)

    monkeypatch.setattr(checks, "run_case", watched)
    done = jetspec("doctor", "--model", tiny_folder, "-n", 4, "--no-reference")
    assert done.code == 0 and done.out.splitlines()[-1] == "passed"
    assert str(tiny_folder) in seen[0][1] and "3 layers" in seen[0][1]
    assert "3 made-up prompts with 4 tokens each" in seen[0][1] and "not a measurement" in seen[0][1]
    first_echo = next(out for name, out in seen if name == "echo")
    assert "random, greedy" in first_echo and "echo" not in first_echo
    groups = [line.split("  ")[1] for line in done.out.splitlines() if " gaps  lossless" in line]
    assert groups[:3] == ["random, greedy", "echo, greedy", "decoy, greedy"] and len(groups) == 8
    assert groups[-2:] == ["decoy, greedy, auto", "decoy, sampled, auto"]


def test_doctor_finds_a_broken_cache(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the alarm: exit code 1, the first difference with its gap; only paths with gaps show it."""
    keep = KVCache.keep

    def wrong(self: KVCache, key: int, path: list[int]) -> None:
        keep(self, key, range(len(path)))

    monkeypatch.setattr(KVCache, "keep", wrong)
    done = jetspec("doctor", "--model", tiny_folder, "-n", 12, "--no-reference")
    assert done.code == 1
    assert "NOT lossless" in done.out and "first difference: " in done.out and "FAILED" in done.out


def test_doctor_finds_wrong_logits(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the comparison with transformers: a target computed wrongly is lossless towards itself."""
    from jetspec.target import transformer

    monkeypatch.setattr(transformer.NativeStack, "build", staticmethod(lambda *parts: None))
    right = transformer.rms_norm
    monkeypatch.setattr(transformer, "rms_norm", lambda x, weight, eps: right(x, weight, eps) * 1.01)
    done = jetspec("doctor", "--model", tiny_folder, "-n", 4)
    assert done.code == 1
    assert "lossless: " in done.out and "logits DIFFER from those of transformers" in done.out


def test_demo_compares_every_prompt(tiny_folder: Path) -> None:
    """Guards `make demo`: each prompt, its text, and a table with a pooled row."""
    done = jetspec("demo", "--model", tiny_folder, "--head", "decoy", "-n", 10)
    assert done.code == 0
    assert all(prompt in done.out for prompt in PROMPTS.values())
    rows = [line for line in done.out.splitlines() if line.startswith("│")]
    assert [row.split("│")[1].strip() for row in rows] == [*PROMPTS, "all"]
    assert all("yes" in row and "×" in row for row in rows)
    assert "40" in rows[-1]
    assert "green" not in done.err  # there are no colours in a file
