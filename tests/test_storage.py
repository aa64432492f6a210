from __future__ import annotations

import errno
import os
import shutil
import signal
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from jetspec import storage
from jetspec.errors import StorageError
from jetspec.storage import MANIFEST, build_once, cache_dir, follow_umask

# A builder for other processes: notes each build in a file, takes its time, and writes two files.
BUILDER = """
import sys, time
from pathlib import Path
from jetspec.storage import build_once
log, seconds = Path(sys.argv[1]), float(sys.argv[2])
def build(folder):
    with log.open("a") as stream:
        stream.write("built\\n")
    (folder / "first").write_text("1")
    time.sleep(seconds)
    (folder / "second").write_text("2")
folder = build_once("model", build, need_bytes=1)
print((folder / "first").read_text() + (folder / "second").read_text())
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache; the folder of models inside it."""
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


def write(folder: Path) -> None:
    """A builder of two files."""
    (folder / "small").write_bytes(b"small")
    (folder / "large").write_bytes(b"large" * 100)


def entries(models: Path) -> set[str]:
    """What lies in the cache beside the lock."""
    return {path.name for path in models.iterdir()} - {"model.lock"}


def start(log: Path, seconds: float) -> subprocess.Popen[str]:
    """Run BUILDER in another process."""
    command = [sys.executable, "-c", BUILDER, str(log), str(seconds)]
    path = os.pathsep.join(["src", *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        command,
        env={**os.environ, "PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_builds_once(cache: Path) -> None:
    """A second start must read the folder, not build it again."""
    calls: list[Path] = []

    def build(folder: Path) -> None:
        calls.append(folder)
        write(folder)

    first = build_once("model", build, need_bytes=1)
    assert build_once("model", build, need_bytes=1, verify=True) == first == cache / "model"
    assert len(calls) == 1
    assert {path.name for path in first.iterdir()} == {"small", "large", MANIFEST}
    assert entries(cache) == {"model"}


def test_two_processes(cache: Path, tmp_path: Path) -> None:
    """Two first starts at once must build one folder, and neither may see it half-done."""
    processes = [start(tmp_path / "log", 1.0) for _ in range(2)]
    outputs = [process.communicate(timeout=60) for process in processes]
    assert [out.strip() for out, _ in outputs] == ["12", "12"]
    assert (tmp_path / "log").read_text() == "built\n"
    assert sum("waiting" in err for _, err in outputs) == 1
    assert entries(cache) == {"model"}


def test_killed_builder(cache: Path, tmp_path: Path) -> None:
    """A killed builder must leave neither a lock that blocks for ever nor files that fill the disk."""
    victim = start(tmp_path / "log", 60)
    while not list(cache.glob(".model.partial-*/content/first")):
        assert victim.poll() is None
        time.sleep(0.02)
    victim.send_signal(signal.SIGKILL)
    victim.communicate()
    assert list(cache.glob(".model.partial-*"))
    build_once("model", write, need_bytes=1)
    assert entries(cache) == {"model"}


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_failed_build_leaves_nothing(cache: Path, error: type[BaseException]) -> None:
    """After Ctrl-C or an error half-way the next start must begin afresh."""

    def build(folder: Path) -> None:
        (folder / "small").write_text("half")
        raise error

    with pytest.raises(error):
        build_once("model", build, need_bytes=1)
    assert entries(cache) == set()
    assert (build_once("model", write, need_bytes=1) / "large").stat().st_size == 500


@pytest.mark.parametrize(
    ("damage", "verify", "reason"),
    [
        (lambda f: (f / "large").write_bytes(b"large"), False, "large has 5 bytes instead of 500"),
        (lambda f: (f / "small").write_bytes(b"other"), False, "small has changed"),
        (lambda f: (f / "large").write_bytes(b"LARGE" * 100), True, "large has changed"),
        (lambda f: (f / "large").unlink(), False, "large is missing"),
        (lambda f: (f / MANIFEST).unlink(), False, "manifest.json is missing"),
        (lambda f: (f / MANIFEST).write_text("{"), False, "manifest.json cannot be read"),
        (lambda f: (f / MANIFEST).write_text("[]"), False, "manifest.json cannot be read"),
        (lambda f: (f / MANIFEST).write_text('{"format": 0}'), False, "another version"),
    ],
)
def test_damage_is_repaired(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], damage, verify, reason
) -> None:
    """A truncated or changed file must be noticed and rebuilt once, saying why."""
    monkeypatch.setattr(storage, "_SMALL_FILE_BYTES", 100)
    folder = build_once("model", write, need_bytes=1)
    damage(folder)
    assert build_once("model", write, need_bytes=1, verify=verify) == folder
    assert (folder / "large").read_bytes() == b"large" * 100
    assert (folder / "small").read_bytes() == b"small"
    assert reason in capsys.readouterr().err
    build_once("model", lambda _: pytest.fail("built again"), need_bytes=1, verify=True)
    assert entries(cache) == {"model"}


def test_large_files_are_not_hashed_at_every_start(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hashing the weights would add seconds to each start; only `verify` pays for that."""
    monkeypatch.setattr(storage, "_SMALL_FILE_BYTES", 100)
    folder = build_once("model", write, need_bytes=1)
    hashed: list[str] = []
    monkeypatch.setattr(storage, "file_sha256", lambda path: hashed.append(path.name) or "")
    monkeypatch.setattr(storage, "_build", lambda *_: None)
    build_once("model", write, need_bytes=1)
    assert "large" not in hashed
    assert folder.exists()


def test_full_disk(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too little space is said before anything is fetched; running full later leaves nothing behind."""
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=500_000_000))
    with pytest.raises(StorageError, match=r"1\.3 GB.*0\.5 GB.*JETSPEC_CACHE"):
        build_once("model", write, need_bytes=1_300_000_000)

    def full(folder: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(folder / "small"))

    with pytest.raises(StorageError, match="No space left") as caught:
        build_once("model", full, need_bytes=1)
    assert "\n" not in str(caught.value)
    assert entries(cache) == set()


def test_no_permission(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder that cannot be written is common in containers; the message names the way out."""

    def refuse(self: Path, *args: object, **kwargs: object) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(StorageError, match=r"Permission denied.*JETSPEC_CACHE"):
        build_once("model", write, need_bytes=1)


def test_cache_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """JETSPEC_CACHE set to a file by mistake."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="JETSPEC_CACHE"):
        build_once("model", write, need_bytes=1)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_write_that_ends_half_way_names_its_file(cache: Path, number: int) -> None:
    """Guards limits on disks, users and files (ulimit -f): the system's error of a write has no file name."""
    expected = pytest.raises(StorageError, match=f"cannot write to {cache}.*--out")
    with expected, storage.storage_errors(cache, "--out"):
        raise OSError(number, os.strerror(number))


def test_other_errors_pass(cache: Path) -> None:
    """Only a full disk or a missing permission is a storage error; a builder's own failure keeps its type."""
    with pytest.raises(ConnectionError), storage.storage_errors(cache):
        raise ConnectionError(errno.ECONNRESET, "reset")


def test_files_are_readable_by_others(cache: Path) -> None:
    """safetensors writes files that only their owner can read, useless in a cache shared by a group."""

    def build(folder: Path) -> None:
        write(folder)
        (folder / "large").chmod(0o600)

    folder = build_once("model", build, need_bytes=1)
    assert (folder / "large").stat().st_mode == (folder / MANIFEST).stat().st_mode


def test_files_follow_the_umask(tmp_path: Path) -> None:
    """Files of safetensors had mode 0600 beside 0644; a mode without the umask would give away too much."""
    files = [tmp_path / "one", tmp_path / "two"]
    for umask, mode in ((0o022, 0o644), (0o027, 0o640)):
        for file in files:
            file.write_text("x")
            file.chmod(0o600)
        before = os.umask(umask)
        try:
            follow_umask(*files)
        finally:
            os.umask(before)
        assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [mode, mode]
    assert sorted(tmp_path.iterdir()) == files


def test_cache_dir(monkeypatch: pytest.MonkeyPatch) -> None:
    """JETSPEC_CACHE beats XDG_CACHE_HOME, which beats the home folder; empty means unset."""
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    monkeypatch.setenv("JETSPEC_CACHE", "~/own")
    assert cache_dir() == Path("/home/someone/own")
    monkeypatch.setenv("JETSPEC_CACHE", "")
    assert cache_dir() == Path("/xdg/jetspec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_dir() == Path("/home/someone/.cache/jetspec")
    monkeypatch.setenv("JETSPEC_CACHE", "~no-such-user/x")
    with pytest.raises(StorageError, match="no home folder"):
        cache_dir()


def test_leftovers_of_odd_names_are_removed(cache: Path) -> None:
    """Guards disk space: a name with brackets (`model[1].gguf`) is a name, not a pattern."""
    leftover = cache_dir() / "models" / ".a[1].partial-dead"
    leftover.mkdir(parents=True)
    build_once("a[1]", write, need_bytes=1)
    assert not leftover.exists()
