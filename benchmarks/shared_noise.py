"""What drafting with the target's own noise gains: tau with and without it, and how well it is calibrated.

Rounds are replayed along plain answers (`replay.py`), so all rows are paired. `--fit` also fits the two
weights per depth to the draws.

    python benchmarks/shared_noise.py --prompts 30 --temperature 1 --fit
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any, NamedTuple

import common
import numpy as np
import torch
from replay import Answer, Walk, ratio_interval, record, tau
from rich.table import Table
from torch import Tensor

from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.path_scorer import MarkovScorer
from jetspec.draft.shared_noise import NoiseWeights
from jetspec.errors import OptionError
from jetspec.noise import gumbel_noise
from jetspec.sampling import Sampling
from jetspec.target.target import Target

PROMPTS = common.PROJECT.parent / "shared" / "data" / "prompts" / "train.jsonl"
BUDGETS = (8, 16, 32)
_RIVALS = 400  # the best tokens with and without noise stand for the whole draft vocabulary in a fit


def read_prompts(path: Path, count: int, skip: int) -> list[str]:
    """`count` prompts, as many of each source as there are, in a fixed random order."""
    rows = [json.loads(line) for line in path.read_text("utf-8").split("\n") if line]
    random.Random(1).shuffle(rows)
    by_source: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        by_source[row["source"]].append(row["turns"][0])
    share = len(by_source)
    return [t for name in sorted(by_source) for t in by_source[name][skip // share : (skip + count) // share]]


def read_sets(args: argparse.Namespace) -> list[str]:
    """The first `args.sets` prompts, evenly spread, of each evaluation set."""
    return [q.text for name in common.SETS for q in common.read_set(args.data, name, args.sets)]


def answer(
    target: Target, taps: tuple[int, ...], prompts: list[str], args: argparse.Namespace
) -> list[Answer]:
    """Plain answers, each with a seed of its own."""
    samplings = [sampling(args, args.seed + args.skip + n) for n in range(len(prompts))]
    return record(target, taps, [common.encode(target, text) for text in prompts], samplings, args.tokens)


def sampling(args: argparse.Namespace, seed: int) -> Sampling:
    """The request's options."""
    return Sampling(
        temperature=args.temperature,
        top_k=args.top_k,
        top_p=args.top_p,
        min_p=args.min_p,
        repetition_penalty=args.repetition_penalty,
        presence_penalty=args.presence_penalty,
        frequency_penalty=args.frequency_penalty,
        seed=seed,
    )


class Row(NamedTuple):
    """Of one answer: tokens and rounds; the tree's expected and real accepted tokens, summed over rounds."""

    tokens: int
    rounds: int
    stated: float
    accepted: int


def follow(drafter: BlockDrafter, answers: list[Answer], budget: int) -> list[Row]:
    """Walk best-first trees of `budget` nodes along the answers."""
    rows: list[Row] = []
    for key, a in enumerate(answers):
        text, position = Walk(drafter, key, a), a.first
        rounds = accepted = 0
        stated = 0.0
        while position < a.last:
            tree = text.grow(drafter.propose([text.at(position)])[0], budget)
            path = text.path(tree)
            rounds, accepted = rounds + 1, accepted + len(path) - 1
            stated += float(np.exp(tree.logps[1:]).sum())
            position += len(path)
        text.close()
        rows.append(Row(len(a.tokens) - a.prompt_len, rounds, stated, accepted))
    return rows


@torch.inference_mode()
def fit_weights(drafter: BlockDrafter, answers: list[Answer], stride: int) -> list[dict[str, float]]:
    """(a, b) of every depth, by maximum likelihood of the token that was drawn, given the true path before
    it; tokens outside the draft vocabulary are left out."""
    scorer, vocab = drafter.scorer, drafter.noise.vocab
    if not isinstance(scorer, MarkovScorer):
        raise OptionError("--fit needs a head with a vanilla or gated scorer")
    depth = drafter.noise.depth
    laws: list[list[Tensor]] = [[] for _ in range(depth)]
    noises: list[list[Tensor]] = [[] for _ in range(depth)]
    for key, a in enumerate(answers):
        seen = 0
        for root in range(a.prompt_len - 1, len(a.tokens) - 1, stride):
            if root > seen:
                drafter.observe(key, a.taps[seen:root], None)
                seen = root
            hidden, logits = drafter.backbone.forward([key], [a.tokens[root]])
            count = min(depth, len(a.tokens) - 1 - root)
            parents = torch.tensor(a.tokens[root : root + count])
            gates = scorer._state_gate(hidden[:, :count])
            terms = scorer._gated(scorer.parent_rows[parents][None, :, None], gates)[0, :, 0]
            law = (logits[0, :count] + terms @ scorer.child_rows.T).log_softmax(-1)
            noise = gumbel_noise(a.sampling.seed, torch.arange(root + 1, root + 1 + count), vocab)
            noise *= a.sampling.temperature
            for d, token in enumerate(a.tokens[root + 1 : root + 1 + count]):
                place = int(torch.searchsorted(vocab, token))
                if place == len(vocab) or int(vocab[place]) != token:
                    continue
                top = torch.cat([x.topk(_RIVALS).indices for x in (law[d], law[d] + noise[d])]).unique()
                ids = torch.cat([torch.tensor([place]), top[top != place]])
                padding = (0, 2 * _RIVALS + 1 - len(ids))
                laws[d].append(torch.nn.functional.pad(law[d, ids], padding, value=-1e4))
                noises[d].append(torch.nn.functional.pad(noise[d, ids], padding))
        drafter.free(key)
    return [_fit(torch.stack(x), torch.stack(y)) for x, y in zip(laws, noises, strict=True)]


def _fit(law: Tensor, noise: Tensor, steps: int = 30) -> dict[str, float]:
    """The weights that make candidate 0 of every row most probable under softmax(a law + b noise): Newton's
    method on a convex function of two variables."""
    features = torch.stack([law, noise], dim=-1).double()  # [n, C, 2]
    weights = torch.tensor([1.0, 0.5], dtype=torch.float64)
    for _ in range(steps):
        chance = (features @ weights).softmax(-1).unsqueeze(-1)
        mean = (chance * features).sum(1)
        gradient = (mean - features[:, 0]).mean(0)
        centred = features - mean.unsqueeze(1)
        curvature = torch.einsum("nci,ncj->ij", chance * centred, centred) / len(features)
        weights = weights - torch.linalg.solve(curvature, gradient).clamp(-0.5, 0.5)

    def loss(a: float, b: float) -> float:
        scores = features @ torch.tensor([a, b], dtype=torch.float64)
        return -float(scores.log_softmax(-1)[:, 0].mean())

    a, b = weights.tolist()
    named = {"without": loss(1.0, 0.0), "default": loss(*NoiseWeights().at(1)), "naive": loss(1.0, 1.0)}
    return {"rows": len(law), "a": a, "b": b, "fitted": loss(a, b), **named}


def main() -> int:
    """Parse, measure, print."""
    parser = common.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=30, help="how many, over all sources (%(default)s)")
    parser.add_argument("--skip", type=int, default=0, help="prompts left out before them (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="most new tokens (%(default)s)")
    parser.add_argument("--file", type=Path, default=PROMPTS, help="JSON lines with 'source' and 'turns'")
    parser.add_argument("--sets", type=int, metavar="N", help="N prompts of each evaluation set instead")
    for name, kind, value in (
        ("temperature", float, 1.0),
        ("top-k", int, 0),
        ("top-p", float, 1.0),
        ("min-p", float, 0.0),
        ("repetition-penalty", float, 1.0),
        ("presence-penalty", float, 0.0),
        ("frequency-penalty", float, 0.0),
        ("seed", int, 1000),
    ):
        parser.add_argument(f"--{name}", type=kind, default=value, help="of the requests (%(default)s)")
    parser.add_argument(
        "--weights",
        type=float,
        nargs=2,
        action="append",
        default=[],
        metavar=("A", "B"),
        help="also try these",
    )
    parser.add_argument("--fit", action="store_true", help="fit the weights of each depth to these answers")
    args = parser.parse_args()
    target, drafter = common.load(args)
    if not isinstance(drafter, BlockDrafter):
        raise OptionError("this measurement needs a block head; give one with --head")
    prompts = read_prompts(args.file, args.prompts, args.skip) if args.sets is None else read_sets(args)
    answers = answer(target, drafter.taps, prompts, args)
    greedy = record(
        target,
        drafter.taps,
        [common.encode(target, p) for p in prompts],
        [Sampling()] * len(prompts),
        args.tokens,
    )
    forms: dict[str, NoiseWeights | None] = {"without": None, "shared noise": NoiseWeights()}
    forms |= {f"a {a:g}, b {b:g}": NoiseWeights((a,), (b,)) for a, b in args.weights}
    found: list[dict[str, Any]] = []
    for budget in BUDGETS:
        certain = tau(follow(drafter, greedy, budget))
        base: list[Row] = []
        for name, weights in forms.items():
            drafter.shared_noise = weights is not None
            drafter.noise.weigh(weights or NoiseWeights())
            rows = follow(drafter, answers, budget)
            base = base or rows
            rounds = sum(r.rounds for r in rows)
            found.append(
                {
                    "budget": budget,
                    "form": name,
                    "tau": tau(rows),
                    "kept": tau(rows) / certain,
                    "ratio": tau(rows) / tau(base),
                    "interval": ratio_interval(base, rows),
                    "stated": sum(r.stated for r in rows) / rounds,
                    "accepted": sum(r.accepted for r in rows) / rounds,
                }
            )
    fits = fit_weights(drafter, answers, 3) if args.fit else []
    hidden = ("data", "results", "json", "threads", "file", "head")
    arguments = {k: v for k, v in vars(args).items() if k not in hidden}
    arguments["head"] = common.head_identity(args.head, target)
    facts = common.provenance(Path(__file__), arguments)
    journal = common.Journal(args.results / "shared_noise.jsonl")
    key = common.run_key(facts)
    journal.append({"kind": "run", "key": key, "run": facts})
    for row in found:
        journal.append({"kind": "form", "key": key, **row})
    if args.json:
        print(json.dumps({"tau": found, "fit": fits, **facts}))
        return 0
    _print(found, fits, facts)
    return 0


def _print(found: list[dict[str, Any]], fits: list[dict[str, float]], facts: dict[str, Any]) -> None:
    console = common.console()
    table = Table(title="τ along the same answers")
    for title in ("budget", "form", "τ", "of τ at T = 0", "ratio", "95 %", "stated", "accepted"):
        table.add_column(title, justify="left" if title == "form" else "right")
    for r in found:
        low, high = r["interval"]
        numbers = (f"{r['tau']:.3f}", f"{r['kept']:.3f}", f"{r['ratio']:.3f}", f"{low:.3f}-{high:.3f}")
        table.add_row(f"{r['budget']}", r["form"], *numbers, f"{r['stated']:.2f}", f"{r['accepted']:.2f}")
    console.print(table)
    if fits:
        names = list(fits[0])
        table = Table(title="weights fitted per depth, and mean -log p of the drawn token")
        for title in ("depth", *names):
            table.add_column(title, justify="right")
        for depth, row in enumerate(fits, start=1):
            table.add_row(f"{depth}", *(f"{row[n]:.0f}" if n == "rows" else f"{row[n]:.3f}" for n in names))
        console.print(table)
    console.print(common.footer(facts))


if __name__ == "__main__":
    common.run(main)
