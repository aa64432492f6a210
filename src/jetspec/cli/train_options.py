"""The options of `jetspec train`, each spelled once; see `options` for those that verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        metavar="NAME|FILE",
        help="A method (jetspec, dflash, dspark, eagle3, mtp), a packaged recipe such as dflash-qwen3-8b,"
        " or a TOML file; by default jetspec, or the method of --from-head.",
    ),
]
FromHead = Annotated[
    str | None,
    typer.Option(
        "--from-head",
        metavar="FOLDER|default",
        help="Begin with the weights of this head (default or auto: the one packaged for the model) instead"
        " of untrained ones. Method, shape, taps and draft vocabulary are the head's.",
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
    int,
    typer.Option("--seed", metavar="N", help="Seed of prompts' order, sampled answers, weights and batches."),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        "-o",
        metavar="FOLDER",
        help="Folder of the run: checkpoint, log, curves, and the head in FOLDER/head; by default"
        " runs/RECIPE-MODEL, with --from-head runs/METHOD-MODEL-tuned.",
    ),
]


def _change(name: str, text: str, metavar: str | None = "N") -> Any:
    """An option that replaces a value of the recipe; a flag has no metavar."""
    return typer.Option(name, help=text, metavar=metavar, show_default=False)


Tokens = Annotated[
    int | None, _change("--tokens", "Answer tokens to make; fewer if --minutes is less than the recipe's.")
]
MaxTokens = Annotated[int | None, _change("--max-tokens", "Longest answer, in tokens.")]
Batch = Annotated[int | None, _change("--batch", "Prompts answered at once.")]
Minutes = Annotated[
    float | None,
    _change(
        "--minutes",
        "Training time; the schedule's length is derived from the measured speed.",
        metavar="MINUTES",
    ),
]
Steps = Annotated[int | None, _change("--steps", "Length of the schedule in steps.")]
Rate = Annotated[float | None, _change("--rate", "Peak learning rate.", metavar="X")]
Optimizer = Annotated[str | None, _change("--optimizer", "adamw or muon.", metavar="NAME")]
Weighting = Annotated[
    str | None,
    _change("--weighting", "Of the depths: uniform, exponential or expected-length.", metavar="NAME"),
]
Decay = Annotated[
    float | None,
    _change("--decay", "Exponential depth weights exp(-(k-1)/decay); 0 is uniform.", metavar="X"),
]
PerBatch = Annotated[int | None, _change("--answers-per-batch", "Answers in a batch.")]
Anchors = Annotated[int | None, _change("--anchors", "Blocks per answer in a batch.")]
Products = Annotated[
    str | None,
    _change(
        "--products", "Matrix products in auto, float32 or bfloat16 (with float32 sums).", metavar="NAME"
    ),
]
Fsdp = Annotated[
    bool,
    typer.Option(
        "--fsdp",
        help="Shard weights, gradients and moments over the processes (started by torchrun), for heads that"
        " are too large to be copied.",
    ),
]
Layers = Annotated[
    int | None, _change("--layers", "Draft layers; more than those of --from-head are added to it.")
]
Block = Annotated[int | None, _change("--block", "Slots per block, root included.")]
Vocab = Annotated[
    int | None,
    _change("--vocab", "Size of the draft vocabulary (the most frequent ids of the answers); 0 = all."),
]
NewVocab = Annotated[
    bool,
    _change(
        "--new-vocab",
        "With --from-head: choose the draft vocabulary anew, from the answers (block heads).",
        metavar=None,
    ),
]
Scorer = Annotated[
    str | None, _change("--scorer", "Path scorer: none, vanilla, gated or rnn.", metavar="NAME")
]
Rank = Annotated[int | None, _change("--rank", "Rank of the path scorer; 0 = none.")]
Plain = Annotated[
    bool, _change("--plain", "The published form: no direct input, no slot embedding.", metavar=None)
]
Bidirectional = Annotated[
    bool,
    _change(
        "--bidirectional", "Slots see all of their block (DFlash), not only what comes before.", metavar=None
    ),
]
Cold = Annotated[bool, _change("--cold", "Random first weights, not the target's last layers.", metavar=None)]
