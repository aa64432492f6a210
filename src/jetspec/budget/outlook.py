"""What a round of a batch may be expected to earn, before anything is drafted."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from typing import NamedTuple

from jetspec.budget.cost import CostModel, RoundSize, blocks
from jetspec.budget.members import Member
from jetspec.budget.prospect import FIRST, Prospect

MOST_ROWS = 2048  # of drafted nodes
_NODES = (
    1,
    2,
    3,
    4,
    5,
    6,
    7,
    8,
    10,
    12,
    15,
    20,
    24,
    31,
    36,
    42,
    48,
    56,
    63,
    80,
    96,
    112,
    127,
)  # per sequence
_FEWER = 0.95  # drafting for fewer than may be has to be clearly better: who is worth it is uncertain
_POOR, _MORE = 0.85, 3  # no step of the cost makes up for a speedup so far behind with so many more nodes
_EACH = 4  # up to here every number of sequences is looked at, then every fourth
_LOOK = 8  # rounds between two looks
_MET = 8  # looks after which a new outlook says more of the head than of who has come
_PRICED = 64  # nodes over which the time of growing one is averaged


class Outlook(NamedTuple):
    """The best round with a draft.

    drafts    sequences to draft for, the most promising ones; 0 if there is no such round
    nodes     to verify of each
    speedup   tokens per second / those of plain decoding
    """

    drafts: int
    nodes: int
    speedup: float


NOTHING = Outlook(0, 0, 0.0)


def planned_depth(nodes: int, whole: int | None) -> int | None:
    """Down to where to draft trees of about so many nodes; None where drafts are always whole."""
    return None if whole is None else min(whole, nodes)


def look_ahead(
    cost: CostModel,
    plain: float,
    size: RoundSize,
    prospect: Prospect,
    weights: Many[float],
    whole: int | None = None,
    hope: bool = False,
) -> Outlook:
    """The number of sequences and of nodes with the highest speedup, among those whose loss the credit covers
    if things go badly: little of the gain comes true, and a step in the cost lies before the size.

    Args:
        plain: seconds of a plain round.
        size: of that round.
        weights: what the mean gains are multiplied with for each sequence that may be drafted for,
            descending.
        whole: depth of a whole draft, where a part of it costs less.
        hope: whether sizes that were hardly run turn out well.
    """
    batch, most = size.sequences, len(weights)
    total = [0.0]
    for gain in prospect.credible[: max(FIRST, MOST_ROWS // most)]:
        total.append(total[-1] + gain)
    span = most * (len(total) - 1)
    draft = cost.draft.hoped(0, most) if hope else cost.draft.along(0, most)
    verify = cost.verify.hoped(batch, span) if hope else cost.verify.along(batch, span)
    further = cost.further(1, size)
    base = plain - cost.verify.at(batch) - cost.build.at(0)
    best, highest, weight = NOTHING, 0.0, 0.0
    for drafts, own in enumerate(weights, start=1):
        weight += own
        if drafts > _EACH and drafts % _EACH and drafts != most:
            continue
        for nodes in _NODES:
            if nodes >= len(total):
                break
            rows = drafts * nodes
            drafting = draft[blocks(drafts, planned_depth(nodes, whole), whole)]
            rest = base + drafting + cost.build.at(rows) + further * rows
            gain = weight * total[nodes]
            speedup = (batch + gain) * plain / (batch * (rest + verify[rows]))
            worth = speedup if drafts == most else _FEWER * speedup
            if worth < _POOR * highest and nodes > _MORE * best.nodes:
                break
            if worth > highest:
                worst = (rest + cost.verify.at_most(batch + rows)) / plain
                sure = prospect.sure(weight * total[min(nodes, FIRST)], gain)
                if worst - 1.0 - sure / batch <= prospect.credit:
                    best, highest = Outlook(drafts, nodes, speedup), worth
    return best


class Forecaster:
    """Keeps the outlook up to date; see `look_ahead`.

    outlook   as costs are known
    hoped     if sizes that were hardly run turn out well
    reach     nodes of a tree, on the average, that are worth the time of growing them

    Args:
        whole: depth of a whole draft, where a part of it costs less.
    """

    def __init__(self, whole: int | None = None) -> None:
        self.whole = whole
        self.outlook = self.hoped = NOTHING
        self.reach = math.inf
        self._key: tuple[int, bool] | None = None
        self._age = self._looks = 0

    def look(
        self, cost: CostModel, prospect: Prospect, contexts: list[int], plain: float, members: list[Member]
    ) -> None:
        """At the start of a round: anew now and then."""
        self._age += 1
        if self._age < min(_LOOK, self._looks):
            return
        before, self._age = self.outlook.speedup, 0
        self._looks += 1
        trust = prospect.trust
        weights = sorted([member.weight(trust) for member in members], reverse=True)
        size = RoundSize.plain(contexts)
        self.outlook = self.hoped = look_ahead(cost, plain, size, prospect, weights, self.whole)
        if len(members) > 1:  # for one, it is enough to try numbers of nodes
            self.hoped = look_ahead(cost, plain, size, prospect, weights, self.whole, hope=True)
        rate = max(1.0, prospect.yields * self.outlook.speedup) * len(contexts) / plain
        self.reach = _worth_growing(cost, rate, prospect.gains)
        if before > 0.0 and self.outlook.speedup > 0.0 and self._looks > _MET:
            prospect.reforecast(self.outlook.speedup / before)

    def meet(self, count: int, sampled: bool, changed: bool) -> None:
        """The batch of the round that begins. What was forecast for another one does not hold for it."""
        if changed or self._key != (count, sampled):
            self.outlook, self._looks, self._key = NOTHING, 0, (count, sampled)

    def hurry(self, rounds: int = _LOOK) -> None:
        """Let the next look come so many rounds earlier."""
        self._age += rounds


def _worth_growing(cost: CostModel, rate: float, gains: Many[float]) -> float:
    """See `Forecaster.reach`; rate: tokens per second that rounds earn."""
    least = rate * (cost.build.at(_PRICED) - cost.build.at(0)) / _PRICED
    count = len(gains)
    while count > FIRST and gains[count - 1] < least:
        count -= 1
    return count if count < len(gains) else math.inf
