from __future__ import annotations

import math

import pytest
from hypothesis import given

from jetspec.tree import Tree, draw_segments, draw_tree
from tests.tree.oracle import trees

WORDS = {0: "The", 1: " cat", 2: " dog", 3: " sat", 4: " is"}
TREE = Tree.of(
    tokens=[0, 1, 3, 2, 4],
    parents=[-1, 0, 1, 0, 1],
    logps=[0.0, *(math.log(p) for p in (0.62, 0.31, 0.2, 0.012))],
)


def test_picture() -> None:
    """Guards the layout as users see it: nesting, order, percentages, marks, where the bonus hangs."""
    assert draw_tree(TREE, WORDS.__getitem__, accepted=[0, 1, 2], bonus=" on") == [
        '"The"',
        '├─ " cat" 62% ✓',
        '│  ├─ " sat" 31% ✓',
        '│  │  └─ " on" bonus',
        '│  └─ " is" 1.2%',
        '└─ " dog" 20%',
    ]


def test_nothing_accepted() -> None:
    """Guards the rejected round: the bonus hangs below the root, last, whether the root is listed or not."""
    expected = [
        '"The"',
        '├─ " cat" 62%',
        '│  ├─ " sat" 31%',
        '│  └─ " is" 1.2%',
        '├─ " dog" 20%',
        '└─ "!" bonus',
    ]
    assert draw_tree(TREE, WORDS.__getitem__, accepted=set(), bonus="!") == expected
    assert draw_tree(TREE, WORDS.__getitem__, accepted={0}, bonus="!") == expected
    assert draw_tree(Tree.root_only(0), WORDS.__getitem__) == ['"The"']


def test_styles() -> None:
    """Guards the colours: only accepted nodes are accepted, and pieces join to the plain drawing."""
    lines = draw_segments(TREE, WORDS.__getitem__, accepted={1}, bonus=" ran")
    named = {text: style for line in lines for text, style in line}
    assert named['"The"'] == "root" and named['" cat"'] == "accepted" and named['" ran"'] == "bonus"
    assert named['" sat"'] == named['" is"'] == named['" dog"'] == "rejected"
    joined = ["".join(text for text, _ in line) for line in lines]
    assert joined == draw_tree(TREE, WORDS.__getitem__, {1}, " ran")
    assert sum(style == "mark" and "✓" in text for line in lines for text, style in line) == 1


@given(trees())
def test_one_line_per_node(tree: Tree) -> None:
    """Guards against lost or repeated nodes in odd shapes, and indents that do not match the depth."""
    lines = draw_segments(tree, "t{}".format, bonus="b")
    assert len(lines) == tree.size + 1
    depths = sorted(len(line[0][0]) // 3 if line[0][1] == "branch" else 0 for line in lines)
    assert depths == sorted([*tree.depths, 1])


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\n", r'"\n"'),
        ("\t\r", r'"\t\r"'),
        ('say "\\"', r'"say \"\\\""'),
        ("\x1b[31m", r'"\u{1b}[31m"'),
        ("\u200b\u202e", r'"\u{200b}\u{202e}"'),
        ("日本 é", '"日本 é"'),
        ("[bold]", '"[bold]"'),
        ("", '""'),
    ],
)
def test_tokens_cannot_break_the_picture(text: str, shown: str) -> None:
    """Guards against tokens that move the cursor: line breaks, escape sequences, right-to-left marks."""
    assert draw_tree(Tree.root_only(0), lambda token: text) == [shown]


def test_deep_chains_do_not_hit_the_recursion_limit() -> None:
    """Guards against recursion: Python stops at 1000 levels."""
    tree = Tree.of(range(1500), range(-1, 1499))
    assert len(draw_tree(tree, str, accepted={1499}, bonus="b")) == 1501


def test_tiny_probabilities_are_not_zero() -> None:
    """Guards against showing 0.0% for a node that is merely unlikely."""
    tree = Tree.of([0, 1, 2, 3], [-1, 0, 0, 0], [0.0, math.log(0.0996), math.log(0.0006), -30.0])
    assert [line.split()[-1] for line in draw_tree(tree, str)[1:]] == ["10%", "0.1%", "<0.1%"]
