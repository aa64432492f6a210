"""The simplest budget: the same number of drafted nodes every round."""

from __future__ import annotations

from collections.abc import Sequence as Many

from jetspec.budget.base import Spent
from jetspec.errors import OptionError, brief
from jetspec.sampling import as_integer
from jetspec.sequence import Sequence
from jetspec.tree import Tree

MAX_BUDGET = 1024
DEFAULT_BUDGET = 8  # the fastest measured at batch 1 on the default target


class FixedBudget:
    """`nodes` drafted nodes per sequence and round, root excluded; 0 is plain decoding.

    depth     a tree of so many nodes is no deeper

    Raises OptionError if `nodes` is not an integer from 0 to 1024.
    """

    def __init__(self, nodes: int) -> None:
        number = as_integer(nodes)
        if number is None or not 0 <= number <= MAX_BUDGET:
            raise OptionError(
                f"the budget must be auto or a number of nodes from 0 (plain decoding) to {MAX_BUDGET}, "
                f"got {brief(nodes)}"
            )
        self.nodes = number
        self.depth = max(1, number)

    def limits(self, sequences: Many[Sequence]) -> list[int]:
        """The same for all."""
        return [self.nodes] * len(sequences)

    def cut(self, sequences: Many[Sequence], trees: Many[Tree]) -> list[Tree]:
        """Everything that was grown is kept."""
        return list(trees)

    def record(
        self, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]], spent: Spent
    ) -> None:
        """A fixed budget learns nothing."""
