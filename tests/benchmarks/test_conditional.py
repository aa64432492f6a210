"""What conditional.py counts, and its way from heads to tables."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from jetspec.errors import DataError, OptionError
from jetspec.tree.proposal import MarginalProposal, MarkovProposal
from tests.benchmarks.tiny import drafter, script, texts
from tests.draft.tiny import tiny_target

arms, conditional, counts, tables = (
    script(name) for name in ("arms", "conditional", "conditional_counts", "conditional_tables")
)

# Depth 1: 10 before 11. Below 10 comes 20, below 11 comes 21. Below 20 and 21 alike 30 before 31.
MARKOV = MarkovProposal(
    [[10, 11], [20, 21], [30, 31]],
    np.log([0.7, 0.3]),
    np.log([[[0.9, 0.1], [0.2, 0.8]], [[0.6, 0.4], [0.6, 0.4]]]),
)
MARGINAL = MarginalProposal([[11, 10], [21, 20], [31, 30]], np.log([[0.3, 0.7], [0.1, 0.9], [0.4, 0.6]]))


def test_ranks_follow_the_written_path() -> None:
    """Guards ranks against parents that are not the written ones, and against going on behind a token that
    was not drafted."""
    assert counts.path_ranks(MARKOV, [11, 21, 31]) == [1, 0, 1]
    assert counts.path_ranks(MARGINAL, [11, 21, 31]) == [1, 1, 1]
    assert counts.path_ranks(MARKOV, [10, 20]) == [0, 0]
    assert counts.path_ranks(MARKOV, [10, 99, 30]) == [0, None]
    assert counts.path_ranks(MARKOV, []) == []
    assert (
        counts.depth_candidates(MARKOV) == counts.depth_candidates(MARGINAL) == [[10, 11], [20, 21], [30, 31]]
    )


def test_recall_by_hand() -> None:
    """Guards the denominators: candidates count at every place, conditional ranks where the path leads; a
    token that is not there is a miss and still a place."""
    tally = counts.Tally(3, (8,))
    for written in ([11, 21, 31], [10, 99, 30], [98, 20]):
        tally.count_ranks(counts.depth_candidates(MARKOV), counts.path_ranks(MARKOV, written), written)
    r = tally.recall
    assert r["places"] == [3, 3, 2] and r["reached"] == [3, 2, 1]
    assert [row[:2] for row in r["candidates"]] == [[1, 2], [1, 2], [1, 2]]
    assert [row[:2] for row in r["candidates_reached"]] == [[1, 2], [0, 1], [0, 1]]
    assert [row[:2] for row in r["conditional"]] == [[1, 2], [1, 1], [0, 1]]
    assert all(row[1] == row[-1] for row in r["conditional"])


def test_next_depth_after_a_sibling_by_hand() -> None:
    """Guards the published comparison: a sibling is not its parent's top child, whatever lies above; the top
    path has top children only; only accepted nodes count."""
    tally = counts.Tally(4, (8,))
    tally.count_next("tree", [1, 0, 1, 0], 3)  # sibling hit; then "later" missed; then sibling hit
    tally.count_next("tree", [0, 0, None], 2)  # top hit, top missed
    tally.count_next("tree", [0, 0, 0, 0], 1)  # accepted down to depth 1 only
    tally.count_next("tree", [None], 0)
    tally.count_next("candidates", [2, 3], 1)
    assert tally.next["tree"] == {
        "top": [[2, 2], [1, 0], [0, 0]],
        "sibling": [[1, 1], [0, 0], [1, 1]],
        "later": [[0, 0], [1, 0], [0, 0]],
    }
    assert tally.next["candidates"]["sibling"] == [[1, 0], [0, 0], [0, 0]]


def test_from_heads_to_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the script as a whole: every file and arm is measured once, an interrupted run goes on, and the
    Markdown is that of the records; a file that lacks an arm stays out of the comparison."""
    torch.set_num_threads(1)
    target = tiny_target()
    heads = {"base": drafter(target, scorer="none", rank=0), "new": drafter(target, scorer="rnn")}
    monkeypatch.setattr(arms, "open_target", lambda args: target)
    monkeypatch.setattr(arms, "open_heads", lambda args, target: heads)
    for name in ("one", "two"):
        lines = [json.dumps({"id": f"{name}-{n}", "turns": [f"{name} {n}"]}) for n in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")
    measured: list[int] = []
    real = conditional.measure

    def watched(arm: Any, answers: list[Any], *rest: Any) -> Any:
        measured.append(len(answers))
        return real(arm, answers, *rest)

    monkeypatch.setattr(conditional, "measure", watched)
    command = [
        "conditional.py",
        "base",
        "new",
        "--second-pass",
        "--prompts",
        "2",
        "--tokens",
        "6",
        "--budgets",
    ]
    command += ["4", "50", "--data", str(tmp_path), "--json", str(tmp_path / "out.jsonl"), "--files", "one"]
    monkeypatch.setattr(sys, "argv", command)
    assert conditional.main() == 0 and measured == [2] * 4
    monkeypatch.setattr(sys, "argv", [*command, "two"])
    assert conditional.main() == 0 and measured == [2] * 8
    assert conditional.main() == 0 and measured == [2] * 8
    out = capsys.readouterr().out
    assert "new, second pass" in out and "one (2), two (2)" in out
    records = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text("utf-8").splitlines()]
    assert records[0]["kind"] == "run" and records[0]["run"]["arguments"]["look"] == 50
    assert [r["arm"] for r in records if r["kind"] == "arm" and r["set"] == "two"] == [
        "base", "base, second pass", "new", "new, second pass"
    ]  # fmt: skip
    monkeypatch.setattr(sys, "argv", ["conditional.py", "--table", "--json", str(tmp_path / "out.jsonl")])
    assert conditional.main() == 0
    page = capsys.readouterr().out
    rounds = [row for r in records if r.get("arm") == "new" for row in r["rounds"]["50"]]
    shown = f"{sum(row[0] for row in rounds) / sum(row[1] for row in rounds):.3f}"
    (line,) = [text for text in page.splitlines() if text.startswith("| new |") and "(" in text]
    assert f" {shown} (" in line and "quiet machine" in page
    facts, found = arms.newest_run(records)
    less = [r for r in found if (r["set"], r["arm"]) != ("two", "new")]
    assert all([r["set"] for r in own] == ["one"] for own in arms.complete(facts, less).values())
    with pytest.raises(DataError, match="no file has been walked"):
        tables.grids(facts, found[:2])
    with pytest.raises(DataError, match="no such run"):
        arms.newest_run(records, "other")


def test_heads_keep_names_apart() -> None:
    """Guards tables in which two heads would be one."""
    assert arms.names_of(["runs/a/head", "runs/b/head/", "heads/c", "auto"]) == ["a", "b", "c", "auto"]
    with pytest.raises(OptionError, match="two heads are called 'a'"):
        arms.names_of(["x/a", "y/a/head"])


def test_bad_options_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against minutes of work before an error."""
    for more, message in (
        ([], "no head given"),
        (["h", "--budgets", "8", "8"], "different numbers"),
        (["h", "--budgets", "0"], "at least 1"),
        (["h", "--budgets", "8", "--look", "16"], "not among --budgets"),
        (["h", "--prompts", "0"], "--prompts must be"),
    ):
        monkeypatch.setattr(sys, "argv", ["conditional.py", *more])
        with pytest.raises(OptionError, match=message):
            conditional.main()


def test_every_position_is_looked_at() -> None:
    """Guards counts of whole walks: every position of every text is a place of depth 1, and depth k lacks the
    last k - 1; a wide tree of the base accepts some siblings."""
    target = tiny_target()
    answers = texts(target)
    tally = conditional.measure(conditional.Arm(drafter(target)), answers, (60,), 60)
    lengths = [len(a.tokens) - a.prompt_len for a in answers]
    assert tally.recall["places"] == [sum(n - k for n in lengths) for k in range(4)]
    accepted = sum(n - r for n, r in tally.rounds[60])
    in_tree = sum(pair[0] for kind in tally.next["tree"].values() for pair in kind)
    assert 0 < in_tree <= accepted
    assert all(len(values) == len(answers) for name, values in tally.ms.items() if name != "again")
    assert not tally.ms["again"]
