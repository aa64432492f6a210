"""A tree as text: one line per node, children below their parent, the most probable first.

    "The"
    ├─ " cat" 62% ✓
    │  ├─ " sat" 31% ✓
    │  │  └─ " on" bonus
    │  └─ " is" 11%
    └─ " dog" 20%

The percentage is the draft's probability of the whole path down to the node.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Literal, TypeAlias

from jetspec.tree.tree import Tree

Style: TypeAlias = Literal["root", "branch", "accepted", "rejected", "bonus", "prob", "mark"]
Segment: TypeAlias = tuple[str, Style]


def draw_tree(
    tree: Tree, decode_token: Callable[[int], str], accepted: Collection[int] = (), bonus: str | None = None
) -> list[str]:
    """The lines of the drawing as plain text; arguments as in `draw_segments`."""
    return ["".join(text for text, _ in line) for line in draw_segments(tree, decode_token, accepted, bonus)]


def draw_segments(
    tree: Tree, decode_token: Callable[[int], str], accepted: Collection[int] = (), bonus: str | None = None
) -> list[list[Segment]]:
    """The lines of the drawing as (text, style name) pieces, for a caller that adds colour.

    decode_token  text of one token id; quotes and escapes are added here, to show blanks and line breaks
    accepted      indices of the accepted nodes; the root may be among them or not
    bonus         text of the bonus token, drawn below the deepest accepted node; None leaves it out
    """
    kept = set(accepted) | {0}
    last = max(kept, key=lambda node: tree.depths[node])
    offspring: list[list[int]] = [[] for _ in range(tree.size)]
    for node in range(1, tree.size):
        offspring[tree.parents[node]].append(node)

    lines: list[list[Segment]] = []
    # A stack, not recursion: a chain may be deeper than Python's recursion limit. Entries: the node (-1 for
    # the bonus), its branch, the indent of its children.
    pending: list[tuple[int, str, str]] = [(0, "", "")]
    while pending:
        node, branch, indent = pending.pop()
        line: list[Segment] = [(branch, "branch")] if branch else []
        if node < 0:
            lines.append([*line, (quote(bonus or ""), "bonus"), (" bonus", "mark")])
            continue
        lines.append(line + _label(tree, node, quote(decode_token(tree.tokens[node])), node in kept))
        below = offspring[node] + ([-1] if node == last and bonus is not None else [])
        for child in reversed(below):
            ends = child == below[-1]
            pending.append((child, indent + ("└─ " if ends else "├─ "), indent + ("   " if ends else "│  ")))
    return lines


def _label(tree: Tree, node: int, text: str, accepted: bool) -> list[Segment]:
    if node == 0:
        return [(text, "root")]
    label: list[Segment] = [(text, "accepted" if accepted else "rejected")]
    label.append((f" {_percent(math.exp(tree.logps[node]))}", "prob"))
    if accepted:
        label.append((" ✓", "mark"))
    return label


def _percent(probability: float) -> str:
    """Whole percent, with a digit more below 10 % and a bound below 0.1 %."""
    percent = 100.0 * probability
    if percent >= 9.95:
        return f"{percent:.0f}%"
    return f"{percent:.1f}%" if percent >= 0.05 else "<0.1%"


def quote(text: str) -> str:
    """Double quotes around `text`, with everything escaped that would move the cursor or be invisible."""
    shown = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\r": "\\r", "\t": "\\t"}
    pieces = [shown.get(c) or (c if c.isprintable() else f"\\u{{{ord(c):x}}}") for c in text]
    return f'"{"".join(pieces)}"'
