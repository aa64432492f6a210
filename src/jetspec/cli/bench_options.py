"""The options of `jetspec bench`, each spelled once; see `options` for those that verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        metavar="NAMES",
        help="Methods, separated by commas; see --list. A named one must have its head, all leaves out those"
        " without.",
    ),
]
Sets = Annotated[
    str | None,
    typer.Option("--sets", metavar="NAMES", help="Evaluation sets, separated by commas; all seven if found."),
]
Data = Annotated[
    str | None,
    typer.Option("--data", metavar="FOLDER", help="Folder of the evaluation sets, with SET.jsonl files."),
]
PromptFile = Annotated[
    list[Path] | None,
    typer.Option(
        "--prompt-file",
        metavar="FILE",
        help="Prompts of your own instead: JSON lines with `turns` or `messages`, or text, one per line."
        " May be repeated.",
    ),
]
Prompts = Annotated[
    int, typer.Option("--prompts", metavar="N", help="Prompts per set, evenly spaced over its file.")
]
Tokens = Annotated[int, typer.Option("--tokens", "-n", metavar="N", help="Most tokens of an answer.")]
Budgets = Annotated[
    str,
    typer.Option("--budgets", metavar="LIST", help="Drafted nodes per round, or auto; between commas."),
]
Temperatures = Annotated[
    str, typer.Option("--temperatures", metavar="LIST", help="Temperatures, separated by commas.")
]
Batches = Annotated[
    str, typer.Option("--batch", metavar="LIST", help="Prompts decoded at once, separated by commas.")
]
Seeds = Annotated[
    str, typer.Option("--seed", metavar="LIST", help="Seeds of the sampled texts, separated by commas.")
]
HeadOf = Annotated[
    list[str] | None,
    typer.Option(
        "--head",
        metavar="[METHOD=]FOLDER",
        help="The head of a method or of a family (jetspec, dflash, eagle3, dspark, mtp); without a name that"
        " of its own family. May be repeated.",
    ),
]
HeadFolder = Annotated[
    str | None,
    typer.Option("--heads", metavar="FOLDER", help="Folder that holds heads as METHOD/ or FAMILY/."),
]
Confidence = Annotated[
    float,
    typer.Option(
        "--confidence",
        metavar="P",
        help="DSpark's chains end at the first depth whose chance of acceptance its head puts below P.",
    ),
]
Assistant = Annotated[
    str | None,
    typer.Option(
        "--assistant", metavar="MODEL", help="A smaller model, for transformers' assisted generation."
    ),
]
OutsidePrompts = Annotated[
    int,
    typer.Option(
        "--outside-prompts", metavar="N", help="Prompts per set that transformers decodes too; it is slow."
    ),
]
IgnoreEos = Annotated[
    bool, typer.Option("--ignore-eos", help="Go on after the end of the text, always to --tokens.")
]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="FILE", help="File of JSON lines that records are added to.")
]
Fresh = Annotated[
    bool, typer.Option("--fresh", help="Measure everything again, also what is recorded already.")
]
ListThem = Annotated[
    bool,
    typer.Option("--list", help="Only list the methods, and where their heads are; nothing is measured."),
]
Records = Annotated[
    list[Path], typer.Argument(metavar="RECORDS", help="Files of records that jetspec bench wrote.")
]
RunKey = Annotated[
    str | None,
    typer.Option(
        "--run", metavar="KEY", help="The run to show, by the start of its key; the newest if left out."
    ),
]
Profile = Annotated[
    bool,
    typer.Option("--profile", help="Take rounds apart by operator instead: `jetspec bench profile`."),
]
