"""What a finished request amounts to: its text, its tokens, and the counters of its share of the rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetspec.decode.round import Outcome
from jetspec.decode.stats import Stats
from jetspec.sequence import Finish, Kind, Sequence


@dataclass(frozen=True)
class Result:
    """One finished request.

    text, tokens   what was emitted; a stop id is in `tokens`, but not in `text`
    kinds          per token: "accepted" (drafted), "bonus" (the target's own), "plain" (from a round without
                   a draft)
    prompt_tokens  length of the prompt
    finish         "stop" (end of text or a stop string), "length" or "abort"
    stats          counters of what is in here: tokens that a stop string took back do not count. Its seconds
                   are those of the whole batch, decoded together: they must not be added up over a batch
    batch          counters of the whole batch, for its speed; the same as `stats` for a single request
    """

    text: str
    tokens: list[int]
    kinds: list[Kind]
    prompt_tokens: int
    finish: Finish
    stats: Stats
    batch: Stats


class Tally:
    """What one sequence's share of the rounds adds up to."""

    def __init__(self, sequence: Sequence) -> None:
        self.sequence, self.emitted = sequence, 0
        self._rounds: list[tuple[int, int, list[Kind]]] = []  # nodes, depth of the tree, what was emitted

    def add(self, outcome: Outcome) -> None:
        """Note what a round did for this sequence."""
        kinds = [emission.kind for emission in outcome.emissions]
        self._rounds.append((outcome.tree.budget, outcome.tree.depth, kinds))
        self.emitted += len(kinds)

    def result(self, shared: Stats, given: int | None = None, shown: int | None = None) -> Result:
        """`shared` are the engine's: time is spent on the whole batch. `given` and `shown` are how many
        emissions and characters a reader took; None is all.
        """
        sequence = self.sequence
        assert sequence.finished is not None
        tokens, taken = sequence.emitted[:given], list[Kind]()
        stats = Stats(forwards=len(self._rounds), seconds=dict(shared.seconds))
        for nodes, depth, kinds in self._rounds:
            kept = kinds[: len(tokens) - len(taken)]  # a stop string takes tokens back that had gone out
            taken += kept
            stats.record(nodes, depth, kept.count("accepted"), len(kept))
        finish: Finish = sequence.finished if given in (None, self.emitted) else "abort"
        text = sequence.text[:shown]
        return Result(text, tokens, taken, sequence.prompt_len, finish, stats, batch=stats)


def batch_results(tallies: list[Tally], shared: Stats) -> list[Result]:
    """The results of a batch; `shared` are the engine's counters."""
    results = [tally.result(shared) for tally in tallies]
    batch = Stats()
    for result in results:
        batch.add(result.stats)
    batch.forwards, batch.seconds = shared.forwards, dict(shared.seconds)
    return [replace(result, batch=batch) for result in results]
