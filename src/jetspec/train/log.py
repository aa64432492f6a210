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
    """All records; lines that a kill cut off are left out."""
    if not path.exists():
        return []
    lines = path.read_text("utf-8").split("\n")
    return [json.loads(line) for line in lines if _step(line) >= 0]


def trim_log(path: Path, step: int) -> None:
    """Drop what lies behind `step`, because a run that was killed does those steps again, and a line cut
    off by the kill.
    """
    if not path.exists():
        return
    kept = [line for line in path.read_text("utf-8").split("\n") if 0 <= _step(line) <= step]
    write_whole(path, "".join(line + "\n" for line in kept))


def write_whole(path: Path, text: str) -> None:
    """Write a small text file that appears whole or not at all. Raises StorageError."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        temporary.write_text(text, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        raise StorageError(f"{path} cannot be written ({error}); free space, then run again") from None


def _step(line: str) -> int:
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return -1
