"""`jetspec train`: from a model, and prompts or answers if there are any, to a head."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec.cli import answer_options, options, train_options
from jetspec.cli.answers import check_limit, make_answers
from jetspec.cli.loading import use_threads
from jetspec.cli.train_settings import (
    answers_given,
    changed,
    run_folder,
    scorer_options,
    starting_recipe,
    timed,
)
from jetspec.errors import OptionError

if TYPE_CHECKING:
    from jetspec.target.target import Target
    from jetspec.train.distributed import Processes
    from jetspec.train.from_head import SourceHead
    from jetspec.train.recipe import Settings


def train(
    out: train_options.Out = None,
    recipe: train_options.Recipe = None,
    from_head: train_options.FromHead = None,
    model: options.Model = options.DEFAULT_MODEL,
    prompts: answer_options.Prompts = None,
    answers: train_options.Answers = [],  # noqa: B006 (typer reads it)
    exclude: answer_options.Exclude = None,
    strict: answer_options.Strict = False,
    limit: answer_options.Limit = None,
    skip_broken: answer_options.SkipBroken = False,
    raw: answer_options.RawPrompts = False,
    yes: answer_options.Yes = False,
    sets: train_options.Sets = [],  # noqa: B006
    seed: train_options.Seed = 0,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    fsdp: train_options.Fsdp = False,
    tokens: train_options.Tokens = None,
    max_tokens: train_options.MaxTokens = None,
    batch: train_options.Batch = None,
    minutes: train_options.Minutes = None,
    steps: train_options.Steps = None,
    rate: train_options.Rate = None,
    optimizer: train_options.Optimizer = None,
    weighting: train_options.Weighting = None,
    decay: train_options.Decay = None,
    answers_per_batch: train_options.PerBatch = None,
    anchors: train_options.Anchors = None,
    products: train_options.Products = None,
    layers: train_options.Layers = None,
    block: train_options.Block = None,
    vocab: train_options.Vocab = None,
    new_vocab: train_options.NewVocab = False,
    scorer: train_options.Scorer = None,
    rank: train_options.Rank = None,
    plain: train_options.Plain = False,
    bidirectional: train_options.Bidirectional = False,
    cold: train_options.Cold = False,
) -> None:
    """Train a draft head: prompts are answered by the target first, unless --answers names folders that
    hold enough. Without prompts and answers the target writes its own prompts.

    With --from-head an existing head is trained further, for example the packaged one on your own prompts.
    Several processes train one head when torchrun or accelerate starts the command. Everything behind --fsdp
    changes what the recipe says. An interrupted run goes on where it stopped when the same command is given
    again.
    """
    from jetspec.target.loading import load_target
    from jetspec.train.distributed import join_processes
    from jetspec.train.from_head import read_source
    from jetspec.train.pipeline import check_confidence, resolve_products

    with join_processes(device, fsdp=fsdp) as processes:  # around all, so that errors are said once
        head = {"layers": layers, "block_size": block, "vocab": vocab, **scorer_options(scorer, rank)}
        flags = {
            "plain": (plain, True),
            "causal": (bidirectional, False),
            "warm": (cold, False),
            "new_vocab": (new_vocab, True),
        }
        if new_vocab and from_head is None:
            raise OptionError(
                "--new-vocab is for --from-head: an untrained head always chooses its vocabulary"
            )
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
        begin = None if from_head is None else read_source(from_head, model)
        settings = changed(starting_recipe(recipe, model, begin), tables, sets)
        if begin is not None:
            begin.check_options(settings)
        folder = out if out is not None else run_folder(recipe, model, begin)
        settings = timed(settings, minutes, steps, seed, folder, answers_given(tokens, sets))
        settings = settings if products is None else replace(settings, products=products)
        resolve_products(settings.products)  # refuse before hours of work
        check_confidence(settings, further=begin is not None)
        check_limit(limit)
        if answers and not prompts:
            _refuse({"--exclude": bool(exclude), "--strict": strict, "--limit": limit is not None})
        source = _Source(prompts, answers, exclude or [], strict, limit, skip_broken, raw, yes)
        use_threads(threads)
        target = load_target(model, dtype=dtype, device=processes.place(device))
        _run(settings, target, folder, source, processes, begin)


def _refuse(given: dict[str, bool]) -> None:
    """Raise OptionError for an option about prompts where there are answers alone."""
    for name in (name for name, there in given.items() if there):
        raise OptionError(
            f"{name} chooses among prompts, but --answers without --prompts takes the answers as they are; "
            f"leave it out, or make the answers anew with `jetspec answers {name} ..`"
        )


@dataclass(frozen=True)
class _Source:
    """Where answers come from."""

    prompts: list[str] | None
    answers: list[Path]
    exclude: list[Path]
    strict: bool
    limit: int | None
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
        from jetspec.train.corpus import check_distinct

        check_distinct(self.answers)
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
                strict=self.strict,
                limit=self.limit,
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
            own_prompts(target, path, options, begun=_parts_of(folder) is not None)
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


def _run(
    settings: Settings,
    target: Target,
    out: Path,
    source: _Source,
    processes: Processes,
    begin: SourceHead | None,
) -> None:
    from jetspec.cli.watch import Watch, stop_between_steps
    from jetspec.train.families import find_family
    from jetspec.train.loop import Paused
    from jetspec.train.pipeline import train_head

    family = find_family(settings.method)
    if begin is None:
        family.check(target, settings.head)
    else:
        begin.check(target, out)
    taps = family.taps(target, settings.head) or None
    folders = source.folders(settings, target, out, taps, processes)
    with stop_between_steps() as asked, Watch() if processes.first else nullcontext() as watch:
        on_report = watch or (lambda report: None)
        try:
            folder = train_head(
                target,
                folders,
                out,
                settings,
                source=begin,
                on_report=on_report,
                processes=processes,
                pause=asked,
                say=(lambda line: None) if watch is None else watch.say,
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
