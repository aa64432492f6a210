"""`jetspec doctor`: does this target, on this machine, decode losslessly?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import typer

from jetspec.cli import options
from jetspec.cli.loading import open_model
from jetspec.cli.screen import Screen

if TYPE_CHECKING:
    from jetspec.api import LanguageModel
    from jetspec.cli.checks import Run
    from jetspec.sequence import Limits

_STUBS = ("random", "echo", "decoy")


def doctor(
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = "auto",
    max_tokens: options.MaxTokens = 16,
    reference: options.Reference = True,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Check that a model decodes losslessly here.

    Exit code 0 if it is, 1 if not.
    """
    from jetspec.cli import report
    from jetspec.sequence import Limits

    limits = Limits(max_tokens=max_tokens, ignore_eos=True)
    screen = Screen(no_color=no_color, quiet=quiet or json)
    loaded = open_model(
        screen, model, head, budget=16, grow="best-first", dtype=dtype, device=device, threads=threads
    )
    findings = examine(screen, loaded, limits, reference)
    if json:
        screen.json(
            {
                **findings,
                "settings": report.model_values(loaded, head),
                "versions": report.versions(),
            }
        )
    else:
        _print(screen, loaded, findings)
    if not findings["passed"]:
        raise typer.Exit(1)


def examine(screen: Screen, loaded: LanguageModel, limits: Limits, reference: bool) -> dict[str, Any]:
    """Run every check; the values are ready for JSON."""
    from rich.progress import track

    from jetspec.cli import checks, report
    from jetspec.draft.loading import load_drafter
    from jetspec.target.loading import read_model

    target = loaded.target
    prompts = checks.prompt_ids(target)
    screen.progress("decoding plainly")
    plain = checks.plain_outputs(target, prompts, limits)
    drafters = [load_drafter(name, target) for name in _STUBS]
    has_head = loaded.drafter.name not in ("off", *_STUBS)
    if has_head:
        drafters.append(loaded.drafter)
    hidden = screen.quiet or not screen.err.is_terminal
    runs = [
        checks.run_case(target, case, prompts, plain, limits)
        for case in track(
            checks.cases(drafters), "decoding with drafts", console=screen.err, transient=True, disable=hidden
        )
    ]
    logits = None
    if reference:
        screen.progress("comparing logits with transformers")
        ids = [*prompts[0], *plain["greedy"][0]][: target.config.max_positions]
        logits = checks.reference_logits(target, read_model(target.name).tokenizer_dir, ids)
    facts = checks.head_facts(target, loaded.drafter, prompts, limits) if has_head else None
    lossless = all(run.lossless for run in runs)
    head_fits = facts is None or facts["taps_exist"]
    return {
        "model": checks.model_facts(target),
        "lossless": lossless,
        "passed": lossless and head_fits and (logits is None or logits["agree"]),
        "comparisons": len(runs) * len(prompts),
        "ties": sum(run.ties for run in runs),
        "runs": [_run_values(run, report.divergence_values) for run in runs],
        "reference": logits,
        "head": facts,
    }


def _run_values(run: Run, values: Any) -> dict[str, Any]:
    found = [{"prompt": number, **values(first)} for number, first in run.divergences]
    return {
        "drafter": run.drafter,
        "grow": run.grow,
        "budget": run.budget,
        "sampling": run.sampling,
        "tokens": run.tokens,
        "tau": run.tau,
        "gaps": run.gaps,
        "lossless": run.lossless,
        "divergences": found,
    }


def _print(screen: Screen, loaded: LanguageModel, findings: dict[str, Any]) -> None:
    from rich.table import Table

    from jetspec.cli import report

    facts = findings["model"]
    screen.line(loaded.target.name, "bold")
    screen.line(
        f"  {facts['family']}, {facts['layers']} layers, hidden size {facts['hidden_size']},"
        f" {facts['heads']} heads ({facts['kv_heads']} for keys), vocabulary {facts['vocabulary']},"
        f" context {facts['context']}, {'with' if facts['chat_template'] else 'without'} chat template"
    )
    screen.line(
        f"  {facts['dtype']} on {facts['device']}, {facts['threads']} of {facts['cpus']} threads,"
        f" {facts['kernel']}"
    )
    screen.line("  " + ", ".join(f"{name} {version}" for name, version in report.versions().items()))
    table = Table()
    for title in ("drafter", "sampling", "runs", "tokens", "τ", "gaps", "lossless"):
        table.add_column(title)
    groups: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for run in findings["runs"]:
        groups.setdefault((run["drafter"], run["sampling"]), []).append(run)
    for (drafter, sampling), runs in groups.items():
        table.add_row(
            drafter,
            sampling,
            str(len(runs)),
            str(sum(run["tokens"] for run in runs)),
            _span([run["tau"] for run in runs]),
            str(sum(run["gaps"] for run in runs)),
            "yes" if all(run["lossless"] for run in runs) else "NO",
        )
    screen.show(table)
    screen.line("a run: one builder and budget, three prompts at once; gaps: accepted paths that skip rows")
    for line in _verdict_lines(findings):
        screen.line(line)
    screen.line("passed" if findings["passed"] else "FAILED", "green" if findings["passed"] else "red")


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f}–{high:.2f}"


def _verdict_lines(findings: dict[str, Any]) -> list[str]:
    """What was found, one line per check."""
    count, ties = findings["comparisons"], findings["ties"]
    lines: list[str] = []
    different = [(run, first) for run in findings["runs"] for first in run["divergences"]]
    if findings["lossless"]:
        rest = f", {ties} of them up to a numeric tie" if ties else ""
        lines.append(f"lossless: {count} outputs equal those of plain decoding{rest}")
    else:
        lines.append(f"NOT lossless: {len(different) - ties} of {count} outputs differ from plain decoding's")
    worst = [pair for pair in different if not pair[1]["tie"]] or different
    if worst:
        run, first = worst[0]
        gap = "none" if first["gap"] is None else f"{first['gap']:.2g}"
        lines.append(
            f"  first difference: {run['drafter']}, {run['grow']}, budget {run['budget']}, {run['sampling']},"
            f" prompt {first['prompt'] + 1}, token {first['place'] + 1}; top-two gap {gap}"
        )
    logits = findings["reference"]
    if logits is not None:
        verdict = "agree with" if logits["agree"] else "DIFFER from"
        lines.append(
            f"logits {verdict} those of transformers: largest difference {logits['max_difference']:.2g}"
            f" (bound {logits['bound']:.2g}), same best token in {logits['same_best']} of {logits['rows']}"
        )
    head = findings["head"]
    if head is not None:
        exists = "" if head["taps_exist"] else ", which do NOT all exist"
        lines.append(
            f"head {head['name']}: taps {head['taps']}{exists}, {head['tap_width']} features per token;"
            f" first token right in {head['first_slot']:.0%} of rounds, τ {head['tau']:.2f} with 16 nodes"
        )
    return lines
