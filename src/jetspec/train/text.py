"""What makes a text one that can be written to a file."""

from __future__ import annotations


def check_whole(text: str) -> str:
    """The text, unless it holds half of a surrogate pair: JSON can spell it, and UTF-8 cannot.

    Raises ValueError.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ValueError("the text holds half of a surrogate pair") from None
    return text
