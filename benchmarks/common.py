"""What the measurement scripts share; records, provenance and prompts are those of `jetspec.bench`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rich.console import Console
from rich.progress import Progress

from jetspec.bench import prompts, record
from jetspec.bench.prompts import SETS, WARM_UP
from jetspec.bench.record import cpu_name, footer, run_key
from jetspec.cli.progress import new_bar
from jetspec.decode.engine import Engine
from jetspec.decode.stats import Stats
from jetspec.draft.base import Drafter
from jetspec.draft.loading import PACKAGED, load_drafter, packaged_head
from jetspec.errors import OptionError, UserError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.default_model import DEFAULT_MODEL
from jetspec.target.loading import load_target
from jetspec.target.target import Target

PROJECT = Path(__file__).resolve().parents[1]
RESULTS = PROJECT / "benchmarks" / "results"
DATA = PROJECT.parent / "shared" / "data" / "eval"
__all__ = [
    "DATA", "PROJECT", "RESULTS", "SETS", "WARM_UP", "Journal", "Question", "console", "cpu_name", "encode",
    "footer", "head_identity", "load", "note", "parser", "progress", "provenance", "read_set", "run",
    "run_key", "warm_up",
]  # fmt: skip


# --- prompts


class Question(NamedTuple):
    """One prompt of an evaluation set: its first user turn."""

    set: str
    id: str
    text: str


def read_set(folder: Path, name: str, count: int) -> list[Question]:
    """`count` questions of a set; see `jetspec.bench.prompts.read_file`."""
    found = prompts.read_file(folder / f"{name}.jsonl", count)
    return [Question(q.set, q.id, q.messages[-1]["content"]) for q in found]


def encode(target: Target, text: str) -> list[int]:
    """A question in the chat template, thinking mode left at its default; as it is without a template."""
    return prompts.encode(target, prompts.Question("", "", ({"role": "user", "content": text},)))


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
    """Where numbers come from; see `jetspec.bench.record.provenance`."""
    source = record.source_hash(Path(__file__), script)
    return {"script": script.name, **record.provenance(arguments), "source": source}


def head_identity(head: str, target: Target) -> dict[str, str | None]:
    """What `--head` stands for: its name and, for a folder, a hash of its weights. The path is left out."""
    folder = packaged_head(target.name) if head in PACKAGED else Path(head).expanduser()
    weights = None if folder is None else folder / "model.safetensors"
    if weights is None or not weights.is_file():
        return {"name": "off" if head in PACKAGED else head, "sha256": None}
    name = "auto" if head in PACKAGED else Path(head).name
    return {"name": name, "sha256": record.file_hash(weights)}


def Journal(path: Path) -> record.Journal:
    """A file of records whose unreadable lines are told of."""
    return record.Journal(path, note)


# --- the terminal


def console() -> Console:
    """Standard output; wide enough for every table where it is redirected."""
    made = Console(highlight=False)
    return made if made.is_terminal else Console(highlight=False, width=160)


def note(text: str) -> None:
    """A line on standard error."""
    Console(stderr=True, highlight=False, markup=False).print(text)


def progress() -> Progress:
    """A progress bar on standard error; use it as a context."""
    return new_bar(elapsed=True)


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
