"""A head's calibration on disk: `calibration.json` in the head's folder."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

from jetspec.budget.maps import Calibration, from_values, to_values
from jetspec.draft.head_files import WEIGHTS
from jetspec.errors import StorageError
from jetspec.storage import say

FILE = "calibration.json"
# What reading an edited or half-written JSON file can raise; numbers without end overflow.
DAMAGE = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
_FORMAT = 1
_PIECE = 1 << 20


class Kept(NamedTuple):
    """A calibration that a head has, and fingerprints of the prompts that it was fitted on: () where its file
    does not say.
    """

    calibration: Calibration
    prints: tuple[str, ...]


def prompt_print(ids: Many[int]) -> str:
    """A fingerprint of a prompt's token ids."""
    return hashlib.sha256(",".join(map(str, ids)).encode()).hexdigest()[:8]


def weights_print(folder: Path) -> str:
    """A fingerprint of a head's weights: size, beginning and end of the file, which training changes all."""
    path = folder / WEIGHTS
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as stream:
        digest.update(stream.read(_PIECE))
        stream.seek(max(0, size - _PIECE))
        digest.update(stream.read(_PIECE))
    return digest.hexdigest()[:16]


def load_calibration(folder: Path, shared_noise: bool | None = None) -> Calibration | None:
    """A head's calibration; None if it has none, or if the one there cannot be used, which is said on
    standard error: it can cost time, never text.

    shared_noise: whether the drafter sees the noise of sampled requests. What it states for them means
        something else then, so maps that were made the other way are left out.
    """
    found = load_kept(folder, shared_noise)
    return None if found is None else found.calibration


def load_kept(folder: Path, shared_noise: bool | None = None) -> Kept | None:
    """As `load_calibration`, with what the maps were fitted on."""
    path = folder / FILE
    if not path.is_file():
        return None
    try:
        values = json.loads(path.read_text("utf-8"))
        if values["format"] != _FORMAT:
            raise ValueError("another format")
        if values["weights"] != weights_print(folder):
            raise ValueError("made for other weights")
        found = from_values(values["maps"], values.get("gains"))
        prints = tuple(str(values.get("prompt_prints", "")).split())
        return Kept(found if values.get("shared_noise") == shared_noise else found.without_sampled(), prints)
    except (OSError, *DAMAGE) as error:
        say(f"{path} is left out ({error}); make it again with jetspec calibrate --head {folder}")
        return None


def save_calibration(folder: Path, calibration: Calibration, facts: Mapping[str, Any]) -> Path:
    """Write the file, whole or not at all. Raises StorageError.

    facts: how it was made and how well it does.
    """
    path = folder / FILE
    values = {
        "format": _FORMAT,
        "weights": weights_print(folder),
        **facts,
        "gains": {kind: list(own) for kind, own in calibration.gains.items()},
        "maps": to_values(calibration),
    }
    partial = folder / (FILE + ".tmp")
    try:
        partial.write_text(_compact(values) + "\n", "utf-8")
        os.replace(partial, path)
    except OSError as error:
        raise StorageError(
            f"the calibration cannot be written to {folder} ({error.strerror or error}); "
            "copy the head to a folder of your own, or free space"
        ) from None
    return path


def _compact(values: Mapping[str, Any]) -> str:
    """JSON with one line per map, and one for the gains."""
    maps = ",\n    ".join(json.dumps(entry) for entry in values["maps"])
    rest = {name: value for name, value in values.items() if name not in ("maps", "gains")}
    head = json.dumps(rest, indent=2)[:-2]
    return f'{head},\n  "gains": {json.dumps(values["gains"])},\n  "maps": [\n    {maps}\n  ]\n}}'
