"""What the policy knows of single sequences of its batch: whose drafts come true, and whose do not."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

from jetspec.budget.prospect import FIRST, surprise
from jetspec.sequence import Sequence

_DOUBT = 1.0  # see `Prospect.trust`
_TYPICAL = 0.5
_MEMORY = 1 - 1 / 24  # per tree
_EXTRA_MEMORY = 0.8  # per tree of one that is otherwise left out
_NEWEST = 1 / 24  # weight of the newest tree in a sequence's share of the gains
_FEW = 1.5  # trees that those of all sequences count for
_SHORTEST, _LONGEST = 8.0, 512.0  # rounds in which a sequence is left out
_GROWTH = 1.6


@dataclass
class Member:
    """One sequence.

    share     gains of its trees' first nodes / those of all sequences' trees
    waited    rounds in which it was left out, since the last look at it
    """

    share: float = 1.0
    trees: int = 0
    waited: int = 0
    _accepted: float = 0.0
    _expected: float = 0.0
    _interval: float = _SHORTEST

    def trust(self, common: float) -> float:
        """Accepted nodes / expected ones: as for all sequences, but where the difference is not by chance."""
        return common * surprise(self._accepted, common * self._expected, _DOUBT)

    def typical(self, common: float) -> bool:
        """Whether its drafts come true about as often as those of all. Chances are learned from such."""
        return self.trust(common) > _TYPICAL * common

    def weight(self, common: float) -> float:
        """What to expect of its drafts / the mean gains of all."""
        return self.trust(common) * self.share

    def see(self, gains: Many[float], common: float) -> None:
        """The chances of one tree's nodes, descending; `common`: of all sequences' first ones together."""
        self.trees += 1
        share = sum(gains[:FIRST]) / common if common > 0.0 else 1.0
        self.share += max(_NEWEST, 1.0 / (_FEW + self.trees)) * (share - self.share)

    def count(self, accepted: int, expected: float, extra: bool) -> None:
        """The outcome of one tree; `extra`: of one that is otherwise left out."""
        memory = _EXTRA_MEMORY if extra else _MEMORY
        self._accepted = memory * self._accepted + accepted
        self._expected = memory * self._expected + expected

    @property
    def due(self) -> float:
        """From 0.0 on, it is time to look at one that is left out."""
        return self.waited - self._interval

    def looked_at(self, chosen: bool) -> None:
        """It was drafted for, because it was chosen or else to have a look."""
        self.waited = 0
        self._interval = _SHORTEST if chosen else min(_LONGEST, _GROWTH * self._interval)


class Members:
    """The sequences of the batch under way."""

    def __init__(self) -> None:
        self._known: dict[int, Member] = {}

    def of(self, sequences: Many[Sequence]) -> tuple[list[Member], bool]:
        """One per sequence, and whether some have come or left. Who has left is forgotten."""
        known = self._known
        found = [known[s.id] for s in sequences if s.id in known]
        if len(found) == len(sequences) and len(found) >= len(known):
            return found, False
        self._known = {s.id: known.get(s.id) or Member() for s in sequences}
        return [self._known[s.id] for s in sequences], True
