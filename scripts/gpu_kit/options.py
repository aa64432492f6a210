"""The command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

METHODS = ("jetspec", "dflash", "dspark", "eagle3", "mtp")


def parse(argv: Sequence[str] | None, about: str | None) -> argparse.Namespace:
    """The options of a call; `about` heads the help."""
    parser = argparse.ArgumentParser(description=about, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--step", default="all", help="answers, features, plan, train:METHOD, report, all, or join")
    add("--minutes", type=float, default=8.5, help="of this call")
    add("--gguf", type=Path, help="the target as one GGUF file")
    add("--gguf-parts", help="a pattern of the parts that make up the GGUF, in the order of their names")
    add("--model", help="the target by name or folder, instead of a GGUF")
    add("--wheels", help="a pattern of wheels that are imported from where they are")
    add("--prompts", action="append", default=[], help="prompt file; may be repeated")
    add("--exclude", action="append", default=[], type=Path, help="evaluation file; see jetspec train")
    add("--own-prompts", type=int, default=0, help="prompts that the target writes in addition")
    add("--answers", action="append", default=[], type=Path, help="answers.jsonl that exists; none are made")
    add("--work", type=Path, default=Path("runs/gpu"), help="state between calls; features need 7 kB a token")
    add("--out", type=Path, default=Path("runs/gpu-out"), help="results in files below 16 MB")
    add("--tokens", type=int, default=1_500_000, help="answer tokens")
    add("--max-tokens", type=int, default=256, help="longest answer")
    add("--batch", type=int, default=512, help="prompts answered at once")
    add("--methods", default=",".join(METHODS), help="heads to train")
    add(
        "--recipes", default="smollm2-135m", help="a target with packaged recipes, or a folder of METHOD.toml"
    )
    add("--train-minutes", type=float, default=14.0, help="of all heads together; fixes their common steps")
    add("--steps", type=int, help="the schedule of every head, instead of --train-minutes")
    add("--answers-per-batch", type=int, default=64)
    add("--anchors", type=int, default=64)
    add("--part", type=int, default=32, help="answers that are worked on at once")
    add("--rate", type=float, help="peak learning rate; by default that of the recipe")
    add("--rows", type=int, default=16384, help="tokens per forward when features are computed")
    add("--validate-answers", type=int, default=16)
    add("--seed", type=int, default=0)
    add("--device", default="cuda")
    add("--threads", type=int, help="CPU threads")
    return parser.parse_args(argv)
