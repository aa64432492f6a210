from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from jetspec.budget.calibrate import Reliability
from jetspec.budget.calibration_file import FILE, Kept, load_calibration, load_kept
from jetspec.budget.choose import knowledge_of
from jetspec.budget.maps import Calibration, Group, Knot
from jetspec.cli import plain_lines
from jetspec.decode.calibration import calibrate
from jetspec.draft.checkpoint import save_head
from jetspec.draft.config import HeadConfig
from jetspec.draft.loading import folder_drafter
from jetspec.draft.stubs import Decoy, Off
from jetspec.errors import DataError
from jetspec.target.loading import load_target
from jetspec.tree import GROW
from tests.decode.tiny import PROMPTS, shared_target
from tests.draft.tiny import random_head
from tests.helpers import jetspec, tiny_folder

__all__ = ["tiny_folder"]  # a fixture


def test_a_drafter_that_is_never_sure_is_found_out() -> None:
    """Guards the run itself: the decoy's right token is always its second choice, which no monotone map puts
    before the first. Still chances get much nearer to shares, and both kinds of sampling are seen."""
    target = shared_target()
    seen: list[int] = []
    outcome = calibrate(
        target, Decoy(target), [*PROMPTS, *PROMPTS, *PROMPTS], tokens=300, nodes=12, watch=seen.append
    )
    assert outcome.prompts >= 4 and outcome.tokens >= 300 and seen[-1] == outcome.tokens
    assert outcome.nodes > outcome.rounds > 50
    assert set(outcome.tau) == {"greedy", "sampled"} and min(outcome.tau.values()) > 2.0
    assert outcome.after["path"].error < 0.6 * outcome.before["path"].error
    assert outcome.calibration.knots


@pytest.mark.parametrize("prompts", [[], [[1]] * 3])
def test_too_few_prompts_are_refused(prompts: list[list[int]]) -> None:
    """Guards the held-out half: it needs a prompt of each kind."""
    with pytest.raises(DataError, match="at least 4 prompts"):
        calibrate(shared_target(), Off(), prompts, tokens=10)


def test_nothing_drafted_is_an_error() -> None:
    """Guards against an empty table that would pass for a calibration."""
    with pytest.raises(DataError, match="too little was drafted"):
        calibrate(shared_target(), Off(), [*PROMPTS, *PROMPTS], tokens=10)


def test_maps_that_the_head_had_are_judged_by_prompts_that_are_new_to_them() -> None:
    """Guards the comparison with the old maps: fitted on the held-out prompts themselves they would win
    against any that were not, so that more prompts of one file could never replace them."""
    target, prompts = shared_target(), [*PROMPTS, *PROMPTS, *PROMPTS]
    once = calibrate(target, Decoy(target), prompts, tokens=300, nodes=12)
    assert once.earlier is None and once.better

    def again(*prints: str) -> dict[str, Reliability] | None:
        kept = Kept(once.calibration, prints)
        return calibrate(target, Decoy(target), prompts, tokens=300, nodes=12, kept=kept).earlier

    known, of_others = again(), again("1234abcd")
    assert known is not None and known == of_others
    assert known["path"].error < once.before["path"].error
    assert again(*once.prints) is None
    assert again(*once.prints, *(str(n) for n in range(len(prompts)))) == known  # of more prompts than now


@pytest.fixture(scope="module")
def head_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head for the tiny model."""
    folder = tmp_path_factory.mktemp("head")
    target = load_target(str(tiny_folder))
    head = random_head(target, taps=(0,), block_size=4)
    assert isinstance(head.config, HeadConfig)
    save_head(folder, head)
    return folder


def test_the_command_writes_what_auto_reads(tiny_folder: Path, head_folder: Path, tmp_path: Path) -> None:
    """Guards the way from the command to the policy: file and plot are there, errors of both kinds are
    reported, and an engine with the budget auto uses the maps."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"Tell me about the number {n}." for n in range(12)))
    arguments = ["--model", tiny_folder, "--head", head_folder, "--prompts", prompts]
    done = jetspec("calibrate", *arguments, "--tokens", 150, "--nodes", 8, "--json")
    facts = done.json
    assert set(facts["error_on_held_out_half"]) == {"path", "step"}
    assert facts["written"] and facts["file"] == str(head_folder / FILE)
    assert len(set(load_kept(head_folder).prints)) == facts["prompts"]  # type: ignore[union-attr]
    named = f"--model {tiny_folder.name} --head {head_folder.name}"  # without them: the packaged head's file
    assert facts["command"].startswith(f"jetspec calibrate {named} --prompts prompts.txt --tokens 150")
    assert json.loads((head_folder / "calibration.json").read_text())["rounds"] == facts["rounds"] > 0
    assert Path(facts["plot"]).read_bytes().startswith(b"\x89PNG")
    target = load_target(str(tiny_folder))
    drafter = folder_drafter(head_folder, target)
    known = knowledge_of(target, drafter, GROW["best-first"])
    kept = load_calibration(head_folder, drafter.shared_noise)  # type: ignore[attr-defined]
    assert known is not None and kept is not None
    assert known.calibration.knots == kept.knots != Calibration().knots
    gains = kept.gains["greedy"]
    assert 1 <= len(gains) <= 8 and list(gains) == sorted(gains, reverse=True) and gains[-1] >= 0.0
    assert tuple(known.prospects["greedy"].gains) == gains
    text = jetspec("calibrate", *arguments, "--tokens", 60, "--nodes", 8).out
    assert "a path is accepted" in text and "held-out half" in text


def test_a_run_speaks_without_a_terminal(
    tiny_folder: Path, head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards nohup: nothing came between start and end. Nobody who asks for --json or -q gets a line."""
    monkeypatch.setattr(plain_lines, "FIRST", 0.0)
    monkeypatch.setattr(plain_lines, "EVERY", 0.001)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"Tell me about the number {n}." for n in range(12)))
    run = ["calibrate", "--model", tiny_folder, "--head", head_folder, "--prompts", prompts]
    run += ["--tokens", 60, "--nodes", 8, "--plot", tmp_path / "plot.png"]
    assert " of 60 tokens, " in jetspec(*run).err
    for option in "--json", "-q":
        assert "decoding" not in jetspec(*run, option).err


def test_maps_that_are_no_better_are_not_written(
    tiny_folder: Path, head_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the head's file, above all the packaged one: the default prompts are few, and what was fitted to
    them was written although it erred twice as much as the head's own word."""
    sure = Calibration({Group(s, p, 0): [Knot(-1.0, 0.0, 1)] for s in (False, True) for p in (False, True)})
    folder = tmp_path / "head"
    shutil.copytree(head_folder, folder)
    for left in folder.glob("calibration.*"):
        left.unlink()
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("\n".join(f"Tell me about the number {n}." for n in range(12)))
    given = ["calibrate", "--model", tiny_folder, "--head", folder, "--prompts", prompts]
    given += ["--tokens", 60, "--nodes", 8]
    with monkeypatch.context() as patched:
        patched.setattr("jetspec.decode.calibration.fit", lambda samples: sure)
        done = jetspec(*given)
        assert done.code == 1 and not list(folder.glob("calibration.*"))
        line = done.out.splitlines()[-1]
        assert line.startswith(f"{folder / FILE} is not written: ") and "--force" in line
        assert line.count("%") == 2 and "as stated" in line
        done = jetspec(*given, "--force")
        assert done.code == 0 and f"wrote {folder / FILE}" in done.err
    with monkeypatch.context() as patched:  # those are poor, so better ones replace them
        patched.setattr("jetspec.decode.calibration.fit", lambda samples: Calibration({}))
        before = (folder / FILE).read_bytes()
        done = jetspec(*given, "--json", "--plot", tmp_path / "plot.png")
        values = json.loads(done.out)
        assert done.code == 1 and values["written"] is False and (tmp_path / "plot.png").is_file()
        assert (folder / FILE).read_bytes() == before
    other = tmp_path / "other.txt"
    other.write_text("\n".join(f"What is the colour of the number {n}?" for n in range(12)))
    given[given.index(prompts)] = other
    values = jetspec(*given, "--json").json
    errors = values["error_on_held_out_half"]["path"]
    assert values["written"] and errors["calibrated"] < min(errors["stated"], errors["earlier"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--head", "random"], "not the folder of a head"),
        (["--tokens", "0"], "--tokens"),
        (["--nodes", "0"], "--nodes"),
        (["--nodes", "9999"], "budget"),
        (["--prompts", "nowhere.jsonl"], "nowhere.jsonl"),
        (["--plot", "picture.xyz"], "--plot is picture.xyz; give a .png file"),
        (["--plot", "folder"], "--plot is folder; give a .png file"),
    ],
)
def test_bad_options_are_one_line(
    tiny_folder: Path, head_folder: Path, given: list[str], message: str
) -> None:
    """Guards the command's errors."""
    head = [] if "--head" in given else ["--head", head_folder]
    assert message in jetspec("calibrate", "--model", tiny_folder, *head, *given).error
