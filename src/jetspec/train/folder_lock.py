"""One writer per folder or file: a second command with the same one would mix its lines and shards with the
first one's.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from jetspec.errors import StorageError

try:
    import fcntl
except ImportError:  # pragma: no cover - Windows; there the folder is not guarded
    fcntl = None  # type: ignore[assignment]

LOCK_FILE = ".lock"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes from writing to `folder`, which is made if it does not exist.

    The system holds the lock, not the file: a process that is killed leaves none behind. File systems
    without locks are written unguarded.

    Raises StorageError if another process writes there, or the folder cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / LOCK_FILE).open("a")
    except OSError as error:
        raise StorageError(
            f"{folder} cannot be written ({error.strerror}); choose another folder (--out)"
        ) from None
    with file:
        _hold(file, folder)
        yield


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Keep other processes that ask from writing to a file; it and its folder are made if they do not exist.
    It must be changed in place: a file that replaces it has no lock.

    Raises StorageError as `locked` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror or error}); choose another file (--out)"
        ) from None
    with file:
        _hold(file, path)
        yield


def _hold(file: IO[Any], place: Path) -> None:
    if fcntl is not None:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise StorageError(
                    f"another process is writing to {place}; wait for it to end, or choose another place "
                    "(--out)"
                ) from None
