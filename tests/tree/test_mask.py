from __future__ import annotations

import pytest
import torch
from hypothesis import given

from jetspec.tree import Tree
from jetspec.tree.mask import ancestor_mask
from tests.tree.oracle import trees


@given(trees(max_size=20))
def test_rows_are_the_paths(tree: Tree) -> None:
    """Guards against a node that sees a sibling, a descendant or not itself: rejected text would leak in."""
    mask = ancestor_mask(tree)
    assert mask.dtype == torch.bool and mask.shape == (tree.size, tree.size)
    for node in range(tree.size):
        assert mask[node].nonzero().flatten().tolist() == tree.path_to(node)


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 65, 300])
def test_a_chain_is_causal(size: int) -> None:
    """Guards the packing of bits into bytes at and around multiples of eight and beyond 64 nodes."""
    tree = Tree.of(range(size), range(-1, size - 1))
    assert torch.equal(ancestor_mask(tree), torch.ones(size, size).tril().bool())


def test_a_star_sees_root_and_itself() -> None:
    """Guards against wide trees being read as chains."""
    mask = ancestor_mask(Tree.of(range(40), [-1] + [0] * 39))
    expected = torch.eye(40).bool()
    expected[:, 0] = True
    assert torch.equal(mask, expected)


def test_masks_are_independent_and_writable() -> None:
    """Guards against sharing memory, or a read-only buffer: callers may write to their mask."""
    tree = Tree.of([1, 2], [-1, 0])
    ancestor_mask(tree)[0, 1] = True
    assert not ancestor_mask(tree)[0, 1]
