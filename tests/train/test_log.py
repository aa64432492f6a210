"""The log of a training."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from jetspec.errors import StorageError
from jetspec.train.log import append_log, read_log, trim_log


@pytest.mark.skipif(sys.platform != "linux", reason="needs a device that is always full")
def test_a_full_disk_names_the_file(tmp_path: Path) -> None:
    """The error of the system names no file: whoever trains on two disks does not know which one is full."""
    path = tmp_path / "log.jsonl"
    path.symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"log\.jsonl cannot be written .*No space left.*free space"):
        append_log(path, {"step": 1})


def test_a_record_is_added(tmp_path: Path) -> None:
    """A log that is written anew with every record would lose the curve."""
    path = tmp_path / "run" / "log.jsonl"
    for step in (1, 2):
        append_log(path, {"step": step})
    assert [record["step"] for record in read_log(path)] == [1, 2]


@pytest.mark.parametrize(
    "damage",
    [b'{"step": 2, "l\xffss": 1}', b"\xff\xfe", b'{"step": 1e999}', b'{"step": ' + b"[" * 100_000, b"[1]"],
    ids=["byte", "bytes", "infinite", "deep", "list"],
)
def test_damaged_lines_are_left_out(tmp_path: Path, damage: bytes) -> None:
    """Guards a run that goes on: a byte that is not UTF-8, or a step of 1e999, ended it in a traceback."""
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n' + damage + b'\n{"step": 3}\n{"step": 5}\n')
    assert [record["step"] for record in read_log(path)] == [1, 3, 5]
    trim_log(path, 4)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 3}\n'
