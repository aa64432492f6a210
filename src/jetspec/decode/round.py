"""The round: draft, verify, commit. There is one for every method and every batch size.

Plain decoding is this round with the drafter off or the budget 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from itertools import islice
from typing import NamedTuple, TypeAlias

from torch import Tensor

from jetspec.budget.base import Budget, Spent
from jetspec.decode.stats import Stats
from jetspec.draft.base import Drafter
from jetspec.errors import ModelError
from jetspec.sampling import History, pick_each, pick_tokens
from jetspec.sequence import Emission, Sequence
from jetspec.target.cache import KVCache
from jetspec.target.plan import pack
from jetspec.target.target import Target
from jetspec.tree import Grow, Tree
from jetspec.tree.proposal import Children, Proposal, State
from jetspec.verify import walk


class Outcome(NamedTuple):
    """What a round did for one sequence."""

    sequence: Sequence
    tree: Tree
    path: list[int]  # node indices from the root to the last accepted node
    emissions: list[Emission]

    @property
    def accepted(self) -> int:
        """Drafted tokens that were emitted; what a stop cut off does not count."""
        return sum(emission.kind == "accepted" for emission in self.emissions)

    def count_in(self, stats: Stats) -> None:
        """Add this round to the counters of a sequence or a run."""
        stats.record(self.tree.budget, self.tree.depth, self.accepted, len(self.emissions))


_VIEW_SHARE = 16  # rows of a forward for each one observed, up to which a view is handed on

# From a tree and the logits [n, V] of its rows to the accepted path and the token after it.
Walker: TypeAlias = Callable[[Sequence, Tree, Tensor], tuple[list[int], int]]


def decode_round(
    sequences: Many[Sequence],
    target: Target,
    drafter: Drafter,
    grow: Grow,
    budget: Budget,
    cache: KVCache,
    stats: Stats,
    walker: Walker | None = None,
) -> list[Outcome]:
    """Draft, verify and commit once. Each sequence emits between 1 and depth + 1 tokens.

    `walker` takes the place of the walk along the target's own picks for requests above temperature 0, for
    methods whose published rule is another one; the text is then not that of plain decoding. Trees that it
    verifies are neither cut nor ended by the budget's floor: a rule that draws what it drafts must not be
    shortened by what was drawn.

    Invariant before and after, for unfinished sequences: cache.length(s) == len(s.tokens) - 1 == rows the
    drafter observed, because the root is not cached yet.
    """
    before = dict(stats.seconds)
    with stats.phase("draft"):
        limits = budget.limits(sequences)
        depth: int | None = getattr(budget, "depth", None)
        proposals = _propose(sequences, limits, drafter, depth)
    with stats.phase("build"):
        floor: float = getattr(budget, "floor", -math.inf)
        drawn = [walker is not None and not s.sampling.greedy for s in sequences]
        grown = [
            _grow(s, p, n, -math.inf if whole else floor, grow)
            for s, p, n, whole in zip(sequences, proposals, limits, drawn, strict=True)
        ]
        cut = budget.cut(sequences, grown)
        trees = [tree if whole else less for tree, less, whole in zip(grown, cut, drawn, strict=True)]
        plan = pack([(s.id, tree) for s, tree in zip(sequences, trees, strict=True)], cache)
    with stats.phase("verify"):
        output = target.forward(plan, cache, drafter.taps, drafter.needs_hidden)
        assert output.logits is not None
        stats.forwards += 1
        start = time.perf_counter()
        walks = _walk_together(sequences, trees, output.logits) if walker is None else None
        walks = walks or [
            (_walk if walker is None or s.sampling.greedy else walker)(
                s, tree, output.logits[segment.start : segment.start + segment.count]
            )
            for s, tree, segment in zip(sequences, trees, plan.segments, strict=True)
        ]
        # See Spent. On other devices the forward may still be running when the walk begins.
        apart = target.device.type == "cpu" and any(not s.sampling.greedy for s in sequences)
        drawing = time.perf_counter() - start if apart else 0.0
    outcomes: list[Outcome] = []
    with stats.phase("commit"):
        chosen = [
            [segment.start + node for node in path]
            for segment, (path, _) in zip(plan.segments, walks, strict=True)
        ]
        taps, hidden = _observed_each(output.taps, chosen), _observed_each(output.hidden, chosen)
        for n, (s, tree, (path, bonus)) in enumerate(zip(sequences, trees, walks, strict=True)):
            cache.keep(s.id, path)
            drafter.observe(s.id, taps[n], hidden[n])
            emissions = s.commit(list(tree.tokens_of(path)), bonus, drafted=tree.size > 1)
            outcomes.append(Outcome(s, tree, path, emissions))
            outcomes[-1].count_in(stats)
    draft, build, verify, commit = (
        stats.seconds[phase] - before[phase] for phase in ("draft", "build", "verify", "commit")
    )
    with stats.phase("commit"):
        paths = [path for path, _ in walks]
        budget.record(sequences, trees, paths, Spent(draft, build, verify - drawing, commit))
    return outcomes


def check_roots(sequences: Many[Sequence], target: Target, cache: KVCache) -> None:
    """Raise ModelError naming the sequences whose next token cannot be picked, draft or no draft: the
    target's logits behind their roots are not finite.
    """
    trees = [Tree.root_only(s.root) for s in sequences]
    plan = pack([(s.id, tree) for s, tree in zip(sequences, trees, strict=True)], cache)
    logits = target.forward(plan, cache).logits
    assert logits is not None
    sick, reason = [], ""
    for n, (s, tree) in enumerate(zip(sequences, trees, strict=True)):
        cache.keep(s.id, [])
        try:
            _walk(s, tree, logits[n : n + 1])
        except ModelError as error:
            sick.append(s)
            reason = str(error)
    if sick:
        names = ", ".join(str(s.id) for s in sick)
        raise ModelError(f"request {names}: {reason}", sick)


def observed(values: Tensor | None, rows: Many[int]) -> Tensor | None:
    """What a drafter is given of a forward's values [M, ...]: the ascending `rows` of one sequence, as a view
    where they are contiguous and not few among many.
    """
    if values is None:
        return None
    if rows[-1] - rows[0] != len(rows) - 1:
        return values[list(rows)]
    found = values[rows[0] : rows[-1] + 1]
    # A head keeps what it observes until it drafts again, in a large batch for hundreds of rounds. A view
    # keeps all rows of its forward in memory, those of other requests and of rejected nodes as well. In a
    # small forward that costs less than a copy of each request's rows in each round.
    return found.clone() if values.shape[0] > _VIEW_SHARE * len(rows) else found


def _observed_each(values: Tensor | None, chosen: Many[list[int]]) -> Many[Tensor | None]:
    """`observed` for the rows of every sequence. Where each has one and there are no others, as in a plain
    round, all views are made at once: one by one they take longer than the rest of the commit.
    """
    if values is None:
        return [None] * len(chosen)
    if values.shape[0] == len(chosen) <= _VIEW_SHARE:
        return values.split(1)
    return [observed(values, rows) for rows in chosen]


def _propose(
    sequences: Many[Sequence], limits: Many[int], drafter: Drafter, depth: int | None
) -> list[Proposal | None]:
    """One draft forward for the sequences that may grow a tree; none if there are none."""
    chosen = [s for s, limit in zip(sequences, limits, strict=True) if limit]
    if not chosen:
        return [None] * len(sequences)
    if depth is None or getattr(drafter, "whole_depth", None) is None:
        made = iter(drafter.propose(chosen))
    else:
        made = iter(drafter.propose(chosen, depth))  # type: ignore[call-arg]
    return [next(made) if limit else None for limit in limits]


def _grow(sequence: Sequence, proposal: Proposal | None, nodes: int, floor: float, grow: Grow) -> Tree:
    """Grow a tree no deeper than can still be emitted: one token of the remaining ones is the bonus."""
    depth = sequence.room - 1
    if proposal is None or nodes == 0 or depth < 1:
        return Tree.root_only(sequence.root)
    if proposal.max_depth > depth:
        proposal = _Shallow(proposal, depth)
    if floor == -math.inf:
        return grow(sequence.root, proposal, nodes)
    return grow(sequence.root, proposal, nodes, floor=floor)


def _walk_together(
    sequences: Many[Sequence], trees: Many[Tree], logits: Tensor
) -> list[tuple[list[int], int]] | None:
    """The walks of a round whose tokens are picked together: of a round without any draft, and of every
    round where results are far away. None for another round: on a CPU a tree is walked with picks of
    its path alone where they are drawn.
    """
    if any(s.sampling.needs_history for s in sequences):
        return None
    if not _is_far(logits) and any(tree.size > 1 for tree in trees):
        return None
    positions, samplings = [], []
    for s, tree in zip(sequences, trees, strict=True):
        positions += [s.position + 1 + depth for depth in tree.depths]
        samplings += [s.sampling] * tree.size
    picks = iter(pick_each(logits, positions, samplings))
    return [walk(tree, list(islice(picks, tree.size)).__getitem__) for tree in trees]


def _is_far(logits: Tensor) -> bool:
    """Whether asking for one result takes longer than computing all of them."""
    return logits.device.type != "cpu"


def _walk(sequence: Sequence, tree: Tree, logits: Tensor) -> tuple[list[int], int]:
    """Walk one tree with the target's own picks; logits [n, V] are the tree's rows."""
    sampling = sequence.sampling
    first = sequence.position + 1  # absolute position of the token that follows the root
    if sampling.greedy and not sampling.needs_history:
        picks = pick_tokens(logits, [first + depth for depth in tree.depths], sampling)
        return walk(tree, picks.__getitem__)

    def pick(node: int) -> int:
        histories = None
        if sampling.needs_history:
            own_path = tree.tokens_of(tree.path_to(node))
            histories = [History([*sequence.tokens, *own_path], sequence.prompt_len)]
        return pick_tokens(logits[node : node + 1], [first + tree.depths[node]], sampling, histories)[0]

    return walk(tree, pick)


class _Shallow:
    """A proposal that ends earlier."""

    def __init__(self, proposal: Proposal, max_depth: int) -> None:
        self._proposal, self.max_depth = proposal, max_depth

    @property
    def root_state(self) -> State:
        return self._proposal.root_state

    def expand(self, states: Many[State]) -> list[Children]:
        return self._proposal.expand(states)
