"""Do branches know where they are? Trees of several heads, replayed along the same greedy texts.

For every head's folder (and, with --second-pass, for each causal one once more with a second pass over its
own tree, see `second_pass.py`) and every file of prompts:

tau        at every budget, with the ratio to the first head and its 95 % bootstrap interval over answers
recall     how often the token that was really written at depth k is among the first K candidates of that
           depth, and among the first K children of the node that the written path leads to
next       where a node was accepted that is not its parent's top child: how often the top child below it is
           the next written token; against the same along the top path. "in the tree" counts rounds of budget
           --look, "among candidates" every position of the text
cost       milliseconds of a draft by stage; they mean something on a quiet machine only

    python benchmarks/conditional.py runs/marginal/head runs/gated/head --prompts 10 --second-pass
    python benchmarks/conditional.py --table         # Markdown from the newest run's records
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

import arms
import common
from conditional_counts import Tally, depth_candidates, path_ranks
from conditional_tables import grids, notes
from replay import Answer, Walk
from second_pass import SecondPass, can_run_twice

from jetspec.draft.jetspec import BlockDrafter
from jetspec.errors import OptionError
from jetspec.sequence import Sequence
from jetspec.tree.proposal import Proposal

BUDGETS = (4, 8, 16, 32, 64, 128)


class Arm(NamedTuple):
    """A head under test.

    again: what runs it a second time, or None
    nodes: of the second pass's first tree, where the budget is smaller
    """

    head: BlockDrafter
    again: SecondPass | None = None
    nodes: int = 0

    def at(self, sequence: Sequence, proposal: Proposal, budget: int) -> Proposal:
        """What a tree of `budget` nodes is grown from, after the first pass proposed `proposal`."""
        if self.again is None:
            return proposal
        return self.again.again(sequence, proposal, max(budget, self.nodes))


# --- replaying


def measure(arm: Arm, answers: Many[Answer], budgets: Many[int], look: int) -> Tally:
    """Walk one arm along answers. Ranks and costs are those of budget `look`, one of `budgets`."""
    tally = Tally(arm.head.head.config.depth, budgets)
    for key, answer in enumerate(answers):
        _follow(arm, Walk(arm.head, key, answer), budgets, look, tally)
    return tally


def _follow(arm: Arm, walk: Walk, budgets: Many[int], look: int, tally: Tally) -> None:
    answer = walk.answer
    roots, rounds = dict.fromkeys(budgets, answer.first), dict.fromkeys(budgets, 0)
    times: dict[str, list[float]] = {name: [] for name in tally.ms}
    for position in range(answer.first, answer.last):
        s = walk.at(position)
        proposal = _timed_proposal(arm, s, times)
        before = arm.again.again_seconds if arm.again is not None else 0.0
        seen = arm.at(s, proposal, look)
        if arm.again is not None:
            times["again"].append(arm.again.again_seconds - before)
        accepted = None
        for budget in sorted(budgets, key=lambda n: n != look):  # its trees are timed, so they come first
            if roots[budget] != position:
                continue
            source = seen if budget == look else arm.at(s, proposal, budget)
            start = time.perf_counter()
            tree = walk.grow(source, budget)
            if budget == look:
                times["build"].append(time.perf_counter() - start)
            path = walk.path(tree)
            rounds[budget], roots[budget] = rounds[budget] + 1, position + len(path)
            if budget == look:
                accepted = len(path) - 1
        written = answer.tokens[position + 1 : position + 1 + proposal.max_depth]
        ranks = path_ranks(seen, written)
        tally.count_ranks(depth_candidates(proposal), ranks, written)
        tally.count_next("candidates", ranks, len(ranks) - 1)
        if accepted is not None:
            tally.count_next("tree", ranks, accepted)
    walk.close()
    for budget in budgets:
        tally.rounds[budget].append([len(answer.tokens) - answer.prompt_len, rounds[budget]])
    for name, values in times.items():
        if values:
            tally.ms[name].append(round(1e3 * statistics.median(values), 4))


def _timed_proposal(arm: Arm, s: Sequence, times: dict[str, list[float]]) -> Proposal:
    scored, start = arm.head.scorer_seconds, time.perf_counter()
    proposal = arm.head.propose([s])[0]
    total, scorer = time.perf_counter() - start, arm.head.scorer_seconds - scored
    times["backbone"].append(total - scorer)
    times["scorer"].append(scorer)
    return proposal


# --- the command


def main() -> int:
    """Measure what is missing, then print all of this run."""
    args = _arguments()
    if args.table:
        return arms.print_newest(args, grids, notes)
    target = arms.open_target(args)
    tested = make_arms(arms.open_heads(args, target), args.second_pass, args.first_nodes)
    given = {"budgets": args.budgets, "look": args.look, "first_nodes": args.first_nodes}
    facts = arms.facts_of(Path(__file__), args, target, tested, **given)
    layers = {layer for arm in tested.values() for layer in arm.head.taps}

    def counted(name: str, answers: list[Answer]) -> dict[str, Any]:
        return measure(tested[name], answers, args.budgets, args.look).as_dict()

    records = arms.measure_missing(args, target, facts, layers, counted)
    arms.show(grids(facts, records), notes(facts, records), facts)
    return 0


def make_arms(heads: dict[str, BlockDrafter], second_pass: bool, nodes: int = 0) -> dict[str, Arm]:
    """The heads in the given order, each followed by itself with a second pass where that was asked for and
    is possible."""
    made = {}
    for name, head in heads.items():
        made[name] = Arm(head)
        if second_pass and can_run_twice(head):
            made[f"{name}, second pass"] = Arm(head, SecondPass(head), nodes)
    return made


def _arguments() -> argparse.Namespace:
    parser = arms.parser(__doc__, "conditional.jsonl")
    parser.add_argument("--budgets", nargs="+", type=int, default=list(BUDGETS), help="4 8 16 32 64 128")
    parser.add_argument("--look", type=int, help="budget of ranks and costs: 32, else the largest")
    parser.add_argument("--second-pass", action="store_true", help="causal heads also with a second pass")
    parser.add_argument(
        "--first-nodes",
        type=int,
        default=0,
        help="nodes of the second pass's first tree, where the budget is smaller (%(default)s)",
    )
    args = parser.parse_args()
    arms.check(args)
    if min(args.budgets) < 1 or len(set(args.budgets)) < len(args.budgets):
        raise OptionError(f"--budgets must be different numbers of at least 1, got {args.budgets}")
    if args.look is None:
        args.look = 32 if 32 in args.budgets else max(args.budgets)
    if args.look not in args.budgets:
        raise OptionError(f"--look {args.look} is not among --budgets; valid: {args.budgets}")
    return args


if __name__ == "__main__":
    common.run(main)
