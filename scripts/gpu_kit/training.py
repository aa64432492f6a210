"""One schedule for all heads, and the training of each."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_kit.clock import OutOfTime
from gpu_kit.options import METHODS
from gpu_kit.parts import packed, write_parts
from gpu_kit.results import collect
from gpu_kit.state import Kit

PROBE, WARM = 14, 4  # steps that measure a head's speed, and those of them that do not count


def make_plan(kit: Kit) -> None:
    """Measure a step of every head; the common number of steps makes all of them fit together. Raises
    SystemExit if the schedule has begun with another number of steps than --steps.
    """
    options, seconds = kit.options, dict[str, float]()
    if plan := kit.plan():
        if options.steps not in (None, plan["steps"]):
            raise SystemExit(
                f"--steps is {options.steps}, but {kit.work} has a plan of {plan['steps']} steps; leave "
                "it out, or give another --work"
            )
        return
    if options.steps is None:
        for method in kit.methods:
            seconds[method] = _probe(kit, method)
            kit.clock.say(f"{method}: {seconds[method] * 1000:.1f} ms a step")
    steps = options.steps or max(1, int(options.train_minutes * 60 / sum(seconds.values())))
    path = kit.work / "plan.json"
    path.with_suffix(".tmp").write_text(json.dumps({"steps": steps, "seconds_per_step": seconds}))
    os.replace(path.with_suffix(".tmp"), path)
    kit.clock.say(f"plan: {steps} steps for each of {', '.join(kit.methods)}")


def _probe(kit: Kit, method: str) -> float:
    """Seconds of one step of a head."""
    from jetspec.train.loop import Paused

    times: list[float] = []
    folder = kit.work / "probe"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        _train(kit, method, folder, lambda report: times.append(report.seconds), lambda: len(times) >= PROBE)
    except Paused:
        shutil.rmtree(folder, ignore_errors=True)
    return (times[-1] - times[WARM - 1]) / (len(times) - WARM)


def train(kit: Kit, method: str) -> None:
    """Train a head to the end of its schedule, and pack it."""
    if method not in METHODS:
        raise SystemExit(f"--step train:{method} is unknown; valid: {', '.join(METHODS)}")
    from jetspec.train.loop import Paused

    folder = kit.work / method
    if (folder / "done").exists():
        return

    def watch(report: Any) -> None:
        if report.step % 500 == 0 and report.by_depth:
            depths = " ".join(f"{value:.3f}" for value in report.by_depth)
            kit.clock.say(f"{method} step {report.step} of {report.steps}: loss by depth {depths}")

    try:
        _train(kit, method, folder, watch, kit.clock.must_pause)
    except Paused as paused:
        kit.clock.say(f"{method} {paused}")
        raise OutOfTime from None
    write_parts(packed(folder / "head", folder / "log.jsonl"), kit.options.out, f"{method}.tar")
    (folder / "done").touch()
    taus = collect(kit)["heads"][method]["validation"]["tau"]
    kit.clock.say(f"{method}: tau {', '.join(f'{name} {tau:.2f}' for name, tau in taus.items())}")


def _train(
    kit: Kit, method: str, folder: Path, on_report: Callable[[Any], None], pause: Callable[[], bool]
) -> None:
    from jetspec.train.pipeline import train_head

    train_head(
        kit.target,
        [kit.work / "features"],
        folder,
        kit.settings(method),
        on_report=on_report,
        pause=pause,
        resident=kit.options.device.startswith("cuda"),
    )
