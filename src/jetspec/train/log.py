"""The curves of a run as JSON lines: one record per line, in the order of the steps."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from jetspec.errors import StorageError


def append_log(path: Path, record: dict[str, Any]) -> None:
    """Add a record, which holds its `step`. Raises StorageError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(record) + "\n")
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); free space, then run again") from None


def read_log(path: Path) -> list[dict[str, Any]]:
    """All records; lines that a kill cut off, or that are damaged otherwise, are left out."""
    return [json.loads(line) for line in _lines(path)]


def trim_log(path: Path, step: int) -> None:
    """Drop what lies behind `step`, because a run that was killed does those steps again, and damaged lines,
    such as one cut off by the kill.
    """
    if path.exists():
        write_whole(path, "".join(line + "\n" for line in _lines(path) if _step(line) <= step))


def write_whole(path: Path, text: str) -> None:
    """Write a small text file that appears whole or not at all. Raises StorageError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); free space, then run again") from None


def _lines(path: Path) -> list[str]:
    """The lines that are records. A byte that is not UTF-8 spoils its own line only."""
    if not path.exists():
        return []
    texts = (line.decode("utf-8", "replace") for line in path.read_bytes().split(b"\n"))
    return [text for text in texts if _step(text) >= 0]


def _step(line: str) -> int:
    """The step of a record; -1 for what is none."""
    if "\N{REPLACEMENT CHARACTER}" in line:
        return -1
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return -1
