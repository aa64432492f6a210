"""Answers, features and the heads of all methods on a CUDA machine without network, in steps that resume.

    python scripts/gpu_train.py --gguf-parts 'parts/model.gguf.*' --prompts prompts.jsonl --out out

Needs Python, torch with CUDA, transformers, tokenizers and safetensors; jetspec is taken from ../src. Reading
a GGUF needs the package gguf, too: install it, or name its wheel with --wheels. A call ends after --minutes
with exit code 75 if anything is left to do; the same call goes on. docs/training.md has more.
"""

from __future__ import annotations

import argparse
import glob
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

from gpu_kit.clock import Clock, OutOfTime, check_minutes
from gpu_kit.data import make_answers, make_features
from gpu_kit.options import parse
from gpu_kit.parts import join_out
from gpu_kit.results import report
from gpu_kit.state import Kit, recipe_of
from gpu_kit.training import make_plan, train

AGAIN = 75  # exit code: not finished, call again


def run(options: argparse.Namespace, clock: Clock) -> None:
    """One call. Raises OutOfTime if something is left to do."""
    kit = Kit(options, clock)
    trainings: dict[str, Callable[[], None]] = {
        f"train:{method}": (lambda method=method: train(kit, method)) for method in kit.methods
    }
    steps: dict[str, Callable[[], None]] = {
        "answers": lambda: make_answers(kit),
        "features": lambda: make_features(kit),
        "plan": lambda: make_plan(kit),
        **trainings,
        "report": lambda: report(kit),
    }
    if options.step != "all" and options.step not in steps:
        raise SystemExit(f"--step {options.step!r} is unknown; valid: {', '.join(steps)}, all, join")
    wanted = list(steps) if options.step == "all" else [options.step]
    if options.step == "all" or options.step in trainings:
        check_minutes(options.minutes)
    if options.step != "report":
        for method in kit.methods:  # before hours of answers
            recipe_of(method, options.recipes)
    if options.step.startswith("train:"):
        wanted.insert(0, "plan")  # which returns at once if there is one
    for name in wanted:
        clock.check()
        steps[name]()


def main(argv: Sequence[str] | None = None) -> int:
    """Run a call; returns its exit code."""
    options = parse(argv, __doc__)
    clock = Clock(options.minutes)
    for wheel in sorted(glob.glob(options.wheels)) if options.wheels else []:
        sys.path.insert(0, wheel)  # wheels of pure Python can be imported as they are
    if options.step == "join":
        for path in join_out(options.out):
            print(path)
        return 0
    from jetspec.errors import UserError

    if options.threads:
        import torch

        torch.set_num_threads(options.threads)
    try:
        run(options, clock)
    except OutOfTime:
        clock.say("not finished; the same call goes on")
        return AGAIN
    except UserError as error:
        print(f"gpu_train: error: {error}", file=sys.stderr)
        return 2
    clock.say("done")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
