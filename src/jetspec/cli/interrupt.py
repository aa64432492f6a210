"""Ctrl-C with something to say."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager


class Interrupted(BaseException):
    """Ctrl-C in a verb that adds to the one line about it, say where its work is kept. No KeyboardInterrupt,
    which typer turns into an exit code without its text."""


@contextmanager
def goes_on(what: str, kept: Callable[[], int | None]) -> Iterator[None]:
    """Work that the same command takes up again; Ctrl-C within the block says so, and how much is kept.

    what: one finished piece, such as "answer".
    kept: how many of them are kept; None if that is not known yet.
    """
    try:
        yield
    except KeyboardInterrupt:
        raise Interrupted(_kept(what, kept())) from None


def _kept(what: str, count: int | None) -> str:
    if count is None:
        return "what is finished is kept, and the same command goes on from there"
    if not count:
        return f"no {what} was finished, so none is kept; the same command begins again"
    pieces = f"1 finished {what} is" if count == 1 else f"{count} finished {what}s are"
    return f"{pieces} kept, and the same command goes on from there"
