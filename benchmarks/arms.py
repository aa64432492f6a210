"""What scripts share that replay several heads along the same texts: options, records, and tables of a run.

A run measures every arm (a head, or a way to use one) on every file of prompts. A record of each file and arm
is written at once, so that an interrupted run goes on with the same command.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import common
import torch
from replay import Answer, record

from jetspec.bench.record import source_hash
from jetspec.bench.table import Grid
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.loading import load_drafter
from jetspec.errors import DataError, OptionError
from jetspec.sampling import Sampling
from jetspec.target.default_model import DEFAULT_MODEL
from jetspec.target.loading import load_target
from jetspec.target.target import Target

# Code that the numbers depend on, beside the package and the script itself.
_BESIDE = ("replay.py", "second_pass.py", "conditional_counts.py")

# --- options


def parser(about: str | None, records: str) -> argparse.ArgumentParser:
    """A parser with the options that these scripts have in common; `records` is the name of their file."""
    made = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument(
        "heads", nargs="*", metavar="HEAD", help="folders of heads, or auto; the first one is the base"
    )
    made.add_argument("--model", default=DEFAULT_MODEL, help="the target (%(default)s)")
    made.add_argument("--data", type=Path, default=common.DATA, help="folder of the files of prompts")
    made.add_argument(
        "--files", nargs="+", default=list(common.SETS), help="NAME.jsonl in it; all seven sets"
    )
    made.add_argument("--prompts", type=int, default=10, help="per file, evenly spaced (%(default)s)")
    made.add_argument("--tokens", type=int, default=64, help="new tokens (%(default)s)")
    made.add_argument("--json", type=Path, default=common.RESULTS / records, help="the file of records")
    made.add_argument("--threads", type=int, help="CPU threads; by default what torch chooses")
    made.add_argument("--table", action="store_true", help="print Markdown of a run that is recorded")
    made.add_argument("--run", help="with --table: key of the run; the newest one if not given")
    return made


def check(args: argparse.Namespace) -> None:
    """Raises OptionError for values that no script can use."""
    if not args.table and not args.heads:
        raise OptionError("no head given; give folders of heads, or --table to print what is recorded")
    for name in ("prompts", "tokens", "threads"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise OptionError(f"--{name} must be at least 1, got {value}")


def open_target(args: argparse.Namespace) -> Target:
    """The target in float32 on the CPU."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return load_target(args.model)


def open_heads(args: argparse.Namespace, target: Target) -> dict[str, BlockDrafter]:
    """The heads by their names, in the given order. Raises OptionError for heads of another kind."""
    found = {}
    for head, name in zip(args.heads, names_of(args.heads), strict=True):
        drafter = load_drafter(head, target)
        if not isinstance(drafter, BlockDrafter):
            raise OptionError(f"{head} is no block head; valid: folders of jetspec, dflash or dspark heads")
        found[name] = drafter
    return found


def names_of(heads: Many[str]) -> list[str]:
    """A short name for each head's folder: its own, or its parent's where it is only called "head".

    Raises OptionError if two heads would have the same name.
    """
    names = []
    for head in heads:
        parts = head.replace("\\", "/").rstrip("/").split("/")
        names.append(parts[-2] if parts[-1] == "head" and len(parts) > 1 else parts[-1])
    for name in names:
        if names.count(name) > 1:
            raise OptionError(f"two heads are called {name!r}; give folders of different names")
    return names


# --- records


def facts_of(
    script: Path, args: argparse.Namespace, target: Target, arms: Iterable[str], **more: Any
) -> dict[str, Any]:
    """Provenance of a run; `more` are further arguments that its numbers depend on."""
    heads = [
        {**common.head_identity(head, target), "name": name}
        for head, name in zip(args.heads, names_of(args.heads), strict=True)
    ]
    given = {"model": target.name, "heads": heads, "arms": list(arms), "dtype": "float32"}
    facts = common.provenance(script, {**given, "prompts": args.prompts, "tokens": args.tokens, **more})
    beside = [script.parent / name for name in _BESIDE]
    return {**facts, "source": source_hash(Path(common.__file__), script, *beside)}


def measure_missing(
    args: argparse.Namespace,
    target: Target,
    facts: dict[str, Any],
    layers: Iterable[int],
    measure: Callable[[str, list[Answer]], dict[str, Any]],
) -> list[dict[str, Any]]:
    """Measure and record what the run lacks; returns its records of the wanted files.

    Args:
        layers: outputs of the target that the arms read.
        measure: an arm's name and the answers of a file to what is recorded.
    """
    journal, key, arms = common.Journal(args.json), common.run_key(facts), facts["arguments"]["arms"]
    done = {(r["set"], r["arm"]) for r in journal.read() if r["kind"] == "arm" and r["key"] == key}
    lacking = [name for name in args.files if any((name, arm) not in done for arm in arms)]
    if lacking:
        journal.append({"kind": "run", "key": key, "run": facts})
    layers = list(layers)
    with common.progress() as bar:
        task = bar.add_task("files and heads", total=len(lacking) * len(arms))
        for name in lacking:
            questions = common.read_set(args.data, name, args.prompts)
            prompts = [common.encode(target, q.text) for q in questions]
            answers = record(target, layers, prompts, [Sampling()] * len(prompts), args.tokens)
            place = {"kind": "arm", "key": key, "set": name, "ids": [q.id for q in questions]}
            for arm in arms:
                if (name, arm) not in done:
                    journal.append({**place, "arm": arm, **measure(arm, answers)})
                bar.advance(task)
    return [r for r in newest_run(journal.read(), key)[1] if r["set"] in args.files]


def newest_run(
    records: Many[dict[str, Any]], key: str | None = None
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Provenance and records of a run: the newest, or the one with this key; the last record of each file and
    arm counts. Raises DataError if there is none."""
    runs = [r for r in records if r["kind"] == "run" and key in (None, r["key"])]
    if not runs:
        raise DataError("no such run is recorded; measure first, or give another file with --json")
    key = runs[-1]["key"]
    latest = {(r["set"], r["arm"]): r for r in records if r["kind"] == "arm" and r["key"] == key}
    return runs[-1]["run"], list(latest.values())


def complete(facts: dict[str, Any], records: Many[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Arm to its records, of the files that all arms have, so that rows stay paired. Raises DataError if
    there is no such file."""
    arms = facts["arguments"]["arms"]
    by_place = {(r["set"], r["arm"]): r for r in records}
    sets = dict.fromkeys(r["set"] for r in records)
    whole = [name for name in sets if all((name, arm) in by_place for arm in arms)]
    if not whole:
        raise DataError("no file has been walked with all heads yet; start the same command again")
    return {arm: [by_place[name, arm] for name in whole] for arm in arms}


def files_of(arms: dict[str, list[dict[str, Any]]]) -> str:
    """The files of a run and how many prompts of each."""
    return ", ".join(f"{r['set']} ({len(r['ids'])})" for r in next(iter(arms.values())))


# --- tables


def show(grids: Iterable[Grid], notes: Iterable[str], facts: dict[str, Any]) -> None:
    """Print tables, notes and where the numbers come from."""
    console = common.console()
    for grid in grids:
        for table in grid.tables(console.width if console.is_terminal else None):
            console.print(table)
    for line in (*notes, common.footer(facts)):
        console.print(line)


def markdown(grids: Iterable[Grid], notes: Iterable[str], facts: dict[str, Any]) -> str:
    """The same for a page."""
    parts = [f"**{grid.title}**\n\n{grid.markdown()}" for grid in grids]
    return "\n\n".join([*parts, *notes, f"Measured {facts['date'][:10]}: {common.footer(facts)}."])


def print_newest(
    args: argparse.Namespace,
    grids: Callable[[dict[str, Any], list[dict[str, Any]]], Iterable[Grid]],
    notes: Callable[[dict[str, Any], list[dict[str, Any]]], Iterable[str]],
) -> int:
    """What --table does: print the newest run's records, or those of --run, for a page. Raises DataError."""
    facts, records = newest_run(common.Journal(args.json).read(), args.run)
    print(markdown(grids(facts, records), notes(facts, records), facts))
    return 0
