"""`jetspec demo`: four prompts with and without drafts, as `make demo` shows them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from jetspec.cli import options
from jetspec.cli.loading import budget_of, open_model
from jetspec.cli.screen import STYLES, Screen

if TYPE_CHECKING:
    from rich.table import Table

    from jetspec.api import Comparison

PROMPTS = {
    "maths": "A baker sells 3 trays of 24 rolls before noon and half as many after noon."
    " How many rolls does she sell on that day? Show your steps.",
    "code": "Write a Python function that returns the n-th Fibonacci number with a loop. Explain it briefly.",
    "explanation": "Explain to a ten-year-old why the moon seems to change its shape during a month.",
    "list": "List six things to check before a long bicycle tour, each with one short reason.",
}


def demo(
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = "auto",
    budget: options.AutoBudget = options.AUTO_BUDGET,
    grow: options.Grow = None,
    max_tokens: options.MaxTokens = 128,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Decode four prompts with and without drafts.

    Both sides run in turns, round by round. Exit code 1 if texts differ by more than rounding.
    """
    from jetspec.api import check_growth
    from jetspec.cli.report import divergence_text
    from jetspec.config import Options, Request
    from jetspec.decode.round import Outcome

    wanted = Options(max_tokens=max_tokens)
    Request.of(wanted)
    nodes = budget_of(budget)
    check_growth(nodes, grow)
    screen = Screen(no_color=no_color, quiet=quiet)
    loaded = open_model(
        screen, model, head, budget=nodes, grow=grow, dtype=dtype, device=device, threads=threads
    )
    if not loaded.target.tokenizer.has_template:
        wanted["raw"] = True
    if screen.colours:
        screen.note("drafted tokens are green, the target's own ones yellow")

    def show(outcome: Outcome) -> None:
        for piece in outcome.emissions:
            screen.text(piece.text, STYLES[piece.kind])

    done: dict[str, Comparison] = {}
    for name, prompt in PROMPTS.items():
        screen.line(f"\n▌ {prompt}", "bold")
        done[name] = loaded.compare(prompt, show, **wanted)
        screen.end_text()
    screen.line("")
    screen.show(summary(done))
    screen.note("tok/s leave out prefill; τ is the number of tokens per forward of the target")
    for name, comparison in done.items():
        if comparison.divergence is not None:
            screen.line(f"{name}: {divergence_text(comparison.divergence, loaded.target)}")
    if not all(comparison.lossless for comparison in done.values()):
        raise typer.Exit(1)


def summary(done: dict[str, Comparison]) -> Table:
    """One row per prompt, and all of them pooled over tokens and rounds."""
    from rich.table import Table

    from jetspec.decode.stats import Stats

    table = Table()
    table.add_column("prompt")
    for title in ("tokens", "τ", "plain tok/s", "speculative tok/s", "speedup", "identical"):
        table.add_column(title, justify="right")

    def row(name: str, plain: Stats, speculative: Stats, verdict: str, style: str = "") -> None:
        slow, fast = plain.tokens_per_second, speculative.tokens_per_second
        cells = (f"{speculative.tokens}", f"{speculative.tau:.2f}", f"{slow:.1f}", f"{fast:.1f}")
        table.add_row(name, *cells, f"{fast / slow:.2f}×", verdict, style=style)

    plain, speculative = Stats(), Stats()
    for name, comparison in done.items():
        row(name, comparison.plain.stats, comparison.speculative.stats, _verdict([comparison]))
        plain.add(comparison.plain.stats)
        speculative.add(comparison.speculative.stats)
    table.add_section()
    row("all", plain, speculative, _verdict(list(done.values())), "bold")
    return table


def _verdict(comparisons: list[Comparison]) -> str:
    if all(comparison.identical for comparison in comparisons):
        return "yes"
    return "yes, but for a tie" if all(comparison.lossless for comparison in comparisons) else "NO"
