"""The simplest budget: the same number of drafted nodes every round."""

from __future__ import annotations

from collections.abc import Sequence as Many

from jetspec.errors import OptionError
from jetspec.sequence import Sequence
from jetspec.tree import Tree

MAX_BUDGET = 1024
DEFAULT_BUDGET = 8  # the fastest measured at batch 1 on the default target


class FixedBudget:
    """`nodes` drafted nodes per sequence and round, root excluded; 0 is plain decoding.

    Raises OptionError if `nodes` is not an integer from 0 to 1024.
    """

    def __init__(self, nodes: int) -> None:
        if isinstance(nodes, bool) or not isinstance(nodes, int) or not 0 <= nodes <= MAX_BUDGET:
            raise OptionError(
                f"the budget must be a number of nodes from 0 (plain decoding) to {MAX_BUDGET}, got {nodes!r}"
            )
        self.nodes = nodes

    def limit(self, sequence: Sequence) -> int:
        """How many nodes to grow for this sequence at most."""
        return self.nodes

    def cut(self, trees: Many[Tree]) -> list[Tree]:
        """Drop nodes that are not worth verifying, across the batch. A fixed budget keeps all that were
        grown.
        """
        return list(trees)

    def record(self, sequence: Sequence, tree: Tree, path: Many[int]) -> None:
        """Learn from a round's outcome; a fixed budget does not."""
