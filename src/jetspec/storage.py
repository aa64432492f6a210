"""Folders in the user's cache that are built once and then only read, safe for several processes at once.

A folder is built under a temporary name while a lock is held, sealed with a manifest (size and SHA-256 of
each file) and renamed into place, so a reader meets either nothing or a complete folder. Whatever dies
half-way leaves only a temporary folder, which the next builder removes. A folder that no longer matches its
manifest is rebuilt.
"""

from __future__ import annotations

import errno
import glob
import hashlib
import json
import os
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from jetspec.errors import StorageError

MANIFEST = "manifest.json"
_MANIFEST_FORMAT = 1
# Files up to this size are hashed at every start (milliseconds); of larger ones only the size is compared.
_SMALL_FILE_BYTES = 8_000_000
_STORAGE_ERRORS = {
    *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG),  # full, or beyond the largest file that is allowed
    *(errno.EACCES, errno.EPERM, errno.EROFS),  # not allowed
    *(errno.ENOTDIR, errno.EEXIST),  # a file is in the way
}


def cache_dir() -> Path:
    """Where converted models are kept: JETSPEC_CACHE, or XDG_CACHE_HOME/jetspec, or ~/.cache/jetspec.

    Raises StorageError where there is no home folder.
    """
    if own := os.environ.get("JETSPEC_CACHE"):
        place = user_path(own)
    else:
        shared = os.environ.get("XDG_CACHE_HOME")
        place = (Path(shared) if shared else user_path("~/.cache")) / "jetspec"
    if place.parts and place.parts[0].startswith("~"):
        raise StorageError(f"no home folder is known for {place}; set JETSPEC_CACHE to a folder")
    return place


def user_path(text: str | Path) -> Path:
    """A path with `~` resolved as far as that is possible."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user, or no home
        return Path(text)


def path_kind(path: Path) -> Literal["folder", "file"] | None:
    """What a path leads to; None if nothing is there.

    Raises OSError where that cannot be found out: too long a name, a folder that may not be entered.
    """
    try:
        return "folder" if stat.S_ISDIR(path.stat().st_mode) else "file"
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a NUL in it: no path at all
        return None


def say(message: str) -> None:
    """One line of progress on standard error."""
    print(f"jetspec: {message}", file=sys.stderr, flush=True)


def build_once(name: str, build: Callable[[Path], None], *, need_bytes: int, verify: bool = False) -> Path:
    """The folder `name` of the cache, made by `build(empty_folder)` if it is missing or damaged.

    verify: compare the SHA-256 of every file, not only of the small ones.
    need_bytes: free disk space that building takes at its peak.

    Raises StorageError where there is no space or no permission, and whatever `build` raises; in both cases
    nothing half-done stays behind.
    """
    folder = cache_dir() / "models" / name
    if _damage(folder, verify) is None:
        return folder
    with storage_errors(folder.parent):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder):
            damage = _damage(folder, verify)
            if damage is None:  # another process built it while this one waited
                return folder
            if folder.exists():
                say(f"the cached model {name} is damaged ({damage}); building it again")
            _build(folder, build, need_bytes)
    return folder


def remove(folder: Path) -> None:
    """Delete a cached folder; readers that already mapped its files keep their view."""
    with storage_errors(folder):
        shutil.rmtree(folder, ignore_errors=True)


def file_sha256(path: Path) -> str:
    """Hexadecimal SHA-256 of a file's content, read in pieces."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def follow_umask(*paths: Path) -> None:
    """Give files of one folder the mode that the umask, or the folder's own rules, gives a new file there.

    safetensors writes its files with mode 0600 whatever the umask says, which would keep others from reading
    them. The umask itself can be read only by changing it for all threads, so a new file shows it.
    """
    if not paths:
        return
    probe = paths[0].with_name(f".{paths[0].name}.mode")
    try:
        probe.touch()
        mode = stat.S_IMODE(probe.stat().st_mode)
    finally:
        probe.unlink(missing_ok=True)
    for path in paths:
        path.chmod(mode)


@contextmanager
def storage_errors(place: Path, setting: str = "JETSPEC_CACHE") -> Iterator[None]:
    """Turn a full disk or a missing permission into a StorageError naming `place` and the variable to set."""
    try:
        yield
    except OSError as error:
        if error.errno not in _STORAGE_ERRORS:
            raise
        raise StorageError(
            f"cannot write to {error.filename or place}: {error.strerror};"
            f" free some space or set {setting} to a folder that can be written"
        ) from error


def _build(folder: Path, build: Callable[[Path], None], need_bytes: int) -> None:
    """Build, seal and move into place; the caller holds the lock."""
    leftovers = folder.parent.glob(f".{glob.escape(folder.name)}.partial-*")
    for leftover in leftovers:  # its owner is dead: we hold the lock
        shutil.rmtree(leftover, ignore_errors=True)
    free = shutil.disk_usage(folder.parent).free
    if free < need_bytes:
        raise StorageError(
            f"building {folder.name} needs {need_bytes / 1e9:.1f} GB in {folder.parent},"
            f" but only {free / 1e9:.1f} GB are free;"
            " free some space or set JETSPEC_CACHE to a folder on another disk"
        )
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.partial-", dir=folder.parent))
    try:
        content = partial / "content"  # mkdtemp's folder is private (mode 0700); this one follows the umask
        content.mkdir()
        build(content)
        _seal(content)
        if folder.exists():
            folder.rename(partial / "damaged")
        content.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock. The system releases it when its owner dies, so it never goes stale."""
    from filelock import FileLock, Timeout

    lock = FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        say(f"another process is preparing {folder.name}; waiting for it")
        lock.acquire(poll_interval=0.1)
    try:
        yield
    finally:
        lock.release()


def _seal(folder: Path) -> None:
    """Write the manifest of all files in the folder."""
    files = {
        path.name: {"bytes": path.stat().st_size, "sha256": file_sha256(path)}
        for path in sorted(folder.iterdir())
    }
    manifest = {"format": _MANIFEST_FORMAT, "files": files}
    path = folder / MANIFEST
    path.write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
    follow_umask(*(folder / name for name in files))


def _damage(folder: Path, verify: bool) -> str | None:
    """What is wrong with a built folder, in a few words; None if it matches its manifest."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if manifest["format"] != _MANIFEST_FORMAT:
            return "written by another version"
        for name, expected in manifest["files"].items():
            path = folder / name
            size = path.stat().st_size
            if size != expected["bytes"]:
                return f"{name} has {size} bytes instead of {expected['bytes']}"
            if (verify or size <= _SMALL_FILE_BYTES) and file_sha256(path) != expected["sha256"]:
                return f"{name} has changed"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except OSError as error:
        return f"{error.filename} cannot be read: {error.strerror}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"{MANIFEST} cannot be read"
    return None
