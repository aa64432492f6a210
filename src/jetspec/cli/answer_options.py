"""The options of `jetspec answers`, some of which `train` and `prompts` have too, each spelled once."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Prompts = Annotated[
    list[str] | None,
    typer.Option(
        "--prompts",
        metavar="SOURCE",
        help="Prompts: a file of JSON lines, a JSON array, or text with one prompt per line, packed (.gz) or"
        " not; or a data set of the hub, hf:org/name[/config][:split]. May be repeated.",
    ),
]
Tokens = Annotated[int, typer.Option("--tokens", metavar="N", help="Answer tokens to make.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", metavar="N", help="Longest answer, in tokens.")]
MaxPrompt = Annotated[
    int,
    typer.Option(
        "--max-prompt", metavar="N", help="Longest prompt, in tokens, with the conversation before it."
    ),
]
Batch = Annotated[int, typer.Option("--batch", metavar="N", help="Prompts answered at once.")]
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
Exclude = Annotated[
    list[Path] | None,
    typer.Option(
        "--exclude",
        metavar="FILE",
        help="Evaluation prompts that must not be trained on: prompts that equal or contain one are left out"
        " and counted. May be repeated.",
    ),
]
Strict = Annotated[
    bool, typer.Option("--strict", help="Stop if there are prompts that --exclude would leave out.")
]
Limit = Annotated[
    int | None, typer.Option("--limit", metavar="N", help="Most records to read from each source.")
]
Temperatures = Annotated[
    str,
    typer.Option(
        "--temperatures",
        metavar="T:SHARE,…",
        help="Temperatures of the answers and the shares of prompts that get them; one alone is for all.",
    ),
]
RawPrompts = Annotated[
    bool, typer.Option("--raw", help="Continue the prompts as they are, without chat template (base models).")
]
Thinking = Annotated[
    bool | None,
    typer.Option(
        "--thinking/--no-thinking", help="Let the answers begin with reasoning, if the template can."
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="N", help="Seed of the prompts' order and of sampled answers.")
]
Yes = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before writing many gigabytes.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", metavar="FOLDER", help="Folder that answers are written to.")
]
TextOnly = Annotated[
    bool, typer.Option("--text-only", help="Write the answers' text and no features; see --from.")
]
From = Annotated[
    list[Path] | None,
    typer.Option(
        "--from",
        metavar="FILE",
        help="Answer nothing: compute the features of answers that exist as JSON lines. May be repeated.",
    ),
]
Taps = Annotated[
    str | None,
    typer.Option(
        "--taps", metavar="N,N,…", help="Target layers to record, counted from 0; by default five of them."
    ),
]
Url = Annotated[
    str | None,
    typer.Option(
        "--endpoint",
        metavar="URL",
        help="Let an OpenAI-compatible endpoint answer, which serves the target; text only.",
    ),
]
EndpointModel = Annotated[
    str | None, typer.Option("--endpoint-model", metavar="NAME", help="The target's name at the endpoint.")
]
ApiKeyEnv = Annotated[
    str | None,
    typer.Option("--api-key-env", metavar="VAR", help="Environment variable with the endpoint's key."),
]
Concurrency = Annotated[
    int, typer.Option("--concurrency", metavar="N", help="Requests to the endpoint at once.")
]
Timeout = Annotated[
    float,
    typer.Option("--timeout", metavar="SECONDS", help="Longest wait for a whole answer of the endpoint."),
]
