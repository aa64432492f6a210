"""The round under way, as the policy sees it, and what it remembers of rounds like it."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from jetspec.budget.members import Member
from jetspec.budget.outlook import Outlook
from jetspec.budget.prospect import Prospect
from jetspec.tree import Tree

TRIALS = 4  # drafted rounds in a row after which drafting is no trial any more
LEAST_REACH = 4.0  # nodes that are grown at least
MOST_REACH = 256.0
_FIRST_REACH = 16.0
_RISE, _FALL = 0.1, 0.05  # steps of the limits of growth: about every third round runs against them
_FIRST_PACE, _FIRST_ROUNDS = 3.0, 12  # how much larger those of the first rounds are
_MARGIN = 0.2  # nodes that are so much likelier than the limit count as running against it, in logs
_FIRST_MARGIN = 1.0
_FAR = 1.5  # how many times wider a plan has to be for limits to be found anew
_WIDER_REACH, _WIDER_FLOOR = 1.25, 0.4  # of rounds that try other sizes

# A draft, one whose promise is little tested, one for the sake of learning about the head or about requests
# that have just come, or none.
Kind: TypeAlias = Literal["draft", "trial", "probe", "look", "plain"]


@dataclass
class Situation:
    """What is remembered per batch size (in octaves) and kind of sampling.

    reach     nodes to grow per sequence
    floor     log-prob of a path below which none is grown
    trials    drafted rounds in a row that were no probes
    undrafted rounds since the last plain one
    rounds    all of them
    """

    reach: float
    floor: float = -math.inf
    trials: int = 0
    undrafted: int = 0
    rounds: int = 0

    @staticmethod
    def first(count: int, nodes: int) -> Situation:
        """For a batch of so many sequences, where so many nodes of each may be worth it (0: not known)."""
        return Situation(1.25 * nodes + LEAST_REACH if nodes else max(LEAST_REACH, _FIRST_REACH / count**0.5))

    def widen(self, nodes: int) -> None:
        """So many nodes are planned with. If that is far more than lately, the old limits say nothing."""
        if nodes > _FAR * self.reach:
            self.reach, self.floor = float(nodes), -math.inf

    def limits(self, nodes: int, explores: bool) -> tuple[float, float]:
        """Nodes to grow at most, and the floor, where so many nodes are planned with."""
        reach = max(self.reach, float(nodes))
        if self.trials < TRIALS:
            reach = max(reach, _WIDER_REACH * nodes + 2.0)
        if explores:
            return _WIDER_REACH * reach + 2.0, self.floor - _WIDER_FLOOR
        return reach, self.floor

    def move(self, grown: Many[Tree], kept: Many[list[int]]) -> None:
        """Grow more next time if nodes were kept right up to where a limit had stopped a tree, else less. The
        limits come to lie where they are in the way of every third round: nodes near them hardly pay.
        """
        limit, floor = int(self.reach), self.floor
        bounded = floored = False
        least = 0.0
        for tree, own in zip(grown, kept, strict=True):
            if own:
                low = tree.logps[own[-1]]
                least = min(least, low)
                bounded = bounded or own[-1] >= limit
                floored = floored or low < floor + _MARGIN or len(own) == tree.budget < limit
        if not least:
            return
        pace = _FIRST_PACE if self.rounds < _FIRST_ROUNDS else 1.0
        reach = self.reach * (1.0 + pace * (_RISE if bounded else -_FALL))
        self.reach = min(MOST_REACH, max(LEAST_REACH, reach))
        if floor == -math.inf:
            self.floor = least - _FIRST_MARGIN
        else:
            self.floor += pace * (-_RISE if floored else _FALL)


@dataclass
class Turn:
    """One round.

    outlook   what was planned before the draft, and the speedup expected of it
    contexts  committed tokens of each sequence
    plain     seconds of plain decoding
    drafts    for whom is drafted
    blocks    of draft that this costs
    extra     drafted for only to see whether their drafts have got better
    fresh     whether requests have come since the last draft, when probes were rare
    rests     whether it is plain, and so would the next ones be until the outlook is looked at again
    explores  whether a size may be tried whose cost is not known
    least     nodes to verify in any case, of all sequences together
    learns    whether chances and costs are refined by it
    compared  whether drafted rounds of such batches were compared with plain ones often enough
    grown     nodes
    stated    chances of the nodes of every grown tree
    expected  accepted nodes, per sequence
    rows      of the trees after the cut
    allowed   seconds that the forward of a size that is tried may take without a loss
    """

    prospect: Prospect
    situation: Situation
    outlook: Outlook
    forecast: float
    contexts: list[int]
    plain: float
    members: list[Member]
    drafts: list[bool]
    extra: list[bool]
    kind: Kind = "plain"
    blocks: int = 0
    fresh: bool = False
    rests: bool = False
    explores: bool = False
    least: int = 0
    learns: bool = True
    compared: bool = True
    grown: int = 0
    stated: list[list[float]] = field(default_factory=list)
    expected: list[float] = field(default_factory=list)
    rows: int = 0
    allowed: float | None = None

    @property
    def tries(self) -> bool:
        """Whether it drafts only for the sake of learning."""
        return self.kind in ("probe", "look")

    @property
    def rate(self) -> float | None:
        """Tokens per second that the rounds to come are expected to earn; None if nothing is known yet."""
        if not self.outlook.drafts:
            return None
        return max(1.0, self.forecast) * len(self.contexts) / self.plain
