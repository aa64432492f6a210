"""`jetspec doctor`: does this target, on this machine, decode losslessly?"""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import TYPE_CHECKING, Any

import typer

from jetspec.cli import options
from jetspec.cli.loading import open_model
from jetspec.cli.plain_lines import PlainLines
from jetspec.cli.progress import new_bar
from jetspec.cli.screen import Screen

if TYPE_CHECKING:
    from jetspec.api import LanguageModel
    from jetspec.cli.checks import Run
    from jetspec.draft.base import Drafter
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

    Every check prints its line as soon as it ends. Exit code 0 if the model passes, 1 if not.
    """
    from jetspec.cli import report
    from jetspec.sequence import Limits

    limits = Limits(max_tokens=max_tokens, ignore_eos=True)
    screen = Screen(no_color=no_color, quiet=quiet or json)
    loaded = open_model(
        screen, model, head, budget=16, grow="best-first", dtype=dtype, device=device, threads=threads
    )
    tell = _silent if json else screen.line
    findings = examine(screen, loaded, limits, reference, tell)
    if json:
        screen.json(
            {
                **findings,
                "settings": report.model_values(loaded, head),
                "versions": report.versions(),
            }
        )
    else:
        passed = findings["passed"]
        screen.line("passed" if passed else "FAILED", "green" if passed else "red")
    if not findings["passed"]:
        raise typer.Exit(1)


def _silent(line: str) -> None:
    """For --json, which prints at the end."""


def examine(
    screen: Screen,
    loaded: LanguageModel,
    limits: Limits,
    reference: bool,
    tell: Callable[[str], None] = _silent,
) -> dict[str, Any]:
    """Run every check; the values are ready for JSON. `tell` is given the line of each check as it ends."""
    from jetspec.cli import checks
    from jetspec.draft.loading import load_drafter
    from jetspec.target.loading import read_model

    target = loaded.target
    for line in _model_lines(target.name, checks.model_facts(target)):
        tell(line)
    prompts = checks.prompt_ids(target)
    screen.progress("decoding plainly")
    plain = checks.plain_outputs(target, prompts, limits)
    drafters = [load_drafter(name, target) for name in _STUBS]
    has_head = loaded.drafter.name not in ("off", *_STUBS)
    if has_head:
        drafters.append(loaded.drafter)
    runs = _decode(screen, loaded, drafters, prompts, plain, limits, tell)
    logits = None
    if reference:
        screen.progress("comparing logits with transformers")
        ids = [*prompts[0], *plain["greedy"][0]][: target.config.max_positions]
        logits = checks.reference_logits(target, read_model(target.name).tokenizer_dir, ids)
        tell(_logits_line(logits))
    facts = checks.head_facts(target, loaded.drafter, prompts, limits) if has_head else None
    if facts is not None:
        tell(_head_line(facts))
    lossless = all(run["lossless"] for run in runs)
    head_fits = facts is None or facts["taps_exist"]
    return {
        "model": checks.model_facts(target),
        "lossless": lossless,
        "passed": lossless and head_fits and (logits is None or logits["agree"]),
        "comparisons": len(runs) * len(prompts),
        "ties": sum(first["tie"] for run in runs for first in run["divergences"]),
        "runs": runs,
        "reference": logits,
        "head": facts,
    }


def _decode(
    screen: Screen,
    loaded: LanguageModel,
    drafters: list[Drafter],
    prompts: list[list[int]],
    plain: dict[str, list[list[int]]],
    limits: Limits,
    tell: Callable[[str], None],
) -> list[dict[str, Any]]:
    """All runs with drafts under a progress bar; a line for each drafter and sampling, and the verdict."""
    from jetspec.cli import checks, report

    cases = checks.cases(drafters)
    tell(
        "with drafts (a run: one builder and budget, three prompts at once; gaps: how often accepted tokens"
        " were not neighbours in the cache, where a wrong mask or cache would show)"
    )
    tell(
        f"(every τ below is of {len(prompts)} made-up prompts with {limits.max_tokens} tokens each, and"
        " three of the drafters are stubs, no heads: it is low, and a check, not a measurement; for that:"
        " jetspec bench)"
    )
    runs: list[dict[str, Any]] = []
    bar = new_bar(screen.err, hidden=screen.quiet, transient=True)
    lines = PlainLines("decoding with drafts", "runs", len(cases), hidden=screen.quiet or not bar.disable)
    with bar, lines:
        task = bar.add_task("decoding with drafts", total=len(cases))
        for _, group in groupby(cases, lambda case: (case[0].name, case[3], isinstance(case[2], str))):
            done: list[dict[str, Any]] = []
            for case in group:
                run = checks.run_case(loaded.target, case, prompts, plain, limits)
                done.append(_run_values(run, report.divergence_values))
                bar.advance(task)
                lines.show(len(runs) + len(done))
            tell(_group_line(done))
            runs += done
    for line in _lossless_lines(runs, len(prompts)):
        tell(line)
    return runs


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


def _model_lines(name: str, facts: dict[str, Any]) -> list[str]:
    """What is examined: the target, the arithmetic, and the versions of what computes."""
    from jetspec.cli import report

    return [
        name,
        f"  {facts['family']}, {facts['layers']} layers, hidden size {facts['hidden_size']},"
        f" {facts['heads']} heads ({facts['kv_heads']} for keys), vocabulary {facts['vocabulary']},"
        f" context {facts['context']}, {'with' if facts['chat_template'] else 'without'} chat template",
        f"  {facts['dtype']} on {facts['device']}, {facts['threads']} of {facts['cpus']} threads,"
        f" {facts['kernel']}",
        "  " + ", ".join(f"{name} {version}" for name, version in report.versions().items()),
    ]


def _group_line(runs: list[dict[str, Any]]) -> str:
    """Runs of one drafter and sampling."""
    first = runs[0]
    what = f"{first['drafter']}, {first['sampling']}" + (", auto" if first["budget"] == "auto" else "")
    tokens, gaps = (sum(run[key] for run in runs) for key in ("tokens", "gaps"))
    verdict = "lossless" if all(run["lossless"] for run in runs) else "NOT lossless"
    counted = f"{len(runs)} run{'s' if len(runs) > 1 else ' '}"
    return (
        f"  {what:<22}  {counted:>7}  {tokens:>5} tokens  τ {_span([run['tau'] for run in runs]):<9}"
        f"  {gaps:>3} gaps  {verdict}"
    )


def _span(values: list[float]) -> str:
    low, high = min(values), max(values)
    return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f}–{high:.2f}"


def _lossless_lines(runs: list[dict[str, Any]], prompts: int) -> list[str]:
    """The verdict over all runs, and where the first difference is, if there is one."""
    count = len(runs) * prompts
    different = [(run, first) for run in runs for first in run["divergences"]]
    ties = sum(first["tie"] for _, first in different)
    if all(run["lossless"] for run in runs):
        rest = f", {ties} of them up to a numeric tie" if ties else ""
        lines = [f"lossless: {count} outputs equal those of plain decoding{rest}"]
    else:
        lines = [f"NOT lossless: {len(different) - ties} of {count} outputs differ from plain decoding's"]
    worst = [pair for pair in different if not pair[1]["tie"]] or different
    if worst:
        run, first = worst[0]
        gap = "none" if first["gap"] is None else f"{first['gap']:.2g}"
        lines.append(
            f"  first difference: {run['drafter']}, {run['grow']}, budget {run['budget']}, {run['sampling']},"
            f" prompt {first['prompt'] + 1}, token {first['place'] + 1}; top-two gap {gap}"
        )
    return lines


def _logits_line(logits: dict[str, Any]) -> str:
    verdict = "agree with" if logits["agree"] else "DIFFER from"
    return (
        f"logits {verdict} those of transformers: largest difference {logits['max_difference']:.2g}"
        f" (bound {logits['bound']:.2g}), same best token in {logits['same_best']} of {logits['rows']}"
    )


def _head_line(head: dict[str, Any]) -> str:
    exists = "" if head["taps_exist"] else ", which do NOT all exist"
    return (
        f"head {head['name']}: taps {head['taps']}{exists}, {head['tap_width']} features per token;"
        f" first token right in {head['first_slot']:.0%} of rounds, τ {head['tau']:.2f} with 16 nodes"
    )
