"""What a training step costs: seconds, products in FLOPs, their rate beside the machine's own, and memory.

FLOPs are those of matrix products, forward and backward, as torch's operators report them; element-wise work
and the optimiser count as none, so the rate of a step is a lower bound. The machine's rate is measured
between the steps, on the shapes of the step's own products (each as often as the step does it) and on one
large product, both in the arithmetic of the training. Memory is the process's peak without files that are
mapped: features are read from such files, and the system may drop those pages at any time. One process per
recipe, so that a peak belongs to it.

    python benchmarks/training_step.py --answers data/answers --recipe jetspec dflash dspark eagle3 mtp

Records go to training_step.jsonl.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import common
import torch
from rich.table import Table
from torch.utils._python_dispatch import TorchDispatchMode

from jetspec.errors import OptionError
from jetspec.target.loading import load_target
from jetspec.train.data import Corpus, batches_at
from jetspec.train.distributed import ALONE, make_learner
from jetspec.train.families import find_family
from jetspec.train.optim import make_optimizer
from jetspec.train.pipeline import resolve_products
from jetspec.train.recipe import find_recipe

LARGE = (2048, 2048, 2048)


def main() -> int:
    """Measure each recipe in a process of its own, record, print."""
    args = _arguments()
    if args.alone:
        print(json.dumps(_measure(args, args.recipe[0])))
        return 0
    records = []
    for recipe in args.recipe:
        common.note(f"{recipe}: {args.steps} steps")
        words = [sys.executable, __file__, *_passed(args), "--recipe", recipe, "--alone"]
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            return done.returncode
        records.append(json.loads(done.stdout.splitlines()[-1]))
        common.Journal(args.results / "training_step.jsonl").append(records[-1])
    if args.json:
        print(json.dumps(records, indent=2))
    else:
        _print(records)
    return 0


def _arguments() -> argparse.Namespace:
    parser = common.parser(__doc__)
    parser.add_argument(
        "--answers", type=Path, required=True, nargs="+", help="folders of answers with features"
    )
    parser.add_argument("--recipe", nargs="+", default=["jetspec"], help="recipes, as for jetspec train")
    parser.add_argument("--steps", type=int, default=8, help="steps that are timed (%(default)s)")
    parser.add_argument("--alone", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.steps < 1:
        raise OptionError(f"--steps must be at least 1, got {args.steps}")
    return args


def _passed(args: argparse.Namespace) -> list[str]:
    words = ["--model", args.model, "--steps", str(args.steps), "--answers", *map(str, args.answers)]
    return words if args.threads is None else [*words, "--threads", str(args.threads)]


class Products(TorchDispatchMode):
    """Counts the matrix products of what runs inside by shape (batch, rows, inner, columns)."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, int, int, int]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        if name in ("mm", "addmm", "bmm", "baddbmm"):
            a, b = args[-2:]
            batch = a.shape[0] if a.ndim == 3 else 1
            self.shapes[(batch, a.shape[-2], a.shape[-1], b.shape[-1])] += 1
        return func(*args, **(kwargs or {}))

    @property
    def flops(self) -> float:
        """Two for every multiplication with its addition."""
        return float(sum(2 * b * m * k * n * times for (b, m, k, n), times in self.shapes.items()))


class Peak(threading.Thread):
    """The largest resident memory that no file backs, in bytes, looked at every 10 ms."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.bytes, self._stop_now = 0, threading.Event()

    def run(self) -> None:
        while not self._stop_now.wait(0.01):
            self.bytes = max(self.bytes, self._now())

    def finish(self) -> int:
        """Stop looking; the peak."""
        self._stop_now.set()
        self.join()
        return self.bytes

    @staticmethod
    def _now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon:"):
                return int(line.split()[1]) * 1024
        return 0


def _measure(args: argparse.Namespace, recipe: str) -> dict[str, Any]:
    peak = Peak()
    peak.start()
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    settings = find_recipe(recipe, args.model)
    family = find_family(settings.method)
    target = load_target(args.model)
    corpus = Corpus(args.answers)
    taps = family.taps(target, settings.head)
    corpus = corpus if taps is None else corpus.with_taps(taps)
    loop = settings.loop
    products = resolve_products(settings.products)
    torch.set_float32_matmul_precision("medium" if products == "bfloat16" else "highest")
    method = family.build(target, corpus, settings.head, settings.loss, loop.seed)
    learner = make_learner(method, ALONE, None)
    optimizer = make_optimizer(method.module, loop.optimizer, 1e-6, loop.betas)

    def step(number: int) -> float:
        start = time.perf_counter()
        batches = batches_at(
            corpus, number, seed=loop.seed, answers=loop.answers, anchors=loop.anchors,
            weights=method.weights, part=loop.part, share=(0, 1),
        )  # fmt: skip
        optimizer.zero_grad(set_to_none=True)
        learner.learn(list(batches))
        torch.nn.utils.clip_grad_norm_(method.module.parameters(), loop.clip)
        optimizer.step()
        return time.perf_counter() - start

    step(0)
    seconds, shares, own, large = [], [], [], []
    for number in range(1, args.steps + 1):
        counted = Products()
        with counted:  # counted apart: counting takes time
            step(number)
        seconds.append(step(number))
        own.append(_rate(counted.shapes))
        large.append(_rate(Counter({(1, *LARGE): 20})))
        shares.append(counted.flops / seconds[-1])
    found = {
        "step_seconds": statistics.median(seconds),
        "flops": counted.flops,
        "rate": statistics.median(shares),
        "own_shapes_rate": statistics.median(own),
        "large_rate": statistics.median(large),
    }
    found["share_of_own_shapes"] = found["rate"] / found["own_shapes_rate"]
    found["share_of_large"] = found["rate"] / found["large_rate"]
    found["peak_anonymous_bytes"] = peak.finish()
    found["peak_resident_bytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    facts = common.provenance(Path(__file__), {
        "model": target.name, "recipe": recipe, "steps": args.steps, "answers_per_batch": loop.answers,
        "anchors": loop.anchors, "products": products, "answers": len(corpus.training),
    })  # fmt: skip
    return {"kind": "training_step", "run": facts, **found}


def _rate(shapes: Counter[tuple[int, int, int, int]]) -> float:
    """FLOP/s of these products alone; of shapes that come often a few are timed and counted for all."""
    seconds = flops = 0.0
    for (b, m, k, n), times in shapes.items():
        x, y = torch.randn(b, m, k), torch.randn(b, k, n)
        out = torch.empty(b, m, n)
        repeats = min(times, 4)
        if b == 1:
            x, y, out = x[0], y[0], out[0]
        torch.matmul(x, y, out=out)
        start = time.perf_counter()
        for _ in range(repeats):
            torch.matmul(x, y, out=out)
        seconds += (time.perf_counter() - start) * times / repeats
        flops += 2 * b * m * k * n * times
    return flops / seconds


def _print(records: list[dict[str, Any]]) -> None:
    table = Table(title="Training step")
    for name in ("recipe", "s / step", "GFLOP", "GFLOP/s", "own products", "large product", "peak GB"):
        table.add_column(name, justify="left" if name == "recipe" else "right")
    for r in records:
        table.add_row(
            r["run"]["arguments"]["recipe"],
            f"{r['step_seconds']:.2f}",
            f"{r['flops'] / 1e9:.0f}",
            f"{r['rate'] / 1e9:.0f}",
            f"{r['own_shapes_rate'] / 1e9:.0f} ({r['share_of_own_shapes']:.0%})",
            f"{r['large_rate'] / 1e9:.0f} ({r['share_of_large']:.0%})",
            f"{r['peak_anonymous_bytes'] / 1e9:.1f}",
        )
    common.console().print(table)


if __name__ == "__main__":
    common.run(main)
