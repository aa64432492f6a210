"""`jetspec prompts`: the target writes prompts for its own training."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetspec.cli import answer_options, options
from jetspec.cli.interrupt import goes_on
from jetspec.cli.loading import use_threads
from jetspec.cli.plain_lines import PlainLines
from jetspec.cli.progress import new_bar, say
from jetspec.errors import DataError

if TYPE_CHECKING:
    from jetspec.target.target import Target
    from jetspec.train.exclusion import Exclusion
    from jetspec.train.responses import AnswerOptions
    from jetspec.train.self_instruct import SelfCounts, SelfOptions

Count = Annotated[int, typer.Option("--count", "-n", metavar="N", help="Prompts to write.")]
Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="JSON lines to write to.")]
Topics = Annotated[
    Path | None,
    typer.Option("--seed-topics", metavar="FILE", help="Subjects to ask about, one per line, in turn."),
]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Longest prompt, in tokens.")]
Temperature = Annotated[float, typer.Option("--temperature", "-t", metavar="T", help="Above 0.")]
Batch = Annotated[
    int, typer.Option("--batch", metavar="N", help="Prompts written at once; changes nothing else.")
]
Seed = Annotated[int, typer.Option("--seed", metavar="N", help="Selects the prompts.")]


def prompts(
    count: Count = 1000,
    out: Out = Path("data/prompts.jsonl"),
    model: options.Model = options.DEFAULT_MODEL,
    seed_topics: Topics = None,
    exclude: answer_options.Exclude = None,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 1.0,
    top_p: options.TopP = 0.9,
    batch: Batch = 64,
    seed: Seed = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
) -> None:
    """Let the target write prompts, as its users would. Run it again to go on where it stopped."""
    from jetspec.target.loading import load_target
    from jetspec.train.prompts import load_exclusion
    from jetspec.train.self_instruct import SelfOptions

    topics = _topics(seed_topics)
    wanted = SelfOptions(count, max_tokens, temperature, top_p, seed, topics, batch)
    exclusion = load_exclusion(exclude or ())
    use_threads(threads)
    target = load_target(model, dtype=dtype, device=device)
    done = _write(target, out, wanted, exclusion)
    say(*done.report(), f"  {out}")


def own_prompts(target: Target, path: Path, answers: AnswerOptions, begun: bool) -> Path:
    """Let the target write as many prompts as the wanted answers need, for a training without a data set.

    begun: whether some are answered already. Then the file stays as it is, since answers know their prompts
        by number, and more prompts would make the folder another one's.

    Raises DataError if the prompts of a run that has begun are gone.
    """
    from jetspec.train.self_instruct import SelfOptions

    count = max(32, 2 * answers.tokens // answers.max_tokens)  # an answer takes about half of its room
    if begun:
        try:
            there = path.read_bytes().count(b"\n")
        except OSError as error:
            raise DataError(
                f"the prompts {path} cannot be read ({error.strerror or error}), and their answers have "
                "begun; give the --prompts that were answered, or another --out"
            ) from None
        if there < count:
            say(
                f"the {there} prompts of {path} stay, as their answers have begun; where they give fewer "
                "tokens than wanted, start another run (--out)"
            )
        return path
    done = _write(target, path, SelfOptions(count, seed=answers.seed, batch=answers.batch))
    say(*done.report(), f"  {path}")
    return path


def _write(target: Target, path: Path, wanted: SelfOptions, exclusion: Exclusion | None = None) -> SelfCounts:
    from jetspec.train.self_instruct import write_prompts

    kept: int | None = None
    bar = new_bar(None, "{task.fields[more]}")
    task = bar.add_task("prompts", total=wanted.count, more="")
    lines = PlainLines("prompts", "prompts", wanted.count, hidden=not bar.disable)

    def show(counts: SelfCounts) -> None:
        nonlocal kept
        kept = counts.kept
        more = f"{counts.dropped} dropped, {counts.tokens} tokens written"
        bar.update(task, completed=kept, more=more)
        lines.show(kept, more)

    with goes_on("prompt", lambda: kept), bar, lines:
        return write_prompts(target, path, wanted, exclusion, show)


def _topics(path: Path | None) -> tuple[str, ...]:
    if path is None:
        return ()
    try:
        lines = [line.strip() for line in path.read_text("utf-8-sig").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"--seed-topics {path} cannot be read ({error})") from None
    topics = tuple(line for line in lines if line)
    if not topics:
        raise DataError(f"--seed-topics {path} holds no topics; write one per line")
    return topics
