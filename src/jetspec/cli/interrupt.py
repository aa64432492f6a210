"""Ctrl-C with something to say."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """Ctrl-C in a verb that adds to the one line about it, say where its work is kept. No KeyboardInterrupt,
    which typer turns into an exit code without its text."""


@contextmanager
def goes_on() -> Iterator[None]:
    """Work that the same command takes up again; Ctrl-C within the block says so."""
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted("what is finished is kept, and the same command goes on from there") from None
