"""Records: where numbers come from, and a file of JSON lines that a killed process cannot break."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from jetspec import __version__
from jetspec.bench.shape import fault
from jetspec.errors import DataError
from jetspec.storage import storage_errors

PACKAGE = Path(__file__).resolve().parents[1]
# What may differ between two starts of one run, whose records are put together.
_NOT_IN_KEY = ("date", "load", "commit", "dirty")


def provenance(arguments: dict[str, Any], device: str = "cpu") -> dict[str, Any]:
    """Where numbers come from.

    commit, dirty   of the project, None where it is not a git checkout; dirty: src/ or benchmarks/ differ
                    from the commit, records aside
    source          a hash of the package's code
    load            of the machine over the last minute, before the run adds to it
    """
    facts = {
        "jetspec": __version__,
        "arguments": arguments,
        "commit": _git("rev-parse", "--short=12", "HEAD"),
        "dirty": _dirty(),
        "source": source_hash(),
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": cpu_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": load_average(),
        "platform": platform.platform(),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("torch", "transformers", "tokenizers")},
    }
    if device.startswith("cuda"):
        facts["gpu"] = torch.cuda.get_device_name(device)
        facts["cuda"] = torch.version.cuda
    return facts


def run_key(facts: dict[str, Any]) -> str:
    """Equal for runs whose records may be put together: same arguments, code, versions and machine."""
    same = {name: value for name, value in facts.items() if name not in _NOT_IN_KEY}
    return hashlib.sha256(json.dumps(same, sort_keys=True, default=str).encode()).hexdigest()[:16]


def source_hash(*more: Path) -> str:
    """A hash of the package's Python and C files, and of `more`."""
    digest = hashlib.sha256()
    for path in [*sorted(p for p in PACKAGE.rglob("*") if p.suffix in (".py", ".c", ".cpp", ".h")), *more]:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def file_hash(path: Path) -> str:
    """The first 16 hexadecimal digits of a file's SHA-256."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]


def load_average() -> float | None:
    """Of the last minute; None where the system has none."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def peak_memory() -> int | None:
    """The process's resident memory at its highest so far, in bytes; None where the system does not say."""
    try:
        import resource
    except ImportError:
        return None
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Journal:
    """A file of records, one JSON object a line. One that a killed process left half-written is skipped, and
    so is one that lacks what its readers need (`shape`); `complain` is told of them. Anything else that is no
    record means that this is another kind of file.
    """

    def __init__(self, path: Path, complain: Callable[[str], None] = lambda text: None) -> None:
        self.path, self._complain = path, complain

    def check(self) -> None:
        """Raises DataError if the path is no regular file but there: a device never ends or keeps nothing."""
        if self.path.exists() and not self.path.is_file():
            raise DataError(
                f"{self.path} is no regular file; give a file of JSON lines that records are added to"
            )

    def read(self) -> list[dict[str, Any]]:
        """All complete records, oldest first; none if the file does not exist.

        Raises DataError naming the first line that is no record.
        """
        self.check()
        if not self.path.exists():
            return []
        try:
            lines = self.path.read_bytes().split(b"\n")
        except OSError as error:
            raise DataError(f"the records in {self.path} cannot be read ({error.strerror})") from None
        records: list[dict[str, Any]] = []
        cut: list[int] = []
        odd: list[tuple[int, str]] = []
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8"))  # a line may end inside of a letter
            except (ValueError, RecursionError):
                if not line.startswith(b'{"'):  # as every record begins, a half-written one as well
                    raise self._wrong(number, "an object with a `kind`") from None
                cut.append(number)
                continue
            if not isinstance(record, dict) or not isinstance(record.get("kind"), str):
                raise self._wrong(number, "an object with a `kind`")
            lacking = fault(record)
            if lacking is None:
                records.append(record)
            else:
                odd.append((number, f"a `{lacking}` in a record of the kind {record['kind']!r}"))
        if odd and not records:
            raise self._wrong(*odd[0])
        # Of a file's only line, enough must be there to see that it is one of ours.
        if cut and not records and (len(cut) > 1 or b'{"kind"' not in lines[cut[0] - 1]):
            raise self._wrong(cut[0], "a whole object with a `kind`")
        if cut:
            more = f" and {len(cut) - 1} more are" if len(cut) > 1 else " is"
            self._complain(f"{self.path.name} line {cut[0]}{more} cut off and left out")
        if odd:
            more = f", and {len(odd) - 1} more are" if len(odd) > 1 else ""
            self._complain(f"{self.path.name} line {odd[0][0]} is left out: expected {odd[0][1]}{more}")
        return records

    def _wrong(self, number: int, expected: str) -> DataError:
        return DataError(
            f"{self.path} line {number} is no record of jetspec bench: expected {expected}; give a file that "
            "jetspec bench --out wrote"
        )

    def append(self, record: dict[str, Any]) -> None:
        """Add one record at once, behind a half-written one if need be. Raises StorageError."""
        with storage_errors(self.path, "--out"):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            line = json.dumps(record, ensure_ascii=False, allow_nan=False) + "\n"
            with self.path.open("a+b") as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":
                        line = "\n" + line
                file.write(line.encode())


def cpu_name() -> str:
    """What the processor calls itself."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def footer(facts: dict[str, Any]) -> str:
    """Machine, versions and commit in one line."""
    parts = [facts["cpu"], f"{facts['threads']} thread{'' if facts['threads'] == 1 else 's'}"]
    if "gpu" in facts:
        parts.append(f"{facts['gpu']}, CUDA {facts['cuda']}")
    parts.append(f"torch {facts['torch']}, transformers {facts['transformers']}")
    if facts["commit"]:
        parts.append(f"commit {facts['commit']}{' with changes' if facts['dirty'] else ''}")
    return ", ".join(parts)


def _dirty() -> bool | None:
    status = _git("status", "--porcelain", "--", "src", "benchmarks", ":!benchmarks/results")
    return None if status is None else bool(status)


def _git(*arguments: str) -> str | None:
    """Git's answer about the checkout that this package is developed in; None for an installed copy."""
    project = PACKAGE.parents[1]
    if not (project / ".git").exists() or not (project / "pyproject.toml").is_file():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(project), *arguments], capture_output=True, text=True, timeout=20
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
