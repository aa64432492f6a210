"""`jetspec bench` and `jetspec theory` as a user types them, on a tiny model."""

from __future__ import annotations

import json
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from jetspec.bench.methods import METHODS
from jetspec.cli import bench_run, plain_lines
from jetspec.cli.bench_input import given_heads
from jetspec.draft.checkpoint import save_head
from jetspec.errors import HeadError, OptionError
from tests.bench.tiny import facts, items
from tests.draft.tiny import random_head, tiny_target
from tests.helpers import jetspec, tiny_folder

__all__ = ["tiny_folder"]  # a fixture


@pytest.fixture
def given(tiny_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Options of a short run on two prompts of one's own."""
    monkeypatch.setattr("jetspec.bench.record.source_hash", lambda: "code")  # somebody may be editing it
    (tmp_path / "mine.txt").write_text("Hello there\nCount to ten\n", "utf-8")
    own = ["--head", "jetspec=decoy", "--prompt-file", tmp_path / "mine.txt", "--prompts", 2, "-n", 8]
    return ["bench", "--model", tiny_folder, *own, "--out", tmp_path / "r.jsonl"]


def test_bench_then_everything_made_of_it(given: list[object], tmp_path: Path) -> None:
    """Guards the whole way: measure, print, measure nothing again, table, plots, report, theory."""
    first = jetspec(*given, "--methods", "jetspec-tree,jetspec-chain,hf-generate")
    assert first.code == 0, first
    assert "jetspec-tree 8" in first.out and "hf-generate" in first.out
    assert "2/2" in first.out and "NOT LOSSLESS" not in first.out
    lines = (tmp_path / "r.jsonl").read_text("utf-8").splitlines()
    again = jetspec(*given, "--methods", "jetspec-tree,jetspec-chain,hf-generate", "--json")
    assert (tmp_path / "r.jsonl").read_text("utf-8").splitlines() == lines
    values = again.json
    assert {row["method"] for row in values["rows"]} == {
        "plain",
        "jetspec-tree",
        "jetspec-chain",
        "hf-generate",
    }
    assert all(row["same"] == 2 for row in values["rows"])
    jetspec(*given, "--methods", "jetspec-tree,jetspec-chain,hf-generate", "--fresh", "--json")
    assert len((tmp_path / "r.jsonl").read_text("utf-8").splitlines()) == 2 * len(lines)

    records = tmp_path / "r.jsonl"
    table = jetspec("bench", "table", records)
    assert table.code == 0 and "| jetspec-tree 8 |" in table.out and "### Speedup" in table.out
    assert jetspec("bench", "table", records, "--json").json["key"] == values["key"]
    plots = jetspec("bench", "plot", records, "--out", tmp_path / "plots", "--format", "svg")
    assert plots.code == 0 and (tmp_path / "plots" / "round.svg").is_file()
    report = jetspec("bench", "report", records, "--out", tmp_path / "report.html")
    assert report.code == 0 and "<svg" in (tmp_path / "report.html").read_text("utf-8")
    theory = jetspec("theory", records, "--out", tmp_path / "theory.png", "--json").json
    assert [mark["method"] for mark in theory["measured"]] == ["jetspec-tree", "jetspec-chain"]
    assert (tmp_path / "theory.png").is_file()


def test_a_named_method_must_run(given: list[object], tmp_path: Path) -> None:
    """Guards scripts: a method that was asked for by name and has no head used to be left out with exit code
    0; the default list still leaves such methods out, and says so."""
    (tmp_path / "heads" / "jetspec").mkdir(parents=True)
    named = jetspec(*given, "--methods", "jetspec-tree,mtp", "--heads", tmp_path / "heads").error
    assert named.startswith("method mtp cannot run: no head: there is no --head mtp=FOLDER, --heads ")
    assert "/heads has no mtp/config.json, and none is packaged for " in named
    assert "train one with: jetspec train --recipe mtp --model " in named
    broken = jetspec(*given, "--methods", "mtp", "--head", f"mtp={tmp_path / 'heads' / 'jetspec'}").error
    assert "method mtp cannot run: " in broken and "has no config.json; give the folder" in broken
    assert "method hf-assisted cannot run: no assistant" in jetspec(*given, "--methods", "hf-assisted").error
    left = jetspec(*given, "--methods", "hf-generate", "--outside-prompts", 0).error
    assert left == "--outside-prompts 0 leaves out hf-generate, which --methods names"
    done = jetspec(*given, "--outside-prompts", 0, "-n", 2)
    assert done.code == 0 and "jetspec-tree 8" in done.out and "no head" in done.out
    assert "jetspec: mtp is left out: no head" in done.err and "Not measured: mtp" in done.out


def test_a_difference_is_exit_code_1(given: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the alarm in scripts: a run whose text differs fails, and says so."""
    from jetspec.target.cache import KVCache

    keep = KVCache.keep
    monkeypatch.setattr(KVCache, "keep", lambda self, key, path: keep(self, key, range(len(path))))
    done = jetspec(*given, "--methods", "jetspec-tree")
    assert done.code == 1 and "NOT LOSSLESS: jetspec-tree 8 on mine" in done.out


def test_a_run_speaks_without_a_terminal(given: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards nohup: a line came only where a group of prompts ended a minute behind the last line. Nobody
    who asks for --json or -q gets one."""
    monkeypatch.setattr(plain_lines, "FIRST", 0.0)
    monkeypatch.setattr(plain_lines, "EVERY", 0.001)
    run = [*given, "--methods", "plain", "--fresh"]
    assert "measuring: 0 of 2 groups\n" in jetspec(*run).err
    for option in "--json", "-q":
        assert "measuring" not in jetspec(*run, option).err


def test_interrupted_runs_keep_what_is_done(
    given: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards Ctrl-C: exit code 130, one line that says where the records are, the first prompt in them, and a
    table that says how many are missing."""
    run = bench_run._watch

    def interrupted(screen: Any, made: Any, missing: list[Any], done: int, **options: Any) -> None:
        measured = made.run
        made.run = lambda *asked: islice(measured(*asked), 1)
        run(screen, made, missing, done, **options)
        raise KeyboardInterrupt

    monkeypatch.setattr(bench_run, "_watch", interrupted)
    done = jetspec(*given, "--methods", "jetspec-tree")
    assert done.code == 130 and "Traceback" not in done.err
    kept = [line for line in done.err.splitlines() if "interrupted" in line]
    assert kept == [f"jetspec: interrupted; what is done is kept in {tmp_path / 'r.jsonl'}"]
    kinds = [json.loads(line)["kind"] for line in (tmp_path / "r.jsonl").read_text("utf-8").splitlines()]
    assert kinds == ["run", "item"]
    table = jetspec("bench", "table", tmp_path / "r.jsonl")
    assert "1 of 2 groups of prompts, unfinished" in table.err and "1 of 2 groups" in table.out


def test_list_names_every_method(tiny_folder: Path) -> None:
    """Guards discovery: each method with its state, and where heads come from."""
    done = jetspec("bench", "--list", "--model", tiny_folder, "--head", "dflash=echo")
    assert done.code == 0
    found = {line.split()[0]: line for line in done.out.splitlines()}
    assert set(found) == set(METHODS)
    assert found["ddtree"].endswith("head echo") and found["mtp"].endswith("no head")
    starts = {line.index(METHODS[name].about) for name, line in found.items()}
    assert len(starts) == 1, "the longest name must not move its line"


def test_a_head_without_a_name_is_that_of_its_family(tmp_path: Path) -> None:
    """Guards the short form: a folder says itself whose head it holds; two for one method are refused."""
    folder = tmp_path / "mine"
    save_head(folder, random_head(tiny_target(), causal=False))
    assert given_heads([str(folder), "mtp=heads/mtp"]) == {
        "dflash": str(folder),
        "mtp": "heads/mtp",
    }
    with pytest.raises(OptionError, match="two heads for dflash"):
        given_heads([str(folder), "dflash=other"])
    (folder / "config.json").write_text("{")
    with pytest.raises(HeadError, match=r"config.json cannot be read"):
        given_heads([str(folder)])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--methods", "tree"], "unknown method 'tree'; valid: all, plain"),
        (["--methods", ","], "--methods is empty"),
        (["--budgets", "8,x"], "--budgets is '8,x'; give whole numbers or 'auto', separated by commas"),
        (["--budgets", "0"], "budget 0 is plain decoding"),
        (["--temperatures", "-1"], "temperature must be"),
        (["--prompts", "0"], "--prompts must be at least 1"),
        (["--head", "mtp"], "--head is 'mtp'; give METHOD=FOLDER"),
        (["--data", "/nowhere"], "--data /nowhere is no folder"),
        (["--prompt-file", "x.txt", "--sets", "gsm8k"], "--prompt-file takes the place of"),
        (
            ["--prompt-file", "a/x.txt", "--prompt-file", "b/x.jsonl"],
            "--prompt-file gives two sets the name 'x': a/x.txt and b/x.jsonl; rename one of them",
        ),
    ],
)
def test_errors_come_before_the_model_is_loaded(arguments: list[str], message: str) -> None:
    """Guards patience: what is wrong with the options is said at once, on one line, with what is valid."""
    assert message in jetspec("bench", "--model", "/no/such/model", *arguments).error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bench", "table", "none.jsonl"], "none.jsonl is no file of records"),
        (["bench", "plot", "RECORDS", "--format", "pdf"], "valid: svg, png"),
        (["bench", "report", "RECORDS", "--run", "zz"], "holds no run 'zz'; valid: k"),
        (["theory", "RECORDS", "--batch", "9"], "no drafting method"),
        (["theory", "--alpha", "1.5"], "alpha is a probability"),
        (["theory", "--cost", "x"], "--cost is 'x'"),
        (["theory", "--out", "x.pdf"], "give a .svg or a .png file"),
    ],
)
def test_errors_of_what_is_made_of_records(tmp_path: Path, arguments: list[str], message: str) -> None:
    """Guards the other verbs' messages likewise."""
    records = tmp_path / "records.jsonl"
    lines = [{"kind": "run", "key": "k", "run": facts()}, *items(2, 2.0)]
    records.write_text("\n".join(map(json.dumps, lines)), "utf-8")
    done = jetspec(*(str(records) if word == "RECORDS" else word for word in arguments))
    assert message in done.error


@pytest.mark.parametrize("verb", [["bench", "table"], ["bench", "plot"], ["bench", "report"], ["theory"]])
def test_a_wrong_file_is_one_line(tmp_path: Path, verb: list[str]) -> None:
    """Guards the terminal against a line for each line of, say, a training log given by mistake."""
    wrong = tmp_path / "log.jsonl"
    wrong.write_text('{"step": 10}\n' * 50, "utf-8")
    assert f"{wrong} line 1 is no record of jetspec bench: expected" in jetspec(*verb, wrong).error


def test_theory_needs_no_records() -> None:
    """Guards the article's figure: both costs, as a table and as JSON."""
    done = jetspec("theory")
    assert done.code == 0 and "c = 0.05" in done.out and "c = 0.0005" in done.out
    values = jetspec("theory", "--alpha", "0.8", "--cost", "0.05", "--json").json
    assert next(v["speedup"] for v in values["formula"] if v["n"] == 8) == pytest.approx(
        (1 - 0.8**9) / 0.2 / 1.4
    )


def test_out_must_be_a_file(given: list[object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a whole measurement against /dev/null, which ended it in a traceback, and the memory against
    /dev/full; and a file that is deleted while measuring is one line."""
    for device in ("/dev/null", "/dev/full"):
        assert f"{device} is no regular file" in jetspec(*given, "--out", device).error
    watch = bench_run._watch

    def deleted(*arguments: Any, **more: Any) -> None:
        watch(*arguments, **more)
        (tmp_path / "r.jsonl").unlink()

    monkeypatch.setattr(bench_run, "_watch", deleted)
    done = jetspec(*given, "--methods", "plain", "-n", 2)
    assert done.code == 2 and "r.jsonl no longer holds this run" in done.err.splitlines()[-1]


def test_a_named_method_that_no_budget_suits(given: list[object]) -> None:
    """Guards against plain decoding alone where a method was asked for: rejection sampling takes no budget
    `auto`, and was dropped without a word. What is not measured this time is said with --json, too."""
    own = [*given, "--head", "dspark=decoy", "--temperatures", 1, "-n", 2]
    wrong = jetspec(*own, "--methods", "dspark-rejection", "--budgets", "auto").error
    assert wrong.startswith("method dspark-rejection cannot run: it takes no budget but numbers")
    done = jetspec(*own, "--methods", "hf-generate", "--json")
    assert done.json["unfinished"] is None
    assert "jetspec: hf-generate is measured at T = 0 and batch 1 only" in done.err


def test_an_unknown_set_names_the_valid_ones(tmp_path: Path) -> None:
    """Guards the message for a typing error, which spoke of a missing file only."""
    for name in ("gsm8k", "mine"):
        (tmp_path / f"{name}.jsonl").write_text('{"turns": ["x"]}', "utf-8")
    wrong = jetspec("bench", "--data", tmp_path, "--sets", "gsm9k").error
    assert wrong == f"--sets names 'gsm9k', which {tmp_path} lacks; valid: gsm8k, mine, builtin"
