from __future__ import annotations

from itertools import pairwise

from jetspec.budget.gain import Gain


def play(gain: Gain, rounds: int, tokens: float, cost: float = 1.4) -> list[bool]:
    """Rounds in which a draft brings so many tokens; whether each drafted."""
    found = []
    for _ in range(rounds):
        drafted = gain.wants_draft()
        if drafted:
            gain.drafted(tokens, tokens, cost, 1)
        else:
            gain.plain()
        found.append(drafted)
    return found


def test_probes_get_rarer() -> None:
    """Guards the cost of a useless head: the probes of ten thousand rounds are a handful, ever further
    apart."""
    gain = Gain()
    drafted = play(gain, 10_000, tokens=1.0)
    places = [n for n, one in enumerate(drafted) if one]
    assert len(places) < 25
    gaps = [b - a for a, b in pairwise(places[5:])]
    assert gaps == sorted(gaps) and gaps[0] >= 8


def test_a_probe_that_pays_brings_drafting_back() -> None:
    """Guards the way back: one good probe may be luck, the next follows at once and decides."""
    gain = Gain()
    play(gain, 100, tokens=1.0)
    assert not gain.drafting
    drafted = play(gain, 80, tokens=3.0)
    assert gain.drafting and all(drafted[-20:])


def test_what_pays_clearly_is_never_interrupted() -> None:
    """Guards throughput: plain rounds for the sake of knowing their cost come only where it is close."""
    assert all(play(Gain(), 1000, tokens=3.0))
    close = play(Gain(), 1000, tokens=1.5)
    assert 5 < close.count(False) < 30


def test_two_rounds_are_too_few_to_give_up() -> None:
    """Guards against giving up on bad luck; a batch tells as much in one round as a request in several."""
    gain = Gain()
    play(gain, 3, tokens=1.0)
    assert gain.drafting
    gain = Gain()
    for _ in range(2):
        gain.drafted(1.0, 1.0, 1.4, 8)
    assert not gain.drafting
