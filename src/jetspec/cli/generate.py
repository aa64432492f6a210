"""`jetspec generate`, which is also `jetspec "prompt"`: decode one prompt, showing what was drafted."""

from __future__ import annotations

from typing import TYPE_CHECKING

import typer

from jetspec.cli import options
from jetspec.cli.loading import budget_of, from_argument, open_model, read_prompt
from jetspec.cli.screen import STYLES, Screen

if TYPE_CHECKING:
    from jetspec.api import LanguageModel
    from jetspec.config import Options


def generate(
    prompt: options.Prompt = None,
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = "auto",
    budget: options.AutoBudget = options.AUTO_BUDGET,
    grow: options.Grow = None,
    temperature: options.Temperature = 0.0,
    top_k: options.TopK = 0,
    top_p: options.TopP = 1.0,
    min_p: options.MinP = 0.0,
    repetition_penalty: options.RepetitionPenalty = 1.0,
    presence_penalty: options.PresencePenalty = 0.0,
    frequency_penalty: options.FrequencyPenalty = 0.0,
    seed: options.Seed = 0,
    shared_noise: options.SharedNoise = True,
    confidence_threshold: options.ConfidenceThreshold = 0.0,
    max_tokens: options.MaxTokens = 256,
    stop: options.Stop = None,
    raw: options.Raw = False,
    system: options.System = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    compare: options.Compare = False,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Decode a prompt (the verb that may be left out).

    On a terminal, drafted tokens that were accepted are green, the target's own tokens behind a draft
    (bonus) yellow, and those of rounds that drafted nothing (plain) have no colour. Speed goes to standard
    error.
    """
    from jetspec.api import check_growth
    from jetspec.cli import report
    from jetspec.config import Options, Request

    wanted = Options(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        presence_penalty=presence_penalty,
        frequency_penalty=frequency_penalty,
        seed=seed,
        max_tokens=max_tokens,
        stop=[from_argument(text, "--stop") for text in stop or ()],
        raw=raw,
        system=None if system is None else from_argument(system, "--system"),
    )
    request = Request.of(wanted)  # before the model is loaded: mistakes show at once
    nodes = budget_of(budget)
    check_growth(nodes, grow)
    text = read_prompt(prompt, raw)
    screen = Screen(no_color=no_color, quiet=quiet)
    loaded = open_model(
        screen,
        model,
        head,
        budget=nodes,
        grow=grow,
        dtype=dtype,
        device=device,
        threads=threads,
        shared_noise=shared_noise,
        confidence_threshold=confidence_threshold,
    )
    if json:
        values = (
            report.comparison_values(loaded.compare(text, **wanted))
            if compare
            else report.result_values(loaded.generate(text, **wanted))
        )
        settings = report.settings_values(loaded, head, request)
        screen.json({"prompt": text, **values, "settings": settings, "versions": report.versions()})
        lossless = values.get("divergence") is None or values["divergence"]["tie"]
    elif compare:
        lossless = _compare(screen, loaded, text, wanted)
    else:
        lossless = _stream(screen, loaded, text, wanted)
    if not lossless:
        raise typer.Exit(1)


def _stream(screen: Screen, model: LanguageModel, prompt: str, wanted: Options) -> bool:
    from jetspec.cli import report

    with model.stream(prompt, **wanted) as stream:
        for piece in stream:
            screen.text(piece.text, STYLES[piece.kind])
        screen.end_text()
        for line in report.closing_lines(stream.result, model):
            screen.note(line)
    return True


def _compare(screen: Screen, model: LanguageModel, prompt: str, wanted: Options) -> bool:
    from jetspec.cli import report
    from jetspec.decode.round import Outcome

    def show(outcome: Outcome) -> None:
        for piece in outcome.emissions:
            screen.text(piece.text, STYLES[piece.kind])

    comparison = model.compare(prompt, show, **wanted)
    screen.end_text()
    for line in report.comparison_lines(comparison, model):
        screen.line(line)
    return comparison.lossless
