from __future__ import annotations

import pytest

from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.base import Spent
from jetspec.budget.fixed import FixedBudget
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.maps import Calibration, Group, Knot
from jetspec.budget.profile import Measurement
from jetspec.budget.store import CostFile
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.tree import GROW, Tree
from tests.budget.world import Head, Log, Machine, accepted, run, sequences

STEPS = {
    "flat": lambda rows: 0.012 + 0.0002 * rows,
    "stairs": lambda rows: 0.012 if rows <= 8 else 0.020 if rows <= 16 else 0.022 if rows <= 32 else 0.06,
    "steep": lambda rows: 0.012 * max(1.0, rows / 4),
}
MEMBERS = sequences(2)
NOISY = {"noise": 0.1, "stalls": 0.01}


def knowledge(machine: Machine, wrong: float = 0.0, calibration: Calibration | None = None) -> Knowledge:
    """What a measurement with errors of that spread would tell."""
    return Knowledge(Measurement(machine.model(wrong), 1.0, False), calibration)


def auto(head: Head, machine: Machine, rounds: int, batch: int = 1, grow: str = "best-first") -> Log:
    """A new policy in its world."""
    return run(AdaptiveBudget(knowledge(machine, wrong=0.03)), head, machine, rounds, batch, GROW[grow])


@pytest.mark.parametrize("grow", GROW)
@pytest.mark.parametrize("shape", STEPS)
def test_near_the_best_fixed_budget_that_it_was_not_told(shape: str, grow: str) -> None:
    """Guards the purpose, with a noisy clock and stalls: within 5 % of the best fixed budget (3 % on longer
    runs), for every builder and shape of the cost, the learning included."""
    machine = Machine(verify=STEPS[shape], **NOISY)
    fixed = [
        run(FixedBudget(nodes), Head(), machine, 250, grow=GROW[grow]).rate for nodes in (0, 1, 3, 7, 12, 24)
    ]
    assert auto(Head(), machine, 300, grow=grow).rate > 0.95 * max(fixed)


@pytest.mark.parametrize("batch", [1, 8])
def test_a_useless_head_is_left_alone(batch: int) -> None:
    """Guards the floor: a head that is sure of itself and never right is drafted with for a few rounds, and
    then in probes that get rarer; in the long run that costs less than 1 % of plain decoding."""
    machine = Machine(noise=0.1)
    log = auto(Head(right=False, sure=3.0), machine, 1500, batch)
    assert sum(map(bool, log.drafted[:40])) <= 8 and not all(log.drafted[:10])
    assert sum(map(bool, log.drafted[700:])) <= 5
    assert log.rounds(200).rate > 0.99 * batch / machine.plain(batch)


@pytest.mark.parametrize(("length", "last"), [(64, 56), (6, 3)])
def test_nothing_is_tried_with_requests_that_are_about_to_end(length: int, last: int) -> None:
    """Guards short answers: one probe in eight came in the last eight tokens of sixty-four and could not pay.
    Requests that are shorter than that are still tried, in their first half."""
    machine = Machine(noise=0.1)
    budget, tried = AdaptiveBudget(knowledge(machine)), set()
    for number in range(2000 // length):
        limits = Limits(max_tokens=length)
        request = Sequence(number, [1] * 65, Sampling(), limits, lambda ids: "")
        for place in range(length):
            head = Head(right=False, sure=1.0, seed=length * number + place)
            if run(budget, head, machine, 1, members=[request]).drafted[0]:
                tried.add(place)
            request.tokens.append(0)
    assert tried and max(tried) < last


def test_a_head_that_becomes_useful_is_found_again() -> None:
    """Guards against giving up for good: after a stretch that it cannot guess, drafting comes back."""
    machine = Machine(**NOISY)
    budget = AdaptiveBudget(knowledge(machine))
    log = run(budget, Head(right=False), machine, 60)
    assert sum(log.drafted[-20:]) <= 4
    log = run(budget, Head(), machine, 400)
    assert all(log.drafted[-50:])


def test_what_pays_clearly_is_never_interrupted() -> None:
    """Guards throughput: plain rounds for the sake of knowing their cost come only where it is close."""
    assert all(auto(Head(sure=2.0), Machine(), 300).drafted[20:])
    close = auto(Head(sure=-1.2), Machine(verify=lambda rows: 0.012 * max(1.0, rows / 4)), 300).drafted[20:]
    assert 0 < close.count(0) < 60


def test_a_perfect_head_grows() -> None:
    """Guards growth beyond the first limit: where rows are free and everything is accepted, trees get as deep
    as the head goes."""
    machine = Machine(verify=lambda rows: 0.012)
    log = auto(Head(sure=9.0, drift=0.0, depth=40), machine, 60, grow="chain")
    assert log.nodes[-1] >= 36
    assert auto(Head(), machine, 200).nodes[-1] > 64


def test_where_rows_cost_a_whole_round_each_nothing_is_verified() -> None:
    """Guards n = 0: a draft that is there already is not verified if that does not pay."""
    machine = Machine(draft=1e-5, verify=lambda rows: 0.012 * rows)
    log = auto(Head(sure=-1.0), machine, 200)
    assert sum(log.nodes[20:]) < 0.2 * len(log.nodes[20:])


@pytest.mark.parametrize("grow", GROW)
def test_limits_and_cuts_are_kept(grow: str) -> None:
    """Guards the contract with the round for every builder: limits are numbers from 0, cuts are valid trees
    of nodes that were grown, and requests of a batch share the budget."""
    budget = AdaptiveBudget(knowledge(Machine()))
    members = sequences(3)
    heads = [Head(sure=2.5, seed=1), Head(sure=-2.0, seed=2), Head(sure=0.5, seed=3)]
    shares = [0, 0, 0]
    for _ in range(40):
        limits = budget.limits(members)
        assert len(limits) == 3 and min(limits) >= 0
        drafts = [head.draft() for head in heads]
        grown = [
            GROW[grow](0, p, n) if n else Tree.root_only(0) for (p, _), n in zip(drafts, limits, strict=True)
        ]
        trees = budget.cut(members, grown)
        for number, (tree, whole) in enumerate(zip(trees, grown, strict=True)):
            tree.check()
            inside, around = [
                {tuple(t.tokens[n] for n in t.path_to(node)) for node in range(t.size)} for t in (tree, whole)
            ]
            assert inside <= around
            shares[number] += tree.budget
        paths = [accepted(tree, truth) for tree, (_, truth) in zip(trees, drafts, strict=True)]
        budget.record(members, trees, paths, Spent(0.004, 0.0005, 0.015, 0.0005))
    if grow != "chain":
        assert len(set(shares)) == 3, "nodes go to where they are worth most, not to each the same number"


def test_trees_of_another_rule_count_as_a_whole() -> None:
    """Guards rejection sampling, whose trees come back uncut: what was accepted is compared with what all of
    their nodes promised, or the head would seem better than it is."""
    known = knowledge(Machine(draft=1e-3, verify=lambda rows: 0.006 + 0.006 * rows))
    budget, head, members = AdaptiveBudget(known), Head(sure=1.0), sequences(1)
    for _ in range(60):
        (limit,) = budget.limits(members)
        proposal, truth = head.draft()
        tree = GROW["chain"](0, proposal, limit) if limit else Tree.root_only(0)
        budget.cut(members, [tree])
        budget.record(
            members, [tree], [accepted(tree, truth)], Spent(0.001, 0.0005, 0.006 + 0.006 * tree.size, 0.0005)
        )
    assert known.prospect(False).trust < 1.2


def test_a_request_that_may_emit_one_more_token_is_not_drafted_for() -> None:
    """Guards the end of a text: the bonus is all that fits."""
    budget = AdaptiveBudget(knowledge(Machine()))
    last = Sequence(0, [1, 2, 3], sequences(1)[0].sampling, Limits(max_tokens=1), lambda ids: "")
    assert budget.limits([last]) == [0]
    nothing, some = budget.limits([last, *sequences(1)])
    assert nothing == 0 < some


def test_knowledge_is_shared_and_kinds_of_sampling_are_not_mixed() -> None:
    """Guards what engines share, and that a poor draft at one batch size is remembered at the next."""
    known = knowledge(Machine())
    run(AdaptiveBudget(known), Head(right=False), Machine(), 40)
    assert known.prospect(False).trust < 0.6 and not known.prospect(True).gains
    log = run(AdaptiveBudget(known), Head(right=False), Machine(), 30, batch=4)
    assert sum(log.drafted) <= 3
    assert set(known.situations) == {(1, False), (3, False)}


def test_gains_outlive_the_process() -> None:
    """Guards the next start: with a useless head it begins with a probe instead of learning all over, with a
    good one it drafts at once."""
    file, machine = CostFile({"test": 1}), Machine()
    known = Knowledge(Measurement(machine.model(), 1.0, False), file=file)
    run(AdaptiveBudget(known), Head(right=False), machine, 60)
    known.keep()
    kept = file.load()
    assert kept is not None and max(kept.gains["greedy"]) < 0.5
    again = Knowledge(Measurement(kept.cost, 1.0, False), gains=kept.gains)
    assert sum(run(AdaptiveBudget(again), Head(right=False), machine, 60).drafted) <= 4
    known = Knowledge(Measurement(machine.model(), 1.0, False), file=file)
    run(AdaptiveBudget(known), Head(), machine, 60)
    known.keep()
    kept = file.load()
    assert kept is not None
    again = Knowledge(Measurement(kept.cost, 1.0, False), gains=kept.gains)
    assert all(run(AdaptiveBudget(again), Head(), machine, 20).drafted)


def test_the_first_text_drafts_where_a_calibration_promises_it() -> None:
    """Guards the first impression: a head that was measured when it was calibrated need not prove itself
    again, node by node, in everybody's first answer. A promise that is not kept is seen through."""
    machine = Machine()
    gains = {"greedy": [0.8, 0.5, 0.3, 0.2, 0.1, 0.05, 0.03, 0.02]}
    maps = {Group(False, True, 0): [Knot(-3.0, -3.0, 9)]}
    log = run(AdaptiveBudget(knowledge(machine, calibration=Calibration(maps, gains))), Head(), machine, 20)
    assert all(log.drafted)
    kept = knowledge(machine, calibration=Calibration(maps, gains))
    assert sum(run(AdaptiveBudget(kept), Head(right=False), machine, 80).drafted) <= 12


def test_a_machine_that_no_longer_fits_is_measured_again() -> None:
    """Guards against costs from a busy hour: where rounds take much longer or shorter than measured, the
    costs are measured again, and the file goes."""
    file = CostFile({"test": 2})
    machine, calls = Machine(), list[int]()

    def measure() -> Measurement:
        calls.append(1)
        return Measurement(machine.model(), 0.0, False)

    slow = Machine(draft=0.04, verify=lambda rows: 0.12 + 0.002 * rows)
    known = Knowledge(Measurement(slow.model(), 0.0, False), measure=measure, file=file)
    known.keep()
    assert file.load() is not None
    run(AdaptiveBudget(known), Head(), machine, 5)
    assert not calls, "a few rounds prove nothing"
    run(AdaptiveBudget(known), Head(), machine, 30)
    assert calls and known.odd < 1.5
    stuck = Knowledge(Measurement(slow.model(), 9.0, False), file=file)
    run(AdaptiveBudget(stuck), Head(), machine, 30)
    stuck.keep()
    assert file.load() is None


def test_without_a_calibration_maps_are_fitted_on_the_way() -> None:
    """Guards heads that promise too much: within some hundred rounds the policy has maps of its own, and does
    as well as with those of a calibration."""
    machine = Machine(verify=STEPS["steep"])
    known = knowledge(machine)
    run(AdaptiveBudget(known), Head(boast=0.3), machine, 20)
    assert known.calibration.knots
    given = Calibration({Group(False, True, 0): [Knot(-3.0, -3.0, 9)]})
    fixed = knowledge(machine, calibration=given)
    run(AdaptiveBudget(fixed), Head(boast=0.3), machine, 100)
    assert fixed.calibration is given


def test_plain_rounds_without_a_thought_end_with_a_new_request() -> None:
    """Guards the short way through plain rounds: it is taken where drafting is off for long, leaves time for
    probes, and never for other requests than those it was decided for."""
    machine = Machine()
    budget, head = AdaptiveBudget(knowledge(machine)), Head(right=False)
    members = sequences(2)
    log = run(budget, head, machine, 700, members=members)
    assert 0 < sum(map(bool, log.drafted[300:])) < 6
    while not budget._rest:
        run(budget, head, machine, 1, members=members)
    turn = budget._turn
    assert budget.limits(members) == [0, 0] and budget._turn is turn
    assert budget.limits(sequences(3)[1:]) == [0, 0] and budget._turn is not turn, "another batch"


def test_a_probe_does_not_end_the_short_way() -> None:
    """Guards the price of not drafting: once plain decoding is settled, a probe that fails is followed by
    rounds without a thought again."""
    budget = AdaptiveBudget(knowledge(Machine()))
    thoughts: list[bool] = []
    for _ in range(400):
        before = budget._turn
        log = run(budget, Head(right=False), Machine(), 1, members=MEMBERS)
        thoughts.append(budget._turn is None or budget._turn is not before)
        if log.drafted[0]:
            probed = len(thoughts)
    assert 100 < probed < 360, "there was a probe in between"
    assert sum(thoughts[probed + 2 : probed + 34]) <= 8
