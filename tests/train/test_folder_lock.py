"""Two commands with the same folder: the second one has to say so and leave the first one's files alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from jetspec.errors import StorageError
from jetspec.train.folder_lock import locked

_HOLD = """
import sys, time
from pathlib import Path
from jetspec.train.folder_lock import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(60)
"""


def _holder(folder: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", _HOLD, str(folder)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_process_is_refused_and_a_killed_one_leaves_no_lock(tmp_path: Path) -> None:
    """Guards against mixed lines of two writers, and against a lock that outlives a kill."""
    folder = tmp_path / "run"
    process = _holder(folder)
    try:
        with pytest.raises(StorageError, match="another process is writing to"), locked(folder):
            pass
    finally:
        process.kill()
        process.wait()
    with locked(folder):
        pass


def test_the_lock_ends_with_the_block(tmp_path: Path) -> None:
    """Guards against a lock that is kept: answers are made and then trained on by one process."""
    for _ in range(2):
        with locked(tmp_path):
            pass


def test_an_unwritable_place_is_named(tmp_path: Path) -> None:
    """Guards against a traceback where the folder cannot be made."""
    (tmp_path / "file").write_text("x")
    with pytest.raises(StorageError, match="file"), locked(tmp_path / "file" / "run"):
        pass
