"""The policy against fixed budgets in the simulated world, in batches, on a clock without noise (what the
policy sees is noisy, and its measured costs are wrong by some percent)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean

import pytest

from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.profile import Measurement
from jetspec.budget.prospect import CREDIT
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from tests.budget.world import Head, Log, Machine, fixed_rates, run, sequences

COSTS: dict[str, Callable[[float], float]] = {
    "flat": lambda rows: 0.012 + 0.0002 * rows,
    "stairs": lambda rows: 0.012 if rows <= 8 else 0.020 if rows <= 16 else 0.022 if rows <= 32 else 0.06,
    "tiles": lambda rows: 0.012 + 0.004 * (rows // 64),
    "steep": lambda rows: 0.012 * max(1.0, rows / 4),
}
BUDGETS = (0, 1, 3, 7, 10, 14, 30, 46)


def auto(machine: Machine, wrong: float = 0.03) -> AdaptiveBudget:
    """A new policy whose costs were measured with errors of that spread."""
    return AdaptiveBudget(Knowledge(Measurement(machine.model(wrong), 1.0, False)))


@pytest.mark.parametrize(
    ("shape", "head", "batch"),
    [
        ("stairs", {"sure": 2.5}, 16),  # flat beyond 32 rows, where only trees of 40 nodes pay
        ("tiles", {"sure": 2.5}, 16),
        ("flat", {"boast": 0.3}, 4),
        ("tiles", {}, 4),
        ("steep", {"sure": 2.5}, 16),  # nothing pays
    ],
)
def test_near_the_best_fixed_budget_after_64_rounds(shape: str, head: dict[str, float], batch: int) -> None:
    """Guards batches: within 5 % of the best fixed budget (3 % on longer runs) wherever that is, and never
    far below plain decoding, for costs with steps and for a head that promises too much. The mean of a few
    runs: in a single one a stall during a trial costs 3 %."""
    best, plain = list[float](), list[float]()
    for seed in range(4):
        machine = Machine(verify=COSTS[shape], noise=0.1, stalls=0.01, seed=seed)
        log = run(auto(machine), Head(**head, seed=seed), machine, 150, batch)
        fixed = fixed_rates(Head(**head, seed=seed), machine, 60, batch, BUDGETS)
        best.append(log.rounds(64).rate / max(fixed.values()))
        plain.append(log.rate / fixed[0])
    assert fmean(best) > 0.95
    assert fmean(plain) > 0.98


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("shape", COSTS)
@pytest.mark.parametrize("sure", [0.8, 3.0])
def test_trying_costs_no_more_than_the_credit(shape: str, sure: float, batch: int) -> None:
    """Guards the promise to whoever has a useless head: however sure it is of itself and whatever rows cost,
    the first 128 rounds lose no more than the credit and a little of the time, 2 % in all."""
    machine = Machine(verify=COSTS[shape], noise=0.1)
    log = run(auto(machine, wrong=0.0), Head(sure=sure, right=False), machine, 128, batch)
    plain = machine.plain(batch)
    assert sum(log.tokens) == 128 * batch and any(log.drafted)
    assert sum(log.seconds) / plain - 128 <= CREDIT + 0.01 * 128
    assert log.rate >= 0.98 * batch / plain


def test_an_expensive_draft_is_tried_once_it_is_affordable() -> None:
    """Guards against a credit that never covers a try: a draft that takes two plain rounds and brings six
    tokens pays, and is found out after some hundred rounds."""
    machine = Machine(draft=0.026, verify=lambda rows: 0.012)
    log = run(auto(machine, wrong=0.0), Head(sure=5.0, drift=0.0), machine, 700)
    assert not any(log.drafted[:100]) and all(log.drafted[-50:])


def test_sequences_with_useless_drafts_are_left_out_of_a_batch() -> None:
    """Guards mixed batches: those whose drafts come true are drafted for, the others hardly ever, which is
    faster than any fixed budget for all."""
    machine = Machine(verify=COSTS["tiles"], noise=0.1, stalls=0.01)

    def heads() -> list[Head]:
        return [Head(sure=2.5, seed=n) if n % 2 else Head(sure=2.0, right=False, seed=n) for n in range(8)]

    log = run(auto(machine), heads(), machine, 160, 8)
    late = log.rounds(64)
    assert 3.8 < sum(late.drafted) / len(late.drafted) < 4.6
    fixed = fixed_rates(heads(), machine, 60, 8, BUDGETS)
    assert late.rate > 1.15 * max(fixed.values())


def test_sequences_come_and_go() -> None:
    """Guards continuous batching: the batch is another one every few rounds, drafting pays in small ones and
    not in large ones, and what was learned in one holds in the next."""
    machine = Machine(verify=COSTS["flat"], noise=0.1)
    budget, dice = auto(machine), random.Random(1)
    pool = iter(sequences(400))
    members = [next(pool)]
    logs: dict[int, list[Log]] = {1: [], 4: [], 16: []}
    best: dict[int, list[dict[int, float]]] = {1: [], 4: [], 16: []}
    for _ in range(60):
        count, seed = dice.choice(list(logs)), dice.randrange(1000)
        members = [*members, *(next(pool) for _ in range(count - len(members)))][-count:]
        logs[count].append(run(budget, Head(seed=seed), machine, 4, members=members))
        best[count].append(fixed_rates(Head(seed=seed), machine, 4, count, BUDGETS))
    for count, parts in logs.items():
        start = len(parts) // 3
        rate = sum(sum(log.tokens) for log in parts[start:]) / sum(sum(log.seconds) for log in parts[start:])
        fixed = max(sum(rates[n] for rates in best[count][start:]) / len(parts[start:]) for n in BUDGETS)
        assert rate > 0.95 * fixed, count
    assert sum(sum(log.drafted) for log in logs[16][5:]) < 0.1 * 16 * 4 * len(logs[16])
    assert len(budget._members._known) == len(members), "who has left is forgotten"


def test_long_contexts_are_priced_before_a_probe() -> None:
    """Guards the credit with long contexts: what a drafted row reads of the context was left out of the price
    of probes and looks, and a probe of four nodes cost more than the credit."""
    machine = Machine()
    nodes: dict[int, int] = {}
    for context in (64, 8000):
        known = Knowledge(Measurement(replace(machine.model(), row_context=1e-6), 1.0, noisy=False))
        budget = AdaptiveBudget(known)
        members = [Sequence(0, [1] * context, Sampling(), Limits(max_tokens=99), lambda ids: "")]
        known.prospects["greedy"].credit = 0.6
        limits = budget.limits(members)
        turn = budget._turn
        assert turn is not None
        nodes[context] = turn.least if any(limits) else 0
    assert nodes[8000] < nodes[64] == 4


def test_a_steady_batch_is_not_planned_anew_in_every_round() -> None:
    """Guards the price of planning: where drafting pays for all requests of a batch, five of six rounds
    follow the look ahead, with as many nodes for each request, nothing cut and nothing computed. A request
    that comes or leaves ends that, and a single request gets a plan of its own in every round."""
    budget = auto(Machine(verify=COSTS["flat"]), wrong=0.0)
    members = sequences(5)
    head = Head(sure=2.0)
    run(budget, head, Machine(verify=COSTS["flat"]), 100, members=members[:4])
    repeated = []
    for _ in range(40):
        log = run(budget, head, Machine(verify=COSTS["flat"]), 1, members=members[:4])
        repeated.append(budget._repeated)
        assert log.drafted == [4]
        if budget._repeated:
            assert log.nodes[0] <= 4 * budget._nodes
    assert 25 <= sum(repeated) <= 34
    while not budget._repeats:
        run(budget, head, Machine(verify=COSTS["flat"]), 1, members=members[:4])
    budget.limits(members)
    assert not budget._repeated, "another batch"
    alone = auto(Machine(), wrong=0.0)
    for _ in range(150):
        run(alone, head, Machine(), 1, members=members[:1])
        assert not alone._repeated


def test_a_steady_batch_whose_drafts_get_worse_is_noticed() -> None:
    """Guards repeated rounds: they teach nothing, but every sixth one is planned, and drafting ends."""
    machine, members = Machine(verify=COSTS["flat"]), sequences(4)
    budget = auto(machine, wrong=0.0)
    assert all(run(budget, Head(sure=2.0), machine, 120, members=members).nodes[-20:])
    log = run(budget, Head(right=False, sure=2.0), machine, 160, members=members)
    assert sum(map(bool, log.nodes[-60:])) <= 8
