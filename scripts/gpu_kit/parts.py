"""Large files as several small ones, for transfers that limit their size, and together again."""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import shutil
import tarfile
from pathlib import Path
from typing import Any

SHARD_BYTES = 15_900_000


def join_parts(pattern: str, to: Path) -> Path:
    """One file from its parts, once. Raises SystemExit if there are none."""
    parts = sorted(glob.glob(pattern))
    if not parts:
        raise SystemExit(f"--gguf-parts {pattern!r} matches no file")
    size = sum(os.path.getsize(part) for part in parts)
    if not (to.exists() and to.stat().st_size == size):
        to.parent.mkdir(parents=True, exist_ok=True)
        temporary = to.with_suffix(".tmp")
        with temporary.open("wb") as sink:
            for part in parts:
                with open(part, "rb") as source:
                    shutil.copyfileobj(source, sink)
        os.replace(temporary, to)
    return to


def write_parts(data: bytes, folder: Path, name: str) -> dict[str, Any]:
    """Write `name`.00, `name`.01, … and return what `join_out` needs to check them."""
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob(f"{name}.[0-9][0-9]"):
        old.unlink()
    count = max(1, -(-len(data) // SHARD_BYTES))
    for n in range(count):
        (folder / f"{name}.{n:02d}").write_bytes(data[n * SHARD_BYTES : (n + 1) * SHARD_BYTES])
    record = {"parts": count, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (folder / f"{name}.json").write_text(json.dumps(record))
    return record


def join_out(folder: Path) -> list[Path]:
    """Put everything in `folder` together again: heads become folders, answers a file. Raises SystemExit if a
    part is missing or damaged.
    """
    made = []
    for description in sorted(folder.glob("*.tar.json")) + sorted(folder.glob("*.gz.json")):
        name, record = description.name.removesuffix(".json"), json.loads(description.read_text())
        paths = [folder / f"{name}.{n:02d}" for n in range(record["parts"])]
        data = b"".join(path.read_bytes() for path in paths if path.exists())
        if hashlib.sha256(data).hexdigest() != record["sha256"]:
            raise SystemExit(f"{name}: a part is missing or damaged; copy {', '.join(map(str, paths))} again")
        if name.endswith(".gz"):
            made.append(folder / name.removesuffix(".gz"))
            made[-1].write_bytes(gzip.decompress(data))
        else:
            made.append(folder / name.removesuffix(".tar"))
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(made[-1], filter="data")
    return made


def packed(folder: Path, *more: Path) -> bytes:
    """The files of a folder and some others as one archive."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path in (*sorted(folder.iterdir()), *more):
            if path.is_file():
                archive.add(path, arcname=path.name)
    return buffer.getvalue()
