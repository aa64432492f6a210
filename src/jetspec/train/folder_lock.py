"""One writer per folder: a second command with the same folder would mix its lines and shards with the
first one's.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
        if fcntl is not None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    raise StorageError(
                        f"another process is writing to {folder}; wait for it to end, or choose another "
                        "folder (--out)"
                    ) from None
        yield
