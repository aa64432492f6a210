from __future__ import annotations

from itertools import pairwise

import pytest

from jetspec.budget.cost import RoundSize
from jetspec.budget.members import Member, Members
from jetspec.budget.outlook import look_ahead
from jetspec.budget.prospect import MOST_CREDIT, Prospect, surprise
from tests.budget.world import Machine, sequences


def test_probes_get_rarer() -> None:
    """Guards the cost of a useless head in the long run: the probes of ten thousand rounds are a handful,
    ever further apart. One that pays is followed by another at once."""
    prospect = Prospect()
    places = []
    for number in range(10_000):
        if prospect.due:
            places.append(number)
            prospect.probed(False)
        else:
            prospect.wait()
    assert len(places) < 25
    gaps = [b - a for a, b in pairwise(places)]
    assert gaps == sorted(gaps) and gaps[0] >= 8
    prospect.probed(True)
    assert prospect.due


def test_chance_is_no_surprise() -> None:
    """Guards factors against noise: what a few nodes more or less say is nothing, what dozens say counts."""
    assert surprise(3, 4.0, 1.0) == surprise(5, 4.0, 1.0) == 1.0
    assert surprise(0, 40.0, 1.0) < 0.2
    assert surprise(80, 40.0, 1.0) > 1.7
    prospect = Prospect()
    for _ in range(3):
        prospect.count(0, 2.0, 4)
    assert prospect.trust < 0.5, "three trees of which nothing was accepted are no chance"


def test_little_evidence_supports_no_wide_tree() -> None:
    """Guards against a bet on what nobody has seen: the gains of nodes far beyond those that were verified do
    not count at first, and what was expected counts in full only after many outcomes."""
    prospect = Prospect([0.5] * 64)
    assert prospect.sure(2.0, 20.0) == 0.0 and len(prospect.credible) == 4
    prospect.count(3, 3.0, 4)
    assert 0.0 < prospect.sure(2.0, 2.0) < 1.0 and len(prospect.credible) == 16
    for _ in range(60):
        prospect.count(3, 3.0, 16)
    assert 18.0 > prospect.sure(2.0, 20.0) > 15.0 and len(prospect.credible) == 64


def test_gains_follow_the_trees() -> None:
    """Guards the forecast: mean gains by rank, those of the newest trees first, and a tail that is not grown
    is not kept for ever."""
    prospect = Prospect()
    prospect.see([0.9, 0.5], whole=False, probe=False)
    assert prospect.gains == [0.9, 0.5]
    for _ in range(200):
        prospect.see([0.6, 0.2, 0.1, 0.1], whole=False, probe=False)
    assert prospect.gains == pytest.approx([0.6, 0.2, 0.1, 0.1], abs=0.01)
    for _ in range(200):
        prospect.see([0.6, 0.2], whole=True, probe=False)
    assert prospect.gains[3] < 0.08


def test_the_outlook_finds_the_best_round_and_respects_the_credit() -> None:
    """Guards the forecast against brute force, over numbers of sequences and nodes; and that what could lose
    more than the credit is not planned."""
    machine = Machine(verify=lambda rows: 0.012 if rows <= 24 else 0.030)
    cost = machine.model()
    prospect = Prospect([0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.1])
    for _ in range(60):
        prospect.count(3, 3.0, 8)
    size = RoundSize.plain([64] * 8)
    weights = [1.2, 1.0, 1.0, 1.0, 0.5, 0.1, 0.1, 0.1]
    plain = cost.seconds(size)
    found = look_ahead(cost, plain, size, prospect, weights)

    def speedup(drafts: int, nodes: int) -> float:
        rows = drafts * nodes
        round_size = RoundSize(8, drafts, rows, 8 + rows, 512, 64 * (8 + rows))
        tokens = 8 + sum(weights[:drafts]) * sum(prospect.gains[:nodes])
        return tokens / cost.seconds(round_size) / (8 / plain)

    assert found.speedup == pytest.approx(speedup(found.drafts, found.nodes))
    best = max(speedup(drafts, nodes) for drafts in (1, 2, 3, 4, 8) for nodes in range(1, 9))
    assert found.speedup >= 0.95 * best and found.drafts < 8
    prospect.credit = -5.0
    assert look_ahead(cost, plain, size, prospect, weights).drafts == 0


def test_sequences_are_told_apart_and_forgotten() -> None:
    """Guards mixed batches: a sequence whose drafts fail weighs little beside one whose drafts come true, is
    looked at ever more seldom, and leaves nothing behind when it has left."""
    good, bad = Member(), Member()
    for _ in range(10):
        good.see([0.8, 0.5], 1.3)
        bad.see([0.8, 0.5], 1.3)
        good.count(2, 1.3, False)
        bad.count(0, 1.3, False)
    assert bad.weight(0.9) < 0.4 < 0.9 < good.weight(0.9)
    assert good.typical(0.9) and not bad.typical(0.9)
    waits = []
    for _ in range(6):
        bad.waited = 0
        while bad.due < 0.0:
            bad.waited += 1
        waits.append(bad.waited)
        bad.looked_at(False)
    assert waits == sorted(waits) and waits[0] == 8 and waits[-1] > 60
    members, batch = Members(), sequences(3)
    first, changed = members.of(batch)
    assert changed
    again, changed = members.of(batch)
    assert not changed and again == first
    fewer, changed = members.of(batch[1:])
    assert changed and fewer[0] is first[1]
    last, _ = members.of(batch)
    assert last[0] is not first[0] and last[1] is first[1]


def test_a_probe_that_paid_is_followed_at_once() -> None:
    """Guards the way back to drafting: after a few failures the interval is no whole number of rounds, and
    the next probe came eight rounds later."""
    prospect = Prospect()
    for _ in range(3):
        prospect.probed(paid=False)
    prospect.probed(paid=True)
    assert prospect.due


def test_what_was_saved_for_an_expensive_try_is_not_saved_again() -> None:
    """Guards the limit of the credit: it stayed at what one expensive try had needed, and everything that was
    tried later might lose as much at once."""
    prospect = Prospect()
    prospect.save(3.0)
    for _ in range(1000):
        prospect.wait()
    assert prospect.credit > 3.0
    prospect.saved()
    prospect.pay(4.0, 3.0)
    for _ in range(1000):
        prospect.wait()
    assert prospect.credit == MOST_CREDIT
