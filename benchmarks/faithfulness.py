"""Would the target have written the branch that a head likes best?

Along greedy texts, replayed, each head drafts its top branch: the chain of first children. The target then
scores it with teacher forcing. The gap at depth k is, in nats and given the DRAFTED tokens before it,

    log p(the target's own greedy token) - log p(the drafted token)

which is 0 where the two agree. A branch of small gaps is one that the target might have gone on with, whether
or not it does; one of large gaps is put together from depths that do not know of each other. So heads of any
mask, loss or scorer can be compared at depths that acceptance never reaches. Chains end with a drafted
end-of-text token.

    python benchmarks/faithfulness.py runs/causal/head runs/bidirectional/head --prompts 10
    python benchmarks/faithfulness.py --table         # Markdown from the newest run's records
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import arms
import common
import numpy as np
import torch
from replay import Answer, Walk

from jetspec.bench.summary import bootstrap
from jetspec.bench.table import Grid
from jetspec.draft.base import Drafter
from jetspec.errors import OptionError
from jetspec.target.cache import KVCache
from jetspec.target.plan import chunk, pack
from jetspec.target.target import Target
from jetspec.tree import GROW, Tree

BATCH = 16  # answers that are scored together
COLUMNS = ("nodes", "same", "gap", "branch", "agreeing", "stated", "scored")


def measure(
    target: Target, drafter: Drafter, answers: Many[Answer], depth: int, stride: int
) -> list[list[list[float]]]:
    """For every answer, sums over the branches drafted at every `stride`-th root, by depth: [n][D][7].

    The columns are those of COLUMNS: branches that reach the depth; drafted tokens that are the target's own;
    gaps in nats; gaps of the branch up to there, added up; branches that agree up to there; log-probs of the
    drafted token by the head and by the target.
    """
    found = []
    for first in range(0, len(answers), BATCH):
        found += _measure(target, drafter, answers[first : first + BATCH], depth, stride)
    return found


def _measure(
    target: Target, drafter: Drafter, answers: Many[Answer], depth: int, stride: int
) -> list[list[list[float]]]:
    cache, ends = target.new_cache(), target.tokenizer.eos_ids
    walks = [Walk(drafter, key, answer) for key, answer in enumerate(answers)]
    sums = np.zeros((len(answers), depth, len(COLUMNS)))
    for key, answer in enumerate(answers):
        cache.add(key, capacity=len(answer.tokens) + depth + stride)
        _commit(target, cache, key, answer.tokens[: answer.first])
    for offset in range(0, max((a.last - a.first for a in answers), default=0), stride):
        active = [key for key, answer in enumerate(answers) if answer.first + offset < answer.last]
        roots = [answers[key].first + offset for key in active]
        proposals = drafter.propose([walks[key].at(root) for key, root in zip(active, roots, strict=True)])
        branches = [
            _ended(GROW["chain"](answers[key].tokens[root], proposal, depth), ends)
            for key, root, proposal in zip(active, roots, proposals, strict=True)
        ]
        # Beside its branch every root gets the written tokens up to the next root, which are then kept.
        written = [
            answers[key].tokens[root + 1 : root + stride] for key, root in zip(active, roots, strict=True)
        ]
        trees = [_beside(branch, own) for branch, own in zip(branches, written, strict=True)]
        plan = pack(zip(active, trees, strict=True), cache)
        logits = target.forward(plan, cache).logits
        assert logits is not None
        for key, branch, own, segment in zip(active, branches, written, plan.segments, strict=True):
            rows = logits[segment.start : segment.start + branch.size]
            sums[key, : branch.budget] += score(branch, rows)
            cache.keep(key, [0, *range(branch.size, branch.size + len(own))])
    for walk in walks:
        walk.close()
    return sums.tolist()


def score(branch: Tree, logits: torch.Tensor) -> np.ndarray:
    """One branch of n drafted tokens: [n, 7], the columns of `measure`. logits [n + 1, V] of its nodes, the
    root first."""
    count = branch.budget
    laws = logits[:count].double().log_softmax(-1)
    tokens = torch.tensor(branch.tokens[1:], device=laws.device)
    drafted = laws.gather(1, tokens.unsqueeze(1)).squeeze(1)
    gap = (laws.max(-1).values - drafted).cpu().numpy()
    same = (laws.argmax(-1) == tokens).cpu().numpy().astype(float)
    gap = gap * (1 - same)
    agreeing = np.cumprod(same)
    columns = (
        np.ones(count),
        same,
        gap,
        np.cumsum(gap),
        agreeing,
        np.diff(branch.logps),
        drafted.cpu().numpy(),
    )
    return np.stack(columns, axis=1)


def _ended(branch: Tree, ends: frozenset[int]) -> Tree:
    """The branch up to its first end-of-text token."""
    for node in range(1, branch.size):
        if branch.tokens[node] in ends:
            return branch.cut(node)
    return branch


def _beside(branch: Tree, written: list[int]) -> Tree:
    """The branch, and behind its nodes a second branch of written tokens from the same root."""
    count, more = branch.size, len(written)
    parents = (0, *range(count, count + more - 1)) if more else ()
    return Tree(
        (*branch.tokens, *written),
        (*branch.parents, *parents),
        (*branch.depths, *range(1, more + 1)),
        (*branch.logps, *[0.0] * more),
    )


def _commit(target: Target, cache: KVCache, key: int, tokens: list[int], rows: int = 256) -> None:
    for start in range(0, len(tokens), rows):
        piece = tokens[start : start + rows]
        target.forward(chunk([(key, piece)], cache), cache)
        cache.keep(key, range(len(piece)))


# --- tables


def grids(facts: dict[str, Any], records: Many[dict[str, Any]]) -> list[Grid]:
    """Gaps, agreement, and what heads state beside what the target says, by depth."""
    sums = {
        arm: np.concatenate([r["sums"] for r in own]) for arm, own in arms.complete(facts, records).items()
    }
    depths = max(table.shape[1] for table in sums.values())
    columns = ("head", *(f"depth {n}" for n in range(1, depths + 1)))

    def means(arm: str, name: str, form: str) -> tuple[str, ...]:
        nodes, total = (sums[arm][:, :, COLUMNS.index(x)].sum(0) for x in ("nodes", name))  # [D]
        cells = [form.format(t / n) if n else "–" for t, n in zip(total, nodes, strict=True)]
        return (*cells, *[""] * (depths - len(cells)))

    def grid(title: str, name: str, form: str) -> Grid:
        return Grid(title, columns, [(arm, *means(arm, name, form)) for arm in sums])

    said = [
        (f"{arm}, {who}", *means(arm, name, "{:.3f}"))
        for arm in sums
        for who, name in (("head", "stated"), ("target", "scored"))
    ]
    return [
        grid("Gap in nats, given the drafted tokens before it", "gap", "{:.3f}"),
        grid("Gap in nats of the branch down to a depth, added up", "branch", "{:.3f}"),
        grid("Drafted token is the target's own", "same", "{:.1%}"),
        grid("Branch is the target's own down to a depth", "agreeing", "{:.1%}"),
        Grid("Log-prob of the drafted token by the head and by the target", columns, said),
        _intervals(sums),
    ]


def _intervals(sums: dict[str, np.ndarray]) -> Grid:
    """The mean gap over all depths and its difference to the first head's, with bootstrap intervals over
    answers."""
    base = next(iter(sums))

    def totals(arm: str) -> np.ndarray:
        return sums[arm][:, :, [COLUMNS.index("gap"), COLUMNS.index("nodes")]].sum(1)  # [n, 2]

    rows = []
    for arm in sums:
        own = bootstrap(totals(arm), lambda x: x[..., 0] / x[..., 1])
        pair = np.concatenate([totals(arm), totals(base)], axis=1)
        less = bootstrap(pair, lambda x: x[..., 0] / x[..., 1] - x[..., 2] / x[..., 3])
        difference = "–" if arm == base else f"{less.value:+.3f} ({less.low:+.3f} to {less.high:+.3f})"
        rows.append((arm, f"{own.value:.3f} ({own.low:.3f}-{own.high:.3f})", difference))
    return Grid("Gap in nats, all depths (95 %)", ("head", "gap", f"less that of {base}"), rows)


def notes(facts: dict[str, Any], records: Many[dict[str, Any]]) -> list[str]:
    """The line below the tables."""
    given, found = facts["arguments"], arms.complete(facts, records)
    branches = int(sum(answer[0][0] for r in next(iter(found.values())) for answer in r["sums"]))
    return [
        f"Greedy texts of up to {given['tokens']} tokens by {given['model']}, a branch at one of "
        f"{given['stride']} tokens, {branches} branches per head; files and prompts: {arms.files_of(found)}."
    ]


# --- the command


def main() -> int:
    """Measure what is missing, then print all of this run."""
    args = _arguments()
    if args.table:
        return arms.print_newest(args, grids, notes)
    target = arms.open_target(args)
    heads = arms.open_heads(args, target)
    facts = arms.facts_of(Path(__file__), args, target, heads, stride=args.stride)
    layers = {layer for head in heads.values() for layer in head.taps}

    def scored(name: str, answers: list[Answer]) -> dict[str, Any]:
        depth = heads[name].head.config.depth
        return {"sums": np.round(measure(target, heads[name], answers, depth, args.stride), 5).tolist()}

    records = arms.measure_missing(args, target, facts, layers, scored)
    arms.show(grids(facts, records), notes(facts, records), facts)
    return 0


def _arguments() -> argparse.Namespace:
    parser = arms.parser(__doc__, "faithfulness.jsonl")
    parser.add_argument("--stride", type=int, default=3, help="a branch at every n-th token (%(default)s)")
    args = parser.parse_args()
    arms.check(args)
    if args.stride < 1:
        raise OptionError(f"--stride must be at least 1, got {args.stride}")
    return args


if __name__ == "__main__":
    common.run(main)
