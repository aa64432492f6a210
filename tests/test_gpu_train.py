"""The kit for machines with a GPU, end to end with a tiny model on the CPU."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from jetspec.draft.loading import load_drafter
from jetspec.target.loading import load_target
from jetspec.train.answers import read_answers
from tests.conftest import PROJECT_ROOT
from tests.target.tiny import save_tokenizer, tiny_model, write_gguf

BLOCK = "[head]\nvocab = 90\nlayers = 1\nblock_size = 4\n"
RECIPES = {
    "jetspec": BLOCK + 'scorer = "gated"\nrank = 4\n',
    "dflash": BLOCK,
    "dspark": BLOCK + "rank = 4\n",
    "eagle3": "[head]\nvocab = 90\nsteps = 2\ndepth = 3\n",
    "mtp": "[head]\nvocab = 90\nsteps = 2\ndepth = 3\n",
}


@pytest.fixture(scope="module")
def kit() -> Any:
    """The script as a module."""
    path = PROJECT_ROOT / "scripts" / "gpu_train.py"
    spec = importlib.util.spec_from_file_location("gpu_train", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def arguments(tmp_path: Path) -> list[str]:
    """A tiny Qwen3 and a dozen prompts; recipes of a size that fits."""
    model = tmp_path / "model"
    tiny_model("qwen3", vocab_size=344, num_hidden_layers=9).save_pretrained(model)
    save_tokenizer(model)
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the quick brown fox jumps over {n} lazy dogs\n" for n in range(12)))
    recipes = tmp_path / "recipes"
    recipes.mkdir()
    for name, text in RECIPES.items():
        (recipes / f"{name}.toml").write_text(f'method = "{name}"\n{text}')
    given = {"model": model, "prompts": prompts, "recipes": recipes, "work": tmp_path / "work"}
    small = "--device cpu --tokens 150 --max-tokens 8 --batch 5 --answers-per-batch 4 --anchors 3 --part 3"
    paths = [piece for name, path in given.items() for piece in (f"--{name}", str(path))]
    return [*paths, "--out", str(tmp_path / "out"), *small.split(), "--validate-answers", "1"]


def test_all_heads_in_calls_that_are_cut_short(
    kit: Any,
    arguments: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards the whole kit: calls that run out of time anywhere resume one another, all heads see the same
    number of steps and positions, and what comes out in small files is put together to heads that decode."""
    monkeypatch.setattr("gpu_kit.parts.SHARD_BYTES", 10_000)
    monkeypatch.setattr("gpu_kit.clock.RESERVE", 0.0)
    asked = [0]

    def left(clock: Any) -> float:
        asked[0] += 1
        return 1.0 if asked[0] % 17 else -1.0  # every 17th look at the clock ends a call

    monkeypatch.setattr(kit.Clock, "left", left)
    codes = [kit.main([*arguments, "--steps", "6"])]
    while codes[-1] == kit.AGAIN and len(codes) < 30:
        codes.append(kit.main([*arguments, "--steps", "6"]))
    assert codes[-1] == 0 and 3 < len(codes) < 30, capsys.readouterr().out
    out = tmp_path / "out"
    assert all(path.stat().st_size <= 10_000 for path in out.glob("*.[0-9][0-9]"))
    assert len(list(out.glob("jetspec.tar.[0-9][0-9]"))) > 1
    heads = json.loads((out / "results.json").read_text())["heads"]
    assert list(heads) == list(RECIPES)
    assert {head["steps"] for head in heads.values()} == {6}
    assert {head["supervised_blocks"] for head in heads.values()} == {6 * 4 * 3}
    assert all(head["validation"]["tau"]["best-first-16"] >= 1.0 for head in heads.values())
    assert capsys.readouterr().out.count("| mtp | 6 |") >= 1

    assert kit.main(["--step", "join", "--out", str(out)]) == 0
    target = load_target(arguments[1])
    for method in RECIPES:
        assert load_drafter(out / method, target).name is not None
        assert (out / method / "log.jsonl").exists()
    answers = read_answers(out / "answers.jsonl")[0]
    assert len({(answer.id, answer.seed) for answer in answers}) == len(answers) > 12  # a second round
    damaged = out / "mtp.tar.00"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with pytest.raises(SystemExit, match=r"mtp\.tar"):
        kit.join_out(out)


def test_the_schedule_is_measured_once(kit: Any, arguments: list[str], tmp_path: Path) -> None:
    """Guards the same schedule for all heads in whatever call they are trained: it is measured before the
    first and kept."""
    few = [*arguments, "--methods", "dflash,mtp", "--train-minutes", "0.02"]
    for step in ("answers", "features", "train:mtp"):
        assert kit.main([*few, "--step", step, "--minutes", "30"]) == 0
    plan = json.loads((tmp_path / "work" / "plan.json").read_text())
    assert set(plan["seconds_per_step"]) == {"dflash", "mtp"}
    assert plan["steps"] == int(0.02 * 60 / sum(plan["seconds_per_step"].values()))
    assert not (tmp_path / "work" / "probe").exists()
    assert kit.main([*few, "--step", "all", "--train-minutes", "9", "--minutes", "30"]) == 0
    heads = json.loads((tmp_path / "out" / "results.json").read_text())["heads"]
    assert {name: head["steps"] for name, head in heads.items()} == dict.fromkeys(
        ("dflash", "mtp"), plan["steps"]
    )


def test_a_gguf_in_parts(kit: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the join: parts in the order of their names, and a target that answers."""
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))
    write_gguf(tmp_path / "whole.gguf")
    data = (tmp_path / "whole.gguf").read_bytes()
    for n in range(11):
        size = -(-len(data) // 11)
        (tmp_path / f"model.gguf.{n:02d}").write_bytes(data[n * size : (n + 1) * size])
    (tmp_path / "prompts.txt").write_text("the quick brown fox\nthe lazy dog jumps\n")
    given = ["--gguf-parts", str(tmp_path / "model.gguf.*"), "--prompts", str(tmp_path / "prompts.txt")]
    small = ["--device", "cpu", "--tokens", "6", "--max-tokens", "4", "--work", str(tmp_path / "work")]
    assert kit.main([*given, *small, "--step", "answers", "--out", str(tmp_path / "out")]) == 0
    assert (tmp_path / "work" / "model.gguf").read_bytes() == data
    assert read_answers(tmp_path / "work" / "answers-0" / "answers.jsonl")[0]
    with pytest.raises(SystemExit, match="matches no file"):
        import_module("gpu_kit.parts").join_parts(str(tmp_path / "none.*"), tmp_path / "x")


def test_the_script_finds_its_parts(tmp_path: Path) -> None:
    """Guards machines where only the repository lies: from any folder, without installed packages and with
    Python's own search for the script's folder turned off, the help and the join work."""
    script = str(PROJECT_ROOT / "scripts" / "gpu_train.py")
    for more in ("--help", "--step=join"):
        bare = [sys.executable, "-I", "-S", script, more, "--out", str(tmp_path)]
        done = subprocess.run(bare, cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0 and not done.stderr
        assert ("--train-minutes" in done.stdout) == (more == "--help")


def test_wrong_steps_are_named(kit: Any, arguments: list[str]) -> None:
    """Guards minutes on a rented machine against a typing mistake."""
    for step in ("anwsers", "train:medusa"):
        with pytest.raises(SystemExit, match=r"train:eagle3.*join"):
            kit.main([*arguments, "--step", step])


def test_calls_that_cannot_do_what_they_say_are_refused(
    kit: Any, arguments: list[str], tmp_path: Path
) -> None:
    """Guards rented hours: calls too short to train paused before their first step without end, --steps had
    no effect once there was a plan, and a mistyped --recipes, or a folder without METHOD.toml, trained with
    defaults."""
    for minutes in ("1.5", "0", "nan"):
        with pytest.raises(SystemExit, match=r"leaves no time to train.* give at least 2$"):
            kit.main([*arguments, "--minutes", minutes])
    with pytest.raises(SystemExit, match=r"'smolm2' has no recipe for jetspec; valid: .*smollm2-135m"):
        kit.main([*arguments, "--recipes", "smolm2"])
    (tmp_path / "recipes" / "mtp.toml").unlink()
    with pytest.raises(SystemExit, match=r"has no mtp\.toml"):
        kit.main(arguments)
    assert kit.recipe_of("mtp", "Qwen/Qwen3-8B") == "mtp-qwen3-8b"
    (tmp_path / "work" / "plan.json").write_text(json.dumps({"steps": 6}))
    few = [*arguments, "--methods", "dflash", "--step", "plan"]
    assert kit.main(few) == kit.main([*few, "--steps", "6"]) == 0
    with pytest.raises(SystemExit, match=r"--steps is 7, but .*work has a plan of 6 steps"):
        kit.main([*few, "--steps", "7"])
