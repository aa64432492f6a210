from __future__ import annotations

import dataclasses
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.errors import OptionError
from jetspec.tree import GROW, Proposal, Tree, best_first
from tests.tree.oracle import paths_of, proposals, trees

FORK = Tree.of(tokens=[9, 5, 6, 5, 7], parents=[-1, 0, 0, 2, 2], logps=[0.0, -0.5, -1.0, -1.5, -2.0])


def test_root_only_is_plain_decoding() -> None:
    """Guards against budget 0 needing special cases: the bare root is a valid tree with an empty path."""
    tree = Tree.root_only(3)
    tree.check()
    assert (tree.size, tree.budget, tree.depth) == (1, 0, 0)
    assert tree.path_to(0) == [0] and tree.tokens_of([0]) == []
    assert tree.child(0, 3) is None and tree.children(0) == []


def test_lookups_on_a_known_tree() -> None:
    """Guards against mixing up equal tokens below different parents (token 5 occurs twice)."""
    assert FORK.depths == (0, 1, 1, 2, 2) and FORK.depth == 2 and FORK.budget == 4
    assert [FORK.child(0, 5), FORK.child(2, 5), FORK.child(1, 5)] == [1, 3, None]
    assert FORK.children(0) == [1, 2] and FORK.children(2) == [3, 4] and FORK.children(4) == []
    assert FORK.path_to(4) == [0, 2, 4] and FORK.tokens_of([0, 2, 4]) == [6, 7]


@given(trees())
def test_lookups_agree_with_each_other(tree: Tree) -> None:
    """Guards against a stale or wrong edge table: child, children, path_to and depths tell the same story."""
    for node in range(1, tree.size):
        parent = tree.parents[node]
        assert tree.child(parent, tree.tokens[node]) == node
        assert node in tree.children(parent)
        assert tree.path_to(node) == [*tree.path_to(parent), node]
        assert len(tree.path_to(node)) == tree.depths[node] + 1
    assert sum(len(tree.children(node)) for node in range(tree.size)) == tree.budget


@given(proposals(), st.integers(0, 20), st.integers(0, 25))
def test_cut_keeps_the_first_nodes(proposal: Proposal, budget: int, keep: int) -> None:
    """Guards against counting the root as budget, and against a cached edge table that survives the cut."""
    tree = best_first(1, proposal, budget)
    tree.child(0, 0)  # fill the cache of the large tree
    small = tree.cut(keep)
    small.check()
    assert small.budget == min(keep, tree.budget)
    assert paths_of(small) == paths_of(tree)[:keep]
    for node in range(small.size):
        assert small.children(node) == [child for child in tree.children(node) if child <= keep]
        assert all(
            small.child(node, tree.tokens[child]) is None for child in tree.children(node) if child > keep
        )


def test_cut_refuses_a_negative_budget() -> None:
    """Guards against Python's negative slices: cut(-2) would quietly drop nodes from the end."""
    with pytest.raises(OptionError, match="budget is -2"):
        FORK.cut(-2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": (9, 5, 5, 5, 7)}, "node 2 repeats token 5 below node 0"),
        ({"parents": (-1, 0, 0, 3, 2)}, "node 3 has parent 3"),
        ({"parents": (-1, -1, 0, 2, 2)}, "node 1 has parent -1"),
        ({"parents": (0, 0, 0, 2, 2)}, "node 0 must be the root"),
        ({"depths": (0, 1, 1, 2, 3)}, "node 4 has depth 3"),
        ({"logps": (0.0, -0.5, -1.0, -0.9, -2.0)}, "node 3 has log-prob"),
        ({"logps": (0.0, -0.5, float("nan"), -1.5, -2.0)}, "node 2 has log-prob nan"),
        ({"logps": (0.0, -0.5, -1.0, -1.5)}, "one entry per node"),
        ({"tokens": (), "parents": (), "depths": (), "logps": ()}, "at least the root"),
    ],
)
def test_check_refuses_what_is_not_a_tree(change: dict[str, tuple[float, ...]], message: str) -> None:
    """Guards against a check that passes everything, twins among siblings above all."""
    with pytest.raises(OptionError, match=message):
        dataclasses.replace(FORK, **change).check()


def test_of_checks() -> None:
    """Guards against the public constructor skipping the check, which the plain one does on purpose."""
    with pytest.raises(OptionError, match="repeats token 5"):
        Tree.of([1, 5, 5], [-1, 0, 0])
    with pytest.raises(OptionError, match="node 1 has parent 2"):
        Tree.of([1, 5, 6], [-1, 2, 0])
    with pytest.raises(OptionError, match="one entry per node"):
        Tree.of([1, 5], [-1])


@pytest.mark.parametrize("name", ["best-first", "beam", "chain"])
@given(proposal=proposals(), budget=st.integers(0, 12))
def test_every_name_users_choose_grows_a_tree(name: str, proposal: Proposal, budget: int) -> None:
    """Guards against a builder that no longer takes the common arguments (root, proposal, budget)."""
    tree = GROW[name](2, proposal, budget)
    tree.check()
    assert tree.tokens[0] == 2 and tree.budget <= budget and tree.depth <= proposal.max_depth


def test_needs_neither_torch_nor_transformers() -> None:
    """Guards the start-up time: trees are drawn and tested without loading a framework (seconds)."""
    code = (
        "import sys, jetspec.tree, jetspec.verify;"
        "assert not {'torch', 'transformers'} & set(sys.modules), 'a framework was loaded'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
