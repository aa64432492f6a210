"""What the measurement scripts share: prompts, the model, provenance and records."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from jetspec.decode.engine import Engine
from jetspec.decode.stats import Stats
from jetspec.draft.base import Drafter
from jetspec.draft.loading import load_drafter, packaged_head
from jetspec.errors import DataError, OptionError, UserError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.default_model import DEFAULT_MODEL
from jetspec.target.loading import load_target
from jetspec.target.target import Target

PROJECT = Path(__file__).resolve().parents[1]
RESULTS = PROJECT / "benchmarks" / "results"
DATA = PROJECT.parent / "shared" / "data" / "eval"
SETS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench")
# Not in any set, so no measured prompt has been seen before.
WARM_UP = "Describe in a few sentences how a bicycle stays upright while it is moving."


# --- prompts


class Question(NamedTuple):
    """One prompt of an evaluation set: its first user turn."""

    set: str
    id: str
    text: str


def read_set(folder: Path, name: str, count: int) -> list[Question]:
    """`count` questions, evenly spaced over the file: number i of n is line floor(i * lines / n), from 0 on.

    All of them, if there are fewer. The file `name`.jsonl holds one object a line with `turns` (a list of
    user turns) and perhaps `id`.

    Raises DataError if it is missing or a line cannot be read.
    """
    path = folder / f"{name}.jsonl"
    if count < 1:
        raise OptionError(f"--prompts must be at least 1, got {count}")
    try:
        # Not splitlines: JSON may hold U+2028.
        lines = [line for line in path.read_text("utf-8").split("\n") if line.strip()]
    except OSError as error:
        raise DataError(
            f"cannot read {path} ({error.strerror}); give the folder of the evaluation sets with --data"
        ) from None
    count = min(count, len(lines))
    chosen = [index * len(lines) // count for index in range(count)]
    questions = []
    for index in chosen:
        try:
            record = json.loads(lines[index])
            questions.append(
                Question(name, str(record.get("id", f"{name}-{index}")), str(record["turns"][0]))
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
            raise DataError(f"{path} line {index + 1} is no object with `turns` ({error!r})") from None
    return questions


def encode(target: Target, text: str) -> list[int]:
    """A question in the chat template, thinking mode left at its default; as it is without a template."""
    tokenizer = target.tokenizer
    return (
        tokenizer.chat([{"role": "user", "content": text}])
        if tokenizer.has_template
        else tokenizer.encode(text)
    )


# --- the model


def parser(about: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every script has; `about` is the script's docstring."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "--model", default=DEFAULT_MODEL, help="the target, as for jetspec --model (%(default)s)"
    )
    made.add_argument("--head", default="auto", help="the draft head, as for jetspec --head (%(default)s)")
    made.add_argument("--data", type=Path, default=DATA, help="folder of the evaluation sets")
    made.add_argument("--results", type=Path, default=RESULTS, help="folder that records are added to")
    made.add_argument("--threads", type=int, help="CPU threads; by default what torch chooses")
    made.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    return made


def load(args: argparse.Namespace) -> tuple[Target, Drafter]:
    """The target in float32 on the CPU, and its drafter."""
    if args.threads is not None:
        if args.threads < 1:
            raise OptionError(f"--threads must be at least 1, got {args.threads}")
        torch.set_num_threads(args.threads)
    target = load_target(args.model)
    return target, load_drafter(args.head, target)


def warm_up(engine: Engine, tokens: int = 16) -> None:
    """Decode a prompt of its own through an engine, then forget the counts."""
    engine.generate([encode(engine.target, WARM_UP)], Sampling(), Limits(max_tokens=tokens, ignore_eos=True))
    engine.stats = Stats()


# --- records


def provenance(script: Path, arguments: dict[str, Any]) -> dict[str, Any]:
    """Where numbers come from.

    dirty    src/ or benchmarks/ differ from the commit, records aside
    source   a hash of the code that ran
    load     of the machine, before the script adds to it
    """
    return {
        "script": script.name,
        "arguments": arguments,
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": bool(_git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")),
        "source": _source_hash(script),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }


def run_key(facts: dict[str, Any]) -> str:
    """Equal for runs whose records may be put together: same arguments, code, versions and machine."""
    same = {name: value for name, value in facts.items() if name not in ("date", "load")}
    return hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:16]


def head_identity(head: str, target: Target) -> dict[str, str | None]:
    """What `--head` stands for: its name and, for a folder, a hash of its weights. The path is left out."""
    folder = packaged_head(target.name) if head == "auto" else Path(head).expanduser()
    weights = None if folder is None else folder / "model.safetensors"
    if weights is None or not weights.is_file():
        return {"name": "off" if head == "auto" else head, "sha256": None}
    name = "auto" if head == "auto" else Path(head).name
    return {"name": name, "sha256": hashlib.sha256(weights.read_bytes()).hexdigest()[:16]}


class Journal:
    """A file of records, one JSON object a line. One that a killed process left half-written is skipped."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> list[dict[str, Any]]:
        """All complete records, oldest first; none if the file does not exist."""
        records = []
        for line in self.path.read_text("utf-8").split("\n") if self.path.exists() else ():
            try:
                records.append(json.loads(line))
            except ValueError:
                if line.strip():
                    note(f"{self.path.name}: skipped an unreadable line")
        return records

    def append(self, record: dict[str, Any]) -> None:
        """Add one record at once, after the end of a half-written one if there is one."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
        with self.path.open("a+b") as file:
            if file.seek(0, os.SEEK_END):
                file.seek(-1, os.SEEK_END)
                if file.read(1) != b"\n":
                    line = "\n" + line
            file.write(line.encode())


def cpu_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    names = (
        [
            line.split(":", 1)[1].strip()
            for line in info.read_text().splitlines()
            if line.startswith("model name")
        ]
        if info.exists()
        else []
    )
    return names[0] if names else platform.processor() or platform.machine()


def _git(*arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(PROJECT), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _source_hash(script: Path) -> str:
    digest = hashlib.sha256()
    for path in [*sorted((PROJECT / "src").rglob("*.py")), PROJECT / "benchmarks" / "common.py", script]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


# --- the terminal


def console() -> Console:
    """Standard output; wide enough for every table where it is redirected."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=160)


def footer(facts: dict[str, Any]) -> str:
    """Machine, versions and commit in one line."""
    versions = f"torch {facts['torch']}, transformers {facts['transformers']}"
    commit = f"commit {facts['commit']}{' with changes' if facts['dirty'] else ''}"
    return f"{facts['cpu']}, {facts['threads']} threads, {versions}, {commit}"


def note(text: str) -> None:
    """A line on standard error."""
    Console(stderr=True, highlight=False, markup=False).print(text)


def progress() -> Progress:
    """A progress bar on standard error; use it as a context."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=Console(stderr=True))


def run(main: Callable[[], int]) -> None:
    """Run a script's `main`; what the user got wrong becomes one line and exit code 2."""
    try:
        sys.exit(main())
    except UserError as error:
        note(f"error: {error}")
        sys.exit(2)
    except KeyboardInterrupt:
        note("interrupted; what was recorded is kept")
        sys.exit(130)
