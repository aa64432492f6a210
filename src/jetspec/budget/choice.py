"""Whether a round drafts, and for whom."""

from __future__ import annotations

from collections.abc import Sequence as Many

from jetspec.budget.cost import CostModel, RoundSize
from jetspec.budget.outlook import Outlook
from jetspec.budget.prospect import CREDIT, FIRST
from jetspec.budget.turn import TRIALS, Turn
from jetspec.sequence import Sequence

_PROBE_NODES = 4  # verified per tree of a probe or trial, whatever they promise: it is there to learn
PROBE_GROWN = 32  # grown for it, to see what a larger budget would bring
_LOOK_NODES, LOOK_GROWN = 1, 8  # grown for a look at a request that has just come
_PROBED = 4  # one in so many sequences is drafted for in a probe
_EXPLORE = 4  # in every fourth round sizes may be tried whose cost is not known
_SETTLED = 96  # rounds after which every second one is learned from: the time is better spent on decoding
_PARTIAL = 1.05  # speedup to promise where a part of the batch is drafted for: it gets ahead, and waits
_ABOUT = 0.95  # speedup that counts as about none
_CLOSE, _CHECK = 1.3, 64  # smaller speedups are checked against a plain round, after so many rounds...
_CLOSER, _OFTEN = 1.1, 12  # ...and more often where it is very close...
_FIRST = 3  # ...or where that was hardly ever done
_RESERVE = 0.5 * CREDIT  # left alone by looks, or it would never cover the drafting that they suggest
_BETTER = 2.0  # times as good as lately that requests may be which have just come
_ENDING = 8  # tokens before its end, and in its second half, a request gains nothing by a try
_EXTRA = 8  # one in so many sequences may be drafted for to see whether its drafts have got better


def worth_drafting(turn: Turn) -> bool:
    """Whether drafting is expected to pay. What is about as fast as plain decoding costs next to nothing and
    tells more than probes, so it goes on for a while on credit.
    """
    credit, trials = turn.prospect.credit, turn.situation.trials
    partial = turn.outlook.drafts < len(turn.members)
    forecast = turn.forecast / (_PARTIAL if partial else 1.0)
    if forecast >= 1.0:
        return forecast >= _CLOSE or not trials or credit > 0.0
    return forecast >= _ABOUT and trials > 0 and credit > 0.5 * CREDIT


def choose(turn: Turn, cost: CostModel, hoped: Outlook, sequences: Many[Sequence]) -> None:
    """Decide the round's kind and for whom to draft."""
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
        _choose_members(turn, [s.room > 1 for s in sequences])  # else the bonus is all there will be
        if turn.kind == "trial":
            turn.least = _PROBE_NODES * sum(turn.drafts)
    else:
        turn.rests = True
        _probe(turn, cost, [_lasts(s) for s in sequences])


def _lasts(s: Sequence) -> bool:
    """Whether a request goes on for long enough to be tried with."""
    return s.room > max(1, min(_ENDING, len(s.tokens) - s.prompt_len))


def _choose_members(turn: Turn, able: list[bool]) -> None:
    """The most promising ones, and now and then one of the others, of those that are able to."""
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


def _probe(turn: Turn, cost: CostModel, lasting: list[bool]) -> None:
    """Draft for a few sequences, as many as half the credit allows, or one if all of it does: a look at those
    that have just come, to see whether the head promises more of them than of those before, or else, if it is
    time, a probe of those that have waited longest. Where nodes are dear, fewer of one tree are verified.
    """
    members, prospect, batch = turn.members, turn.prospect, len(lasting)
    order = [n for n in range(batch) if lasting[n]]
    newcomers = [n for n in order if not members[n].trees]
    if turn.fresh and newcomers and _hopeful(turn, cost):
        turn.rests = False
        if prospect.credit > _RESERVE:
            turn.kind, order = "look", newcomers
    if turn.kind != "look":
        if not order or not prospect.due:
            return
        turn.kind, turn.rests = "probe", False
        order.sort(key=lambda n: (members[n].trees, -members[n].waited))
    look = turn.kind == "look"
    most, nodes = (len(order), _LOOK_NODES) if look else (batch // _PROBED, _PROBE_NODES)
    grown = LOOK_GROWN if look else PROBE_GROWN
    base, size = cost.build.at(0) + cost.verify.at(batch), RoundSize.plain(turn.contexts)

    def loss(count: int, nodes: int) -> float:
        rows = count * nodes
        spent = cost.draft.at(count) + cost.build.at(count * grown) + cost.further(rows, size)
        return (spent + cost.verify.at_most(batch + rows) - base) / turn.plain

    count = 1
    while count < most and loss(count + 1, nodes) <= 0.5 * prospect.credit:
        count += 1
    while nodes > 1 and loss(count, nodes) > prospect.credit:
        nodes //= 2
    if loss(count, nodes) > prospect.credit:
        prospect.save(loss(count, nodes))
        turn.kind = "plain"
        return
    prospect.saved()
    for n in order[:count]:
        turn.drafts[n] = True
        turn.least += nodes


def _hopeful(turn: Turn, cost: CostModel) -> bool:
    """Whether drafting for all would pay if the head did some times better than lately."""
    batch, gain, size = len(turn.members), 0.0, RoundSize.plain(turn.contexts)
    for nodes, own in enumerate(turn.prospect.gains[:FIRST], start=1):
        gain += _BETTER * turn.prospect.trust * own
        rows = batch * nodes
        seconds = cost.draft.at(batch) + cost.build.at(rows) - cost.build.at(0)
        seconds += cost.verify.at(batch + rows) - cost.verify.at(batch) + cost.further(rows, size)
        if gain * turn.plain >= seconds:
            return True
    return False
