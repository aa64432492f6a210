"""Does the text follow the target's law? Chi-square of the first two tokens over many seeds.

Equality with plain decoding for the same seed says nothing about the law that both follow; this does. A short
prompt is decoded once per seed: plainly, drafted with the target's noise in view, and with chains that were
sampled from the head and verified by rejection sampling. The first two must emit the same tokens; rejection
sampling has texts of its own. The pair of first tokens must follow p(first) p(second | first), computed from
the processors' output in one prefill per first token. Pairs that are expected at least five times are cells
of their own, the others share one; where even the shared cell is expected less often, it joins the smallest.

A true law fails a case once in 10,000 runs with other seeds; the seeds are fixed, so a pass is a pass.

    python benchmarks/sampling_law.py
    python benchmarks/sampling_law.py --head heads/smollm2-135m/dspark --seeds 2000
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

import common
import torch
from rich.table import Table

from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.draft.sampled import SampledDrafter
from jetspec.errors import OptionError
from jetspec.sampling import History, Sampling, process_logits
from jetspec.sequence import Limits
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.tree import chain

ALARM = 1e-4
CASES: dict[str, dict[str, Any]] = {
    "T 1": {"temperature": 1.0},
    "T 0.7": {"temperature": 0.7},
    "top-k, top-p": {"temperature": 1.0, "top_k": 20, "top_p": 0.9},
    "min-p, bias": {"temperature": 1.0, "min_p": 0.02, "logit_bias": {260: 1.5}},
    "penalties": {
        "temperature": 0.9,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.6,
    },
}
_LEAST = 5.0  # expected count of a cell


def decode(
    target: Target,
    drafter: Drafter | None,
    prompt: list[int],
    case: dict[str, Any],
    seeds: range,
    budget: int,
    *,
    reject: bool = False,
) -> tuple[list[list[int]], Engine]:
    """The tokens of every seed; three are decoded, so that the second is drafted at depth 2.

    reject: draft chains sampled from the drafter's law and verify them by rejection sampling.
    """
    sampled = SampledDrafter(drafter, budget) if reject and drafter is not None else None
    engine = Engine(target, sampled or drafter, budget=budget, max_batch=64)
    if sampled is not None:
        engine.grow, engine.walker = chain, sampled.walk
    limits = Limits(max_tokens=3, ignore_eos=True)
    sequences = [engine.add(prompt, Sampling(**case, seed=seed), limits) for seed in seeds]
    for _ in engine.run(sequences):
        pass
    return [s.emitted for s in sequences], engine


def law(target: Target, prompt: list[int], emitted: list[int], case: dict[str, Any]) -> torch.Tensor:
    """The target's law [V] of the token after prompt and emitted tokens."""
    cache = target.new_cache()
    cache.add(0)
    tokens = [*prompt, *emitted]
    logits = target.forward(chunk([(0, tokens)], cache, logits=True), cache).logits
    assert logits is not None
    scores = process_logits(logits[-1:], Sampling(**case), [History(tokens, len(prompt))])
    return scores[0].double().softmax(-1)


def chi_square(
    target: Target, prompt: list[int], pairs: list[tuple[int, int]], case: dict[str, Any]
) -> tuple[float, int]:
    """The odds of a fit as bad as this under the exact law, and the number of cells."""
    count = len(pairs)
    seen = Counter(pairs)
    first = law(target, prompt, [], case)
    expected: dict[tuple[int, int], float] = {}
    for one in (first * count >= _LEAST).nonzero().flatten().tolist():
        joint = first[one] * law(target, prompt, [one], case) * count
        for two in (joint >= _LEAST).nonzero().flatten().tolist():
            expected[one, two] = float(joint[two])
    if any(float(first[one]) == 0.0 for one, _ in seen):  # a token that a processor had removed
        return 0.0, len(expected)
    cells = [(e, seen[pair]) for pair, e in expected.items()]
    rest = (count - sum(e for e, _ in cells), count - sum(n for _, n in cells))
    if len(cells) + (rest[0] >= _LEAST) < 2:
        raise OptionError(f"{count} seeds are too few to tell laws apart; give more, such as --seeds 320")
    cells.sort()
    if rest[0] >= _LEAST:
        cells.append(rest)
    else:
        cells[0] = (cells[0][0] + rest[0], cells[0][1] + rest[1])
    statistic = sum((n - e) ** 2 / e for e, n in cells)
    half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1])), len(cells)


def main() -> int:
    """Decode, compare, print; exit code 1 if a case fails."""
    parser = common.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=320, help="per case (%(default)s)")
    parser.add_argument("--budget", type=int, default=4, help="drafted nodes (%(default)s)")
    parser.add_argument("--prompt", default="The weather today is very", help="as it is, without a template")
    args = parser.parse_args()
    target, drafter = common.load(args)
    prompt = target.tokenizer.encode(args.prompt)
    records = [
        record
        for number, name in enumerate(CASES)
        for record in _measure(target, drafter, prompt, name, number, args)
    ]
    facts = common.provenance(Path(__file__), _arguments(args, target))
    _keep(args.results / "sampling_law.jsonl", records, facts)
    if args.json:
        print(json.dumps({"cases": records, **facts}))
    else:
        _print(records, facts)
    return 0 if all(r["passed"] for r in records) else 1


def _arguments(args: argparse.Namespace, target: Target) -> dict[str, Any]:
    kept = ("model", "seeds", "budget", "prompt")
    return {name: getattr(args, name) for name in kept} | {"head": common.head_identity(args.head, target)}


def _keep(path: Path, records: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    journal = common.Journal(path)
    key = common.run_key(facts)
    journal.append({"kind": "run", "key": key, "run": facts})
    for record in records:
        journal.append({"kind": "case", "key": key, **record})


def _measure(
    target: Target, drafter: Drafter, prompt: list[int], name: str, number: int, args: argparse.Namespace
) -> list[dict[str, Any]]:
    """A record per rule of verification: plain decoding's texts with the walk, and rejection sampling's."""
    case = CASES[name]
    seeds = range(100_000 * number, 100_000 * number + args.seeds)
    plain, _ = decode(target, None, prompt, case, seeds, 0)
    records = []
    for rule in ("walk", "rejection"):
        reject = rule == "rejection"
        drafted, engine = decode(target, drafter, prompt, case, seeds, args.budget, reject=reject)
        odds, cells = chi_square(target, prompt, [(t[0], t[1]) for t in drafted], case)
        different = sum(a != b for a, b in zip(plain, drafted, strict=True))
        records.append(
            {
                "case": name,
                "rule": rule,
                "seeds": args.seeds,
                "cells": cells,
                "odds": odds,
                "different": different,
                "drafted": engine.stats.nodes,
                "accepted": engine.stats.accepted,
                "passed": odds >= ALARM and (reject or different == 0),
            }
        )
    return records


def _print(records: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    console = common.console()
    table = Table(title="first two tokens against the exact law, and drafted against plain texts")
    titles = ("case", "rule", "seeds", "cells", "odds", "different texts", "drafted", "accepted", "")
    for title in titles:
        table.add_column(title, justify="left" if title in ("case", "rule", "") else "right")
    for r in records:
        numbers = [f"{r[key]}" for key in ("seeds", "cells")]
        numbers += [f"{r['odds']:.4f}"]
        numbers += [f"{r[key]}" for key in ("different", "drafted", "accepted")]
        table.add_row(r["case"], r["rule"], *numbers, "passed" if r["passed"] else "FAILED")
    console.print(table)
    console.print(common.footer(facts))


if __name__ == "__main__":
    common.run(main)
