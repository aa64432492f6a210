"""Whether a round drafts, and for whom."""

from __future__ import annotations

from jetspec.budget.cost import CostModel
from jetspec.budget.outlook import Outlook
from jetspec.budget.prospect import CREDIT, FIRST
from jetspec.budget.turn import TRIALS, Turn

_PROBE_NODES = 4  # verified per tree of a probe or trial, whatever they promise: it is there to learn
PROBE_GROWN = 32  # grown for it, to see what a larger budget would bring
_PROBED = 4  # one in so many sequences is drafted for in a probe
_EXPLORE = 4  # in every fourth round sizes may be tried whose cost is not known
_SETTLED = 96  # rounds after which every second one is learned from: the time is better spent on decoding
_ABOUT = 0.95  # speedup that counts as about none
_CLOSE, _CHECK = 1.3, 64  # smaller speedups are checked against a plain round, after so many rounds...
_CLOSER, _OFTEN = 1.1, 12  # ...and more often where it is very close...
_FIRST = 3  # ...or where that was hardly ever done
_BETTER = 2.0  # times as good as lately that requests may be which have just come
_EXTRA = 8  # one in so many sequences may be drafted for to see whether its drafts have got better


def worth_drafting(turn: Turn) -> bool:
    """Whether drafting is expected to pay. What is about as fast as plain decoding costs next to nothing and
    tells more than probes, so it goes on for a while on credit.
    """
    credit, trials = turn.prospect.credit, turn.situation.trials
    if turn.forecast >= 1.0:
        return turn.forecast >= _CLOSE or not trials or credit > 0.0
    return turn.forecast >= _ABOUT and trials > 0 and credit > 0.5 * CREDIT


def choose(turn: Turn, cost: CostModel, hoped: Outlook, able: list[bool]) -> None:
    """Decide the round's kind and for whom to draft. `able`: who may emit more than the bonus."""
    situation = turn.situation
    situation.rounds += 1
    if worth_drafting(turn):
        situation.undrafted += 1
        often = _FIRST if not turn.compared else _OFTEN if turn.forecast < _CLOSER else _CHECK
        if turn.forecast < _CLOSE and situation.undrafted > often:
            situation.undrafted = 0  # whether drafting pays hangs on a plain round's cost: keep it fresh
            return
        turn.kind = "draft" if situation.trials >= TRIALS else "trial"
        if turn.kind == "draft":
            turn.explores = situation.rounds % _EXPLORE == 0
            turn.learns = situation.rounds < _SETTLED or situation.rounds % 2 == 0
        if turn.explores and hoped.drafts > turn.outlook.drafts:
            turn.outlook = hoped
        _choose_members(turn, able)
        if turn.kind == "trial":
            turn.least = _PROBE_NODES * sum(turn.drafts)
    elif not _look(turn, cost, able) and turn.prospect.due:
        _probe(turn, cost, able)


def _choose_members(turn: Turn, able: list[bool]) -> None:
    """The most promising ones, and now and then one of the others."""
    members, count = turn.members, turn.outlook.drafts
    if count >= len(members):
        turn.drafts = list(able)
        return
    trust = turn.prospect.trust
    order = sorted(range(len(members)), key=lambda n: members[n].weight(trust), reverse=True)
    for n in order[:count]:
        turn.drafts[n] = able[n]
    rest = [n for n in order[count:] if able[n]]
    for n in rest:
        members[n].waited += 1
    if turn.kind == "draft":
        rest.sort(key=lambda n: members[n].due, reverse=True)
        for n in rest[: max(1, len(members) // _EXTRA)]:
            if members[n].due >= 0.0:
                turn.drafts[n] = turn.extra[n] = True


def _look(turn: Turn, cost: CostModel, able: list[bool]) -> bool:
    """Draft for requests that have just come, since drafting may pay for them although it did not for those
    before: for as many as half the credit allows, to see what the head promises of them.
    """
    newcomers = [n for n, member in enumerate(turn.members) if not member.trees and able[n]]
    if not newcomers or not _hopeful(turn, cost):
        return False
    for nodes in (_PROBE_NODES, 1):
        count = len(newcomers)
        while count and _loss(turn, cost, count, nodes) > 0.5 * turn.prospect.credit:
            count -= 1
        if 2 * count >= len(newcomers):
            break
    for n in newcomers[:count]:
        turn.drafts[n] = True
        turn.kind, turn.least = "look", turn.least + nodes
    return count > 0


def _hopeful(turn: Turn, cost: CostModel) -> bool:
    """Whether drafting for all would pay if the head did some times better than lately."""
    batch, gain = len(turn.members), 0.0
    for nodes, own in enumerate(turn.prospect.gains[:FIRST], start=1):
        gain += _BETTER * turn.prospect.trust * own
        rows = batch * nodes
        seconds = cost.draft.at(batch) + cost.build.at(rows) - cost.build.at(0)
        seconds += cost.verify.at(batch + rows) - cost.verify.at(batch)
        if gain * turn.plain >= seconds:
            return True
    return False


def _loss(turn: Turn, cost: CostModel, drafts: int, nodes: int) -> float:
    """Plain rounds' worth of time that a probe of so many sequences takes at most."""
    batch = len(turn.members)
    spent = cost.draft.at(drafts) + cost.build.at(drafts * PROBE_GROWN) - cost.build.at(0)
    return (spent + cost.verify.at_most(batch + drafts * nodes) - cost.verify.at(batch)) / turn.plain


def _probe(turn: Turn, cost: CostModel, able: list[bool]) -> None:
    """Draft for a few sequences, as many as half the credit allows, or one if all of it does: the newest, and
    those that have waited longest. Where nodes are dear, fewer of one tree are verified.
    """
    batch, prospect = len(able), turn.prospect
    count, nodes = 1, _PROBE_NODES
    while count < batch // _PROBED and _loss(turn, cost, count + 1, nodes) <= 0.5 * prospect.credit:
        count += 1
    while nodes > 1 and _loss(turn, cost, count, nodes) > prospect.credit:
        nodes //= 2
    if _loss(turn, cost, count, nodes) > prospect.credit:
        prospect.save(_loss(turn, cost, count, nodes))
        return
    members = turn.members
    order = [n for n in range(batch) if able[n]]
    order.sort(key=lambda n: (members[n].trees, -members[n].waited))
    for n in order[:count]:
        turn.drafts[n] = True
        turn.kind, turn.least = "probe", turn.least + nodes
