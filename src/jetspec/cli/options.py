"""Every option of the command line, spelled once: its name, its help, and nothing else.

Ranges are checked where the values are used (`Sampling`, `Limits`, `FixedBudget`, `load_target`), so that the
library and the command line refuse the same things. This file stays light: `--help` must not load torch.
"""

from __future__ import annotations

from typing import Annotated

import typer

# The names of the loading modules, which import torch; a test keeps them equal.
DEFAULT_MODEL = "smollm2-135m"
DEFAULT_BUDGET = 8  # of benchmarks, which need a number
AUTO_BUDGET = "auto"

Prompt = Annotated[
    str | None,
    typer.Argument(
        metavar="PROMPT",
        help="The prompt; '-' reads it from standard input, and so does leaving it out when input is piped.",
    ),
]

# --- what decodes

Model = Annotated[
    str,
    typer.Option(
        "--model",
        "-m",
        metavar="MODEL",
        help="The target: smollm2-135m, a Hugging Face folder, a .gguf file, or a hub id (org/name).",
    ),
]
Head = Annotated[
    str,
    typer.Option(
        "--head",
        metavar="HEAD",
        help="The draft head: auto or default (the one packaged for the target, if any), off, the folder of a"
        " head (RUN/head of a training), or a stub for tests (random, echo, decoy).",
    ),
]
Budget = Annotated[
    int,
    typer.Option("--budget", metavar="NODES", help="Drafted nodes per round; 0 is plain decoding."),
]
AutoBudget = Annotated[
    str,
    typer.Option(
        "--budget",
        metavar="auto|NODES",
        help="Drafted nodes per round: auto verifies what pays on this machine (measured at its first use);"
        " 0 is plain decoding.",
    ),
]
Grow = Annotated[
    str | None,
    typer.Option(
        "--grow",
        metavar="NAME",
        help="How trees are grown: best-first, beam, chain, accum or dynamic; by default as the head's family"
        " was published (JetSpec: best-first, EAGLE-3: dynamic, others: chain).",
    ),
]
ConfidenceThreshold = Annotated[
    float,
    typer.Option(
        "--confidence-threshold",
        metavar="P",
        help="Drafts end where the head puts the chance of acceptance below P; for heads with a confidence"
        " head (DSpark). Changes speed, not text.",
    ),
]
Dtype = Annotated[
    str,
    typer.Option("--dtype", metavar="NAME", help="float32, bfloat16, float16 or float64."),
]
Device = Annotated[str, typer.Option("--device", metavar="NAME", help="cpu, cuda, cuda:1, …")]
Threads = Annotated[
    int | None,
    typer.Option("--threads", metavar="N", help="CPU threads; by default what torch chooses."),
]

# --- how the target picks tokens

Temperature = Annotated[
    float, typer.Option("--temperature", "-t", metavar="T", help="0 always picks the best token.")
]
TopK = Annotated[int, typer.Option("--top-k", metavar="K", help="Only the K best tokens; 0 is off.")]
TopP = Annotated[
    float,
    typer.Option("--top-p", metavar="P", help="Only the best tokens that together reach P; 1 is off."),
]
MinP = Annotated[
    float,
    typer.Option("--min-p", metavar="P", help="Only tokens at least P times as probable as the best."),
]
RepetitionPenalty = Annotated[
    float,
    typer.Option("--repetition-penalty", metavar="X", help="Above 1 disfavours tokens of prompt and output."),
]
PresencePenalty = Annotated[
    float,
    typer.Option("--presence-penalty", metavar="X", help="Taken off tokens that were emitted before."),
]
FrequencyPenalty = Annotated[
    float,
    typer.Option(
        "--frequency-penalty", metavar="X", help="Taken off a token for each time it was emitted before."
    ),
]
Seed = Annotated[
    int,
    typer.Option("--seed", metavar="N", help="Selects the text at a temperature above 0."),
]
SharedNoise = Annotated[
    bool,
    typer.Option(
        "--shared-noise/--no-shared-noise",
        help="Above temperature 0, rank drafts with the noise that picks the text. Changes speed, not text.",
    ),
]

# --- the prompt and the end of the text

MaxTokens = Annotated[
    int, typer.Option("--max-tokens", "-n", metavar="N", help="Most tokens to emit (per prompt).")
]
Stop = Annotated[
    list[str] | None,
    typer.Option("--stop", metavar="TEXT", help="Ends the output, and is not part of it. May be repeated."),
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Use the prompt as it is, without the model's chat template.")
]
System = Annotated[
    str | None,
    typer.Option("--system", metavar="TEXT", help="The system message before the prompt."),
]

# --- what is shown

Json = Annotated[
    bool, typer.Option("--json", help="Print one JSON object with everything, and nothing else.")
]
Compare = Annotated[
    bool,
    typer.Option(
        "--compare",
        help="Also decode plainly, in turns with the drafts; print both speeds and whether the texts agree."
        " Exit code 1 if they differ by more than rounding.",
    ),
]
Quiet = Annotated[
    bool,
    typer.Option(
        "--quiet",
        "-q",
        help="No notes and no closing lines of speed; results stay, also what --compare finds.",
    ),
]
NoColor = Annotated[bool, typer.Option("--no-color", help="No colours on a terminal either.")]
Round = Annotated[
    int, typer.Option("--round", metavar="N", help="Which round's tree to draw, counted from 1.")
]
Reference = Annotated[
    bool,
    typer.Option(
        "--reference/--no-reference",
        help="Compare logits with those of transformers, which takes the memory of a second copy.",
    ),
]
