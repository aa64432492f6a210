"""How many of a round's ranked nodes to verify."""

from __future__ import annotations

from jetspec.budget.cost import CostModel
from jetspec.budget.plan import Ranking, best_count
from jetspec.budget.turn import Turn


def how_many(turn: Turn, cost: CostModel, ranking: Ranking) -> int:
    """The number that makes the round worth most. What it may lose if things go badly is covered by the
    credit, where its draft is little tested. A probe verifies some nodes in any case.
    """
    gains, batch, rate = ranking.gains, len(turn.contexts), turn.rate
    seconds = cost.verify.along(batch, len(gains))
    further = _further(turn, cost, ranking)
    if further is not None:
        seconds = [own + rest for own, rest in zip(seconds, further, strict=True)]
    if turn.kind == "draft" and rate:  # then what all numbers have in common plays no part
        count = best_count(gains, seconds, batch, rate)
        return _explore(turn, cost, gains, seconds, further, count, rate) if turn.explores else count
    fixed = turn.plain - cost.verify.at(batch) - cost.build.at(0) + cost.build.at(turn.grown)
    fixed += cost.draft.at(turn.blocks)
    prospect, least = turn.prospect, turn.least
    credit = 0.5 * prospect.credit if turn.tries else prospect.credit
    tokens = first = 0.0
    safe = turn.outlook.drafts * turn.outlook.nodes if turn.kind == "trial" else 0  # was covered when planned
    for n, gain in enumerate(gains, start=1):
        tokens += gain
        if n <= least:
            first = tokens
        worst = fixed + cost.verify.at_most(batch + n) + (further[n] if further else 0.0)
        if n > safe and worst / turn.plain - 1.0 - prospect.sure(first, tokens) / batch <= credit:
            safe = n
    count = best_count(gains[:safe], [fixed + own for own in seconds], batch, rate)
    return max(count, min(least, len(gains) if turn.tries else safe))


def _further(turn: Turn, cost: CostModel, ranking: Ranking) -> list[float] | None:
    """[n + 1] seconds that the context adds for 0..n nodes; None if it adds none."""
    price = cost.row_context
    if not price:
        return None
    prices = [price * context for context in turn.contexts]
    if len(prices) == 1:
        return [prices[0] * n for n in range(len(ranking.gains) + 1)]
    found = [0.0]
    for owner in ranking.owners:
        found.append(found[-1] + prices[owner])
    return found


def _explore(
    turn: Turn,
    cost: CostModel,
    gains: list[float],
    seconds: list[float],
    further: list[float] | None,
    count: int,
    rate: float,
) -> int:
    """A number of nodes that may be better than `count` if so many rows turn out to cost little, and that the
    credit covers if they do not.
    """
    verify, batch = cost.verify, len(turn.contexts)
    hoped = verify.hoped(batch, len(gains))
    if further is not None:
        hoped = [own + rest for own, rest in zip(hoped, further, strict=True)]
    tried = best_count(gains, hoped, batch, rate)
    if tried == count:
        return count
    worth = (sum(gains[:tried]) - sum(gains[:count])) / rate
    worst = verify.at_most(batch + tried) + (further[tried] if further else 0.0)
    if worst - seconds[count] - worth > turn.prospect.credit * turn.plain:
        return count
    turn.allowed = seconds[count] + worth - (further[tried] if further else 0.0)
    return tried
