"""Training that is killed, at bad and at random moments, ends with the weights of one that was not."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec.target.target import Target
from jetspec.train import checkpoint as checkpoint_module
from jetspec.train import loop as loop_module
from jetspec.train.block import BlockMethod
from jetspec.train.data import Corpus
from jetspec.train.loop import LoopOptions, train
from tests.draft.tiny import tiny_answers, tiny_target
from tests.train.processes import finish, start
from tests.train.test_distributed import METHODS, corpus_of, new_method
from tests.train.test_pipeline import command

OPTIONS = LoopOptions(
    steps=9, answers=4, anchors=4, part=3, checkpoint_minutes=0.0, validate_minutes=1e6, validate_answers=1
)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Twelve short greedy answers."""
    torch.set_num_threads(1)
    return tiny_answers(target, tmp_path_factory.mktemp("answers"))


@pytest.fixture(autouse=True)
def _no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_module, "draw_curves", lambda *paths: None)  # they take most of the time


def die(*anything: Any, **more: Any) -> None:
    """Ends this process as a kill from outside does: no exception, no exit handler, nothing flushed."""
    os.kill(os.getpid(), signal.SIGKILL)


def half_written(tensors: Any, path: Path, metadata: Any) -> None:
    """A checkpoint of which half reaches the disk."""
    save_file(tensors, path, metadata)
    os.truncate(path, path.stat().st_size // 2)
    die()


# What a child does from some step on instead of the real thing.
MOMENTS: dict[str, tuple[Any, str, Callable[..., None]]] = {
    "before the gradients are used": (torch.nn.utils, "clip_grad_norm_", die),
    "before a checkpoint": (loop_module, "save_checkpoint", die),
    "half a checkpoint written": (checkpoint_module, "save_file", half_written),
    "before it takes the place of the last one": (os, "replace", die),
    "before a line of the log": (loop_module, "append_log", die),
    "before the head": (BlockMethod, "save", die),
    "before the card": (loop_module, "write_card", die),
}


def child(target: Target, corpus: Corpus, folder: Path, name: str, moment: str | None, after: int) -> None:
    """Train, and die at a moment behind `after` steps. A new head has other weights every time, so all must
    come from the checkpoint once there is one."""
    seed = os.getpid() if (folder / "checkpoint.safetensors").exists() else 0
    method = new_method(target, corpus, name, seed)
    steps = [0]

    def count() -> bool:
        if moment is not None and steps[0] == after:
            setattr(*MOMENTS[moment])
        steps[0] += 1
        return False

    options = replace(OPTIONS, optimizer=METHODS[name][2])
    train(method, corpus_of(corpus, name), folder, options, {}, pause=count)


def state_of(folder: Path) -> dict[str, Tensor]:
    """Weights and moments at the end, and the head as it was saved."""
    head = load_file(folder / "head" / "model.safetensors")
    return {**load_file(folder / "checkpoint.safetensors"), **head}


def assert_same_end(one: Path, other: Path) -> None:
    """Bit for bit the same weights, moments and head; and no step twice or missing in the log."""
    wanted, found = state_of(one), state_of(other)
    assert wanted.keys() == found.keys()
    assert all(torch.equal(tensor, found[key]) for key, tensor in wanted.items())
    logs = [(folder / "log.jsonl").read_text().splitlines() for folder in (one, other)]
    assert [json.loads(line)["step"] for line in logs[0]] == [json.loads(line)["step"] for line in logs[1]]


@pytest.mark.parametrize("name", METHODS)
def test_killed_at_bad_and_at_random_moments(
    target: Target, corpus: Corpus, tmp_path: Path, name: str
) -> None:
    """Guards the promise that a run may be killed at any moment: torn and missing files, steps that are done
    again, moments or counters that are not restored."""
    assert finish(start(child, target, corpus, tmp_path / "whole", name, None, 0)) == 0
    dice, killed = random.Random(f"kill {name}"), tmp_path / "killed"
    for moment in dice.sample(sorted(MOMENTS), len(MOMENTS) if name == "jetspec" else 3):
        code = finish(start(child, target, corpus, killed, name, moment, dice.randrange(3)))
        assert code in (0, -signal.SIGKILL)
        process = start(child, target, corpus, killed, name, None, 0)
        process.join(dice.uniform(0.0, 0.1))  # a run takes about 0.2 s on a quiet machine
        process.kill()
        assert finish(process) in (0, -signal.SIGKILL)
    assert finish(start(child, target, corpus, killed, name, None, 0)) == 0
    assert_same_end(tmp_path / "whole", killed)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_command_line_survives_kills(model_folder: Path, tmp_path: Path) -> None:
    """Guards the whole command, loading included: killed at random, given again, the same end."""
    dice, environment = random.Random(4), {**os.environ, "OMP_NUM_THREADS": "1"}
    small = ["--steps", "100", "--set", "training.checkpoint_minutes=0.0"]

    def begin(out: Path) -> subprocess.Popen[bytes]:
        arguments = [*command(model_folder, tmp_path, *small), "--out", str(out)]
        if (tmp_path / "answers").exists():
            place = arguments.index("--prompts")
            arguments[place : place + 2] = ["--answers", str(tmp_path / "answers")]
        return subprocess.Popen([sys.executable, "-m", "jetspec", *arguments], env=environment, stderr=-3)

    assert begin(tmp_path / "whole").wait() == 0
    (tmp_path / "whole" / "answers").rename(tmp_path / "answers")
    kills = 0
    for _ in range(2):
        process = begin(tmp_path / "killed")
        while not (tmp_path / "killed" / "checkpoint.safetensors").exists() and process.poll() is None:
            time.sleep(0.01)
        if kills:  # the first one is killed at its first checkpoint, others somewhere from the start on
            time.sleep(dice.uniform(0.0, 4.0))
        process.kill()
        kills += process.wait() == -signal.SIGKILL
    assert kills >= 1 and begin(tmp_path / "killed").wait() == 0
    assert_same_end(tmp_path / "whole", tmp_path / "killed")
