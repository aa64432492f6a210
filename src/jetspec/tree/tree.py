"""The draft tree of one round: node 0 is the root, every other node is one drafted token.

A tree knows tokens, shape and the draft's log-probs. It does not know where it came from, how the target sees
it, or what will be accepted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from jetspec.errors import OptionError


@dataclass(frozen=True)
class Tree:
    """Nodes of one draft tree in the order in which they were grown: parents first, sibling tokens unique.

    Every field has one entry per node, drafted nodes + 1 in all:

    tokens   token id; `tokens[0]` is the root, the last emitted token
    parents  index of the parent; -1 for the root
    depths   number of edges to the root; the node's position is the root's position + its depth
    logps    the draft's log-prob of the whole path to the node; 0.0 for the root, never above the parent's

    The builders order nodes by (log-prob descending, depth, token id, parent), so every prefix of the nodes
    is a tree as well, see `cut`. The constructor checks nothing because it runs once per sequence and round;
    build trees by hand with `Tree.of`, which does.
    """

    tokens: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    logps: tuple[float, ...]

    @staticmethod
    def root_only(token: int) -> Tree:
        """The tree of budget 0: plain decoding."""
        return Tree((token,), (-1,), (0,), (0.0,))

    @staticmethod
    def of(tokens: Sequence[int], parents: Sequence[int], logps: Sequence[float] | None = None) -> Tree:
        """Build and check a tree by hand; depths follow from `parents`, log-probs default to 0.0 everywhere.

        Raises OptionError if the nodes do not form a tree (see `check`).
        """
        depths: list[int] = []
        for node, parent in enumerate(parents):
            known = 0 <= parent < node
            depths.append(depths[parent] + 1 if known else 0)  # an unknown parent is reported by check()
        cumulative = tuple(logps) if logps is not None else (0.0,) * len(tokens)
        tree = Tree(tuple(tokens), tuple(parents), tuple(depths), cumulative)
        tree.check()
        return tree

    @property
    def size(self) -> int:
        """Number of nodes, root included: the rows that the target's forward has to carry."""
        return len(self.tokens)

    @property
    def budget(self) -> int:
        """Number of drafted nodes, root excluded."""
        return len(self.tokens) - 1

    @property
    def depth(self) -> int:
        """Depth of the deepest node; 0 for a bare root."""
        return max(self.depths)

    @cached_property
    def _edges(self) -> dict[tuple[int, int], int]:
        """(parent, token) -> node, built on the first lookup only."""
        return dict(zip(zip(self.parents, self.tokens, strict=True), range(len(self.tokens)), strict=True))

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that drafts `token`, or None."""
        return self._edges.get((node, token))

    def children(self, node: int) -> list[int]:
        """All children of `node`, the most probable first."""
        return [child for child, parent in enumerate(self.parents) if parent == node]

    def path_to(self, node: int) -> list[int]:
        """Node indices from the root (always 0) down to `node`, both included."""
        path = []
        while node >= 0:
            path.append(node)
            node = self.parents[node]
        path.reverse()
        return path

    def tokens_of(self, path: Sequence[int]) -> list[int]:
        """The drafted tokens along a path that starts at the root; the root itself was emitted before."""
        return [self.tokens[node] for node in path[1:]]

    def cut(self, budget: int) -> Tree:
        """Keep the root and the first `budget` drafted nodes; the same tree if it has no more than that.

        For best-first trees this equals growing with that budget in the first place. Raises OptionError if
        negative.
        """
        check_budget(budget)
        end = budget + 1
        if end >= len(self.tokens):
            return self
        return Tree(self.tokens[:end], self.parents[:end], self.depths[:end], self.logps[:end])

    def check(self) -> None:
        """Raise OptionError, naming the first bad node, unless what the class docstring promises holds."""
        lengths = {len(self.tokens), len(self.parents), len(self.depths), len(self.logps)}
        if len(lengths) != 1 or 0 in lengths:
            raise _broken("tokens, parents, depths and logps must have one entry per node, at least the root")
        if (self.parents[0], self.depths[0], self.logps[0]) != (-1, 0, 0.0):
            raise _broken("node 0 must be the root, with parent -1, depth 0 and log-prob 0.0")
        seen: set[tuple[int, int]] = set()
        for node in range(1, len(self.tokens)):
            parent, token = self.parents[node], self.tokens[node]
            if not 0 <= parent < node:
                raise _broken(f"node {node} has parent {parent}; parents come first, so choose 0..{node - 1}")
            if self.depths[node] != self.depths[parent] + 1:
                raise _broken(f"node {node} has depth {self.depths[node]}, its parent {self.depths[parent]}")
            if not self.logps[node] <= self.logps[parent]:  # also refuses NaN
                logp, bound = self.logps[node], self.logps[parent]
                raise _broken(f"node {node} has log-prob {logp}; it must not exceed its parent's, {bound}")
            if (parent, token) in seen:
                raise _broken(f"node {node} repeats token {token} below node {parent}; siblings must differ")
            seen.add((parent, token))


def check_budget(budget: int) -> None:
    """Raise OptionError unless `budget`, the number of drafted nodes, is 0 (plain decoding) or more."""
    if budget < 0:
        raise OptionError(f"budget is {budget}; give the number of drafted nodes, 0 (plain decoding) or more")


def _broken(reason: str) -> OptionError:
    return OptionError(f"not a valid draft tree: {reason}")
