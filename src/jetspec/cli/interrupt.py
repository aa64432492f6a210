"""Ctrl-C with something to say."""

from __future__ import annotations


class Interrupted(BaseException):
    """Ctrl-C in a verb that adds to the one line about it, say where its work is kept. No KeyboardInterrupt,
    which typer turns into an exit code without its text."""
