"""`jetspec answers` and `jetspec train`: from prompts to a head."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from jetspec.cli import options
from jetspec.cli.loading import use_threads
from jetspec.errors import OptionError

if TYPE_CHECKING:
    from jetspec.target.target import Target
    from jetspec.train.loop import Report

Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE",
        help="Prompts: JSON lines with `turns` or `messages`, or text, one per line.",
    ),
]
Answers = Annotated[
    list[Path],
    typer.Option(
        "--answers",
        metavar="FOLDER",
        help="Folder of answers with features; may be given several times when training.",
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", help="Answer tokens to make.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", help="Longest answer, in tokens.")]
Batch = Annotated[int, typer.Option("--batch", help="Prompts answered at once.")]
Part = Annotated[
    str,
    typer.Option(
        "--part",
        metavar="I/N",
        help="Answer every N-th prompt from the I-th on (from 0), so that N processes can share a file.",
    ),
]
SkipBroken = Annotated[
    bool, typer.Option("--skip-broken", help="Leave out lines that cannot be read instead of stopping.")
]
Seed = Annotated[
    int, typer.Option("--seed", help="Seed of prompts' order, sampled answers, weights and batches.")
]
Out = Annotated[
    Path,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        help="Folder of the run: checkpoint, log, and the head in FOLDER/head.",
    ),
]
Minutes = Annotated[
    float,
    typer.Option(
        "--minutes", help="Training time; the schedule's length is derived from the measured speed."
    ),
]
Steps = Annotated[
    int | None, typer.Option("--steps", help="Length of the schedule in steps, instead of --minutes.")
]
Layers = Annotated[int, typer.Option("--layers", help="Draft layers.")]
Block = Annotated[int, typer.Option("--block", help="Slots per block, root included; depth is one less.")]
Vocab = Annotated[
    int,
    typer.Option(
        "--vocab", help="Size of the draft vocabulary (the most frequent ids of the answers); 0 = all."
    ),
]
Rank = Annotated[int, typer.Option("--rank", help="Rank of the path scorer; 0 = none.")]
Plain = Annotated[
    bool, typer.Option("--plain", help="The published form: no direct input, no slot embedding.")
]
Bidirectional = Annotated[
    bool,
    typer.Option(
        "--bidirectional",
        help="Slots see all of their block (DFlash) instead of what comes before (JetSpec).",
    ),
]
Cold = Annotated[
    bool, typer.Option("--cold", help="Random first weights instead of the target's last layers.")
]
Rate = Annotated[float, typer.Option("--rate", help="Peak learning rate.")]
Decay = Annotated[float, typer.Option("--decay", help="Depth weights exp(-(k-1)/decay); 0 is uniform.")]
PerBatch = Annotated[int, typer.Option("--answers-per-batch", help="Answers in a batch.")]
Anchors = Annotated[int, typer.Option("--anchors", help="Blocks per answer in a batch.")]
Products = Annotated[
    str, typer.Option("--products", help="Matrix products in auto, float32 or bfloat16 (with float32 sums).")
]


def answers(
    prompts: Prompts = None,
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder that answers are written to.")
    ] = Path("data/answers"),
    model: options.Model = options.DEFAULT_MODEL,
    tokens: Tokens = 650_000,
    max_tokens: MaxTokens = 192,
    batch: Batch = 64,
    part: Part = "0/1",
    skip_broken: SkipBroken = False,
    seed: Seed = 0,
    threads: options.Threads = None,
) -> None:
    """Let the target answer prompts and record its features. Run it again to go on where it stopped."""
    target = _load(model, threads)
    make_answers(target, prompts, out, tokens, max_tokens, batch, part, skip_broken, seed)


def train(
    out: Out,
    prompts: Prompts = None,
    answers: Answers = [],  # noqa: B006 (typer reads it)
    model: options.Model = options.DEFAULT_MODEL,
    tokens: Tokens = 650_000,
    max_tokens: MaxTokens = 192,
    batch: Batch = 64,
    skip_broken: SkipBroken = False,
    minutes: Minutes = 30.0,
    steps: Steps = None,
    layers: Layers = 2,
    block: Block = 8,
    vocab: Vocab = 8192,
    rank: Rank = 64,
    plain: Plain = False,
    bidirectional: Bidirectional = False,
    cold: Cold = False,
    rate: Rate = 1e-3,
    decay: Decay = 4.0,
    answers_per_batch: PerBatch = 16,
    anchors: Anchors = 64,
    products: Products = "auto",
    seed: Seed = 0,
    threads: options.Threads = None,
) -> None:
    """Train a draft head: prompts are answered by the target first, unless --answers names folders that
    hold enough.

    An interrupted run goes on where it stopped when the same command is given again.
    """
    from jetspec.train.loop import LoopOptions
    from jetspec.train.pipeline import HeadOptions, resolve_products, train_head

    resolve_products(products)  # refuse before hours of work
    loop = LoopOptions(
        steps=steps,
        minutes=minutes,
        answers=answers_per_batch,
        anchors=anchors,
        learning_rate=rate,
        decay=decay,
        seed=seed,
    )
    head = HeadOptions(layers, block, vocab, rank, plain, not bidirectional, not cold)
    target = _load(model, threads)
    head.check_fits(target)
    folders = answers or [out / "answers"]
    if prompts is not None or not answers:
        make_answers(target, prompts, folders[0], tokens, max_tokens, batch, "0/1", skip_broken, seed)
    with _Watch() as watch:
        folder = train_head(target, folders, out, head, loop, products=products, on_report=watch)
    named = "" if model == options.DEFAULT_MODEL else f"--model {model} "
    for line in (f"head saved to {folder}; use it with", f'  jetspec {named}--head {folder} "your prompt"'):
        watch.console.print(line, highlight=False, markup=False, soft_wrap=True)


def make_answers(
    target: Target,
    prompts: Path | None,
    folder: Path,
    tokens: int,
    max_tokens: int,
    batch: int,
    part: str,
    skip_broken: bool,
    seed: int,
) -> None:
    """Answer prompts into `folder` under a progress bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from jetspec.draft.config import default_tap_layers
    from jetspec.train.prompts import read_prompts
    from jetspec.train.responses import AnswerOptions, answer_prompts
    from jetspec.train.responses import Progress as Count

    if prompts is None:
        raise OptionError(
            "no prompts: give --prompts FILE (JSON lines with `turns` or `messages`, or text, one per line)"
        )
    settings = AnswerOptions(max_tokens=max_tokens, tokens=tokens, batch=batch, seed=seed, part=_part(part))
    columns = (
        TextColumn("answers"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens, {task.fields[answered]} prompts"),
        TimeRemainingColumn(),
    )
    chosen = read_prompts(prompts, seed=seed, skip_broken=skip_broken)
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("answers", total=tokens, answered=0)

        def show(count: Count) -> None:
            bar.update(task, completed=min(count.tokens, tokens), answered=count.answered)

        done = answer_prompts(
            target,
            chosen,
            folder,
            default_tap_layers(target.config.num_layers),
            settings,
            show,
        )
    bar.console.print(
        f"{done.answered} prompts answered with {done.tokens} tokens, "
        f"{done.skipped} skipped (too long): {folder}",
        highlight=False,
        soft_wrap=True,
    )


def _part(text: str) -> tuple[int, int]:
    try:
        index, count = (int(piece) for piece in text.split("/"))
    except ValueError:
        index, count = -1, 0
    if not 0 <= index < count:
        raise OptionError(f"--part is {text!r}; give I/N with 0 <= I < N, for example 0/2")
    return index, count


def _load(model: str, threads: int | None) -> Target:
    from jetspec.target.loading import load_target

    use_threads(threads)
    return load_target(model)


class _Watch:
    """A progress bar of training, with a line per validation."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self.console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[loss]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            disable=not self.console.is_terminal,
        )
        self._task = self._bar.add_task("training", total=None, loss="")
        self._loss: float | None = None

    def __enter__(self) -> _Watch:
        self._bar.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._bar.stop()

    def __call__(self, report: Report) -> None:
        if report.by_depth:
            self._loss = report.loss if self._loss is None else 0.95 * self._loss + 0.05 * report.loss
            self._bar.update(
                self._task, completed=report.step, total=report.steps or None, loss=f"KL {self._loss:.3f}"
            )
        if report.validation is not None:
            taus = ", ".join(f"{name} {tau:.2f}" for name, tau in report.validation.tau.items())
            self.console.print(
                f"step {report.step}, {report.seconds / 60:.1f} min: tau {taus}",
                highlight=False,
                soft_wrap=True,
            )
