"""`jetspec bench`: every method side by side, and tables, plots and a report of what was recorded."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from jetspec.cli import bench_options, options
from jetspec.cli.bench_input import budgets_of, find_questions, given_heads, names_of, numbers_of
from jetspec.cli.bench_run import list_methods as list_them
from jetspec.cli.bench_run import measure, prepare, read_run, show
from jetspec.cli.loading import use_threads
from jetspec.cli.profile import profile
from jetspec.cli.screen import Screen
from jetspec.errors import OptionError

app = typer.Typer(
    short_help="Measure methods side by side: speedup, tau and losslessness.",
    invoke_without_command=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["--help", "-h"]},
)


@app.callback()
def bench(
    context: typer.Context,
    model: options.Model = options.DEFAULT_MODEL,
    methods: bench_options.Methods = "all",
    sets: bench_options.Sets = None,
    data: bench_options.Data = None,
    prompt_file: bench_options.PromptFile = None,
    prompts: bench_options.Prompts = 10,
    tokens: bench_options.Tokens = 64,
    budgets: bench_options.Budgets = str(options.DEFAULT_BUDGET),
    temperatures: bench_options.Temperatures = "0",
    batch: bench_options.Batches = "1",
    seed: bench_options.Seeds = "0",
    head: bench_options.HeadOf = None,
    heads: bench_options.HeadFolder = None,
    confidence: bench_options.Confidence = 0.3,
    assistant: bench_options.Assistant = None,
    outside_prompts: bench_options.OutsidePrompts = 3,
    ignore_eos: bench_options.IgnoreEos = False,
    out: bench_options.Out = Path("jetspec-bench.jsonl"),
    fresh: bench_options.Fresh = False,
    list_methods: bench_options.ListThem = False,
    take_apart: bench_options.Profile = False,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Measure methods side by side: speedup, tau and losslessness, against plain decoding of the same engine.

    Methods take turns on every prompt. What is recorded already, with the same arguments, code and machine,
    is not measured again. Exit code 1 if an answer differs from plain decoding by more than rounding.
    """
    if context.invoked_subcommand is not None:
        return
    if take_apart:
        profile(model, threads=threads, json=json, quiet=quiet, no_color=no_color)
        return
    from jetspec.bench.methods import choose_methods
    from jetspec.bench.record import Journal
    from jetspec.bench.run import Settings

    named = names_of(methods, "--methods")
    chosen = choose_methods(named)
    settings = Settings(
        budgets=budgets_of(budgets),
        temperatures=numbers_of(temperatures, "--temperatures", float),
        batches=numbers_of(batch, "--batch", int),
        seeds=numbers_of(seed, "--seed", int),
        tokens=tokens,
        ignore_eos=ignore_eos,
        outside_prompts=outside_prompts,
    )
    screen = Screen(no_color=no_color, quiet=quiet)
    given = given_heads(head or [])
    questions = (
        [] if list_methods else find_questions(screen, sets, data, prompt_file or [], prompts, settings)
    )
    if not list_methods:
        Journal(out).check()
    use_threads(threads)
    screen.progress(f"loading {model}")
    from jetspec.bench.methods import Heads, sort_out
    from jetspec.storage import user_path
    from jetspec.target.loading import load_target

    target = load_target(model, dtype=dtype, device=device)
    places = Heads(target, given, None if heads is None else user_path(heads), confidence)
    if list_methods:
        list_them(screen, target, places, assistant, json)
        return
    usable, skipped = sort_out(chosen, places, lambda text: screen.note(f"jetspec: {text}", style=""), named)
    made = prepare(screen, target, usable, skipped, places, settings, out, model, assistant, named)
    measure(screen, made, questions, target, settings, fresh, json)


app.command("profile")(profile)


@app.command("table")
def table(
    records: bench_options.Records, run: bench_options.RunKey = None, json: options.Json = False
) -> None:
    """Print a run's tables as Markdown."""
    from jetspec.bench.record import footer
    from jetspec.bench.summary import summarise
    from jetspec.bench.table import findings, grids, legend

    screen = Screen()
    chosen = read_run(screen, records, run)
    rows = summarise(chosen.items)
    if json:
        show(screen, chosen, rows, json)
        return
    skipped = chosen.facts["arguments"].get("skipped", {})
    parts = [f"### {grid.title}\n\n{grid.markdown()}" for grid in grids(rows, skipped)]
    parts += [legend(rows), "\n".join(f"- {line}" for line in findings(rows, skipped))]
    state = f"; {chosen.unfinished}" if chosen.unfinished else ""
    parts += [f"Measured on {footer(chosen.facts)}; {chosen.facts['date']}; run {chosen.key}{state}."]
    print("\n\n".join(filter(None, parts)))


@app.command("plot")
def plot(
    records: bench_options.Records,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder that the pictures are written to.")
    ] = Path("plots"),
    kind: Annotated[
        str, typer.Option("--format", metavar="NAME", help="svg, png, or both with a comma.")
    ] = "svg,png",
    run: bench_options.RunKey = None,
) -> None:
    """Draw a run: tau and speedup against budget and batch, the split of a round, acceptance by depth."""
    from jetspec.bench.plot import figures, save
    from jetspec.bench.summary import summarise

    kinds = names_of(kind, "--format")
    if not set(kinds) <= {"svg", "png"}:
        raise OptionError(f"--format is {kind!r}; valid: svg, png, or both with a comma")
    screen = Screen()
    for name, figure in figures(summarise(read_run(screen, records, run).items)).items():
        for suffix in kinds:
            path = out / f"{name}.{suffix}"
            save(figure, path)
            screen.line(str(path))


@app.command("report")
def report(
    records: bench_options.Records,
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="The page to write.")] = Path(
        "report.html"
    ),
    run: bench_options.RunKey = None,
) -> None:
    """Write one self-contained HTML page with all tables and plots of a run."""
    from jetspec.bench.report import page
    from jetspec.storage import storage_errors

    screen = Screen()
    text = page(read_run(screen, records, run))
    with storage_errors(out, "--out"):
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, "utf-8")
    screen.line(f"{out}: {len(text) / 1024:.0f} KiB")
