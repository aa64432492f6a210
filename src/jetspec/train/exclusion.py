"""Which prompts are not to be trained on: those of evaluation files, also where they hide in a longer text.

Texts are compared as words without case, punctuation and spacing, so a changed line break or quotation mark
hides nothing.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable

# Chinese and Japanese are written without spaces: each character counts as a word.
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_WORD = re.compile(rf"[{_CJK}]|[^\W_{_CJK}]+")
SHINGLE = 5  # words; an eval prompt with fewer counts only where it is the whole text


def words_of(text: str) -> tuple[str, ...]:
    """The words of a text, compatible letters unified (NFKC) and case folded."""
    return tuple(_WORD.findall(unicodedata.normalize("NFKC", text).casefold()))


class Exclusion:
    """Finds evaluation texts in prompts.

    Args:
        texts: (name, text) of every evaluation prompt.
    """

    def __init__(self, texts: Iterable[tuple[str, str]]) -> None:
        self._names: list[str] = []
        self._words: list[tuple[str, ...]] = []
        self._whole: dict[tuple[str, ...], int] = {}
        # Five words -> where they stand: at the start of an eval text, or anywhere in its first half.
        self._starts: dict[tuple[str, ...], list[int]] = {}
        self._inside: dict[int, list[tuple[int, int]]] = {}
        for name, text in texts:
            self._add(name, words_of(text))

    def _add(self, name: str, words: tuple[str, ...]) -> None:
        if not words or words in self._whole:
            return
        number = self._whole[words] = len(self._names)
        self._names.append(name)
        self._words.append(words)
        if len(words) >= SHINGLE:
            self._starts.setdefault(words[:SHINGLE], []).append(number)
        for at in range(min(len(words) // 2, len(words) - SHINGLE) + 1):
            self._inside.setdefault(hash(words[at : at + SHINGLE]), []).append((number, at))

    def __len__(self) -> int:
        """How many different evaluation texts are known."""
        return len(self._names)

    def find(self, text: str) -> str | None:
        """The name of an evaluation text that `text` gives away, or None.

        It does if it is the same, contains one of at least five words, or is itself a piece that makes up
        at least half of one (an eval prompt without its closing instruction).
        """
        words = words_of(text)
        if words in self._whole:
            return self._names[self._whole[words]]
        if len(words) < SHINGLE:
            return None
        for at in range(len(words) - SHINGLE + 1):
            for number in self._starts.get(words[at : at + SHINGLE], ()):
                known = self._words[number]
                if words[at : at + len(known)] == known:
                    return self._names[number]
        for number, at in self._inside.get(hash(words[:SHINGLE]), ()):
            known = self._words[number]
            if 2 * len(words) >= len(known) and known[at : at + len(words)] == words:
                return self._names[number]
        return None
