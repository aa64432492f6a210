"""What a server brings under load: clients in a closed loop, with drafts and without, in turns.

Two servers are started, one with --budget, one with budget 0; only one of them is asked at a time. Each
client asks the next question as soon as it has its answer. Seconds are the clients': with HTTP, queueing and
prefill, on a machine that runs the clients, too. Time per token is an answer's time behind its first chunk
divided by the tokens in it; tokens per second are those of all clients, over the time from the first question
to the last answer. Greedy answers of both servers are compared. Records go to serving.jsonl.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import common
import httpx
import numpy as np
from common import SETS, Journal
from rich.table import Table

from jetspec.errors import OptionError

PLAIN = "0"


class Answer(NamedTuple):
    """One answer as a client saw it."""

    question: str
    text: str
    tokens: int
    first: float  # seconds from asking to the first chunk
    rest: float  # seconds from there to the last one
    after: int  # tokens behind the first chunk


def main() -> int:
    """Measure, record, print."""
    args = _arguments()
    questions = [q.text for name in args.sets for q in common.read_set(args.data, name, args.prompts)]
    facts = common.provenance(Path(__file__), {
        "model": args.model,
        "head": args.head,
        "budget": args.budget,
        "clients": args.clients,
        "turns": args.turns,
        "sets": args.sets,
        "prompts": args.prompts,
        "tokens": args.tokens,
    })  # fmt: skip
    rows: list[dict[str, Any]] = []
    with _server(args, args.budget) as drafted, _server(args, PLAIN) as plain, common.progress() as bar:
        for clients in bar.track(args.clients, description="clients"):
            rows += _in_turns({args.budget: drafted, PLAIN: plain}, clients, questions, args)
    record = {"kind": "serving", "run": facts, "rows": rows}
    Journal(args.results / "serving.jsonl").append(record)
    if args.json:
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        _print(record)
    return 0


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument("--budget", default="auto", help="of the server with drafts (%(default)s)")
    parser.add_argument(
        "--clients", nargs="+", type=int, default=[1, 4, 16], help="how many ask at once (%(default)s)"
    )
    parser.add_argument("--turns", type=int, default=2, help="turns of each server (%(default)s)")
    parser.add_argument(
        "--sets", nargs="+", choices=SETS, default=["gsm8k", "humaneval", "mt_bench"], help="(%(default)s)"
    )
    parser.add_argument("--prompts", type=int, default=8, help="of each set (%(default)s)")
    parser.add_argument("--tokens", type=int, default=64, help="most tokens of an answer (%(default)s)")
    args = parser.parse_args()
    for name, low in (("turns", 1), ("prompts", 1), ("tokens", 2)):
        if getattr(args, name) < low:
            raise OptionError(f"--{name} must be at least {low}, got {getattr(args, name)}")
    if min(args.clients) < 1:
        raise OptionError("--clients must be at least 1")
    if args.budget == PLAIN:
        raise OptionError("--budget 0 is what is compared with; give auto or a number of nodes")
    return args


@contextmanager
def _server(args: argparse.Namespace, budget: str) -> Iterator[str]:
    """The address of a server that runs meanwhile."""
    command = [sys.executable, "-m", "jetspec", "serve", "--port", "0", "--model", args.model]
    command += ["--head", args.head, "--budget", budget]
    if args.threads is not None:
        command += ["--threads", str(args.threads)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        if "http://" not in line:
            raise OptionError("the server did not start; its error stands above")
        yield line.split()[-1].removesuffix("/v1")
    finally:
        process.terminate()
        process.wait()


def _in_turns(
    servers: dict[str, str], clients: int, questions: list[str], args: argparse.Namespace
) -> list[dict[str, Any]]:
    """The rows of one number of clients: first a warm-up of each server, then turns."""
    answers: dict[str, list[Answer]] = defaultdict(list)
    seconds: dict[str, float] = defaultdict(float)
    for turn in range(-1, args.turns):
        order = list(servers) if turn % 2 else list(servers)[::-1]
        for budget in order:
            asked = questions if turn >= 0 else questions[:clients]
            start = time.perf_counter()
            found = asyncio.run(_closed_loop(servers[budget], clients, asked, args.tokens))
            if turn >= 0:
                seconds[budget] += time.perf_counter() - start
                answers[budget] += found
    texts = [{answer.question: answer.text for answer in answers[budget]} for budget in servers]
    same = sum(texts[0][question] == texts[1][question] for question in texts[0])
    return [
        {
            "clients": clients,
            "budget": budget,
            "answers": len(answers[budget]),
            "tokens_per_second": sum(a.tokens for a in answers[budget]) / seconds[budget],
            "first_ms": _spread([a.first for a in answers[budget]]),
            "per_token_ms": _spread([a.rest / a.after for a in answers[budget] if a.after]),
            "same": same,
            "compared": len(texts[0]),
        }
        for budget in servers
    ]


async def _closed_loop(url: str, clients: int, questions: list[str], tokens: int) -> list[Answer]:
    waiting, answers = list(reversed(questions)), list[Answer]()

    async def client(connection: httpx.AsyncClient) -> None:
        while waiting:
            answers.append(await _ask(connection, waiting.pop(), tokens))

    async with httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as connection:
        await asyncio.gather(*(client(connection) for _ in range(clients)))
    return answers


async def _ask(connection: httpx.AsyncClient, question: str, tokens: int) -> Answer:
    asked = {
        "messages": [{"role": "user", "content": question}],
        "temperature": 0,
        "max_tokens": tokens,
        "stream": True,
        "jetspec_details": True,
    }
    text, kinds, early = "", 0, 0
    start = first = last = time.perf_counter()
    async with connection.stream("POST", "/v1/chat/completions", json=asked) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            last = time.perf_counter()
            text += chunk["choices"][0]["delta"].get("content", "")
            kinds += len(chunk["jetspec"]["kinds"])
            if first == start:
                first, early = last, kinds
    return Answer(question, text, kinds, first - start, last - first, kinds - early)


def _spread(seconds: list[float]) -> dict[str, float]:
    """Median and 95th percentile in milliseconds."""
    return {f"p{q}": 1e3 * float(np.quantile(seconds, q / 100)) for q in (50, 95)} if seconds else {}


def _print(record: dict[str, Any]) -> None:
    table = Table("clients", "budget", "tok/s", "first token p50/p95", "per token p50/p95", "same texts")
    for row in record["rows"]:
        spreads = [
            f"{row[name].get('p50', 0.0):.{digits}f} / {row[name].get('p95', 0.0):.{digits}f} ms"
            for name, digits in (("first_ms", 0), ("per_token_ms", 1))
        ]
        same = f"{row['same']} of {row['compared']}"
        pace = f"{row['tokens_per_second']:.1f}"
        table.add_row(str(row["clients"]), row["budget"], pace, *spreads, same)
    out = common.console()
    out.print(table)
    out.print(common.footer(record["run"]))


if __name__ == "__main__":
    common.run(main)
