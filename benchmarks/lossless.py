"""Losslessness: the token ids of drafted decoding against those of plain decoding, on real prompts.

The default is 20 prompts of each of the seven sets, up to 128 new tokens, budgets 4, 16 and 64, greedily and
at temperature 1 with a seed, in float32. Plain decoding runs --plain-batch prompts at a time (1), drafted
decoding --batch.

At each difference plain decoding's scores are computed anew, by prefill of the common prefix: logits at
T = 0, logits / T + noise at T = 1. The gap is the distance between the best two scores, the lag that between
the best score and the worse of the two tokens in question. Where the compiled code runs nothing is excused.
Elsewhere, where the lag (and so the gap) is below 1e-3, rounding decides between the two, and the difference
is counted as a tie and excused; the rest of the answer is then compared with plain decoding resumed behind
the other token, so a tie hides nothing that comes after it. Any other difference makes the exit code 1.

With --bits the logits of every accepted path are compared too, with those of plain decoding at the same
place and bit for bit. Where the compiled decoder runs they have to be equal, and a row that differs makes the
exit code 1.

Records go to lossless.jsonl; a case that is there already, with the same arguments, code, versions and
machine, is not run again.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from common import SETS, Journal
from rich.table import Table

from jetspec.decode.compare import find_divergence, tie_below
from jetspec.decode.engine import Engine
from jetspec.decode.round import Outcome
from jetspec.draft.base import Drafter
from jetspec.errors import OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.plan import Plan
from jetspec.target.target import Target
from jetspec.target.transformer import ForwardOutput
from jetspec.tree import GROW


def main() -> int:
    """Check what is missing, print all of this run, and say with the exit code whether it is lossless."""
    args = _arguments()
    target, drafter = common.load(args)
    facts = common.provenance(Path(__file__), {
        "model": target.name,
        "head": common.head_identity(args.head, target),
        "dtype": "float32",
        "prompts": args.prompts,
        "tokens": args.tokens,
        "grow": args.grow,
        "seed": args.seed,
        "plain_batch": args.plain_batch,
        "ignore_eos": args.ignore_eos,
        "tie_below": tie_below(target),
        **({"bits": True} if args.bits else {}),
    })  # fmt: skip
    key = common.run_key(facts)
    journal = Journal(args.results / "lossless.jsonl")
    wanted = [
        (s, t, b, n) for s in args.sets for t in args.temperatures for b in args.batch for n in args.budgets
    ]
    missing = [case for case in wanted if case not in _recorded(journal, key)]
    if len(missing) < len(wanted):
        common.note(f"{len(wanted) - len(missing)} cases are recorded already")
    if missing:
        counts = {"planned": len(wanted), "done": len(wanted) - len(missing)}
        journal.append({"kind": "run", "key": key, **counts, "run": facts})
        _check(
            target,
            drafter,
            args,
            missing,
            lambda record: journal.append({"kind": "case", "key": key, **record}),
        )
    recorded = _recorded(journal, key)
    records = [recorded[case] for case in wanted]
    broken = sum(record["unexcused"] + record.get("rows_that_differ", 0) for record in records)
    if args.json:
        print(
            json.dumps({"run": facts, "cases": records, "lossless": not broken}, ensure_ascii=False, indent=2)
        )
    else:
        _print(records, facts)
    return 1 if broken else 0


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--sets", nargs="+", default=list(SETS), choices=SETS, help="all seven")
    parser.add_argument(
        "--prompts", type=int, default=20, help="per set, evenly spaced over its file (%(default)s)"
    )
    parser.add_argument("--tokens", type=int, default=128, help="new tokens (%(default)s)")
    parser.add_argument("--budgets", nargs="+", type=int, default=[4, 16, 64], help="4 16 64")
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0], help="0 1")
    parser.add_argument(
        "--batch", nargs="+", type=int, default=[4], help="prompts decoded at once; may be several (4)"
    )
    parser.add_argument(
        "--plain-batch", type=int, default=1, help="prompts decoded plainly at once (%(default)s)"
    )
    parser.add_argument("--grow", default="best-first", choices=list(GROW), help="%(default)s")
    parser.add_argument("--seed", type=int, default=0, help="of the sampled texts (%(default)s)")
    parser.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end of the text, to --tokens always"
    )
    parser.add_argument("--bits", action="store_true", help="compare the logits of accepted paths as well")
    args = parser.parse_args()
    if min(*args.batch, args.plain_batch) < 1:
        raise OptionError("--batch and --plain-batch must be at least 1")
    return args


Case = tuple[str, float, int, int]  # set, temperature, batch, budget


def _recorded(journal: Journal, key: str) -> dict[Case, dict[str, Any]]:
    return {
        (r["set"], r["temperature"], r["batch"], r["budget"]): r
        for r in journal.read()
        if r["kind"] == "case" and r["key"] == key
    }


def _check(
    target: Target,
    drafter: Drafter,
    args: argparse.Namespace,
    cases: list[Case],
    save: Callable[[dict[str, Any]], None],
) -> None:
    """Run cases, sorted by set and temperature, so that plain decoding is done once for each pair."""
    limits = Limits(max_tokens=args.tokens, ignore_eos=args.ignore_eos)
    with common.progress() as bar:
        pairs = list(dict.fromkeys((name, temperature) for name, temperature, _, _ in cases))
        task = bar.add_task("cases", total=len(cases) + len(pairs))
        for name, temperature in pairs:
            bar.update(task, description=f"{name}, T = {temperature:g}")
            questions = common.read_set(args.data, name, args.prompts)
            prompts = [common.encode(target, q.text) for q in questions]
            sampling = Sampling(temperature=temperature, seed=args.seed)
            watch = _Watch(target) if args.bits else None
            plain = _plain(watch or target, prompts, sampling, limits, args.plain_batch)
            kept = watch.kept if watch is not None else []
            bar.advance(task)
            for batch, budget in [(b, n) for s, t, b, n in cases if (s, t) == (name, temperature)]:
                watch = _Watch(target, kept) if args.bits else None
                engine = Engine(watch or target, drafter, budget=budget, grow=args.grow, max_batch=batch)
                sequences = [engine.add(ids, sampling, limits) for ids in prompts]
                if watch is not None:
                    watch.begin(sequences)
                gaps = 0
                while engine.busy:
                    for outcome in _step(engine, watch):
                        gaps += outcome.path[-1] != len(outcome.path) - 1
                outputs = [sequence.emitted for sequence in sequences]
                differences = [
                    {"id": question.id, **difference}
                    for question, ids, expected, found in zip(questions, prompts, plain, outputs, strict=True)
                    for difference in _differences(target, ids, expected, found, sampling, limits)
                ]
                save({
                    "set": name,
                    "temperature": temperature,
                    "batch": batch,
                    "budget": budget,
                    "prompts": len(prompts),
                    "tokens": sum(map(len, outputs)),
                    "tau": engine.stats.tau,
                    "gaps": gaps,  # accepted paths that skip rows of the forward
                    "differences": differences,
                    "ties": sum(d["tie"] for d in differences),
                    "unexcused": sum(not d["tie"] for d in differences),
                    **(watch.counts() if watch is not None else {}),
                })  # fmt: skip
                bar.advance(task)


def _plain(
    target: Target, prompts: list[list[int]], sampling: Sampling, limits: Limits, batch: int = 1
) -> list[list[int]]:
    engine = Engine(target, None, budget=0, max_batch=batch)
    sequences = [engine.add(ids, sampling, limits) for ids in prompts]
    watch = target if isinstance(target, _Watch) else None
    if watch is not None:
        watch.begin(sequences)
    while engine.busy:
        _step(engine, watch)
    return [sequence.emitted for sequence in sequences]


class _Watch(Target):
    """A target that keeps the logits of every committed row of plain decoding, or compares those of accepted
    paths with them.

    kept: per prompt, the logits [V] behind each number of emitted tokens.
    """

    def __init__(self, target: Target, kept: list[dict[int, torch.Tensor]] | None = None) -> None:
        self.__dict__.update(target.__dict__)
        self.kept: list[dict[int, torch.Tensor]] = [] if kept is None else kept
        self.rows = self.different = 0
        self._comparing = kept is not None
        self._numbers: dict[int, int] = {}
        self._last: tuple[Plan, torch.Tensor] | None = None

    def begin(self, sequences: list[Sequence]) -> None:
        """The sequences to come, one per prompt and in the prompts' order."""
        self._numbers = {sequence.id: number for number, sequence in enumerate(sequences)}
        if not self._comparing:
            self.kept = [{} for _ in sequences]

    def forward(self, plan: Plan, *args: Any, **kwargs: Any) -> ForwardOutput:
        """As the target's; remembers what came out."""
        output = super().forward(plan, *args, **kwargs)
        if output.logits is not None:
            self._last = plan, output.logits
        return output

    def see(self, outcomes: list[Outcome]) -> None:
        """Keep or compare the rows that a round accepted."""
        if not outcomes:
            return
        assert self._last is not None
        plan, logits = self._last
        starts = {segment.key: segment.start for segment in plan.segments}
        for outcome in outcomes:
            number = self._numbers[outcome.sequence.id]
            before = len(outcome.sequence.emitted) - len(outcome.emissions)
            for place, node in enumerate(outcome.path, start=before):
                row = logits[starts[outcome.sequence.id] + node]
                if not self._comparing:
                    self.kept[number][place] = row.clone()
                elif place in self.kept[number]:
                    self.rows += 1
                    self.different += not torch.equal(row, self.kept[number][place])

    def counts(self) -> dict[str, int]:
        """For the record."""
        return {"rows_compared": self.rows, "rows_that_differ": self.different}


def _step(engine: Engine, watch: _Watch | None) -> list[Outcome]:
    outcomes = engine.step()
    if watch is not None:
        watch.see(outcomes)
    return outcomes


def _differences(
    target: Target, ids: list[int], plain: list[int], other: list[int], sampling: Sampling, limits: Limits
) -> list[dict[str, Any]]:
    """Every place where `other` leaves plain decoding; behind a tie plain decoding follows it and goes on.

    Only for samplers without penalties: noise depends on the position alone, so that a longer prompt goes on
    with the same text.
    """
    found: list[dict[str, Any]] = []
    while (first := find_divergence(target, ids, plain, other, sampling)) is not None:
        place = first.place
        found.append(first.as_dict())
        if not first.tie:
            break
        plain = other[: place + 1]
        rest = limits.max_tokens - len(plain)
        ended = not limits.ignore_eos and plain[-1] in (target.tokenizer.eos_ids | target.config.eos_ids)
        if rest and not ended:
            follow = Limits(max_tokens=rest, ignore_eos=limits.ignore_eos)
            plain = plain + _plain(target, [[*ids, *plain]], sampling, follow)[0]
    return found


def _print(records: list[dict[str, Any]], facts: dict[str, Any]) -> None:
    console = common.console()
    settings = facts["arguments"]
    table = Table(title=f"{settings['grow']} trees against plain decoding, up to {settings['tokens']} tokens")
    table.add_column("set")
    for title in ("T", "batch", "budget", "prompts", "tokens", "τ", "paths with gaps", "ties", "unexcused"):
        table.add_column(title, justify="right")
    for r in records:
        style = "bold red" if r["unexcused"] else ""
        cells = (
            f"{r['temperature']:g}",
            f"{r['batch']}",
            f"{r['budget']}",
            f"{r['prompts']}",
            f"{r['tokens']}",
            f"{r['tau']:.2f}",
        )
        table.add_row(r["set"], *cells, f"{r['gaps']}", f"{r['ties']}", f"{r['unexcused']}", style=style)
    console.print(table)
    for r in records:
        for d in r["differences"]:
            kind = "tie" if d["tie"] else "UNEXCUSED"
            where = f"{d['id']}, T = {r['temperature']:g}, batch {r['batch']}, budget {r['budget']}"
            why = "one of them ends" if d["lag"] is None else f"gap {d['gap']:.2e}, lag {d['lag']:.2e}"
            console.print(f"{kind}: {where}, token {d['place'] + 1}, {why}")
    tokens, ties, broken = (sum(r[name] for r in records) for name in ("tokens", "ties", "unexcused"))
    bound = f"{settings['tie_below']:g}"
    counts = f"{tokens} tokens compared, {ties} ties below {bound}, {broken} unexcused differences"
    if any("rows_compared" in r for r in records):
        rows, different = (sum(r[name] for r in records) for name in ("rows_compared", "rows_that_differ"))
        counts += f"; logits of {rows} accepted rows compared bit for bit, {different} differ"
        broken += different
    console.print(f"{counts}: {'NOT lossless' if broken else 'lossless'}")
    console.print(common.footer(facts))
    if not any(r["gaps"] for r in records):
        console.print("weak: no accepted path left out a row, so masks and compaction were hardly tested")


if __name__ == "__main__":
    common.run(main)
