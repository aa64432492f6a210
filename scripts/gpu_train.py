"""Answers, features and the heads of all methods on a CUDA machine without network, in steps that resume.

    python scripts/gpu_train.py --gguf-parts 'parts/model.gguf.*' --prompts prompts.jsonl --out out

Needs Python, torch with CUDA, transformers, tokenizers and safetensors; jetspec is taken from ../src. Reading
a GGUF needs the package gguf, too: install it, or name its wheel with --wheels. A call ends after --minutes
with exit code 75 if anything is left to do; the same call goes on. docs/training.md has more.
"""

from __future__ import annotations

import argparse
import glob
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
import tarfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "src"))

AGAIN = 75  # exit code: not finished, call again
METHODS = ("jetspec", "dflash", "dspark", "eagle3", "mtp")
SHARD_BYTES = 15_900_000
RESERVE = 90.0  # seconds before the end of a call at which training pauses: validation comes after its end
GREEDY_FIRST = ((0.0, 0.6), (0.7, 0.15), (1.0, 0.25))
SAMPLED = ((0.7, 0.4), (1.0, 0.6))  # of the later rounds: greedy answers would only come again
PROBE, WARM = 14, 4  # steps that measure a head's speed, and those of them that do not count


class OutOfTime(Exception):
    """The call's minutes are over; everything so far is kept."""


class Clock:
    """The minutes of this call."""

    def __init__(self, minutes: float) -> None:
        self.start = time.monotonic()
        self.end = self.start + minutes * 60

    def left(self) -> float:
        """Seconds."""
        return self.end - time.monotonic()

    def check(self, *anything: Any) -> None:
        """Raise OutOfTime at the end."""
        if self.left() <= 0:
            raise OutOfTime

    def say(self, text: str) -> None:
        """A line with the seconds since the start."""
        print(f"[{time.monotonic() - self.start:6.1f} s] {text}", flush=True)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--step", default="all", help="answers, features, plan, train:METHOD, report, all, or join")
    add("--minutes", type=float, default=8.5, help="of this call")
    add("--gguf", type=Path, help="the target as one GGUF file")
    add("--gguf-parts", help="a pattern of the parts that make up the GGUF, in the order of their names")
    add("--model", help="the target by name or folder, instead of a GGUF")
    add("--wheels", help="a pattern of wheels that are imported from where they are")
    add("--prompts", action="append", default=[], help="prompt file; may be repeated")
    add("--exclude", action="append", default=[], type=Path, help="evaluation file; see jetspec train")
    add("--own-prompts", type=int, default=0, help="prompts that the target writes in addition")
    add("--answers", action="append", default=[], type=Path, help="answers.jsonl that exists; none are made")
    add("--work", type=Path, default=Path("runs/gpu"), help="state between calls; features need 7 kB a token")
    add("--out", type=Path, default=Path("runs/gpu-out"), help="results in files below 16 MB")
    add("--tokens", type=int, default=1_500_000, help="answer tokens")
    add("--max-tokens", type=int, default=256, help="longest answer")
    add("--batch", type=int, default=512, help="prompts answered at once")
    add("--methods", default=",".join(METHODS), help="heads to train")
    add(
        "--recipes", default="smollm2-135m", help="a target with packaged recipes, or a folder of METHOD.toml"
    )
    add("--train-minutes", type=float, default=14.0, help="of all heads together; fixes their common steps")
    add("--steps", type=int, help="the schedule of every head, instead of --train-minutes")
    add("--answers-per-batch", type=int, default=64)
    add("--anchors", type=int, default=64)
    add("--part", type=int, default=32, help="answers that are worked on at once")
    add("--rate", type=float, help="peak learning rate; by default that of the recipe")
    add("--rows", type=int, default=16384, help="tokens per forward when features are computed")
    add("--validate-answers", type=int, default=16)
    add("--seed", type=int, default=0)
    add("--device", default="cuda")
    add("--threads", type=int, help="CPU threads")
    return parser.parse_args(argv)


# --- files


def join_parts(pattern: str, to: Path) -> Path:
    """One file from its parts, once. Raises SystemExit if there are none."""
    parts = sorted(glob.glob(pattern))
    if not parts:
        raise SystemExit(f"--gguf-parts {pattern!r} matches no file")
    size = sum(os.path.getsize(part) for part in parts)
    if not (to.exists() and to.stat().st_size == size):
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_suffix(".tmp")
        with temporary.open("wb") as sink:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, sink)
        os.replace(temporary, to)
    return to


def write_parts(data: bytes, folder: Path, name: str) -> dict[str, Any]:
    """Write `name`.00, `name`.01, … and return what `join_out` needs to check them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}.[0-9][0-9]"):
        old.unlink()
    count = max(1, -(-len(data) // SHARD_BYTES))
    for n in range(count):
        (folder / f"{name}.{n:02d}").write_bytes(data[n * SHARD_BYTES : (n + 1) * SHARD_BYTES])
    record = {"parts": count, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / f"{name}.json").write_text(json.dumps(record))
    return record


def join_out(folder: Path) -> list[Path]:
    """Put everything in `folder` together again: heads become folders, answers a file. Raises SystemExit if a
    part is missing or damaged.
    """
    made = []
    for description in sorted(folder.glob("*.tar.json")) + sorted(folder.glob("*.gz.json")):
        name, record = description.name.removesuffix(".json"), json.loads(description.read_text())
        paths = [folder / f"{name}.{n:02d}" for n in range(record["parts"])]
        data = b"".join(path.read_bytes() for path in paths if path.exists())
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise SystemExit(f"{name}: a part is missing or damaged; copy {', '.join(map(str, paths))} again")
        if name.endswith(".gz"):
            made.append(folder / name.removesuffix(".gz"))
            made[-1].write_bytes(gzip.decompress(data))
        else:
            made.append(folder / name.removesuffix(".tar"))
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(made[-1], filter="data")
    return made


def packed(folder: Path, *more: Path) -> bytes:
    """The files of a folder and some others as one archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in (*sorted(folder.iterdir()), *more):
            if path.is_file():
                archive.add(path, arcname=path.name)
    return buffer.getvalue()


def recipe_of(method: str, recipes: str) -> str:
    """The file or the packaged recipe of a method. Raises SystemExit if there is none."""
    from jetspec.train.recipe import packaged_recipes

    if Path(recipes).is_dir():
        path = Path(recipes) / f"{method}.toml"
        if path.is_file():
            return str(path)
        raise SystemExit(f"--recipes {recipes} has no {method}.toml; write it, or change --methods")
    names, model = [path.stem for path in packaged_recipes()], recipes.rsplit("/", 1)[-1].lower()
    if f"{method}-{model}" in names:
        return f"{method}-{model}"
    valid = [name.removeprefix("mtp-") for name in names if name.startswith("mtp-")]
    raise SystemExit(
        f"--recipes {recipes!r} has no recipe for {method}; valid: a folder of METHOD.toml, "
        f"{', '.join(valid)}"
    )


def check_minutes(minutes: float) -> None:
    """Raise SystemExit for a call in which training pauses before it has begun: calls like it never end."""
    least = RESERVE / 60 + 0.5
    if not minutes >= least:
        raise SystemExit(
            f"--minutes {minutes:g} leaves no time to train, which pauses {RESERVE:g} seconds before the end "
            f"of a call; give at least {least:g}"
        )


# --- steps


class Kit:
    """The target and the state of all steps in `--work`."""

    def __init__(self, options: argparse.Namespace, clock: Clock) -> None:
        self.options, self.clock, self.work = options, clock, options.work
        self.methods = [name for name in options.methods.split(",") if name]
        self.work.mkdir(parents=True, exist_ok=True)
        self._target: Any = None

    @property
    def target(self) -> Any:
        """The target, loaded when it is needed."""
        if self._target is None:
            from jetspec.target.loading import load_target

            options = self.options
            if options.gguf_parts:
                name = str(join_parts(options.gguf_parts, self.work / "model.gguf"))
            else:
                name = str(options.gguf or options.model or "smollm2-135m")
            self._target = load_target(name, device=options.device)
            self.clock.say(f"target {name} on {options.device}")
        return self._target

    def settings(self, method: str) -> Any:
        """The recipe of a method; batches, schedule and validation are the same for all."""
        from jetspec.train.recipe import find_recipe

        options = self.options
        found = find_recipe(recipe_of(method, options.recipes), "")
        loop = replace(
            found.loop,
            epochs=None,
            steps=self.plan().get("steps", 10**6),
            answers=options.answers_per_batch,
            anchors=options.anchors,
            part=options.part,
            seed=options.seed,
            learning_rate=options.rate or found.loop.learning_rate,
            validate_minutes=1e6,
            validate_answers=options.validate_answers,
            checkpoint_minutes=2.0,
        )
        head = found.head
        if (
            self.family(method).taps(self.target, head) is None
        ):  # all that answers hold: here, more than it needs
            head = replace(head, taps=self.block_taps())
        return replace(found, loop=loop, head=head)

    def family(self, method: str) -> Any:
        """What trains heads of this method."""
        from jetspec.train.families import find_family

        return find_family(method)

    def block_taps(self) -> tuple[int, ...]:
        """The layers that block heads read."""
        from jetspec.draft.config import default_tap_layers

        return default_tap_layers(self.target.config.num_layers)

    def taps(self) -> tuple[int, ...]:
        """Every layer that some head reads."""
        wanted = set(self.block_taps())
        for method in self.methods:
            wanted.update(self.family(method).taps(self.target, self.settings(method).head) or ())
        return tuple(sorted(wanted))

    # answers: the text

    def answers(self) -> None:
        """Answer prompts until there are enough tokens; several times with other seeds if they run out."""
        from jetspec.train.prompts import load_prompts
        from jetspec.train.responses import AnswerOptions, answer_prompts

        options = self.options
        if options.answers:
            self.clock.say(f"answers are given: {', '.join(map(str, options.answers))}")
            return
        sources = [*options.prompts, *self._own_prompts()]
        if not sources:
            raise SystemExit("no prompts: give --prompts FILE or --own-prompts COUNT")
        found = load_prompts(sources, seed=options.seed, exclude=options.exclude)
        self.clock.say("; ".join(line.strip() for line in found.report()))
        done, turn = 0, 0
        while done < options.tokens and turn < 8:
            wanted = AnswerOptions(
                tokens=options.tokens - done,
                max_tokens=options.max_tokens,
                temperatures=SAMPLED if turn else GREEDY_FIRST,
                batch=options.batch,
                seed=options.seed + turn * len(found.prompts),  # no two answers share a seed
                features=False,
            )
            folder = self.work / f"answers-{turn}"
            start, before = time.monotonic(), None

            def watch(progress: Any) -> None:
                nonlocal before
                before = progress.tokens if before is None else before
                self.clock.check()

            progress = answer_prompts(self.target, found.prompts, folder, (), wanted, watch)
            made, spent = progress.tokens - (before or 0), time.monotonic() - start
            self.clock.say(f"{folder}: {made} tokens in {spent:.1f} s; " + "; ".join(progress.report()))
            done, turn = done + progress.tokens, turn + 1
            if not progress.tokens:
                break
        if not (self.options.out / "answers.jsonl.gz.json").exists():
            text = b"".join(path.read_bytes() for path in self.texts())
            write_parts(gzip.compress(text), self.options.out, "answers.jsonl.gz")

    def _own_prompts(self) -> list[str]:
        from jetspec.train.prompts import load_exclusion
        from jetspec.train.self_instruct import SelfOptions, write_prompts

        options = self.options
        if not options.own_prompts:
            return []
        path = self.work / "own-prompts.jsonl"
        wanted = SelfOptions(count=options.own_prompts, seed=options.seed, batch=options.batch)
        counts = write_prompts(self.target, path, wanted, load_exclusion(options.exclude), self.clock.check)
        self.clock.say("; ".join(line.strip() for line in counts.report()))
        return [str(path)]

    def texts(self) -> list[Path]:
        """The files that hold the answers."""
        return self.options.answers or sorted(self.work.glob("answers-*/answers.jsonl"))

    # features: the target's states at every token

    def features(self) -> None:
        """Compute what heads are trained on from the text."""
        from jetspec.train.answers import read_answers
        from jetspec.train.replay import replay_answers

        found = [answer for path in self.texts() for answer in read_answers(path)[0]]
        if not found:
            raise SystemExit("there are no answers; run --step answers first")
        start = time.monotonic()
        done = replay_answers(
            self.target, found, self.work / "features", self.taps(), self.clock.check, rows=self.options.rows
        )
        self.clock.say(
            f"features of {done.answered} answers in {time.monotonic() - start:.1f} s; {done.tokens} tokens"
        )

    # plan: how many steps fit

    def plan(self) -> dict[str, Any]:
        """What the plan step left; empty before it."""
        path = self.work / "plan.json"
        return json.loads(path.read_text()) if path.exists() else {}

    def make_plan(self) -> None:
        """Measure a step of every head; the common number of steps makes all of them fit together. Raises
        SystemExit if the schedule has begun with another number of steps than --steps.
        """
        options, seconds = self.options, dict[str, float]()
        if plan := self.plan():
            if options.steps not in (None, plan["steps"]):
                raise SystemExit(
                    f"--steps is {options.steps}, but {self.work} has a plan of {plan['steps']} steps; leave "
                    "it out, or give another --work"
                )
            return
        if options.steps is None:
            for method in self.methods:
                seconds[method] = self._probe(method)
                self.clock.say(f"{method}: {seconds[method] * 1000:.1f} ms a step")
        steps = options.steps or max(1, int(options.train_minutes * 60 / sum(seconds.values())))
        path = self.work / "plan.json"
        path.with_suffix(".tmp").write_text(json.dumps({"steps": steps, "seconds_per_step": seconds}))
        os.replace(path.with_suffix(".tmp"), path)
        self.clock.say(f"plan: {steps} steps for each of {', '.join(self.methods)}")

    def _probe(self, method: str) -> float:
        from jetspec.train.loop import Paused

        times: list[float] = []
        folder = self.work / "probe"
        shutil.rmtree(folder, ignore_errors=True)
        try:
            self._train(
                method, folder, lambda report: times.append(report.seconds), lambda: len(times) >= PROBE
            )
        except Paused:
            shutil.rmtree(folder, ignore_errors=True)
        return (times[-1] - times[WARM - 1]) / (len(times) - WARM)

    def _train(
        self, method: str, folder: Path, on_report: Callable[[Any], None], pause: Callable[[], bool]
    ) -> None:
        from jetspec.train.pipeline import train_head

        train_head(
            self.target,
            [self.work / "features"],
            folder,
            self.settings(method),
            on_report=on_report,
            pause=pause,
            resident=self.options.device.startswith("cuda"),
        )

    # training

    def train(self, method: str) -> None:
        """Train a head to the end of its schedule, and pack it."""
        if method not in METHODS:
            raise SystemExit(f"--step train:{method} is unknown; valid: {', '.join(METHODS)}")
        from jetspec.train.loop import Paused

        folder = self.work / method
        if (folder / "done").exists():
            return

        def watch(report: Any) -> None:
            if report.step % 500 == 0 and report.by_depth:
                depths = " ".join(f"{value:.3f}" for value in report.by_depth)
                self.clock.say(f"{method} step {report.step} of {report.steps}: loss by depth {depths}")

        try:
            self._train(method, folder, watch, lambda: self.clock.left() < RESERVE)
        except Paused as paused:
            self.clock.say(f"{method} {paused}")
            raise OutOfTime from None
        write_parts(packed(folder / "head", folder / "log.jsonl"), self.options.out, f"{method}.tar")
        (folder / "done").touch()
        taus = self._results()["heads"][method]["validation"]["tau"]
        self.clock.say(f"{method}: tau {', '.join(f'{name} {tau:.2f}' for name, tau in taus.items())}")

    def report(self) -> None:
        """tau of every head that is done, as a table."""
        for line in table(self._results()["heads"]):
            print(line, flush=True)

    def _results(self) -> dict[str, Any]:
        """What all heads reached so far; kept in OUT/results.json."""
        import torch

        results: dict[str, Any] = {
            "torch": torch.__version__,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
            "plan": self.plan(),
            "heads": {},
        }
        for method in self.methods:
            path = self.work / method / "head" / "config.json"
            if (self.work / method / "done").exists():
                results["heads"][method] = manifest_of(json.loads(path.read_text()))
        self.options.out.mkdir(parents=True, exist_ok=True)
        (self.options.out / "results.json").write_text(json.dumps(results, indent=2))
        return results


def manifest_of(config: Any) -> dict[str, Any]:
    """The manifest in a head's config.json: the object that holds `validation`, wherever it is."""
    if isinstance(config, dict):
        if "validation" in config and "steps" in config:
            kept = (
                "steps",
                "training_seconds",
                "supervised_blocks",
                "validation",
                "data",
                "products",
                "torch",
            )
            return {key: config.get(key) for key in kept}
        for value in config.values():
            found = manifest_of(value)
            if found:
                return found
    return {}


def tau_of(found: dict[str, Any]) -> dict[str, str]:
    """tau by tree; chains of all depths in one column, with the depth. Empty if no answer was held out."""
    tau = (found.get("validation") or {}).get("tau", {})
    found = {}
    for name, value in tau.items():
        tree, _, budget = name.rpartition("-")
        found["chain" if tree == "chain" else name] = f"{value:.2f}" + f" ({budget})" * (tree == "chain")
    return found


def table(heads: dict[str, Any]) -> list[str]:
    """tau by head and budget as a Markdown table."""
    if not heads:
        return ["no head is done yet"]
    rows = {method: tau_of(found) for method, found in heads.items()}
    budgets = list(dict.fromkeys(name for row in rows.values() for name in row))
    lines = [f"| head | steps | seconds | {' | '.join(budgets)} |", "|---|---|---|" + "---|" * len(budgets)]
    for method, found in heads.items():
        taus = " | ".join(rows[method].get(name, "-") for name in budgets)
        lines.append(f"| {method} | {found['steps']} | {found['training_seconds']} | {taus} |")
    return lines


def run(options: argparse.Namespace, clock: Clock) -> None:
    """One call. Raises OutOfTime if something is left to do."""
    kit = Kit(options, clock)
    trainings: dict[str, Callable[[], None]] = {
        f"train:{method}": (lambda method=method: kit.train(method)) for method in kit.methods
    }
    steps: dict[str, Callable[[], None]] = {
        "answers": kit.answers,
        "features": kit.features,
        "plan": kit.make_plan,
        **trainings,
        "report": kit.report,
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
    options = parse(argv)
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
