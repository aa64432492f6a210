"""What a target forward costs by its number of nodes, and plain decoding against transformers' `generate`.

First part: forwards of random best-first trees behind a committed context, sizes shuffled and interleaved
in one process; the clock covers `Target.forward` with the logits of every node, and neither packing nor
sampling. Nodes count the root.

Second part: this engine with budget 0 and `generate` (greedy, float32, not compiled, its default attention)
decode the same prompts one after the other, the first of the two changing from prompt to prompt, the same
number of new tokens, end-of-text ignored. The decode clock runs from the first new token to the last on both
sides, so prefill is left out of it; the whole call is recorded too.

The floor of one token is what it has to read (weights once, and the context's rows) at the speed at which all
threads read a block of memory, timed between the forwards and between the prompts. Records go to
forward.jsonl.
"""

from __future__ import annotations

import argparse
import gc
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import common
import numpy as np
import torch
from common import SETS, Journal
from rich.table import Table

from jetspec.decode.engine import Engine
from jetspec.errors import OptionError
from jetspec.native import native_available
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.loading import read_model
from jetspec.target.packed import ReadProbe
from jetspec.target.plan import chunk, pack
from jetspec.target.target import Target
from jetspec.tree import Tree
from jetspec.tree.best_first import best_first
from jetspec.tree.proposal import MarginalProposal

NODES = (1, 2, 4, 8, 16, 32, 64)
DEPTH, CANDIDATES = 7, 32  # of the random proposals; the shape that trained heads draft


def main() -> int:
    """Measure, record, print."""
    args = _arguments()
    target, _ = common.load(args)
    facts = common.provenance(Path(__file__), {
        "model": target.name,
        "dtype": "float32",
        "context": args.context,
        "repeats": args.repeats,
        "set": args.set,
        "prompts": args.prompts,
        "tokens": args.tokens,
    })  # fmt: skip
    cost = _cost(target, args)
    record: dict[str, Any] = {"kind": "forward", "run": facts, "cost": cost, "plain": None}
    if args.prompts:
        record["plain"] = _plain(target, args)
    Journal(args.results / "forward.jsonl").append(record)
    if args.json:
        print(json.dumps(record, ensure_ascii=False, indent=2))
    else:
        _print(record)
    return 0


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.set_defaults(head="off")
    parser.add_argument("--nodes", nargs="+", type=int, default=list(NODES), help="sizes, root included")
    parser.add_argument(
        "--context", type=int, default=256, help="committed tokens before the tree (%(default)s)"
    )
    parser.add_argument("--repeats", type=int, default=30, help="forwards of each size (%(default)s)")
    parser.add_argument(
        "--set", default="gsm8k", choices=SETS, help="prompts of the second part (%(default)s)"
    )
    parser.add_argument(
        "--prompts",
        type=int,
        default=8,
        help="of the second part, evenly spaced; 0 leaves it out (%(default)s)",
    )
    parser.add_argument("--tokens", type=int, default=128, help="new tokens of the second part (%(default)s)")
    args = parser.parse_args()
    for name, low in (("context", 1), ("repeats", 1), ("prompts", 0), ("tokens", 2)):
        if getattr(args, name) < low:
            raise OptionError(f"--{name} must be at least {low}, got {getattr(args, name)}")
    if min(args.nodes) < 1:
        raise OptionError("--nodes must be at least 1: the root is one of them")
    args.nodes = sorted({1, *args.nodes})
    return args


# --- the cost of a forward


def _cost(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    dice = random.Random(0)
    vocab = target.config.vocab_size
    cache = target.new_cache()
    cache.add(0, capacity=args.context + max(args.nodes))
    plan = chunk([(0, [dice.randrange(vocab) for _ in range(args.context)])], cache)
    target.forward(plan, cache)
    cache.keep(0, range(plan.size))
    seconds: dict[int, list[float]] = {nodes: [] for nodes in args.nodes}
    probe = ReadProbe() if native_available() else None
    reads: list[float] = []
    with common.progress() as bar:
        for repeat in bar.track(range(-2, args.repeats), description="forwards"):
            if probe is not None:
                reads.append(probe.read())
            for nodes in dice.sample(args.nodes, len(args.nodes)):
                packed = pack([(0, _random_tree(nodes, vocab, dice.randrange(2**32)))], cache)
                start = time.perf_counter()
                target.forward(packed, cache)
                took = time.perf_counter() - start
                cache.keep(0, [])
                if repeat >= 0:  # the first two rounds warm up
                    seconds[nodes].append(took)
    medians = {nodes: statistics.median(values) for nodes, values in seconds.items()}
    read = _bytes_read(target, args)
    return {
        "context": args.context,
        "rows": [
            {
                "nodes": nodes,
                "ms": 1e3 * medians[nodes],
                "quartiles_ms": [1e3 * float(np.quantile(seconds[nodes], q)) for q in (0.25, 0.75)],
                "ratio": medians[nodes] / medians[1],
            }
            for nodes in args.nodes
        ],
        "bytes_per_token": read,
        "bandwidth": read / medians[1],
        **_of_floor(read, reads, medians[1]),
    }


def _of_floor(read: int, reads: list[float], seconds: float) -> dict[str, float]:
    """The median speed of reading, the floor that follows from it, and the share of `seconds` that it is."""
    if not reads:
        return {}
    speed = statistics.median(reads)
    return {"read_speed": speed, "floor_ms": 1e3 * read / speed, "of_floor": read / speed / seconds}


def _random_tree(nodes: int, vocab: int, seed: int) -> Tree:
    """A best-first tree over random marginals whose first candidates stand out, as a trained head's do."""
    dice = np.random.default_rng(seed)
    width = min(CANDIDATES, vocab)
    logits = -1.5 * np.log(np.arange(1, width + 1)) + dice.normal(0.0, 1.0, (DEPTH, width))  # [D, K]
    logps = logits - np.logaddexp.reduce(logits, axis=1, keepdims=True)
    tokens = np.stack([dice.choice(vocab, width, replace=False) for _ in range(DEPTH)])  # [D, K]
    return best_first(int(dice.integers(vocab)), MarginalProposal(tokens, logps), nodes - 1)


def _bytes_read(target: Target, args: argparse.Namespace) -> int:
    """What a forward of one token has to read: all weights once and the context's rows.

    An untied embedding is left out, as only one row of it is read. For mixtures of experts this is too much.
    """
    weights = read_model(args.model).weights
    size = torch.empty(0, dtype=target.dtype).element_size()
    tied = "lm_head.weight" not in weights
    numbers = sum(w.numel() for name, w in weights.items() if tied or name != "model.embed_tokens.weight")
    config = target.config
    return size * (numbers + 2 * args.context * config.num_layers * config.num_kv_heads * config.head_dim)


# --- plain decoding


def _plain(target: Target, args: argparse.Namespace) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    folder = read_model(args.model).tokenizer_dir
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, local_files_only=True).eval()
    engine = Engine(target, None, budget=0)
    common.warm_up(engine)
    _generate(model, common.encode(target, common.WARM_UP), 16)
    prompts = []
    probe = ReadProbe() if native_available() else None
    reads: list[float] = []
    questions = common.read_set(args.data, args.set, args.prompts)
    with common.progress() as bar:
        for number, question in enumerate(bar.track(questions, description="plain decoding")):
            ids = common.encode(target, question.text)
            results: dict[str, dict[str, float]] = {}
            for side in ("jetspec", "transformers") if number % 2 else ("transformers", "jetspec"):
                gc.collect()
                if probe is not None:
                    reads.extend(probe.read() for _ in range(5))
                results[side] = (
                    _generate(model, ids, args.tokens)
                    if side == "transformers"
                    else _decode(engine, ids, args.tokens)
                )
            prompts.append({"id": question.id, "prompt_tokens": len(ids), **results})
    speeds = {
        side: statistics.median(p[side]["tokens_per_second"] for p in prompts)
        for side in ("jetspec", "transformers")
    }
    ratios = [p["jetspec"]["tokens_per_second"] / p["transformers"]["tokens_per_second"] for p in prompts]
    whole = [p["transformers"]["whole_seconds"] / p["jetspec"]["whole_seconds"] for p in prompts]
    return {
        "set": args.set,
        "tokens": args.tokens,
        "prompts": prompts,
        "attention": model.config._attn_implementation,
        "tokens_per_second": speeds,
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        "whole_ratio": statistics.median(whole),
        **_of_floor(_bytes_read(target, args), reads, 1 / speeds["jetspec"]),
    }


class _Clock:
    """A streamer for `generate`: notes when the prompt and each new token come by."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _generate(model: Any, ids: list[int], tokens: int) -> dict[str, float]:
    clock = _Clock()
    prompt = torch.tensor([ids])
    start = time.perf_counter()
    with torch.inference_mode():
        output = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            pad_token_id=0,
            streamer=clock,
        )
    end = time.perf_counter()
    assert (
        output.shape[1] == len(ids) + tokens and len(clock.times) == tokens + 1
    )  # the prompt comes by as well
    return _speed(clock.times[1:], end - start)


def _decode(engine: Engine, ids: list[int], tokens: int) -> dict[str, float]:
    times: list[float] = []
    start = time.perf_counter()
    sequence = engine.add(ids, Sampling(), Limits(max_tokens=tokens, ignore_eos=True))
    for _ in engine.run([sequence]):
        times.append(time.perf_counter())
    end = time.perf_counter()
    assert len(times) == tokens
    return _speed(times, end - start)


def _speed(times: list[float], whole: float) -> dict[str, float]:
    """Tokens per second between the first and the last new token."""
    return {"tokens_per_second": (len(times) - 1) / (times[-1] - times[0]), "whole_seconds": whole}


# --- output


def _print(record: dict[str, Any]) -> None:
    console = common.console()
    cost, plain, facts = record["cost"], record["plain"], record["run"]
    repeats = facts["arguments"]["repeats"]
    table = Table(title=f"one target forward, {cost['context']} tokens of context, median of {repeats}")
    for title in ("nodes", "ms", "quartiles", "ratio", "ms per node"):
        table.add_column(title, justify="right")
    for row in cost["rows"]:
        low, high = row["quartiles_ms"]
        table.add_row(
            f"{row['nodes']}",
            f"{row['ms']:.1f}",
            f"{low:.1f} to {high:.1f}",
            f"{row['ratio']:.2f}",
            f"{row['ms'] / row['nodes']:.2f}",
        )
    console.print(table)
    console.print(
        f"one token reads {cost['bytes_per_token'] / 1e6:.0f} MB: {cost['bandwidth'] / 1e9:.1f} GB/s"
        + _floor_text(cost)
    )
    if plain is not None:
        ours, theirs = plain["tokens_per_second"]["jetspec"], plain["tokens_per_second"]["transformers"]
        low, high = plain["ratio_range"]
        console.print(
            f"plain decoding: {ours:.1f} tok/s here, {theirs:.1f} tok/s with transformers generate"
            f" (medians of {len(plain['prompts'])} prompts): {plain['ratio']:.2f}× (median of the prompts'"
            f" ratios, {low:.2f} to {high:.2f}); whole calls with prefill {plain['whole_ratio']:.2f}×"
            + _floor_text(plain)
        )
        if plain["ratio"] < 1.0:
            console.print("miss: plain decoding is slower here than with transformers")
    console.print(common.footer(facts))


def _floor_text(part: dict[str, Any]) -> str:
    if "of_floor" not in part:
        return ""
    floor, speed = part["floor_ms"], part["read_speed"] / 1e9
    return f"; the floor is {floor:.1f} ms at {speed:.1f} GB/s, {100 * part['of_floor']:.0f} % of the time"


if __name__ == "__main__":
    common.run(main)
