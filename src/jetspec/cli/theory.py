"""`jetspec theory`: what speedup the published formula promises, and what this machine's rounds allow."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetspec.cli import bench_options, options
from jetspec.cli.bench_input import numbers_of
from jetspec.cli.bench_run import read_run
from jetspec.cli.screen import Screen
from jetspec.errors import OptionError

Alphas = Annotated[
    str,
    typer.Option("--alpha", metavar="LIST", help="Chances that a drafted token is accepted, with commas."),
]
Costs = Annotated[
    str,
    typer.Option(
        "--cost", "-c", metavar="LIST", help="c: costs of a drafted token in target steps, with commas."
    ),
]
Records = Annotated[
    list[Path] | None,
    typer.Argument(metavar="RECORDS", help="Files of jetspec bench, to mark where this machine stands."),
]
Picture = Annotated[
    list[Path] | None,
    typer.Option("--out", "-o", metavar="FILE", help="Draw it: a .svg or .png file. May be repeated."),
]
Temperature = Annotated[
    float | None,
    typer.Option(
        "--temperature", "-t", metavar="T", help="Which temperature of the records; the lowest if left out."
    ),
]
Batch = Annotated[int, typer.Option("--batch", metavar="N", help="Which batch size of the records.")]


def theory(
    records: Records = None,
    alpha: Alphas = "0.6,0.7,0.8,0.9",
    cost: Costs = "0.05,0.0005",
    out: Picture = None,
    temperature: Temperature = None,
    batch: Batch = 1,
    run: bench_options.RunKey = None,
    json: options.Json = False,
) -> None:
    """Compare the papers' speedup formula with measured rounds.

    The formula is (1 - alpha^(N+1)) / ((1 - alpha)(N c + 1)): N tokens are drafted at a cost of c target
    steps each and accepted with probability alpha each, and verifying them costs one step. The other model
    prices a round as it was measured: tau(B) / ((draft + build + verify(B) + commit) / plain step).
    """
    from jetspec.bench import theory as models
    from jetspec.bench.plot import save
    from jetspec.bench.summary import summarise

    screen = Screen()
    alphas, costs = numbers_of(alpha, "--alpha", float), numbers_of(cost, "--cost", float)
    if not alphas or not costs:
        raise OptionError("--alpha and --cost must have at least one value each")
    grids = models.formula_grids(alphas, costs)
    found: list[models.Mark] = []
    rows = []
    if records:
        rows = summarise(read_run(screen, records, run).items)
        found = models.marks(rows, temperature, batch)
        level = min(row.temperature for row in rows) if temperature is None else temperature
        rows = [row for row in rows if (row.temperature, row.batch) == (level, batch)]
        grids.append(models.mark_grid(found))
    for path in out or []:
        if path.suffix not in (".svg", ".png"):
            raise OptionError(f"--out is {path}; give a .svg or a .png file")
        save(models.draw(alphas, costs, found, rows), path)
    if json:
        screen.json(
            {
                "formula": [
                    {"alpha": a, "c": c, "n": n, "speedup": models.predicted_speedup(a, c, n)}
                    for c in costs
                    for a in alphas
                    for n in models.LENGTHS
                ],
                "measured": [mark.values() for mark in found],
                "verify": models.verify_curve(rows) if rows else [],
                "pictures": [str(path) for path in out or []],
            }
        )
        return
    for grid in grids:
        screen.grid(grid)
    if found:
        screen.line(
            "alpha and the formula are for chains only; nodes: drafted per round, on average."
            " by phases: τ / (draft + build + verify + commit), medians in plain steps;"
            " measured: on the clock, with the engine's work between the phases."
        )
    for path in out or []:
        screen.line(str(path))
