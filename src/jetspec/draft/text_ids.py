"""Ids of a request's own text that the head's draft vocabulary lacks.

A reduced draft vocabulary holds the frequent ids. A name, an identifier or a number of the prompt is often
not among them, and just these tokens come back in the answer, where they are easy to foresee. The target's
output matrix has a row for every id, so a head can draft them all the same: every request adds the ids of its
prompt and of what it has said. A draft may propose anything, so the text does not depend on it.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many

from torch import Tensor

from jetspec.sequence import Sequence

MOST = 256  # ids of one request
_MOST_OF_BATCH = 1024


class TextIds:
    """Keeps them per sequence, in the order of their first appearance.

    Args:
        vocab: ids [Vd] of the draft vocabulary.
        leave: ids that no answer holds, such as the marks of a chat template.
    """

    def __init__(self, vocab: Tensor, leave: Iterable[int] = ()) -> None:
        self._known = {*vocab.tolist(), *leave}
        self._found: dict[int, dict[int, None]] = {}
        self._read: dict[int, int] = {}  # tokens of each sequence that were looked at

    def of(self, sequences: Many[Sequence]) -> list[tuple[int, ...]]:
        """The ids of each sequence, the newest where there are more than the batch has room for."""
        most = min(MOST, _MOST_OF_BATCH // max(1, len(sequences)))
        return [self._of(s, most) for s in sequences]

    def _of(self, s: Sequence, most: int) -> tuple[int, ...]:
        first = self._read.get(s.id, 0)
        if first > len(s.tokens):  # another sequence under the same number
            self.free(s.id)
            first = 0
        found = self._found.setdefault(s.id, {})
        for token in s.tokens[first:]:
            if token not in self._known:
                found[token] = None
        self._read[s.id] = len(s.tokens)
        ids = tuple(found)
        return ids[len(ids) - most :] if len(ids) > most else ids

    def free(self, key: int) -> None:
        """Forget a sequence."""
        self._found.pop(key, None)
        self._read.pop(key, None)
