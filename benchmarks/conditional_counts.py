"""What `conditional.py` counts along recorded texts."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

from jetspec.tree.proposal import MarginalProposal, Proposal

KS = (1, 2, 4, 8, 16, 32, 64)


class Tally:
    """Counts along some answers; D is the head's depth.

    rounds   budget to one [tokens, rounds] per answer
    recall   [D] counts of places and [D][K] of hits: "places" and "candidates" of all places, "reached" of
             those whose written path can be followed through the proposal, "candidates_reached" and
             "conditional" of these
    next     scope to class to [D - 1] pairs (nodes at depth k, of which the top child is the next token);
             classes are "top" (a path of top children), "sibling" (not its parent's top child) and "later"
             (a top child somewhere below a sibling)
    ms       stage to the median of each answer's rounds
    """

    def __init__(self, depth: int, budgets: Many[int]) -> None:
        self.rounds: dict[int, list[list[int]]] = {budget: [] for budget in budgets}
        self.recall: dict[str, Any] = {name: [0] * depth for name in ("places", "reached")}
        for name in ("candidates", "candidates_reached", "conditional"):
            self.recall[name] = [[0] * len(KS) for _ in range(depth)]
        self.next = {
            scope: {kind: [[0, 0] for _ in range(depth - 1)] for kind in ("top", "sibling", "later")}
            for scope in ("candidates", "tree")
        }
        self.ms: dict[str, list[float]] = {name: [] for name in ("backbone", "scorer", "again", "build")}

    def count_ranks(self, lists: Many[list[int]], ranks: Many[int | None], written: Many[int]) -> None:
        """One position: candidates of every depth, ranks of the written tokens among their siblings as far
        as the path leads, and the written tokens."""
        for depth, token in enumerate(written):
            place = lists[depth].index(token) if token in lists[depth] else None
            self.recall["places"][depth] += 1
            _hits(self.recall["candidates"][depth], place)
            if depth < len(ranks):
                self.recall["reached"][depth] += 1
                _hits(self.recall["candidates_reached"][depth], place)
                _hits(self.recall["conditional"][depth], ranks[depth])

    def count_next(self, scope: str, ranks: Many[int | None], accepted: int) -> None:
        """The same ranks: for the first `accepted` depths, whether the next token is the top child there."""
        for depth in range(min(accepted, len(ranks) - 1)):
            if ranks[depth]:
                kind = "sibling"
            else:
                kind = "later" if any(ranks[:depth]) else "top"
            pair = self.next[scope][kind][depth]
            pair[0] += 1
            pair[1] += ranks[depth + 1] == 0

    def as_dict(self) -> dict[str, Any]:
        """For a record."""
        rounds = {str(budget): rows for budget, rows in self.rounds.items()}
        return {"rounds": rounds, "recall": self.recall, "next": self.next, "ms": self.ms}


def _hits(counts: list[int], rank: int | None) -> None:
    for n, k in enumerate(KS):
        counts[n] += rank is not None and rank < k


def path_ranks(proposal: Proposal, written: Many[int]) -> list[int | None]:
    """Ranks (0 is the top child) of written tokens among the children of the path before them; None, and the
    end, at one that is not among them."""
    ranks: list[int | None] = []
    state = proposal.root_state
    for token in written[: proposal.max_depth]:
        children = proposal.expand((state,))[0]
        if token not in children.tokens:
            ranks.append(None)
            break
        ranks.append(list(children.tokens).index(token))
        state = children.states[ranks[-1]]  # type: ignore[index]
    return ranks


def depth_candidates(proposal: Proposal) -> list[list[int]]:
    """Candidate ids of every depth, likeliest first, whatever the path is: those of the first pass."""
    proposal = getattr(proposal, "_inner", proposal)  # of a head with confidences
    if isinstance(proposal, MarginalProposal):
        return [list(c.tokens) for c in proposal.expand(range(proposal.max_depth))]
    lists: list[list[int]] = proposal.tokens.tolist()  # type: ignore[attr-defined]
    return lists
