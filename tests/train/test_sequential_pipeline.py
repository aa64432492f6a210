"""EAGLE-3 and MTP heads through the command line: from a model folder and prompts to a head that decodes."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

from jetspec.cli.main import main
from jetspec.draft.loading import load_drafter
from jetspec.draft.sequential import SequentialDrafter
from jetspec.target.loading import load_target
from jetspec.train.recipe import packaged_recipes, read_recipe


@pytest.mark.parametrize("model_folder", [("qwen3", 9)], ids=["qwen3"], indirect=True)
@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_train_and_decode(
    method: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the whole way: the recipe is found, the answers hold the layers that the head reads, and what
    the run leaves decodes the same text as no head at all, with every builder."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the quick brown fox jumps over {n} lazy dogs\n" for n in range(12)))
    small = "--tokens 60 --max-tokens 8 --batch 4 --answers-per-batch 4 --anchors 3 --vocab 90 --steps 3"
    model = ["--model", str(model_folder), "--threads", "1"]
    out = tmp_path / "run"
    arguments = ["train", *model, "--prompts", str(prompts), "--out", str(out), "--recipe", method]
    assert main([*arguments, *small.split()]) == 0, capsys.readouterr().err
    head = out / "head"
    drafter = load_drafter(head, load_target(str(model_folder)))
    assert isinstance(drafter, SequentialDrafter) and drafter.name == method
    assert drafter.taps == ((1, 3, 5) if method == "eagle3" else ())
    capsys.readouterr()
    texts = []
    for more in (["--head", "off"], ["--head", str(head)], ["--head", str(head), "--grow", "dynamic"]):
        assert main(["generate", "the lazy dog", *model, "--max-tokens", "12", *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("method", ["eagle3", "mtp"])
def test_recipes_are_there_and_valid(method: str) -> None:
    """Guards keys and values of the packaged recipes, and that each target has one."""
    found = {path.stem: path for path in packaged_recipes() if path.stem.startswith(method)}
    assert set(found) == {f"{method}-{name}" for name in ("smollm2-135m", "qwen3-8b", "qwen3-30b-a3b")}
    for name, path in found.items():
        settings = read_recipe(tomllib.loads(path.read_text("utf-8")), path.name)
        assert settings.method == method and settings.target is not None
        weights = settings.loss.depth_weights(settings.head.steps)
        ratio = 0.8 if method == "eagle3" else 0.6
        assert weights.tolist() == pytest.approx([ratio**k for k in range(settings.head.steps)]), name
