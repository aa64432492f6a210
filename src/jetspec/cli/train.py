"""`jetspec train`: from a model, and prompts or answers if there are any, to a head."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspec.cli import options
from jetspec.cli.answers import Exclude, Prompts, RawPrompts, SkipBroken, Yes, make_answers
from jetspec.cli.loading import use_threads

if TYPE_CHECKING:
    from jetspec.target.target import Target
    from jetspec.train.distributed import Processes
    from jetspec.train.recipe import Settings

Recipe = Annotated[
    str,
    typer.Option(
        "--recipe",
        metavar="NAME|FILE",
        help="A method (jetspec, dflash, dspark, eagle3, mtp), a packaged recipe such as dflash-qwen3-8b,"
        " or a TOML file.",
    ),
]
Sets = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Change any key of the recipe, for example loss.temperature=2 or head.taps=[1,8,14].",
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
Seed = Annotated[
    int, typer.Option("--seed", help="Seed of prompts' order, sampled answers, weights and batches.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        help="Folder of the run: checkpoint, log, curves, and the head in FOLDER/head; by default"
        " runs/RECIPE-MODEL.",
    ),
]


def _change(name: str, text: str) -> Any:
    """An option that replaces a value of the recipe."""
    return typer.Option(name, help=text, show_default=False)


Tokens = Annotated[int | None, _change("--tokens", "Answer tokens to make.")]
MaxTokens = Annotated[int | None, _change("--max-tokens", "Longest answer, in tokens.")]
Batch = Annotated[int | None, _change("--batch", "Prompts answered at once.")]
Minutes = Annotated[
    float | None,
    _change("--minutes", "Training time; the schedule's length is derived from the measured speed."),
]
Steps = Annotated[int | None, _change("--steps", "Length of the schedule in steps.")]
Rate = Annotated[float | None, _change("--rate", "Peak learning rate.")]
Optimizer = Annotated[str | None, _change("--optimizer", "adamw or muon.")]
Weighting = Annotated[
    str | None, _change("--weighting", "Of the depths: uniform, exponential or expected-length.")
]
Decay = Annotated[
    float | None, _change("--decay", "Exponential depth weights exp(-(k-1)/decay); 0 is uniform.")
]
PerBatch = Annotated[int | None, _change("--answers-per-batch", "Answers in a batch.")]
Anchors = Annotated[int | None, _change("--anchors", "Blocks per answer in a batch.")]
Products = Annotated[
    str | None,
    _change("--products", "Matrix products in auto, float32 or bfloat16 (with float32 sums)."),
]
Fsdp = Annotated[
    bool,
    typer.Option(
        "--fsdp",
        help="Shard weights, gradients and moments over the processes (started by torchrun), for heads that"
        " are too large to be copied.",
    ),
]
Layers = Annotated[int | None, _change("--layers", "Draft layers.")]
Block = Annotated[int | None, _change("--block", "Slots per block, root included.")]
Vocab = Annotated[
    int | None,
    _change("--vocab", "Size of the draft vocabulary (the most frequent ids of the answers); 0 = all."),
]
Scorer = Annotated[str | None, _change("--scorer", "Path scorer: none, vanilla, gated or rnn.")]
Rank = Annotated[int | None, _change("--rank", "Rank of the path scorer; 0 = none.")]
Plain = Annotated[bool, _change("--plain", "The published form: no direct input, no slot embedding.")]
Bidirectional = Annotated[
    bool,
    _change("--bidirectional", "Slots see all of their block (DFlash), not only what comes before."),
]
Cold = Annotated[bool, _change("--cold", "Random first weights, not the target's last layers.")]


def train(
    out: Out = None,
    recipe: Recipe = "jetspec",
    model: options.Model = options.DEFAULT_MODEL,
    prompts: Prompts = None,
    answers: Answers = [],  # noqa: B006 (typer reads it)
    exclude: Exclude = None,
    skip_broken: SkipBroken = False,
    raw: RawPrompts = False,
    yes: Yes = False,
    sets: Sets = [],  # noqa: B006
    seed: Seed = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    fsdp: Fsdp = False,
    tokens: Tokens = None,
    max_tokens: MaxTokens = None,
    batch: Batch = None,
    minutes: Minutes = None,
    steps: Steps = None,
    rate: Rate = None,
    optimizer: Optimizer = None,
    weighting: Weighting = None,
    decay: Decay = None,
    answers_per_batch: PerBatch = None,
    anchors: Anchors = None,
    products: Products = None,
    layers: Layers = None,
    block: Block = None,
    vocab: Vocab = None,
    scorer: Scorer = None,
    rank: Rank = None,
    plain: Plain = False,
    bidirectional: Bidirectional = False,
    cold: Cold = False,
) -> None:
    """Train a draft head: prompts are answered by the target first, unless --answers names folders that
    hold enough. Without prompts and answers the target writes its own prompts.

    Several processes train one head when torchrun or accelerate starts the command. Everything behind --fsdp
    changes what the recipe says. An interrupted run goes on where it stopped when
    the same command is given again.
    """
    from jetspec.target.loading import load_target
    from jetspec.train.distributed import join_processes
    from jetspec.train.pipeline import resolve_products
    from jetspec.train.recipe import find_recipe

    with join_processes(device, fsdp=fsdp) as processes:  # around all, so that errors are said once
        head = {"layers": layers, "block_size": block, "vocab": vocab, **_scorer(scorer, rank)}
        flags = {"plain": (plain, True), "causal": (bidirectional, False), "warm": (cold, False)}
        head.update({key: value for key, (given, value) in flags.items() if given})
        tables: dict[str, dict[str, Any]] = {
            "head": head,
            "loss": {"weighting": weighting, "decay": decay},
            "training": {
                "answers": answers_per_batch,
                "anchors": anchors,
                "learning_rate": rate,
                "optimizer": optimizer,
            },
            "answers": {"tokens": tokens, "max_tokens": max_tokens, "batch": batch},
        }
        settings = _changed(find_recipe(recipe, model), tables, sets)
        settings = _timed(settings, minutes, steps, seed)
        settings = settings if products is None else replace(settings, products=products)
        resolve_products(settings.products)  # refuse before hours of work
        name = Path(recipe).stem if recipe.endswith(".toml") else recipe
        folder = out if out is not None else Path("runs") / f"{name}-{Path(model).name.lower()}"
        source = _Source(prompts, answers, exclude or [], skip_broken, raw, yes)
        use_threads(threads)
        target = load_target(model, dtype=dtype, device=processes.place(device))
        _run(settings, target, folder, source, processes)


def _scorer(scorer: str | None, rank: int | None) -> dict[str, Any]:
    """The scorer and rank that one or both of the two options mean."""
    if rank == 0 and scorer is None:
        return {"scorer": "none", "rank": 0}
    if scorer == "none" and rank is None:
        return {"scorer": "none", "rank": 0}
    return {"scorer": scorer, "rank": rank}


def _changed(settings: Settings, tables: dict[str, dict[str, Any]], sets: list[str]) -> Settings:
    from jetspec.train.recipe import change, parse_sets

    given = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }
    head = given["head"]  # a scorer without a rank, or a rank without a scorer, goes on from the recipe's
    if hasattr(settings.head, "scorer"):
        if head.get("scorer", "none") != "none" and "rank" not in head and not settings.head.rank:
            head["rank"] = 64
        if head.get("rank") and "scorer" not in head and settings.head.scorer == "none":
            head["scorer"] = "gated"
    return change(change(settings, given, "options"), parse_sets(sets), "--set")


def _timed(settings: Settings, minutes: float | None, steps: int | None, seed: int) -> Settings:
    """The length of the schedule: what is given replaces all that the recipe says about it."""
    loop = replace(settings.loop, seed=seed)
    if steps is not None:
        loop = replace(loop, steps=steps, epochs=None)
    if minutes is not None:
        loop = replace(loop, minutes=minutes, steps=steps, epochs=None)
    return replace(settings, loop=loop)


@dataclass(frozen=True)
class _Source:
    """Where answers come from."""

    prompts: list[str] | None
    answers: list[Path]
    exclude: list[Path]
    skip_broken: bool
    raw: bool
    yes: bool

    def folders(
        self,
        settings: Settings,
        target: Target,
        out: Path,
        taps: tuple[int, ...] | None,
        processes: Processes,
    ) -> list[Path]:
        """Folders of answers; they are made first unless some were given without prompts. Each of several
        processes answers a part of the prompts in a folder of its own.
        """
        if self.answers and not self.prompts:
            return self.answers
        first, *more = self.answers or [out / "answers"]
        parts = int(processes.agree(_parts_of(first) or processes.size))
        folders = [_part_folder(first, n, parts) for n in range(parts)]
        prompts = self.prompts
        if not prompts:
            prompts = [str(self._own_prompts(settings, target, first, processes))]
        wanted = settings.answers
        for n in range(processes.rank, parts, processes.size):
            make_answers(
                target,
                prompts,
                folders[n],
                -(-wanted.tokens // parts),
                wanted.max_tokens,
                wanted.batch,
                f"{n}/{parts}",
                self.skip_broken,
                settings.loop.seed,
                exclude=self.exclude,
                raw=self.raw,
                taps=None if taps is None else ",".join(map(str, taps)),
                yes=self.yes or processes.size > 1,
            )
        processes.wait()
        return [*folders, *more]

    def _own_prompts(self, settings: Settings, target: Target, folder: Path, processes: Processes) -> Path:
        """Prompts that the target writes; the first process writes them for all."""
        from jetspec.cli.prompts import own_prompts
        from jetspec.train.responses import AnswerOptions

        path = folder / "prompts.jsonl"
        if processes.first:
            wanted = settings.answers
            options = AnswerOptions(
                tokens=wanted.tokens,
                max_tokens=wanted.max_tokens,
                batch=wanted.batch,
                seed=settings.loop.seed,
                raw=self.raw,
            )
            own_prompts(target, path, options)
        processes.wait()
        return path


def _part_folder(folder: Path, part: int, parts: int) -> Path:
    return folder if parts == 1 else folder.with_name(f"{folder.name}-{part}-of-{parts}")


def _parts_of(folder: Path) -> int | None:
    """Among how many processes an earlier run divided the answers that it put into `folder`; None if there
    was none. Another number of processes goes on with the same parts.
    """
    if (folder / "answers.json").exists():
        return 1
    found = sorted(folder.parent.glob(f"{folder.name}-0-of-*"))
    counts = [path.name.rsplit("-", 1)[1] for path in found if (path / "answers.json").exists()]
    return next((int(count) for count in counts if count.isdecimal()), None)


def _run(settings: Settings, target: Target, out: Path, source: _Source, processes: Processes) -> None:
    from jetspec.cli.watch import Watch, stop_between_steps
    from jetspec.train.families import find_family
    from jetspec.train.loop import Paused
    from jetspec.train.pipeline import train_head

    family = find_family(settings.method)
    family.check(target, settings.head)
    taps = family.taps(target, settings.head) or None
    folders = source.folders(settings, target, out, taps, processes)
    with stop_between_steps() as asked, Watch() if processes.first else nullcontext() as watch:
        on_report = watch or (lambda report: None)
        try:
            folder = train_head(
                target, folders, out, settings, on_report=on_report, processes=processes, pause=asked
            )
        except Paused as paused:
            if watch is not None:
                watch.say(f"jetspec: {paused}")
            raise KeyboardInterrupt from None
    if watch is None:
        return
    named = "" if target.name == options.DEFAULT_MODEL else f"--model {target.name} "
    for line in (f"head saved to {folder}; use it with", f'  jetspec {named}--head {folder} "your prompt"'):
        watch.console.print(line, highlight=False, markup=False, soft_wrap=True)
