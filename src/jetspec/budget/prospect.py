"""What drafting brings with one kind of sampling, and what may be spent on finding that out."""

from __future__ import annotations

import math
from collections.abc import Sequence as Many

MOST = 128  # ranks that are told apart
FIRST = 4  # best nodes of a tree, by which sequences are compared
CREDIT, MOST_CREDIT = 0.8, 1.2  # plain rounds' worth of time that may be lost by trying, at first and at most
_REFILL = 0.007  # of the time that passes
_NEWEST = 1 / 24  # share of the newest tree in the mean gains, once there are many...
_NEWEST_PROBE = 1 / 4  # ...and where drafting is off: old evidence is what a probe is there to replace
_DOUBT = 0.7  # standard deviations by which outcomes may differ from what was expected for nothing
_MEMORY = 1 - 1 / 64  # of accepted and expected nodes, per tree
_PROBE_MEMORY = 0.7  # per probe
_YIELD_MEMORY = 1 - 1 / 16  # of rounds that drafted
_YIELD_TRUST = 3.0  # plain rounds' worth of time that the forecast counts for
_TAIL = 1.5  # exponent with which gains are taken to fall beyond the last node that was grown
_KEPT = 4.0  # trees that gains from an earlier process count for
_WIDER, _MUCH_WIDER = 4, 12  # times as many nodes as were ever verified of a tree that may be planned with...
_FEW = 16.0  # ...below and above so many accepted nodes
_SHORTEST, _LONGEST = 8, 4096  # rounds between probes
_OFTEN = 16.0  # up to here they are frequent
_GROWTH = 1.6  # of that interval, per failed probe


def surprise(accepted: float, expected: float, doubt: float) -> float:
    """Accepted nodes / expected ones, as near to 1.0 as so many standard deviations of a count allow. The
    nodes of one tree stand and fall together, so one more is allowed.
    """
    most = accepted + 1.0 + doubt * math.sqrt(accepted + 0.25 * doubt * doubt) + 0.5 * doubt * doubt
    if most < expected:
        return most / expected
    least = accepted - 1.0 - doubt * math.sqrt(accepted)
    return least / expected if least > expected else 1.0


class Prospect:
    """Evidence of one kind of sampling, whatever the batch.

    gains     mean chance of a tree's best node, second best, ..., as chances are stated
    credit    plain rounds' worth of time that trying out may still lose
    verified  nodes of one tree, at most
    """

    def __init__(self, gains: Many[float] = ()) -> None:
        self.gains = list(gains[:MOST])
        self._trees = [_KEPT] * len(self.gains)  # seen per rank
        self.verified = 1
        self._accepted = self._expected = 0.0
        self._earned = self._promised = 0.0
        self.credit, self._most_credit = CREDIT, MOST_CREDIT
        # With nothing known the first round is a probe; what is known can wait until the weights are warm.
        self._waited, self._interval = 0 if self.gains else _SHORTEST, float(_SHORTEST)

    @property
    def trust(self) -> float:
        """Accepted nodes / expected ones, as far as chance does not explain the difference."""
        return surprise(self._accepted, self._expected, _DOUBT)

    @property
    def yields(self) -> float:
        """Speedup of drafted rounds / the one that would be forecast now."""
        return (self._earned + _YIELD_TRUST) / (self._promised + _YIELD_TRUST)

    @property
    def first(self) -> float:
        """Mean gain of the first nodes together."""
        return sum(self.gains[:FIRST])

    @property
    def credible(self) -> list[float]:
        """The gains that may be planned with: the wider a tree, the less do narrow ones say of it."""
        return self.gains[: self.verified * (_WIDER if self._accepted < _FEW else _MUCH_WIDER)]

    def sure(self, first: float, gain: float) -> float:
        """What can be counted on of `gain` accepted nodes, `first` of them among the first of their trees: a
        standard deviation less than was accepted lately, and that twice for those further down.
        """
        share = 1.0 - 1.0 / math.sqrt(self._accepted) if self._accepted > 1.0 else 0.0
        return share * (first + share * (gain - first))

    def kept(self) -> list[float]:
        """The gains that a next process may start from."""
        trust = min(1.0, self.trust)
        return [float(f"{gain * trust:.4g}") for gain in self.gains]

    def see(self, gains: Many[float], whole: bool, probe: bool) -> None:
        """The chances of one tree's nodes, descending; `whole`: whether it ended because further nodes
        are unlikely, as opposed to a limit of their number.
        """
        newest = _NEWEST_PROBE if probe else _NEWEST
        known, trees = self.gains, self._trees
        count = min(len(gains), MOST)
        while len(known) < count:
            known.append(0.0)
            trees.append(0.0)
        for n in range(count):
            trees[n] += 1.0
            share = 2.0 / (1.0 + trees[n])
            known[n] += (share if share > newest else newest) * (gains[n] - known[n])
        if whole and count:
            last = gains[count - 1]
            for n in range(count, len(known)):
                known[n] += newest * (last * (count / (n + 1)) ** _TAIL - known[n])

    def count(self, accepted: int, expected: float, nodes: int) -> None:
        """The outcome of one tree: nodes accepted, as many as its verified nodes' chances add up to, and how
        many those were.
        """
        self._accepted = _MEMORY * self._accepted + accepted
        self._expected = _MEMORY * self._expected + expected
        self.verified = max(self.verified, nodes)

    def earn(self, speedup: float, cost: float, forecast: float) -> None:
        """A round that drafted for all that seemed worth it: its speedup, its cost in plain rounds, and the
        speedup that had been forecast.
        """
        self._earned = _YIELD_MEMORY * self._earned + speedup * cost
        self._promised = _YIELD_MEMORY * self._promised + forecast * cost

    def reforecast(self, ratio: float) -> None:
        """What was forecast lately would now be forecast so many times higher."""
        self._promised *= ratio

    def renew(self) -> None:
        """Chances are stated in a new way: what was learned of the old one counts little from now on."""
        self._expected = self._accepted
        self._trees = [min(trees, 3.0) for trees in self._trees]
        self._earned = self._promised = 0.0

    def pay(self, cost: float, loss: float) -> None:
        """A round of `cost` plain rounds' worth of time lost so many of them (or gained, below 0)."""
        self.credit = min(self._most_credit, self.credit + _REFILL * cost - loss)

    def save(self, loss: float) -> None:
        """The cheapest try may lose so much: let the credit grow until it covers that."""
        self._most_credit = max(MOST_CREDIT, 1.01 * loss)

    def saved(self) -> None:
        """What was saved for is being tried."""
        self._most_credit = MOST_CREDIT

    @property
    def due(self) -> bool:
        """Whether it is time for a probe."""
        return self._waited >= self._interval

    @property
    def until_due(self) -> int:
        """Rounds until the next probe is due."""
        return max(0, math.ceil(self._interval - self._waited))

    @property
    def rare(self) -> bool:
        """Whether probes have become rare: who comes now may wait for long until one."""
        return self._interval > _OFTEN

    def wait(self) -> None:
        """A round without a draft went by: a plain round's time, and nothing lost."""
        self._waited += 1
        self.pay(1.0, 0.0)

    def forget(self) -> None:
        """Before the outcome of a probe is counted."""
        self._accepted *= _PROBE_MEMORY
        self._expected *= _PROBE_MEMORY
        self._earned *= _PROBE_MEMORY
        self._promised *= _PROBE_MEMORY

    def probed(self, paid: bool) -> None:
        """Whether a probe paid. If so the next may follow at once."""
        if paid:
            self._waited = math.ceil(self._interval)
        else:
            self._interval = min(_LONGEST, self._interval * _GROWTH)
            self._waited = 0

    def stop(self) -> None:
        """Drafting was found not to pay."""
        self._waited, self._interval = 0, float(_SHORTEST)
