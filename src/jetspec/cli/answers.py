"""`jetspec answers`: the target answers prompts, here or behind an endpoint, and features are recorded."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from jetspec.cli import answer_options, options
from jetspec.cli.interrupt import goes_on
from jetspec.cli.loading import use_threads
from jetspec.cli.progress import AnswerBar, confirm_size, say
from jetspec.errors import DataError, OptionError

if TYPE_CHECKING:
    from jetspec.target.target import Target
    from jetspec.train.answers import Answer
    from jetspec.train.endpoint import Endpoint
    from jetspec.train.prompts import PromptSet
    from jetspec.train.responses import AnswerOptions

MIX = "0:0.6,0.7:0.15,1:0.25"
TOKENS = 650_000
# Options of how answers are made: they mean nothing to answers that exist.
_OF_ANSWERS = ["tokens", "max_tokens", "max_prompt", "temperatures", "batch", "raw", "thinking", "seed"]
_OF_SOURCES = ["text_only", "prompts", "endpoint", "endpoint_model", "api_key_env", "concurrency", "timeout"]


def answers(
    context: typer.Context,
    prompts: answer_options.Prompts = None,
    out: answer_options.Out = Path("data/answers"),
    model: options.Model = options.DEFAULT_MODEL,
    tokens: answer_options.Tokens = TOKENS,
    max_tokens: answer_options.MaxTokens = 192,
    max_prompt: answer_options.MaxPrompt = 512,
    temperatures: answer_options.Temperatures = MIX,
    batch: answer_options.Batch = 64,
    part: answer_options.Part = "0/1",
    exclude: answer_options.Exclude = None,
    strict: answer_options.Strict = False,
    limit: answer_options.Limit = None,
    skip_broken: answer_options.SkipBroken = False,
    raw: answer_options.RawPrompts = False,
    thinking: answer_options.Thinking = None,
    text_only: answer_options.TextOnly = False,
    from_answers: answer_options.From = None,
    taps: answer_options.Taps = None,
    endpoint: answer_options.Url = None,
    endpoint_model: answer_options.EndpointModel = None,
    api_key_env: answer_options.ApiKeyEnv = None,
    concurrency: answer_options.Concurrency = 16,
    timeout: answer_options.Timeout = 300.0,
    yes: answer_options.Yes = False,
    seed: answer_options.Seed = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Let the target answer prompts and record its features. Run it again to go on where it stopped."""
    from jetspec.target.loading import load_target
    from jetspec.train.responses import AnswerOptions

    settings = AnswerOptions(
        max_tokens=max_tokens,
        tokens=tokens,
        temperatures=parse_mix(temperatures),
        batch=batch,
        max_prompt=max_prompt,
        seed=seed,
        part=_part(part),
        raw=raw,
        thinking=thinking,
        features=not text_only,
    )
    if from_answers and (given := _given(context, [*_OF_SOURCES, *_OF_ANSWERS])):
        raise OptionError(
            "--from computes the features of all answers that it reads and makes none, so "
            f"{', '.join(given)} cannot go with it; choose answers with --part, --limit or --exclude"
        )
    where = _endpoint(endpoint, endpoint_model, api_key_env, concurrency, timeout)
    use_threads(threads)
    if from_answers:
        found = choose_answers(from_answers, settings.part, skip_broken, exclude or (), strict, limit)
        replay(load_target(model, dtype=dtype, device=device), found, out, taps, yes)
        return
    chosen = choose_prompts(prompts, seed, skip_broken, exclude or (), strict, limit)
    if where is None:
        target = load_target(model, dtype=dtype, device=device)
        answer_here(target, chosen, out, settings, taps=taps, yes=yes)
    else:
        answer_there(where, chosen, out, settings)


def _given(context: typer.Context, names: Many[str]) -> list[str]:
    """Which of these options stand on the command line, as they are spelled there."""
    spelled = {parameter.name: parameter.opts[0] for parameter in context.command.params}
    sources = {name: context.get_parameter_source(name) for name in names}
    return [spelled[name] for name, source in sources.items() if source and source.name == "COMMANDLINE"]


def make_answers(
    target: Target,
    prompts: Many[str],
    folder: Path,
    tokens: int,
    max_tokens: int,
    batch: int,
    part: str,
    skip_broken: bool,
    seed: int,
    *,
    exclude: Many[Path] = (),
    strict: bool = False,
    limit: int | None = None,
    raw: bool = False,
    taps: str | None = None,
    yes: bool = False,
) -> None:
    """Answer prompts into `folder` with features, as part of `jetspec train`."""
    from jetspec.train.responses import AnswerOptions

    settings = AnswerOptions(
        max_tokens=max_tokens, tokens=tokens, batch=batch, seed=seed, part=_part(part), raw=raw
    )
    chosen = choose_prompts(prompts, seed, skip_broken, exclude, strict, limit)
    answer_here(target, chosen, folder, settings, taps=taps, yes=yes)


def choose_prompts(
    sources: Many[str] | None,
    seed: int,
    skip_broken: bool,
    exclude: Many[Path],
    strict: bool,
    limit: int | None,
) -> PromptSet:
    """Read prompts and say what was left out."""
    from jetspec.train.prompts import load_prompts

    if not sources:
        raise OptionError(
            "no prompts: give --prompts FILE (JSON lines with `turns` or `messages`, or text, one per line),"
            " or let the target write some with `jetspec prompts`"
        )
    check_limit(limit)
    found = load_prompts(
        sources, seed=seed, skip_broken=skip_broken, exclude=exclude, strict=strict, limit=limit
    )
    say(*found.report())
    return found


def check_limit(limit: int | None) -> None:
    """Raise OptionError for a --limit that leaves no prompts."""
    if limit is not None and limit < 1:
        raise OptionError(f"--limit must be at least 1, got {limit}")


def answer_here(
    target: Target,
    chosen: PromptSet,
    folder: Path,
    settings: AnswerOptions,
    *,
    taps: str | None = None,
    yes: bool = False,
) -> None:
    """Answer with our engine under a progress bar; the size of the features is said before."""
    from jetspec.train.responses import answer_prompts, expected_tokens

    layers = parse_taps(taps, target.config.num_layers)
    if settings.features:
        expected = expected_tokens(target, chosen.prompts, settings)
        confirm_size(target.config, layers, expected, folder, yes)
    bar = AnswerBar("answers", settings.tokens)
    with goes_on("answer", lambda: bar.kept), bar:
        done = answer_prompts(target, chosen.prompts, folder, layers, settings, bar.show)
    say(*done.report(settings.tokens), f"  {folder}")


def answer_there(where: Endpoint, chosen: PromptSet, folder: Path, settings: AnswerOptions) -> None:
    """Let an endpoint answer; the text only."""
    from jetspec.train.endpoint import ask_endpoint

    bar = AnswerBar("answers", settings.tokens)
    with goes_on("answer", lambda: bar.kept), bar:
        done = ask_endpoint(where, chosen.prompts, folder, settings, bar.show)
    text = folder / "answers.jsonl"
    say(*done.report(settings.tokens), f"  {text}; features: jetspec answers --from {text}")


def _endpoint(
    url: str | None, model: str | None, api_key_env: str | None, concurrency: int, timeout: float
) -> Endpoint | None:
    from jetspec.train.endpoint import Endpoint

    if url is None:
        if model is not None or api_key_env is not None:
            raise OptionError("--endpoint-model and --api-key-env need --endpoint, the URL of the endpoint")
        return None
    if model is None:
        raise OptionError("--endpoint needs --endpoint-model, the target's name there")
    return Endpoint(url, model, api_key_env, concurrency, timeout)


def choose_answers(
    files: Many[Path],
    part: tuple[int, int],
    skip_broken: bool,
    exclude: Many[Path],
    strict: bool,
    limit: int | None,
) -> list[Answer]:
    """Read answers that exist as text and say what was left out; of those that are left, every n-th."""
    from jetspec.train.answers import read_answers
    from jetspec.train.prompts import load_exclusion

    check_limit(limit)
    exclusion = load_exclusion(exclude)
    read = [read_answers(file, skip_broken=skip_broken) for file in files]
    answers = [answer for some, _ in read for answer in some[:limit]]
    broken = sum(count for _, count in read)
    found = [answer for answer in answers if not any(map(exclusion.find, answer.user_turns))]
    excluded = len(answers) - len(found)
    if strict and excluded:
        raise DataError(
            f"{excluded} answers are to eval prompts; take them out, or leave --strict away to skip them"
        )
    left_out = {f"{broken} broken lines": broken, f"{excluded} answers to eval prompts": excluded}
    losses = "".join(f", {what} left out" for what, count in left_out.items() if count)
    index, parts = part
    chosen = found[index::parts]
    say(f"{len(chosen)} answers{losses}")
    if not chosen:
        raise DataError(f"{' and '.join(map(str, files))} holds no answers for this command; give more")
    return chosen


def replay(target: Target, found: Many[Answer], folder: Path, taps: str | None, yes: bool) -> None:
    """Compute features of answers that exist as text."""
    from jetspec.train.replay import expected_rows, replay_answers

    layers = parse_taps(taps, target.config.num_layers)
    confirm_size(target.config, layers, expected_rows(target, found), folder, yes)
    bar = AnswerBar("features", answers=len(found))
    with goes_on("answer", lambda: bar.kept), bar:
        done = replay_answers(target, found, folder, layers, bar.show)
    say(*done.report(), f"  {folder}")


def parse_mix(text: str) -> tuple[tuple[float, float], ...]:
    """`T:SHARE,…` as pairs; a temperature alone is for everything."""
    try:
        pairs = [piece.split(":") for piece in text.split(",")]
        if len(pairs) == 1 and len(pairs[0]) == 1:
            return ((float(pairs[0][0]), 1.0),)
        return tuple((float(temperature), float(share)) for temperature, share in pairs)
    except ValueError:
        raise OptionError(
            f"--temperatures is {text!r}; give T:SHARE,…, for example {MIX}, or one T"
        ) from None


def parse_taps(text: str | None, layers: int) -> tuple[int, ...]:
    """Layer numbers, or the default ones."""
    from jetspec.draft.config import default_tap_layers

    if text is None:
        return default_tap_layers(layers)
    try:
        taps = tuple(int(piece) for piece in text.split(","))
    except ValueError:
        taps = (-1,)
    if list(taps) != sorted(set(taps)) or not 0 <= taps[0] <= taps[-1] < layers:
        raise OptionError(f"--taps is {text!r}; give ascending layers from 0 to {layers - 1}, such as 1,3,5")
    return taps


def _part(text: str) -> tuple[int, int]:
    try:
        index, count = (int(piece) for piece in text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise OptionError(f"--part is {text!r}; give I/N with 0 <= I < N, for example 0/2")
    return index, count
