from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.budget.plan import best_count, keep, rank
from jetspec.errors import OptionError
from jetspec.tree import Tree

CHANCE = st.sampled_from([0.0, 0.05, 0.1, 0.25, 0.3, 0.5, 0.8, 1.0])


@st.composite
def small_trees(draw: st.DrawFn, most: int = 5) -> tuple[Tree, list[float]]:
    """A tree of up to `most` drafted nodes, with chances that never exceed the parent's."""
    size = draw(st.integers(0, most))
    parents, chances = [-1], [1.0]
    for node in range(1, size + 1):
        parent = draw(st.integers(0, node - 1))
        parents.append(parent)
        chances.append(min(chances[parent], draw(CHANCE)))
    return Tree.of(list(range(size + 1)), parents), chances


def closed_subsets(tree: Tree) -> list[list[int]]:
    """Every set of drafted nodes that holds its nodes' parents."""
    nodes = range(1, tree.size)
    found = []
    for chosen in product([False, True], repeat=tree.budget):
        kept = [node for node, inside in zip(nodes, chosen, strict=True) if inside]
        if all(tree.parents[node] in (0, *kept) for node in kept):
            found.append(kept)
    return found


@given(
    st.lists(small_trees(), min_size=1, max_size=2),
    st.lists(st.sampled_from([0.0, 0.0, 0.01, 0.5, 3.0]), min_size=11, max_size=11),
    st.sampled_from([None, 0.2, 1.0, 5.0]),
)
def test_no_cut_of_a_batch_is_better(
    batch: list[tuple[Tree, list[float]]], steps: list[float], rate: float | None
) -> None:
    """Guards the optimum on costs with steps: brute force over all cuts of all trees finds nothing better. A
    planner that stops at the first number that does not pay would miss what lies behind a step."""
    trees = [tree for tree, _ in batch]
    total = sum(tree.budget for tree in trees)
    seconds = [1.0 + sum(steps[:n]) for n in range(total + 1)]
    gains, owners, nodes = rank([chances for _, chances in batch])
    count = best_count(gains, seconds, len(trees), rate)

    def worth(tokens: float, number: int) -> float:
        return tokens / seconds[number] if rate is None else tokens - rate * seconds[number]

    best = max(
        worth(
            len(trees) + sum(batch[n][1][node] for n, chosen in enumerate(choice) for node in chosen),
            sum(map(len, choice)),
        )
        for choice in product(*(closed_subsets(tree) for tree in trees))
    )
    assert worth(len(trees) + sum(gains[:count]), count) == pytest.approx(best)
    for number, tree in enumerate(trees):
        chosen = zip(owners[:count], nodes[:count], strict=True)
        keep(tree, sorted(node for owner, node in chosen if owner == number)).check()


@given(small_trees(8), st.data())
def test_keep_makes_the_tree_of_the_chosen_nodes(
    drawn: tuple[Tree, list[float]], data: st.DataObject
) -> None:
    """Guards cuts that are no prefix: tokens, parents and depths must go on belonging to each other."""
    tree, _ = drawn
    kept = data.draw(st.sampled_from(closed_subsets(tree)))
    cut = keep(tree, kept)
    cut.check()
    paths = {tuple(tree.tokens[n] for n in tree.path_to(node)) for node in [0, *kept]}
    assert {tuple(cut.tokens[n] for n in cut.path_to(node)) for node in range(cut.size)} == paths
    assert list(cut.tokens) == [tree.tokens[node] for node in [0, *kept]]


def test_a_step_that_does_not_pay_hides_none_that_does() -> None:
    """Guards against stopping early: the second node costs nothing once the first has paid for the step."""
    gains = [0.5, 0.5, 0.5, 0.1]
    seconds = [1.0, 1.9, 1.9, 1.9, 4.0]
    assert best_count(gains, seconds, 1.0) == 3
    assert best_count(gains[:1], seconds[:2], 1.0) == 0


def test_of_equal_numbers_the_smallest_wins() -> None:
    """Guards against verifying nodes that bring nothing."""
    assert best_count([0.0] * 3, [1.0] * 4, 1.0) == 0


@pytest.mark.parametrize("nodes", [[], [1], [1, 2]])
def test_prefixes_are_cut_as_before(nodes: list[int]) -> None:
    """Guards the common case, in which nothing has to be numbered anew."""
    tree = Tree.of([5, 6, 7, 8], [-1, 0, 1, 0], [0.0, -1.0, -1.5, -2.0])
    assert keep(tree, nodes) == tree.cut(len(nodes))
    with pytest.raises(OptionError):
        tree.cut(-1)
