"""The README's measured table, made from the records in benchmarks/results.

Writes what stands between `<!-- results:begin -->` and `<!-- results:end -->`; with --check it writes nothing
and fails if the README says something else than the records. For each set and temperature the newest run with
a trained head and enough prompts counts; the whole sweep of that run is shown, whatever came out of it.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import common
from common import PROJECT, RESULTS, SETS, Journal
from summary import Row, prompt_records, run_facts, summarise

from jetspec.errors import DataError

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
FEWEST = 10  # prompts; a run with fewer was a trial
STUBS = ("off", "random", "echo", "decoy")
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
    runs = _chosen(Journal(results / "speedup.jsonl").read())
    forwards = [r for r in Journal(results / "forward.jsonl").read() if r["kind"] == "forward"]
    checks = _checks(Journal(results / "lossless.jsonl").read())
    parts = [
        *([_speedups(runs)] if runs else []),
        *([_forward(forwards[-1])] if forwards else []),
        *([_lossless(*checks)] if checks else []),
        *_sources([*(facts for facts, _ in runs), *(r["run"] for r in forwards[-1:]), *(checks or ())[:1]]),
    ]
    return "\n\n".join(parts) or NOTHING


Run = tuple[dict[str, Any], list[Row]]  # provenance, rows of one set


def _chosen(records: list[dict[str, Any]]) -> list[Run]:
    """The run that counts for each set and temperature, sets in their usual order."""
    found: dict[tuple[float, int], Run] = {}
    for key, facts in sorted(run_facts(records).items(), key=lambda item: item[1]["date"]):  # the newest wins
        if facts["arguments"]["head"]["name"] in STUBS:
            continue
        prompts = prompt_records(records, key)
        for number, name in enumerate(SETS):
            own = [record for record in prompts if record["set"] == name]
            if len(own) >= FEWEST:
                found[facts["arguments"]["temperature"], number] = (facts, summarise(own))
    return [found[place] for place in sorted(found)]


def _speedups(runs: list[Run]) -> str:
    methods: dict[tuple[str, int], str] = {}
    for _, rows in runs:
        for row in rows[1:]:
            methods.setdefault((row.grow, row.budget), row.name)
    methods = dict(sorted(methods.items()))  # best-first before chain, small budgets first
    lines = [
        "| prompts | " + " | ".join(methods.values()) + " | plain tok/s |",
        "|---|" + "---:|" * (len(methods) + 1),
    ]
    for facts, rows in runs:
        temperature = facts["arguments"]["temperature"]
        by_method = {(row.grow, row.budget): row for row in rows}
        name = rows[0].set + (f", T = {temperature:g}" if temperature else "")
        cells = [_cell(by_method.get(method)) for method in methods]
        lines.append(f"| {name} ({rows[0].prompts}) | {' | '.join(cells)} | {rows[0].per_second:.1f} |")
    measured = [row for _, rows in runs for row in rows[1:]]
    width = max(
        max(row.speedup.high - row.speedup.value, row.speedup.value - row.speedup.low) for row in measured
    )
    settings = runs[-1][0]["arguments"]
    notes = [
        "Speedup over plain decoding, in brackets τ, for builder and budget; number of prompts in brackets."
        f" One request at a time, up to {settings['tokens']} new tokens, {settings['dtype']}. The clock runs"
        f" from {settings['clock']}; both are pooled over prompts. 95 % intervals of the speedups (bootstrap"
        f" over prompts) reach at most {width:.2f} from the value. {_identity(measured)}",
        "\n".join(f"- Miss: {row.verdict}." for row in measured if row.verdict is not None),
    ]
    return "\n".join(lines) + "\n\n" + "\n\n".join(filter(None, notes))


def _cell(row: Row | None) -> str:
    return "–" if row is None else f"{row.speedup.value:.2f}× ({row.tau.value:.2f})"


def _identity(rows: list[Row]) -> str:
    """How many of the timed answers have plain decoding's token ids."""
    answers, same, ties = (sum(getattr(row, name) for row in rows) for name in ("prompts", "same", "ties"))
    text = f"{same} of {answers} of these answers have plain decoding's token ids"
    if ties:
        text += f", {ties} first differ at a numeric tie"
    broken = answers - same - ties
    return text + (f", and {broken} DIFFER." if broken else ".")


def _forward(record: dict[str, Any]) -> str:
    cost, plain = record["cost"], record["plain"]
    costs = ", ".join(f"{row['nodes']}: {row['ratio']:.2f}" for row in cost["rows"])
    text = (
        f"A target forward by its nodes, root included, as a multiple of one token's"
        f" ({cost['rows'][0]['ms']:.1f} ms, {cost['bandwidth'] / 1e9:.1f} GB/s): {costs}."
    )
    if plain is None:
        return text
    ours, theirs = (plain["tokens_per_second"][side] for side in ("jetspec", "transformers"))
    return (
        f"{text} Plain decoding makes {ours:.1f} tok/s, transformers' `generate` {theirs:.1f}"
        f" ({plain['ratio']:.2f}×) on the same prompts, in the same process."
    )


def _checks(records: list[dict[str, Any]]) -> tuple[dict[str, Any], list[dict[str, Any]]] | None:
    """Provenance and cases of the newest losslessness run of a trained head."""
    runs = [r for r in records if r["kind"] == "run" and r["run"]["arguments"]["head"]["name"] not in STUBS]
    if not runs:
        return None
    key = runs[-1]["key"]
    cases = {
        (r["set"], r["temperature"], r["batch"], r["budget"]): r
        for r in records
        if r["kind"] == "case" and r["key"] == key
    }
    return (runs[-1]["run"], list(cases.values())) if cases else None


def _lossless(facts: dict[str, Any], cases: list[dict[str, Any]]) -> str:
    tokens, ties, broken = (sum(case[name] for case in cases) for name in ("tokens", "ties", "unexcused"))

    def listed(name: str) -> str:
        return ", ".join(f"{value:g}" for value in sorted({case[name] for case in cases}))

    sets = len({case["set"] for case in cases})
    where = (
        f"{sets} sets, up to {facts['arguments']['prompts']} prompts of each, budgets {listed('budget')},"
        f" T = {listed('temperature')}, batch {listed('batch')}"
    )
    return (
        f"Losslessness ({where}): {tokens} tokens compared with plain decoding, {ties} numeric ties,"
        f" {broken} other differences."
    )


def _sources(facts: list[dict[str, Any]]) -> list[str]:
    """Machine and code of what is shown; several, if the parts were measured on several."""
    lines = dict.fromkeys(common.footer(fact) for fact in facts)
    days = sorted({fact["date"][:10] for fact in facts})
    return (
        [f"Measured on {'; '.join(lines)}; {' and '.join(dict.fromkeys((days[0], days[-1])))}."]
        if facts
        else []
    )


if __name__ == "__main__":
    common.run(main)
