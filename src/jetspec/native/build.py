"""Compiled kernels: built once with the machine's own C compiler and kept in the user's cache.

No compiler, no cache folder or a failing build means None, and callers use their portable path. The library
is named by its source, flags and processor, so an update or another machine builds anew.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from jetspec.errors import StorageError
from jetspec.storage import cache_dir

# No -ffast-math: it may reorder sums, and then a row's bits would depend on its company.
FLAGS = ("-O3", "-march=native", "-fno-math-errno", "-ffp-contract=fast", "-fopenmp", "-fPIC", "-std=gnu11")
_TIMEOUT = 120


@cache
def load_library(name: str) -> ctypes.CDLL | None:
    """The compiled `name.c` of this package, or None where it cannot be built or loaded."""
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None or platform.system() != "Linux":
        return None
    source = Path(__file__).with_name(name + ".c")
    try:
        path = _cache_folder() / f"{name}-{_fingerprint(source)}.so"
        if not _whole(path):
            _build(compiler, source, path)
        return ctypes.CDLL(str(path))
    except (OSError, subprocess.SubprocessError, StorageError):
        return None


def _build(compiler: str, source: Path, path: Path) -> None:
    """Compile and link without naming an OpenMP library: torch has loaded its own, and a second one would
    fight it for the cores.
    """
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects, library = Path(folder) / "kernel.o", Path(folder) / "kernel.so"
        for command in (
            [compiler, *FLAGS, "-c", str(source), "-o", str(objects)],
            [compiler, "-shared", str(objects), "-o", str(library), "-lm"],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT)
        data = library.read_bytes()
        with library.open("wb") as file:
            file.write(data + hashlib.sha256(data).digest())
            file.flush()
            os.fsync(file.fileno())
        os.replace(library, path)


def _whole(path: Path) -> bool:
    """Whether a library is there with the hash at its end that `_build` wrote. Loading one that a full disk
    or a power cut has shortened would end the process.
    """
    data = path.read_bytes() if path.is_file() else b""
    size = hashlib.sha256().digest_size
    return len(data) > size and hashlib.sha256(data[:-size]).digest() == data[-size:]


def _fingerprint(source: Path) -> str:
    cpu = next(
        (
            line
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith(("flags", "Features"))
        ),
        "",
    )
    headers = b"".join(path.read_bytes() for path in sorted(source.parent.glob("*.h")))
    text = source.read_bytes() + headers + repr(FLAGS).encode() + cpu.encode() + platform.machine().encode()
    return hashlib.sha256(text).hexdigest()[:16]


def _cache_folder() -> Path:
    folder = cache_dir() / "native"
    folder.mkdir(parents=True, exist_ok=True)
    return folder
