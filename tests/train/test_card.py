"""What a run leaves for people: curves and a model card."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jetspec
from jetspec.train.card import card
from jetspec.train.curves import draw_curves
from jetspec.train.log import append_log, read_log

TAU = {"chain-16": 2.0, "best-first-16": 2.5}


def write_log(path: Path) -> None:
    """Three logged steps and two validations, as the loop writes them, and a line that a kill cut off."""
    for step in (10, 20, 30):
        record = {
            "step": step,
            "seconds": step * 6.0,
            "loss": 3.0 - step / 20,
            "by_depth": [1.0, 2.0],
            "agree": [],
        }
        append_log(path, {**record, "validation": {"tau": TAU}} if step > 10 else record)
    with path.open("a") as file:
        file.write('{"step": 4')


def test_curves_are_a_picture(tmp_path: Path) -> None:
    """Guards the picture beside the log: drawn from a log with a damaged last line, whole or not at all, and
    none from an empty log."""
    assert not draw_curves(tmp_path / "log.jsonl", tmp_path / "curves.png")
    write_log(tmp_path / "log.jsonl")
    assert [record["step"] for record in read_log(tmp_path / "log.jsonl")] == [10, 20, 30]
    assert draw_curves(tmp_path / "log.jsonl", tmp_path / "curves.png")
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["curves.png", "log.jsonl"]


@pytest.mark.parametrize(
    ("steps", "title", "last"),
    [
        (4, "loss by depth", 4.0),
        (12, "loss by depth, mean of the last 4 logged steps", 10.5),
        (90, "loss by depth, mean of the last 20 logged steps", 80.5),
    ],
)
def test_smoothing_is_said(
    steps: int, title: str, last: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards readers of the picture: losses were means of 20 logged steps, which nothing said, and which is
    all of a short run."""
    figures: list[Any] = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, path, **_: figures.append(figure))
    monkeypatch.setattr("os.replace", lambda *paths: None)
    for step in range(1, steps + 1):
        append_log(tmp_path / "log.jsonl", {"step": step, "seconds": step, "by_depth": [float(step)]})
    assert draw_curves(tmp_path / "log.jsonl", tmp_path / "curves.png")
    left = figures[0].axes[0]
    assert left.get_title() == title
    assert left.get_lines()[0].get_ydata()[-1] == last


def test_a_card_says_what_a_user_needs(tmp_path: Path) -> None:
    """Guards the card: target, method, command, data, loss, options, licence, and tau against time."""
    write_log(tmp_path / "log.jsonl")
    manifest: dict[str, Any] = {
        "method": "dspark",
        "target": {"name": "my-target", "tokenizer_hash": "a" * 64, "template_hash": "b" * 64},
        "data": {"answers": 40, "answer_tokens": 4321, "held_out": 2},
        "loss": "0.1 cross-entropy",
        "head_options": {"layers": 2},
        "options": {"learning_rate": 0.001},
        "steps": 30,
        "training_seconds": 180.0,
        "validation": {"tau": TAU},
    }
    text = card(manifest, read_log(tmp_path / "log.jsonl"))
    for part in (
        "# DSpark draft head for my-target",
        "jetspec --model my-target --head FOLDER",
        "4321 tokens",
        "0.1 cross-entropy",
        "| layers | 2 |",
        "| learning_rate | 0.001 |",
        "## Licence",
        "| minutes | chain-16 | best-first-16 |",
        "| 2.0 | 2.00 | 2.50 |",
        "| 3.0 | 2.00 | 2.50 |",
    ):
        assert part in text, part
    assert json.dumps(TAU) not in text
    assert "answers of the training" not in text  # heads from before it was measured
    manifest["validation"] = {"tau": TAU, "seen": {"chain-16": 2.25, "best-first-16": 3.0}}
    text = card(manifest, read_log(tmp_path / "log.jsonl"))
    assert "| 3.0 | 2.00 | 2.50 |\n| on answers of the training | 2.25 | 3.00 |\n" in text
    assert "means little" not in text  # heads from before answers were counted
    manifest["validation"]["answers"] = 10
    assert "means little" not in card(manifest, [])
    manifest["validation"]["answers"] = 1
    assert "τ rests on 1 held-out answer and means little. A training with more" in card(manifest, [])
    del manifest["validation"]
    assert "Not validated" in card(manifest, [])


def test_a_card_tells_what_was_done() -> None:
    """Guards the tables: layers that were read although no option named them, the one option that fixed the
    length, what the counts of a batch are, and no plural of one."""
    manifest: dict[str, Any] = {
        "data": {"held_out": 1},
        "threads": 1,
        "steps": 1,
        "taps": [1, 8],
        "head_options": {"taps": []},
        "options": {"steps": 1, "epochs": None, "minutes": 90.0, "answers": 8, "anchors": 32, "part": 2},
    }
    text = card(manifest, [])
    for part in (
        "1 answer held out",
        "- 1 step, ",
        " 1 thread, ",
        "| taps | [1, 8] |",
        "| steps | 1 |",
        "| answers (per batch) | 8 |",
        "| anchors (per answer) | 32 |",
        "| part (answers worked on at once) | 2 |",
    ):
        assert part in text, part
    assert "90.0" not in text and "epochs" not in text
    manifest["options"].update(steps=None)
    assert "| minutes | 90.0 |" in card(manifest, []) and "| steps |" not in card(manifest, [])
    manifest["options"].update(epochs=2.0)
    assert "| epochs | 2.0 |" in card(manifest, []) and "90.0" not in card(manifest, [])


def test_every_packaged_head_has_its_card() -> None:
    """Guards users of the package, who see a folder of weights: whose head it is, on what it was trained, and
    that the card is that of these weights and not of the ones before."""
    folders = [path.parent for path in Path(jetspec.__file__).parent.glob("heads/*/config.json")]
    assert folders
    for folder in folders:
        manifest = json.loads((folder / "config.json").read_text("utf-8"))["jet"]["manifest"]
        text = (folder / "README.md").read_text("utf-8")
        name = manifest["target"]["name"]
        assert f"base_model: {name}\n" in text and f"jetspec --model {name} --head" in text
        assert f"{manifest['supervised_blocks']} blocks" in text and str(manifest["commit"]) in text
