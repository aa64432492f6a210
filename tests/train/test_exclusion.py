"""Which prompts give an evaluation prompt away, and which only share words with one."""

from __future__ import annotations

import pytest

from jetspec.train.exclusion import Exclusion, words_of

EVAL = "Janet’s ducks lay 16 eggs per day. How many does she sell?\nPlease reason step by step."
KNOWN = Exclusion([("ducks", EVAL), ("short", "Sort a list"), ("cjk", "水为什么是蓝色的")])


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (EVAL, "ducks"),
        ("janet's DUCKS lay 16 eggs, per day -- how many does she sell? please reason step-by-step", "ducks"),
        (f"Solve this:\n{EVAL}\nThanks.", "ducks"),
        ("Janet’s ducks lay 16 eggs per day. How many does she sell?", "ducks"),
        ("sort a LIST!", "short"),
        ("请问：水为什么是蓝色的？", "cjk"),
        ("Janet’s ducks lay 16 eggs per week. How many does she sell?", None),
        ("Please reason step by step.", None),
        ("Janet’s ducks lay 16", None),
        ("Sort a list of numbers", None),
        ("", None),
        ("?!", None),
    ],
)
def test_find(text: str, name: str | None) -> None:
    """Guards both ways: quotation marks, case and additions hide nothing, a shared phrase is no theft."""
    assert KNOWN.find(text) == name


def test_many_texts_with_one_beginning() -> None:
    """Guards the index: evaluation prompts that begin with the same words are told apart."""
    known = Exclusion((f"n{n}", f"Write a function that returns the number {n} as a text") for n in range(50))
    for n in range(50):
        assert known.find(f"Now: write a function that returns the number {n} as a text.") == f"n{n}"
    assert known.find("Write a function that returns the number 77 as a text") is None
    assert len(known) == 50


def test_words() -> None:
    """Guards the normal form."""
    assert words_of("The Ａ-side: x²=4, it's 東京!") == ("the", "a", "side", "x2", "4", "it", "s", "東", "京")
