"""Speedup and tau of draft trees against plain decoding: same engine, prompts, process and warm-up.

Every prompt is decoded by all methods before the next one, plain decoding included, and the order rotates
from prompt to prompt. The clock covers everything from the first round to the last token (draft, build,
verify with sampling, commit with detokenising, and the engine's own work between them); prefill is measured
apart. Answers end where the model ends them, and at --tokens. Records go to speedup.jsonl, one line per
prompt; a prompt that is there already, with the same arguments, code, versions and machine, is not measured
again.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import common
from common import SETS, Journal, Question
from rich.table import Table
from summary import PHASES, Row, prompt_records, run_facts, summarise

from jetspec.decode.compare import find_divergence
from jetspec.decode.engine import Engine
from jetspec.decode.stats import Stats
from jetspec.draft.base import Drafter
from jetspec.errors import OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.target import Target
from jetspec.tree import GROW

Method = tuple[str, int]  # builder ("plain" for none), budget
PLAIN: Method = ("plain", 0)


def main() -> int:
    """Measure what is missing, then print all of this run."""
    args = _arguments()
    target, drafter = common.load(args)
    sampling = Sampling(temperature=args.temperature, seed=args.seed)
    limits = Limits(max_tokens=args.tokens)
    methods = _methods(args, drafter)
    questions = [q for name in args.sets for q in common.read_set(args.data, name, args.prompts)]
    facts = common.provenance(Path(__file__), {
        "model": target.name,
        "head": common.head_identity(args.head, target),
        "tokenizer": target.tokenizer.hash[:16],
        "template": (target.tokenizer.template_hash or "none")[:16],
        "dtype": "float32",
        "tokens": args.tokens,
        "methods": [f"{grow} {budget}" for grow, budget in methods],
        "temperature": args.temperature,
        "seed": args.seed,
        "batch": 1,
        "clock": "the first round to the last token, prefill apart",
    })  # fmt: skip
    key = common.run_key(facts)
    journal = Journal(args.results / "speedup.jsonl")
    done = {(r["set"], r["id"]) for r in prompt_records(journal.read(), key)}
    missing = [q for q in questions if (q.set, q.id) not in done]
    if len(missing) < len(questions):
        common.note(f"{len(questions) - len(missing)} prompts are recorded already")
    if missing:
        journal.append({"kind": "run", "key": key, "run": facts})
        _measure(target, drafter, methods, missing, sampling, limits, journal, key)
    wanted = {(q.set, q.id) for q in questions}
    records = journal.read()
    chosen = [r for r in prompt_records(records, key) if (r["set"], r["id"]) in wanted]
    rows = summarise(chosen)
    if args.json:
        print(
            json.dumps(
                {"run": run_facts(records)[key], "rows": [asdict(row) for row in rows]},
                ensure_ascii=False,
                indent=2,
            )
        )
    else:
        _print(rows, facts)
    return 0


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--sets", nargs="+", default=["gsm8k"], choices=SETS, help="evaluation sets (gsm8k)")
    parser.add_argument(
        "--prompts", type=int, default=40, help="per set, evenly spaced over its file (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=128, help="most tokens of an answer (%(default)s)")
    parser.add_argument(
        "--budgets", nargs="+", type=int, default=[4, 8, 12, 16, 24, 32], help="4 8 12 16 24 32"
    )
    parser.add_argument(
        "--grow", nargs="+", default=["best-first", "chain"], choices=list(GROW), help="best-first chain"
    )
    parser.add_argument("--temperature", type=float, default=0.0, help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled text (%(default)s)")
    return parser.parse_args()


def _methods(args: argparse.Namespace, drafter: Drafter) -> list[Method]:
    """Plain decoding, then every builder with every budget.

    A chain is never longer than the head's depth, so larger budgets would measure the same thing again.
    """
    if drafter.name == "off":
        common.note(
            "no draft head: every method decodes plainly, so this measures the noise of the comparison"
        )
    head = getattr(drafter, "head", None)
    depth = head.config.depth if head is not None else getattr(drafter, "depth", math.inf)
    methods = [PLAIN]
    for grow in dict.fromkeys(args.grow):
        budgets = sorted({min(n, depth) if grow == "chain" else n for n in args.budgets})
        methods += [(grow, int(budget)) for budget in budgets]
    if len(methods) == 1:
        raise OptionError("nothing to compare: give at least one of --budgets and --grow")
    return methods


def _measure(
    target: Target,
    drafter: Drafter,
    methods: list[Method],
    questions: list[Question],
    sampling: Sampling,
    limits: Limits,
    journal: Journal,
    key: str,
) -> None:
    engines = {m: _engine(target, drafter, m) for m in methods}
    for engine in engines.values():
        common.warm_up(engine)
    with common.progress() as bar:
        task = bar.add_task("prompts", total=len(questions))
        for number, question in enumerate(questions):
            bar.update(task, description=question.id)
            ids = common.encode(target, question.text)
            turn = number % len(methods)
            results: dict[Method, dict[str, Any]] = {}
            outputs: dict[Method, list[int]] = {}
            for method in methods[turn:] + methods[:turn]:
                results[method], outputs[method] = _decode(engines[method], method, ids, sampling, limits)
            for method in methods:  # off the clock
                first = find_divergence(target, ids, outputs[PLAIN], outputs[method], sampling)
                finite = (
                    None
                    if first is None
                    else {**first._asdict(), "gap": first.gap if math.isfinite(first.gap) else None}
                )
                results[method]["divergence"] = finite
            record = {
                "kind": "prompt",
                "key": key,
                "set": question.set,
                "id": question.id,
                "prompt_tokens": len(ids),
            }
            journal.append({**record, "methods": [results[method] for method in methods]})
            bar.advance(task)


def _engine(target: Target, drafter: Drafter, method: Method) -> Engine:
    grow, budget = method
    return (
        Engine(target, None, budget=0)
        if method == PLAIN
        else Engine(target, drafter, budget=budget, grow=grow)
    )


def _decode(
    engine: Engine, method: Method, ids: list[int], sampling: Sampling, limits: Limits
) -> tuple[dict[str, Any], list[int]]:
    engine.stats = Stats()
    gc.collect()  # so that no method pays for another one's garbage
    start = time.perf_counter()
    sequence = engine.generate([ids], sampling, limits)[0]
    whole = time.perf_counter() - start
    stats = engine.stats
    prefill = stats.seconds["prefill"]
    grow, budget = method
    record = {
        "grow": grow,
        "budget": budget,
        "tokens": len(sequence.emitted),
        "finish": sequence.finished,
        "seconds": whole - prefill,
        "prefill": prefill,
        "split": {phase: stats.seconds[phase] for phase in PHASES},
        "rounds": stats.rounds,
        "accepted": stats.accepted,
        "nodes": stats.nodes,
        "tau": stats.tau,
        "by_depth": stats.by_depth,
    }
    return record, sequence.emitted


def _print(rows: list[Row], facts: dict[str, Any]) -> None:
    console = common.console()
    for name in dict.fromkeys(row.set for row in rows):
        own = [row for row in rows if row.set == name]
        table = Table(title=f"{name}: {own[0].prompts} prompts, {own[0].tokens} tokens")
        table.add_column("method")
        titles = (
            "τ",
            "speedup",
            "95 % interval",
            "with prefill",
            "tok/s",
            *(f"{p} ms" for p in PHASES),
            "identical",
        )
        for title in titles:
            table.add_column(title, justify="right")
        for row in own:
            ties = f" + {row.ties} ties" if row.ties else ""
            table.add_row(
                row.name,
                f"{row.tau.value:.2f}",
                f"{row.speedup.value:.2f}×",
                f"{row.speedup.low:.2f} to {row.speedup.high:.2f}",
                f"{row.whole:.2f}×",
                f"{row.per_second:.1f}",
                *(f"{row.round_ms[phase]:.2f}" for phase in PHASES),
                f"{row.same}/{row.prompts}{ties}",
            )
        console.print(table)
    for row in rows:
        if row.verdict is not None:
            console.print(f"miss: {row.verdict}")
        if broken := row.prompts - row.same - row.ties:
            console.print(
                f"NOT LOSSLESS: {row.name} on {row.set} differs from plain decoding in {broken} prompts"
            )
    console.print("ms are means per round; speedup and τ are pooled over prompts, first user turns only")
    console.print(common.footer(facts))


if __name__ == "__main__":
    common.run(main)
