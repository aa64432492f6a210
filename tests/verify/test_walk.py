from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec.tree import Tree
from jetspec.verify import walk
from tests.tree.oracle import trees

EOS = 2


@given(trees(), st.data())
def test_equals_a_search_over_all_paths(tree: Tree, data: st.DataObject) -> None:
    """Guards against stopping early or going wrong: it is the longest path of which each step is a pick."""
    # Mostly drafted tokens, so that long paths are common.
    offers = [[tree.tokens[child] for child in tree.children(node)] for node in range(tree.size)]
    picks = [data.draw(st.sampled_from([*tokens, *tokens, node % 5])) for node, tokens in enumerate(offers)]
    agreeing = [
        path
        for path in map(tree.path_to, range(tree.size))
        if all(picks[above] == tree.tokens[below] for above, below in itertools.pairwise(path))
    ]
    longest = max(agreeing, key=len)
    assert walk(tree, picks.__getitem__) == (longest, picks[longest[-1]])


@given(trees(), st.data())
def test_emits_what_plain_decoding_emits(tree: Tree, data: st.DataObject) -> None:
    """Guards losslessness: the round's tokens are the target's own continuation of the context."""
    salt = data.draw(st.integers(0, 99))

    def target(context: list[int]) -> int:
        return hash((salt, *context)) % 5

    path, bonus = walk(tree, lambda node: target(tree.tokens_of(tree.path_to(node))))
    plain: list[int] = []
    for _ in path:
        plain.append(target(plain))
    assert [*tree.tokens_of(path), bonus] == plain


@given(trees(), st.data())
def test_picks_only_along_the_path(tree: Tree, data: st.DataObject) -> None:
    """Guards the cost and the random draws: one pick per node of the path, none for rejected nodes."""
    asked: list[int] = []

    def pick(node: int) -> int:
        asked.append(node)
        return data.draw(st.integers(0, 4))

    path, _ = walk(tree, pick)
    assert asked == path


def test_bare_root() -> None:
    """Guards plain decoding: nothing accepted, the bonus is the next token."""
    assert walk(Tree.root_only(7), lambda node: 5) == ([0], 5)
    assert walk(Tree.root_only(7), lambda node: 7) == ([0], 7), "the root is no child of itself"


def test_reaching_a_leaf_still_gives_a_bonus() -> None:
    """Guards the fully accepted round: depth + 1 tokens, also if the bonus repeats the last token."""
    for depth in (1, 3, 40):
        tree = Tree.of([7] + [1] * depth, range(-1, depth))
        assert walk(tree, lambda node: 1) == (list(range(depth + 1)), 1)


@pytest.mark.parametrize(
    ("picks", "expected"),
    [
        (
            [EOS, 4, 3, 9],
            ([0, 1, 3], 9),
        ),  # the end token was drafted and accepted: walked through, commit stops
        ([4, 9, EOS, 9], ([0, 2], EOS)),  # the end token as bonus
        ([9, 4, 3, 9], ([0], 9)),
    ],
)
def test_end_token_is_a_token(picks: list[int], expected: tuple[list[int], int]) -> None:
    """Guards against two places that know where text ends: the walk treats the end token as any other."""
    tree = Tree.of([7, EOS, 4, 4], [-1, 0, 0, 1])
    assert walk(tree, picks.__getitem__) == expected


def test_second_best_is_found() -> None:
    """Guards against following first children only: the path 0 -> 2 -> 4 skips rows."""
    tree = Tree.of([7, 1, 2, 1, 2], [-1, 0, 0, 2, 2])
    assert walk(tree, [2, 9, 2, 9, 3].__getitem__) == ([0, 2, 4], 3)
