"""The README's measured tables, made from the records in benchmarks/results.

Writes what stands between `<!-- results:begin -->` and `<!-- results:end -->`; with --check it writes nothing
and fails if the README says something else than the records. The newest run with trained heads of one family
and enough prompts counts, and the newest one that compares several families; all of their methods and budgets
are shown, whatever came out.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

import common
from common import PROJECT, RESULTS, Journal

from jetspec.bench.methods import PLAIN
from jetspec.bench.runs import Run, runs_of
from jetspec.bench.summary import POOLED, Row, summarise
from jetspec.bench.table import findings, legend, main_grid, totals
from jetspec.errors import DataError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
FEWEST = 8  # prompts of a set; a run with fewer was a trial
STUBS = ("off", "random", "echo", "decoy")
COMPARISON = "All methods side by side"  # folded, so that the way to a first text is not far from the top
ALIKE = "Heads trained alike and not for long ([how](docs/evidence.md))."
NOTHING = "Nothing is recorded yet: `make bench` measures this machine and writes the table."


def main() -> int:
    """Write the table, or compare it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if the README differs, and write nothing")
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of the records")
    parser.add_argument("--readme", type=Path, default=PROJECT / "README.md", help="the file to write")
    args = parser.parse_args()
    old = args.readme.read_text("utf-8")
    new = put(old, table(args.results), args.readme.name)
    if new == old:
        return 0
    if args.check:
        common.note(f"{args.readme.name} differs from the records; run: python benchmarks/table.py")
        return 1
    args.readme.write_text(new, "utf-8")
    common.note(f"{args.readme.name}: table written")
    return 0


def put(text: str, body: str, name: str) -> str:
    """`text` with `body` between its markers. Raises DataError unless it holds each marker once, in order."""
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise DataError(f"{name} must hold {BEGIN} and, after it, {END}, each once")
    head, rest = text.split(BEGIN)
    return f"{head}{BEGIN}\n{body.strip()}\n{END}{rest.split(END)[1]}"


def table(results: Path) -> str:
    """The markdown between the markers."""
    found = runs_of([
        record for name in ("speedup", "bench") for record in Journal(results / f"{name}.jsonl").read()
    ])  # fmt: skip
    run, compared = _chosen(found, several=False), _by_temperature(found)
    forwards = [r for r in Journal(results / "forward.jsonl").read() if r["kind"] == "forward"]
    checks = _checks(Journal(results / "lossless.jsonl").read())
    parts = [
        *([_speedups(run)] if run is not None else []),
        *([_folded(COMPARISON, "\n\n".join([ALIKE, *map(_compared, compared)]))] if compared else []),
        *([_forward(forwards[-1])] if forwards else []),
        *([_lossless(*checks)] if checks else []),
    ]
    return "\n\n".join(parts) or NOTHING


def _by_temperature(runs: list[Run]) -> list[_Chosen]:
    """The newest comparison of several families at each temperature, which may be one run or several."""
    temperatures = sorted({item["temperature"] for run in runs for item in run.items})
    found = []
    for temperature in temperatures:
        own = [
            run._replace(items=[item for item in run.items if item["temperature"] == temperature])
            for run in runs
        ]
        found.append(_chosen(own, several=True))
    return [chosen for chosen in found if chosen is not None]


class _Chosen(NamedTuple):
    """A run to be shown, and how many prompts those of its sets have that are left out."""

    run: Run
    small: dict[str, int]


def _chosen(runs: list[Run], *, several: bool) -> _Chosen | None:
    """The newest run of trained heads, of several families or of one, with those of its sets that have
    enough prompts; None if there is none. Raises DataError if it is unfinished."""
    for run in reversed(runs):
        arguments = run.facts["arguments"]
        heads = [*arguments.get("heads", {}).values(), *filter(None, [arguments.get("head")])]
        if not heads or any(head["name"] in STUBS for head in heads):
            continue
        if (len({head.get("drafter") for head in heads}) > 1) != several:
            continue
        counts: dict[str, set[str]] = {}
        for item in run.items:
            counts.setdefault(item["set"], set()).update(item["ids"])
        items = [item for item in run.items if len(counts[item["set"]]) >= FEWEST]
        if items:
            _refuse(run.key, run.unfinished)
            small = {name: len(ids) for name, ids in counts.items() if len(ids) < FEWEST}
            return _Chosen(run._replace(items=items), small)
    return None


def _refuse(key: str, unfinished: str | None) -> None:
    """Raises DataError for a run that did not reach its end, whose numbers would pass for those of all."""
    if unfinished:
        raise DataError(
            f"run {key} is no table yet ({unfinished}); finish it with the command that began it, or take "
            "its lines out of the records"
        )


def _speedups(chosen: _Chosen) -> str:
    run = chosen.run
    rows = summarise(run.items)
    arguments = run.facts["arguments"]
    skipped = arguments.get("skipped", {})
    parts = []
    cases = list(dict.fromkeys((row.temperature, row.batch) for row in rows))
    for temperature, batch in cases:
        own = [row for row in rows if (row.temperature, row.batch) == (temperature, batch)]
        grid = main_grid(own, skipped, "")
        if len(cases) > 1:
            parts.append(f"T = {temperature:g}, batch {batch}:")
        parts.append(grid.markdown())
    drafting = [row for row in rows if row.budget]
    widths = [
        max(row.speedup.high - row.speedup.value, row.speedup.value - row.speedup.low)
        for row in drafting
        if row.speedup.known
    ]
    reach = (
        f" 95 % intervals of the speedups (bootstrap over prompts) reach at most {max(widths):.2f} from the"
        " value."
        if widths
        else ""
    )
    where = "" if len(cases) > 1 else f" T = {cases[0][0]:g}, batch {cases[0][1]}."
    few = "".join(f" Left out: {name}, {count} prompts only." for name, count in chosen.small.items())
    identity = _identity(drafting) + _outside(rows)
    parts.append(
        f"{legend(rows)} Number of prompts in brackets.{where}{few} Up to {arguments['tokens']} new tokens,"
        f" {arguments['dtype']}. The clock runs from {arguments['clock']}.{reach} {identity}"
    )
    parts.append(" ".join([f"Measured on {_source(run.facts)}.", *_rounds(rows)]))
    misses = "\n".join(f"- {line}." for line in findings(rows, skipped))
    if misses:  # marked in the cells; in words and with intervals they are many
        parts.append(_folded("Misses, with their intervals", misses))
    return "\n\n".join(filter(None, parts))


def _compared(chosen: _Chosen) -> str:
    """A table of several families, folded above temperature 0."""
    temperature = chosen.run.items[0]["temperature"]
    text = f"T = {temperature:g}:\n\n{_speedups(chosen)}"
    return text if not temperature else _folded(f"The same at T = {temperature:g}", text)


def _folded(title: str, text: str) -> str:
    return f"<details><summary>{title}</summary>\n\n{text}\n\n</details>"


def _identity(rows: list[Row]) -> str:
    """How many of the timed answers have plain decoding's token ids; those that follow its law have a text of
    their own and are named apart."""
    own = [row for row in rows if row.set != POOLED and not row.in_law]
    answers, same, ties = (sum(getattr(row, name) for row in own) for name in ("answers", "same", "ties"))
    text = f"{same} of {answers} of these answers have plain decoding's token ids"
    if ties:
        text += f", {ties} first differ at a numeric tie"
    broken = answers - same - ties
    text += f", and {broken} DIFFER" if broken else ""
    lawful = dict.fromkeys(row.method for row in rows if row.in_law)
    return text + "".join(f"; {name} follows the same law, not the same text" for name in lawful) + "."


def _outside(rows: Many[Row]) -> str:
    """How many of another library's answers differ, which is no fault of the run; nothing if none does."""
    text = ""
    for name in dict.fromkeys(row.method for row in rows if row.outside):
        own = [row for row in rows if row.method == name and row.set != POOLED]
        answers, same = sum(row.answers for row in own), sum(row.same for row in own)
        if same < answers:
            differ = f"{answers - same} of {answers} answers of {name} differ"
            text += f" {differ}: transformers rounds differently."
    return text


def _rounds(rows: Many[Row]) -> list[str]:
    """What a plain round and one of the first drafting method cost, because ratios depend on the machine's
    hour: a sentence per temperature and batch."""
    found = []
    for temperature, batch in dict.fromkeys((row.temperature, row.batch) for row in rows):
        own = totals([row for row in rows if (row.temperature, row.batch) == (temperature, batch)])
        plain = next(row for row in own if row.method == PLAIN)
        first = next((row for row in own if row.budget), None)
        if first is not None and plain.step_ms:
            ratio = first.step_ms / plain.step_ms
            found.append(
                f"A plain round took {plain.step_ms:.1f} ms (median), one of {first.name}"
                f" {first.step_ms:.1f} ms ({ratio:.2f}×)."
            )
    return found


def _forward(record: dict[str, Any]) -> str:
    cost, plain = record["cost"], record["plain"]
    costs = ", ".join(f"{row['nodes']}: {row['ratio']:.2f}" for row in cost["rows"])
    text = (
        f"A target forward by its nodes, root included, as a multiple of one token's"
        f" ({cost['rows'][0]['ms']:.1f} ms, {cost['bandwidth'] / 1e9:.1f} GB/s): {costs}."
    )
    if plain is None:
        return f"{text} Measured on {_source(record['run'])}."
    ours, theirs = (plain["tokens_per_second"][side] for side in ("jetspec", "transformers"))
    return (
        f"{text} Plain decoding makes {ours:.1f} tok/s, transformers' `generate` {theirs:.1f}"
        f" ({plain['ratio']:.2f}×, median of the prompts' ratios) on the same prompts, in the same process."
        " Measured on"
        f" {_source(record['run'])}."
    )


def _checks(records: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Provenance and cases of the newest losslessness run of a trained head. Raises DataError if some are
    missing: their values are printed as if each had met each."""
    runs = [r for r in records if r["kind"] == "run" and r["run"]["arguments"]["head"]["name"] not in STUBS]
    if not runs:
        return None
    key = runs[-1]["key"]
    cases = {
        (r["set"], r["temperature"], r["batch"], r["budget"]): r
        for r in records
        if r["kind"] == "case" and r["key"] == key
    }
    if not cases:
        return None
    product = math.prod(len(set(values)) for values in zip(*cases, strict=True))
    planned = max(product, *(r.get("planned", 0) for r in runs if r["key"] == key), 0)
    _refuse(key, f"{len(cases)} of {planned} cases, unfinished" if len(cases) < planned else None)
    return runs[-1]["run"], list(cases.values())


def _lossless(facts: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    tokens, ties, broken = (sum(case[name] for case in cases) for name in ("tokens", "ties", "unexcused"))
    broken += sum(case.get("rows_that_differ", 0) for case in cases)
    arguments = facts["arguments"]

    def listed(name: str) -> str:
        return ", ".join(f"{value:g}" for value in sorted({case[name] for case in cases}))

    sets = len({case["set"] for case in cases})
    where = (
        f"{sets} sets, up to {arguments['prompts']} prompts of each and {arguments['tokens']} tokens,"
        f" budgets {listed('budget')}, T = {listed('temperature')}, batch {listed('batch')}, plain decoding"
        f" with batch {arguments['plain_batch']}"
    )
    return (
        f"Losslessness ({where}): {tokens} tokens compared with plain decoding, {ties} numeric ties,"
        f" {broken} other differences. Measured on {_source(facts)}."
    )


def _source(facts: dict[str, Any]) -> str:
    """Machine, versions, code and day of what is shown, in one line."""
    return f"{common.footer(facts)}, {facts['date'][:10]}"


if __name__ == "__main__":
    common.run(main)
