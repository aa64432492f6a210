"""The runs of `jetspec bench`: made ready, measured under a progress bar, shown; and the list of methods."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from jetspec.cli.interrupt import Interrupted
from jetspec.cli.plain_lines import PlainLines
from jetspec.cli.progress import new_bar
from jetspec.cli.screen import Screen
from jetspec.errors import OptionError

if TYPE_CHECKING:
    from jetspec.bench.methods import Heads, Method
    from jetspec.bench.prompts import Question
    from jetspec.bench.run import Bench, Item, Settings
    from jetspec.bench.runs import Run
    from jetspec.bench.summary import Row
    from jetspec.target.target import Target


def prepare(
    screen: Screen,
    target: Target,
    usable: list[Method],
    skipped: dict[str, str],
    places: Heads,
    settings: Settings,
    out: Path,
    model: str,
    assistant: str | None,
    named: Many[str] = (),
) -> Bench:
    """Load the outside baselines, leaving out those that cannot run, and put everything together.

    Methods that no case asks for stay: what is run later with the same arguments belongs to the same run.

    named: methods that were asked for by name. Raises OptionError if one of them cannot run.
    """
    from jetspec.bench.baselines import Library
    from jetspec.bench.record import Journal
    from jetspec.bench.run import Bench
    from jetspec.errors import UserError

    if settings.outside_prompts == 0:
        unwanted = [method.name for method in usable if method.outside and method.name in named]
        if unwanted:
            raise OptionError(f"--outside-prompts 0 leaves out {unwanted[0]}, which --methods names")
        usable = [method for method in usable if not method.outside]
    library = Library(target, model, assistant) if any(m.outside for m in usable) else None
    for method in list(usable):
        if not settings.reaches(method):
            where = "T = 0 and batch 1" if method.outside else "temperatures above 0"
            screen.note(f"jetspec: {method.name} is measured at {where} only", style="")
        elif method.outside and library is not None:
            try:
                library.model()
                library.options(method.name)
            except UserError as error:
                if method.name in named:
                    raise OptionError(f"method {method.name} cannot run: {error}") from None
                usable.remove(method)
                skipped[method.name] = str(error)
                screen.note(f"jetspec: {method.name} is left out: {error}", style="")
    usable = _with_variants(screen, usable, settings, places, skipped, named)
    journal = Journal(out, lambda text: screen.note(f"jetspec: {text}", style=""))
    return Bench(target, usable, places, settings, journal, library, skipped)


def _with_variants(
    screen: Screen,
    usable: list[Method],
    settings: Settings,
    places: Heads,
    skipped: dict[str, str],
    named: Many[str],
) -> list[Method]:
    """The methods that a budget suits; see `methods.variants`. Raises OptionError if a named one has none."""
    from jetspec.bench.methods import variants

    there = {method for method, _ in variants(usable, settings.budgets, places)}
    for method in usable:
        if method not in there:
            why = "it takes no budget but numbers, because its drafts must not be cut: add one to --budgets"
            if method.name in named:
                raise OptionError(f"method {method.name} cannot run: {why}")
            skipped[method.name] = why
            screen.note(f"jetspec: {method.name} is left out: {why}", style="")
    return [method for method in usable if method in there]


def measure(
    screen: Screen,
    made: Bench,
    questions: list[Question],
    target: Target,
    settings: Settings,
    fresh: bool,
    json: bool,
) -> None:
    """Measure what is missing under a progress bar, then show all that was asked for."""
    from jetspec.bench.run import place_of, plan
    from jetspec.bench.runs import runs_of
    from jetspec.bench.summary import summarise
    from jetspec.errors import DataError

    items = plan(questions, target, settings, lambda text: screen.note(f"jetspec: {text}", style=""))
    recorded = made.done()  # read in any case, so that nothing is added to a file of another kind
    done = set() if fresh else recorded
    missing = [item for item in items if item.place not in done]
    if len(missing) < len(items):
        screen.note(
            f"jetspec: {len(items) - len(missing)} of {len(items)} groups of prompts are recorded already"
        )
    try:
        _watch(screen, made, missing, len(items) - len(missing), hidden=json, fresh=fresh)
    except KeyboardInterrupt:
        raise Interrupted(f"what is done is kept in {made.journal.path}") from None
    wanted = {item.place for item in items}
    run = next((run for run in runs_of(made.journal.read()) if run.key == made.key), None)
    if run is None:
        raise DataError(
            f"{made.journal.path} no longer holds this run, so it was deleted or replaced while measuring; "
            "measure again, and leave the file where it is"
        )
    rows = summarise([record for record in run.items if place_of(record) in wanted])
    show(screen, run, rows, json)
    if any(row.broken for row in rows if not row.outside):
        raise typer.Exit(1)


def _watch(
    screen: Screen, made: Bench, missing: list[Item], done: int, hidden: bool, fresh: bool = False
) -> None:
    """Run under a progress bar with the time that is left; without a terminal, a line now and then.

    done: groups that were asked for and are recorded already. hidden: show no progress.
    fresh: see `Bench.run`.
    """
    hidden = hidden or screen.quiet
    bar = new_bar(screen.err, elapsed=True, hidden=hidden, transient=True)
    lines = PlainLines("measuring", "groups", len(missing), hidden=hidden or not bar.disable)
    task = bar.add_task("measuring", total=len(missing))
    with bar, lines:
        lines.show(0)
        for number, item in enumerate(made.run(missing, done, fresh), start=1):
            case = f"{item.set}, T = {item.temperature:g}"
            bar.update(task, advance=1, description=case)
            lines.show(number, f"the last of {case}")


def show(screen: Screen, run: Run, rows: list[Row], json: bool) -> None:
    """Tables of a run, its misses, and where the numbers come from."""
    from jetspec.bench.record import footer
    from jetspec.bench.runs import volume
    from jetspec.bench.table import findings, grids, legend

    skipped = run.facts["arguments"].get("skipped", {})
    lines = findings(rows, skipped)
    if json:
        screen.json(
            {
                "key": run.key,
                "unfinished": run.unfinished,
                "run": run.facts,
                "rows": [row.values() for row in rows],
                "findings": lines,
                "peak_memory": max(
                    (i["peak_memory"] or 0 for i in run.items if "peak_memory" in i), default=0
                ),
            }
        )
        return
    for grid in grids(rows, skipped, depths=False):
        screen.grid(grid)
    for line in [legend(rows), *lines, volume(run), footer(run.facts), f"run {run.key}, {run.facts['date']}"]:
        screen.line(line)


def list_methods(screen: Screen, target: Target, places: Heads, assistant: str | None, json: bool) -> None:
    """The methods with what they are and where their heads are."""
    from jetspec.bench.methods import METHODS

    listed = []
    for method in METHODS.values():
        place = None if method.family is None else places.find(method)
        if method.family is not None:
            state = "no head" if place is None else f"head {place}"
        elif method.name == "hf-assisted":
            state = "no assistant" if assistant is None else f"assistant {assistant}"
        else:
            state = "ready"
        listed.append({"method": method.name, "about": method.about, "family": method.family, "state": state})
    if json:
        screen.json({"model": target.name, "methods": listed})
        return
    widths = {key: max(len(str(entry[key])) for entry in listed) for key in ("method", "about")}
    for entry in listed:
        cells = [f"{entry[key]:<{width}}" for key, width in widths.items()]
        screen.line("  ".join([*cells, str(entry["state"])]))


def read_run(screen: Screen, records: list[Path], key: str | None) -> Run:
    """The chosen run of the files."""
    from jetspec.bench.record import Journal
    from jetspec.bench.runs import choose_run, runs_of
    from jetspec.errors import DataError

    found = []
    for path in records:
        if not path.is_file():
            raise DataError(f"{path} is no file of records; jetspec bench --out writes one")
        found += Journal(path, lambda text: screen.note(f"jetspec: {text}", style="")).read()
    run = choose_run(runs_of(found), key, " ".join(map(str, records)))
    if run.unfinished:
        screen.note(f"jetspec: run {run.key}: {run.unfinished}; the same command goes on", style="")
    return run
