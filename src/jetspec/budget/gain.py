"""Whether drafting pays at all: off for text that the head cannot guess, and tried again now and then."""

from __future__ import annotations

_FIRST_ROUNDS, _FIRST_TREES = 2, 5  # drafted before anything is decided
_MEMORY = 1 - 1 / 24  # per drafted round
_PROBE_MEMORY = 1 - 1 / 5  # per probe: old evidence is what a probe is there to replace
_HOPELESS = 6  # first trees of which nothing was accepted
_BEFORE = 6.0  # plain rounds' worth of drafting that an expected speedup below 1 counts for
_AGAIN = 1.02  # speedup from which drafting begins again
_SHORTEST, _LONGEST = 8, 4096  # rounds between probes
_GROWTH = 1.6  # of that interval, per failed probe
_CLOSE = 1.3  # speedups below are checked against a plain round now and then
_CHECK = 64  # rounds between these checks


class Gain:
    """The speedup of drafted rounds over plain ones, in one situation, and the decision that follows from it.

    speedup     expected tokens per second of drafted rounds / those of plain rounds; None before the first
    drafting    whether drafting is on; off, single rounds still draft (probes)

    Args:
        before: the speedup that there is reason to expect. Below 1 the first round is a probe.
        careful: it is one as well where nothing is expected.
    """

    def __init__(self, before: float | None = None, careful: bool = False) -> None:
        self.drafting = not careful if before is None else before >= 1.0
        self._tokens = self._cost = 0.0
        if not self.drafting and before is not None:
            self._tokens, self._cost = _BEFORE * before, _BEFORE
        self._rounds = self._trees = 0
        self._accepted = 0.0
        self._waited, self._interval = _SHORTEST, float(_SHORTEST)
        self._since_plain = 0

    @property
    def speedup(self) -> float | None:
        """See the class."""
        return self._tokens / self._cost if self._cost else None

    def wants_draft(self) -> bool:
        """Whether the round that begins should draft."""
        if not self.drafting:
            return self._waited >= self._interval
        # A plain round's cost decides whether drafting pays. Where it is close, that cost is kept fresh.
        speedup = self.speedup
        return not (speedup is not None and speedup < _CLOSE and self._since_plain >= _CHECK)

    def plain(self) -> None:
        """A round without a draft went by."""
        self._waited += 1
        self._since_plain = 0

    def drafted(self, expected: float, emitted: float, cost: float, trees: int) -> None:
        """A drafted round.

        Args:
            expected, emitted: tokens per sequence. What was expected scatters less, what came has no bias,
                so the speedup is judged by their mean.
            cost: of the round, in rounds of plain decoding.
            trees: of the round.
        """
        memory = _MEMORY if self.drafting else _PROBE_MEMORY
        self._tokens = memory * self._tokens + 0.5 * (expected + emitted)
        self._cost = memory * self._cost + cost
        self._rounds, self._trees = self._rounds + 1, self._trees + trees
        self._accepted += emitted - 1.0
        self._since_plain += 1
        speedup = self._tokens / self._cost
        if self.drafting:
            known = self._rounds >= _FIRST_ROUNDS and self._trees >= _FIRST_TREES
            if not self._accepted and self._trees >= _HOPELESS and known:  # whatever had been expected
                self._tokens = self._cost / cost
                speedup = 1.0 / cost
            if known and speedup < 1.0:
                self.drafting = False
                self._interval = float(_SHORTEST)
                self._waited = 0
        elif speedup >= _AGAIN:
            self.drafting = True
        elif emitted >= cost:  # it paid for itself, so the next one may follow at once
            self._waited = int(self._interval)
        else:
            self._interval = min(_LONGEST, self._interval * _GROWTH)
            self._waited = 0
