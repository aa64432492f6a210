"""`jetspec calibrate`: how far a head's word can be trusted, measured on rounds of real decoding."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from jetspec.cli import options
from jetspec.cli.loading import open_model
from jetspec.cli.plain_lines import PlainLines
from jetspec.cli.progress import new_bar
from jetspec.cli.screen import Screen
from jetspec.errors import HeadError, OptionError

if TYPE_CHECKING:
    from jetspec.api import LanguageModel
    from jetspec.budget.calibrate import Reliability
    from jetspec.decode.calibration import Outcome

Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="SOURCE",
        help="Prompts that the head was not trained on, in any form that jetspec train reads; without it a"
        " few that come with the package. The last ones of a shuffled source are taken. May be repeated.",
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", help="Tokens to decode.")]
Nodes = Annotated[int, typer.Option("--nodes", metavar="N", help="Drafted nodes per round.")]
Plot = Annotated[
    Path | None,
    typer.Option(
        "--plot", metavar="PNG", help="The reliability plot; by default calibration.png in the head's folder."
    ),
]


Force = Annotated[
    bool,
    typer.Option(
        "--force",
        help="Write the new maps even if they are no better than the head's word or the maps that it has.",
    ),
]

_FEW = 40  # prompts below which errors of 20 bins are hardly more than chance


def calibrate(
    head: options.Head = "auto",
    model: options.Model = options.DEFAULT_MODEL,
    prompts: Prompts = None,
    tokens: Tokens = 6000,
    nodes: Nodes = 32,
    plot: Plot = None,
    force: Force = False,
    grow: options.Grow = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Fit a head's path probabilities to what is accepted.

    Writes calibration.json into the head's folder, which the budget auto reads from there, and a reliability
    plot. The errors that are printed are those on prompts that the maps were not fitted on. Where new maps
    err there no less on paths than the head's word, or than the maps that it has, nothing is written and the
    exit code is 1.
    """
    from jetspec.api import check_growth
    from jetspec.budget.calibration_file import FILE, save_calibration
    from jetspec.cli import report

    check_growth(nodes, grow)
    if tokens < 1 or nodes < 1:
        raise OptionError(f"--tokens and --nodes must be at least 1, got {tokens} and {nodes}")
    if plot is not None and plot.suffix != ".png":
        raise OptionError(f"--plot is {plot}; give a .png file")
    screen = Screen(no_color=no_color, quiet=quiet or json)
    loaded = open_model(
        screen, model, head, budget=nodes, grow=grow, dtype=dtype, device=device, threads=threads
    )
    folder = getattr(loaded.drafter, "folder", None)
    if not isinstance(folder, Path):
        raise HeadError(f"{head} is not the folder of a head, and only those can be calibrated")
    start = time.monotonic()
    outcome = _run(screen, loaded, folder, prompts, tokens, nodes)
    facts = _facts(outcome, loaded, _command(loaded, head, prompts, tokens, nodes))
    written = outcome.better or force
    path = save_calibration(folder, outcome.calibration, facts) if written else folder / FILE
    # Without new maps the picture in the head's folder stays that of the old ones.
    place = plot if plot is not None else folder / "calibration.png" if written else None
    picture = None if place is None else _draw(screen, outcome, loaded, place)
    if json:
        found = {"written": written, "file": str(path), "plot": None if picture is None else str(picture)}
        screen.json({**facts, **found, "versions": report.versions()})
    else:
        _report(screen, outcome, time.monotonic() - start)
        if written:
            screen.note(f"jetspec: wrote {path}" + ("" if picture is None else f" and {picture}"))
        else:
            screen.line(_kept_line(outcome, path))
    if not written:
        raise typer.Exit(1)


def _report(screen: Screen, outcome: Outcome, seconds: float) -> None:
    """What was decoded, and the errors."""
    screen.line(
        f"{outcome.rounds} rounds of {outcome.prompts} prompts, {outcome.nodes} nodes,"
        f" {seconds:.0f} s; τ " + ", ".join(f"{value:.2f} {name}" for name, value in outcome.tau.items())
    )
    for name, what in (("path", "a path is accepted"), ("step", "a node is accepted after its parent")):
        before, after = outcome.before[name].error, outcome.after[name].error
        had = "" if outcome.earlier is None else f", {outcome.earlier[name].error:.2%} with the maps it had"
        screen.line(
            f"calibration error, chance that {what}: {before:.2%} as stated{had}, {after:.2%} calibrated"
        )
    screen.line("errors are those on the held-out half of the prompts")
    if outcome.prompts < _FEW:
        screen.note(
            f"jetspec: {outcome.prompts} prompts are few: the errors say little; raise --tokens, or give more"
        )


def _kept_line(outcome: Outcome, path: Path) -> str:
    """Why nothing was written, and what to do."""
    had = "" if outcome.earlier is None else f" and {outcome.earlier['path'].error:.2%} with the maps it had"
    state = "kept as it is" if path.exists() else "not written"
    return (
        f"{path} is {state}: on the held-out half paths err by {outcome.after['path'].error:.2%} with the new"
        f" maps, {outcome.before['path'].error:.2%} as stated{had}; give more prompts (--prompts, --tokens),"
        " or write the new maps all the same with --force"
    )


def _run(
    screen: Screen, loaded: LanguageModel, folder: Path, sources: list[str] | None, tokens: int, nodes: int
) -> Outcome:
    from jetspec.budget.calibration_file import load_kept
    from jetspec.budget.choose import shares_noise
    from jetspec.decode import calibration

    per_prompt = calibration.MAX_TOKENS // 2  # many answers end early
    ids = _prompt_ids(loaded, sources, max(16, tokens // per_prompt))
    kept = load_kept(folder, shares_noise(loaded.drafter))
    bar = new_bar(screen.err, hidden=screen.quiet, transient=True)
    lines = PlainLines("decoding", "tokens", tokens, hidden=screen.quiet or not bar.disable)
    task = bar.add_task("decoding", total=tokens)

    def watch(emitted: int) -> None:
        bar.update(task, completed=emitted)
        lines.show(emitted)

    with bar, lines:
        return calibration.calibrate(
            loaded.target,
            loaded.drafter,
            ids,
            tokens=tokens,
            nodes=nodes,
            grow=loaded.grow,
            kept=kept,
            watch=watch,
        )


def _prompt_ids(loaded: LanguageModel, sources: list[str] | None, count: int) -> list[list[int]]:
    """Prompts as token ids: the last `count` of shuffled sources, since training begins with the first."""
    from jetspec.bench.prompts import BUILTIN, WARM_UP
    from jetspec.cli import checks, demo
    from jetspec.train.prompts import load_prompts

    tokenizer = loaded.target.tokenizer
    if sources:
        chosen = [prompt.messages for prompt in load_prompts(sources).prompts[-count:]]
    else:
        texts = [*BUILTIN, *checks.PROMPTS, *demo.PROMPTS.values(), WARM_UP]
        chosen = [({"role": "user", "content": text},) for text in texts]
    most = loaded.target.config.max_positions // 2
    if tokenizer.has_template:
        encoded = [tokenizer.chat(list(messages)) for messages in chosen]
    else:
        encoded = [tokenizer.encode(messages[-1]["content"]) for messages in chosen]
    return [ids for ids in encoded if len(ids) <= most]


def _command(loaded: LanguageModel, head: str, sources: list[str] | None, tokens: int, nodes: int) -> str:
    """The command to run again. What others cannot find where it is here goes by its name alone."""
    from jetspec.api import published_grow
    from jetspec.draft.loading import PACKAGED

    words = ["jetspec calibrate"]
    if loaded.target.name != options.DEFAULT_MODEL:
        words.append(f"--model {_shown(loaded.target.name)}")
    if head not in PACKAGED:
        words.append(f"--head {_shown(head)}")
    words += [f"--prompts {Path(source).name}" for source in sources or ()]
    words.append(f"--tokens {tokens} --nodes {nodes}")
    if loaded.grow != published_grow(loaded.drafter):
        words.append(f"--grow {loaded.grow}")
    return " ".join(words)


def _shown(path: str) -> str:
    return Path(path).name if Path(path).is_absolute() else path


def _facts(outcome: Outcome, loaded: LanguageModel, command: str) -> dict[str, Any]:
    """What the file says beside the maps."""
    from jetspec import __version__
    from jetspec.budget.choose import shares_noise

    earlier = outcome.earlier
    return {
        "target": loaded.target.name,
        "shared_noise": shares_noise(loaded.drafter),
        "jetspec": __version__,
        "command": command,
        "prompts": outcome.prompts,
        "prompt_prints": " ".join(outcome.prints),
        "rounds": outcome.rounds,
        "nodes": outcome.nodes,
        "tokens": outcome.tokens,
        "tau": {name: round(value, 3) for name, value in outcome.tau.items()},
        "error_on_held_out_half": {
            name: {
                "stated": round(outcome.before[name].error, 5),
                "calibrated": round(outcome.after[name].error, 5),
                **({} if earlier is None else {"earlier": round(earlier[name].error, 5)}),
                "nodes": sum(count for _, _, count in outcome.after[name].bins),
            }
            for name in outcome.before
        },
    }


def _draw(screen: Screen, outcome: Outcome, loaded: LanguageModel, path: Path) -> Path | None:
    """The reliability plot, or a note where matplotlib is not installed."""
    from jetspec.storage import storage_errors

    try:
        from matplotlib.figure import Figure
    except ImportError:
        screen.note("jetspec: no plot without matplotlib (pip install jetspec[bench])", style="")
        return None
    figure = Figure(figsize=(9, 4.2), layout="constrained")
    titles = {"path": "a path is accepted", "step": "a node is accepted after its parent"}
    for place, (name, title) in enumerate(titles.items(), start=1):
        axes = figure.add_subplot(1, 2, place)
        axes.plot([0, 1], [0, 1], color="0.7", linewidth=1)
        pairs: list[tuple[str, Reliability, str]] = [
            ("as stated", outcome.before[name], "o"),
            ("calibrated", outcome.after[name], "s"),
        ]
        for label, found, marker in pairs:
            chance, share, _ = zip(*found.bins, strict=True)
            axes.plot(chance, share, marker=marker, label=f"{label}: error {found.error:.2%}")
        axes.set(title=f"Chance that {title}", xlabel="chance", ylabel="share accepted")
        axes.legend(loc="upper left", frameon=False)
    figure.suptitle(f"{loaded.drafter.name} head of {loaded.target.name}, held-out prompts")
    with storage_errors(path, "--plot"):
        figure.savefig(path, format="png", dpi=110)
    return path
