"""What a head that drafts depth by depth proposes: it runs as the tree grows, for many nodes at once."""

from __future__ import annotations

from collections.abc import Sequence as Many
from heapq import heappop, heappush, nsmallest
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from jetspec.draft.ranking import ranked_children
from jetspec.draft.shared_noise import Draws
from jetspec.target.plan import Segment
from jetspec.tree.proposal import NO_CHILDREN, Children, State

if TYPE_CHECKING:
    from jetspec.draft.sequential import SequentialDrafter

AHEAD_ROWS = 8  # nodes drafted together for a builder that asks for them one by one

_ROOT: tuple[int, int] = (-2, 0)
_Node = tuple[int, int]  # row of the parent (-1: the root's), token


class AutoregressiveProposal:
    """What a sequential head drafts behind one root: the children of any nodes, in one forward per level.

    The state of a node is (row of its parent, its token); its own row comes into being when it is expanded. A
    proposal serves any number of builders, but only until its sequence goes on.

    What is asked for tells what will be asked for soon, and joins the same forward:

    - a builder that opens nodes one by one, best-first, will want the other nodes of high probability: once
      it asks for a node that is not the first child of the newest one, the most probable unopened nodes join;
    - the other sequences of the round (`peers`) will be grown by the same builder: those that have not been
      grown yet draft the nodes in the corresponding place.

    What is drafted stays the same, some of it sooner and some in vain.

    Args:
        position: of the root; the rows of its children's level stand there.
        state: output [H] of the root's row.
        tokens, logps: the root's children.
    """

    root_state: State = _ROOT

    def __init__(
        self,
        drafter: SequentialDrafter,
        key: int,
        position: int,
        state: Tensor,
        tokens: list[int],
        logps: list[float],
    ) -> None:
        self.drafter, self.key, self.position = drafter, key, position
        self.max_depth = drafter.depth
        self.peers: Many[AutoregressiveProposal] = ()
        self.draws: Draws | None = None  # what is known of the noise that the target will add
        self.outputs = state.unsqueeze(0)  # [1 + rows, H]; the root's first
        self._begun = False  # whether a builder has asked for anything
        self._depths: list[int] = []  # of the node of each row
        self._lines: list[list[int]] = []  # rows that a row's descendants in the same module see, itself last
        self._known: dict[_Node, Children] = {}
        self._opened: list[tuple[float, Children]] = []  # [1 + rows], -log-prob of the path and the children
        self._next: list[tuple[float, int, int]] = []  # a heap: -log-prob, row, its next child to open ahead
        self._first: _Node | None = None  # the most probable child of the newest row
        self._add(_ROOT, 0.0, tokens, logps)

    def expand(self, states: Many[State]) -> list[Children]:
        """Children of many nodes; nodes that are new go through one forward together."""
        self._begun = True
        new = [state for state in dict.fromkeys(states) if state not in self._known]
        if new:
            self._open(new)
        return [self._known[state] for state in states]

    def _open(self, states: list[_Node]) -> None:
        by_module: dict[int, list[_Node]] = {}
        for state in states:
            if self._depth(state) >= self.max_depth:
                self._known[state] = NO_CHILDREN
            else:
                by_module.setdefault(self._module(state), []).append(state)
        single, chained = len(states) == 1, states == [self._first]
        waiting = [peer for peer in self.peers if not peer._begun and peer.is_current]
        for module, group in by_module.items():
            depth = self._depth(group[0])
            if single and not chained:
                group.extend(self._likely(module, AHEAD_ROWS - 1, group[0]))
            parts = [(self, group)]
            for peer in waiting:
                if chained:
                    nodes = peer._chained(module)
                elif single:
                    nodes = peer._likely(module, len(group))
                else:
                    nodes = peer._level(depth, len(group))
                if nodes:
                    parts.append((peer, nodes))
            _draft(self.drafter, module, parts)

    @property
    def is_current(self) -> bool:
        """Whether its rows are still the ones behind the committed rows."""
        return self.drafter.is_current(self.key, self)

    def _chained(self, module: int) -> list[_Node]:
        """The most probable child of the newest row, if it belongs to a module."""
        node = self._first
        if node is None or node in self._known or self._depth(node) >= self.max_depth:
            return []
        return [node] if self._module(node) == module else []

    def _level(self, depth: int, count: int) -> list[_Node]:
        """The `count` most probable nodes of a depth, those left out that have a row."""
        if depth >= self.max_depth:
            return []
        rows = [n for n, own in enumerate([0, *self._depths], start=-1) if own == depth - 1]
        offered = [
            (self._opened[row + 1][0] - logp, state)
            for row in rows
            for logp, state in zip(
                self._opened[row + 1][1].logps[:count], self._opened[row + 1][1].states, strict=False
            )
        ]
        return [state for _, state in nsmallest(count, offered) if state not in self._known]

    def _likely(self, module: int, count: int, wanted: _Node | None = None) -> list[_Node]:
        """The most probable nodes that have no row yet and belong to a module, `wanted` left out."""
        found: list[_Node] = []
        others: list[tuple[float, int, int]] = []
        while self._next and len(found) < count:
            entry = heappop(self._next)
            _, row, rank = entry
            child = self._opened[row + 1][1].states[rank]
            if child not in self._known and child != wanted:
                if self._module(child) != module:
                    others.append(entry)
                    continue
                found.append(child)
            self._push(row, rank + 1)
        for entry in others:
            heappush(self._next, entry)
        return found

    def _push(self, row: int, rank: int) -> None:
        """Put a row's child on the heap, if there is one and it may have children itself."""
        cost, children = self._opened[row + 1]
        depth = 0 if row < 0 else self._depths[row]
        if rank < len(children.tokens) and depth + 1 < self.max_depth:
            heappush(self._next, (cost - children.logps[rank], row, rank))

    def _depth(self, state: _Node) -> int:
        return 1 if state[0] < 0 else self._depths[state[0]] + 1

    def _module(self, state: _Node) -> int:
        return min(self._depth(state), self.drafter.modules - 1)

    def score(self, states: list[_Node], logits: Tensor) -> Tensor:
        """Logits [n, Vd] of nodes' children, or with what is known of the target's noise, their scores."""
        if self.draws is None:
            return logits
        depths = [self._depth(state) for state in states]
        return self.draws.below(depths).score(logits.unsqueeze(0)).squeeze(0)

    def begin_rows(self, module: int, states: list[_Node]) -> tuple[Tensor, list[int]]:
        """Make room for the rows of nodes: who sees whom [n, drafted], and positions."""
        assert self.is_current, "the sequence has gone on since this was proposed"
        base = self.drafter.cache.append(self.key, len(states))
        mask = torch.zeros(len(states), base + len(states), dtype=torch.bool)
        depths = [self._depth(state) for state in states]
        for i, (parent, _) in enumerate(states):
            same = parent >= 0 and min(self._depths[parent], self.drafter.modules - 1) == module
            line = [*self._lines[parent], base + i] if same else [base + i]
            mask[i, line] = True
            self._lines.append(line)
        self._depths.extend(depths)
        return mask, [self.position - 1 + depth for depth in depths]

    def end_rows(
        self, states: list[_Node], outputs: Tensor, ranked: Many[tuple[list[int], list[float]]]
    ) -> None:
        """Note the outputs [n, H] of the rows and the children of their nodes."""
        base = len(self._opened) - 1
        self.outputs = torch.cat([self.outputs, outputs])
        for state, (tokens, logps) in zip(states, ranked, strict=True):
            cost, siblings = self._opened[state[0] + 1]
            self._add(state, cost - siblings.logps[siblings.tokens.index(state[1])], tokens, logps)
        newest = ranked[0][0]
        self._first = (base, newest[0]) if newest else None

    def _add(self, state: _Node, cost: float, tokens: list[int], logps: list[float]) -> None:
        """Note the children of a node; its row is the next one, -1 for the root."""
        row = len(self._opened) - 1
        children = Children(tokens, logps, [(row, token) for token in tokens])
        self._known[state] = children
        self._opened.append((cost, children))
        self._push(row, 0)
        if row < 0 and tokens:
            self._first = children.states[0]


@torch.inference_mode()
def _draft(
    drafter: SequentialDrafter, module: int, parts: Many[tuple[AutoregressiveProposal, list[_Node]]]
) -> None:
    """One forward of a module over nodes of several proposals."""
    ids: list[int] = []
    positions: list[int] = []
    segments: list[Segment] = []
    features: list[Tensor] = []
    device = parts[0][0].outputs.device
    for proposal, states in parts:
        mask, own = proposal.begin_rows(module, states)
        segments.append(Segment(proposal.key, len(ids), len(states), mask.to(device), logits=True))
        parents = torch.tensor([parent + 1 for parent, _ in states], device=device)
        features.append(proposal.outputs[parents])
        ids.extend(token for _, token in states)
        positions.extend(own)
    tokens = torch.tensor(ids, device=device)
    outputs = drafter.forward(module, torch.cat(features), tokens, positions, tuple(segments))
    logits = drafter.network.logits(module, outputs)  # [n, Vd]
    if any(proposal.draws is not None for proposal, _ in parts):
        own_logits = logits.split([len(states) for _, states in parts])
        logits = torch.cat([p.score(states, own) for (p, states), own in zip(parts, own_logits, strict=True)])
    ranked = ranked_children(logits, drafter.network.vocab, drafter.candidates)
    for (proposal, states), segment in zip(parts, segments, strict=True):
        rows = slice(segment.start, segment.start + segment.count)
        proposal.end_rows(states, outputs[rows], ranked[rows])
