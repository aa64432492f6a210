"""How the target judges a head's top branch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from jetspec.draft.stubs import Echo
from jetspec.target.target import Target
from jetspec.tree import GROW, Tree
from tests.benchmarks.tiny import drafter, script, texts
from tests.decode.tiny import teacher_forced
from tests.draft.tiny import tiny_target

arms, replay, faithfulness = (script(name) for name in ("arms", "replay", "faithfulness"))


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    torch.set_num_threads(1)
    return tiny_target()


@pytest.mark.parametrize("stride", [1, 3])
def test_gaps_equal_a_slow_reference(target: Target, stride: int) -> None:
    """Guards the branch's conditioning: the target sees the written text up to the root and then the DRAFTED
    tokens, one causal forward per branch; with a stride the written tokens between roots must end up in the
    cache, and no drafted one."""
    answers, head = texts(target), drafter(target)
    found = np.array(faithfulness.measure(target, head, answers, 4, stride))
    for key, answer in enumerate(answers):
        expected = np.zeros((4, len(faithfulness.COLUMNS)))
        walk = replay.Walk(head, 99, answer)
        for root in range(answer.first, answer.last, stride):
            branch = GROW["chain"](answer.tokens[root], head.propose([walk.at(root)])[0], 4)
            drafted = [t for n, t in enumerate(branch.tokens) if n and 0 not in branch.tokens[1:n]]
            logits, _, _ = teacher_forced(target, [*answer.tokens[: root + 1], *drafted])
            total = agreeing = 0.0
            for depth, token in enumerate(drafted):
                law = logits[root + depth].log_softmax(-1)
                same = float(int(law.argmax()) == token)
                gap = float(law.max() - law[token])
                agreeing = same if depth == 0 else agreeing * same
                total += gap
                stated = branch.logps[depth + 1] - branch.logps[depth]
                expected[depth] += [1, same, gap, total, agreeing, stated, float(law[token])]
        walk.close()
        assert np.abs(found[key] - expected).max() < 2e-3, (
            key
        )  # sums of up to 20 gaps of about 5 nats, float32
    assert found[:, :, 2].min() > 1.0


def test_the_targets_own_branch_has_no_gap(target: Target) -> None:
    """Guards zero: a drafter that is the target agrees everywhere, at every depth."""
    answers = texts(target)
    found = np.array(faithfulness.measure(target, Echo(target, depth=3), answers, 3, 2))
    nodes, same, gap, branch, agreeing = found.sum(0).T[:5]
    assert nodes[0] > 20 and np.array_equal(nodes, same) and np.array_equal(nodes, agreeing)
    assert not gap.any() and not branch.any()


def test_a_branch_ends_with_its_text() -> None:
    """Guards depths behind a drafted end of text, which nobody would ever write."""
    branch = Tree.of([5, 6, 0, 7], [-1, 0, 1, 2])
    assert faithfulness._ended(branch, frozenset({0})).tokens == (5, 6, 0)
    assert faithfulness._ended(branch, frozenset({9})).tokens == branch.tokens
    both = faithfulness._beside(branch, [8, 9])
    assert both.parents == (-1, 0, 1, 2, 0, 4) and both.depths == (0, 1, 2, 3, 1, 2)
    assert faithfulness._beside(branch, []) == branch


def test_from_heads_to_tables(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the script as a whole, with heads of different depths and masks side by side."""
    heads = {"causal": drafter(target), "both ways": drafter(target, causal=False, block_size=4)}
    monkeypatch.setattr(arms, "open_target", lambda args: target)
    monkeypatch.setattr(arms, "open_heads", lambda args, target: heads)
    lines = [json.dumps({"id": f"q{n}", "turns": [f"text {n}"]}) for n in range(3)]
    (tmp_path / "one.jsonl").write_text("\n".join(lines), "utf-8")
    out = tmp_path / "out.jsonl"
    command = ["f.py", "causal", "both ways", "--prompts", "2", "--tokens", "6", "--data", str(tmp_path)]
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(out), "--files", "one"])
    assert faithfulness.main() == 0
    capsys.readouterr()
    monkeypatch.setattr(sys, "argv", ["f.py", "--table", "--json", str(out)])
    assert faithfulness.main() == 0
    page = capsys.readouterr().out
    sums = {
        r["arm"]: np.array(r["sums"]).sum(0)
        for r in map(json.loads, out.read_text("utf-8").splitlines())
        if r["kind"] == "arm"
    }
    first = sums["both ways"][0]
    assert f"| both ways | {first[2] / first[0]:.3f} |" in page
    assert "less that of causal" in page and "one (2)" in page
