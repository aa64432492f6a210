"""`jetspec bench profile`: where the time of a round goes, beside what the machine could do."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetspec.cli import bench_options, options
from jetspec.cli.loading import use_threads
from jetspec.cli.screen import Screen
from jetspec.errors import OptionError

if TYPE_CHECKING:
    from jetspec.bench.profile import Operator, Profile
    from jetspec.bench.table import Grid


def profile(
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = "auto",
    prompts: Annotated[int, typer.Option("--prompts", metavar="N", help="Built-in prompts to decode.")] = 4,
    prompt_file: bench_options.PromptFile = None,
    tokens: bench_options.Tokens = 128,
    budget: options.Budget = options.DEFAULT_BUDGET,
    grow: options.Grow = None,
    threads: options.Threads = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Take rounds apart by phase and operator: time, bytes, arithmetic, share of the machine's ceilings.

    Plain and drafted decoding are profiled one after the other, greedily and one prompt at a time. The
    ceilings (memory read, large product) are measured first, in the same run.
    """
    if tokens < 16:
        raise OptionError(f"--tokens must be at least 16 for a profile, got {tokens}")
    from jetspec.api import published_grow
    from jetspec.bench import prompts as questions
    from jetspec.bench.profile import as_record, measure_ceilings
    from jetspec.bench.profile import profile as measure
    from jetspec.bench.record import provenance
    from jetspec.draft.loading import load_drafter
    from jetspec.draft.stubs import Off
    from jetspec.target.loading import load_target

    screen = Screen(quiet=quiet or json, no_color=no_color)
    use_threads(threads)
    screen.progress(f"loading {model}")
    target = load_target(model)
    drafter = load_drafter(head, target)
    grow = published_grow(drafter) if grow is None else grow
    found = [q for path in prompt_file or () for q in questions.read_file(Path(path), prompts)]
    chosen = found or questions.builtin(prompts)
    ids = [questions.encode(target, question) for question in chosen]
    ceilings = measure_ceilings()
    ways = [("plain", Off(), 0)] + ([(f"{drafter.name} {grow}", drafter, budget)] if budget else [])
    profiles = [
        measure(target, d, ids, ceilings, method=name, budget=n, grow=grow, tokens=tokens)
        for name, d, n in ways
    ]
    if json:
        asked = {"model": target.name, "head": head, "tokens": tokens, "budget": budget, "grow": grow}
        screen.json({"run": provenance(asked), **as_record(ceilings, profiles)})
        return
    for one in profiles:
        screen.grid(_grid(one))
    screen.line(
        f"ceilings: {ceilings.read / 1e9:.1f} GB/s read, {ceilings.product / 1e9:.0f} GFLOP/s in a product;"
        " ceiling = the longer of an operator's two floors / its time"
    )


def _grid(profile: Profile) -> Grid:
    from jetspec.bench.table import Grid

    title = (
        f"{profile.method}, budget {profile.budget}: {1e3 * profile.seconds:.2f} ms a round,"
        f" tau {profile.tau:.2f}, {profile.context:.0f} tokens of context,"
        f" {100 * profile.host:.0f} % outside compiled code"
    )
    columns = ("phase", "operator", "ms", "share", "MB", "MFLOP", "GB/s", "GFLOP/s", "ceiling")
    rows, last = [], ""
    for operator in profile.operators:
        phase = operator.phase if operator.phase != last else ""
        rows.append((phase, operator.name, *_cells(operator, profile)))
        last = operator.phase
    return Grid(title, columns, rows, names=2)


def _cells(operator: Operator, profile: Profile) -> list[str]:
    seconds = operator.seconds
    cells = [f"{1e3 * seconds:.2f}", f"{100 * seconds / profile.seconds:.1f} %"]
    if operator.of_ceiling is None:
        return [*cells, "", "", "", "", ""]
    return [
        *cells,
        f"{operator.bytes / 1e6:.1f}",
        f"{operator.flops / 1e6:.0f}",
        f"{operator.bytes / seconds / 1e9:.1f}",
        f"{operator.flops / seconds / 1e9:.0f}",
        f"{100 * operator.of_ceiling:.0f} %",
    ]
