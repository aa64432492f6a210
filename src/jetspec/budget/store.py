"""Measured costs in the user's cache: one file per machine, target, drafter and code, written whole or not at
all, and measured again wherever it does not fit.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping
from collections.abc import Sequence as Many
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch

from jetspec.budget.calibration_file import DAMAGE, weights_print
from jetspec.budget.cost import CostModel
from jetspec.draft.base import Drafter
from jetspec.draft.head_files import WEIGHTS
from jetspec.errors import StorageError
from jetspec.storage import cache_dir
from jetspec.target.target import Target
from jetspec.tree import Grow

_FORMAT = 2
_PACKAGE = Path(__file__).resolve().parents[1]
_STAGES = ("tree", "target", "draft", "budget", "decode")  # whose code a round consists of


def cost_facts(target: Target, drafter: Drafter, grow: Grow) -> dict[str, Any]:
    """Everything that the cost of a round depends on, as far as it can be told beforehand."""
    device = target.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "gpu": gpu,
        "device": str(device),
        "threads": torch.get_num_threads(),
        "dtype": str(target.dtype).removeprefix("torch."),
        "model": target.name,
        "shape": _digest(repr(target.config)),
        "compiled": target.transformer.native is not None,
        "drafter": drafter.name,
        "shared_noise": getattr(drafter, "shared_noise", None),
        "head": _digest(_shape_of(drafter)),
        "grow": getattr(grow, "__name__", "custom"),
        "torch": torch.__version__,
        "code": _code(),
    }


class Kept(NamedTuple):
    """What a file holds: the costs, the mean gains of drafts by kind of sampling (see Prospect), and how far
    the costs of drafted and plain rounds are out of proportion, by batch size in octaves (see Bias).
    """

    cost: CostModel
    gains: dict[str, list[float]]
    biases: dict[int, float]


class CostFile:
    """Where the costs of one set of facts are kept."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.facts = facts
        self.key = _digest(json.dumps(facts, sort_keys=True))

    @property
    def path(self) -> Path:
        """Raises StorageError where there is no cache folder."""
        return cache_dir() / "cost" / f"{self.key}.json"

    def load(self) -> Kept | None:
        """What is kept; None if there is nothing, if it is damaged, or if it was measured elsewhere."""
        try:
            values = json.loads(self.path.read_text("utf-8"))
            if values["format"] != _FORMAT or values["facts"] != self.facts:
                return None
            gains = {str(name): _chances(found) for name, found in values["gains"].items()}
            biases = {int(octave): float(value) for octave, value in values.get("biases", {}).items()}
            if not all(abs(value) <= 1.0 for value in biases.values()):
                raise ValueError("a bias is out of range")
            return Kept(CostModel.from_values(values["cost"]), gains, biases)
        except (OSError, StorageError, *DAMAGE):
            return None

    def save(
        self, cost: CostModel, gains: Mapping[str, Many[float]], biases: Mapping[int, float] | None = None
    ) -> bool:
        """Write the file; whichever process writes last stays. False where it cannot be written, which costs
        a measurement at the next start and nothing else.
        """
        values = {
            "format": _FORMAT,
            "facts": self.facts,
            "gains": {name: list(own) for name, own in gains.items()},
            "biases": {str(octave): round(value, 4) for octave, value in (biases or {}).items()},
        }
        text = json.dumps({**values, "cost": cost.to_values()})
        try:
            folder = self.path.parent
            folder.mkdir(parents=True, exist_ok=True)
            handle, partial = tempfile.mkstemp(prefix=".cost-", dir=folder)
            try:
                with os.fdopen(handle, "w", encoding="utf-8") as stream:
                    stream.write(text)
                os.replace(partial, self.path)
            except BaseException:
                os.unlink(partial)
                raise
        except (OSError, StorageError):
            return False
        return True

    def remove(self) -> None:
        """Delete the file, so that the next start measures again."""
        with contextlib.suppress(OSError, StorageError):
            self.path.unlink(missing_ok=True)


def _chances(values: Any) -> list[float]:
    """Raises ValueError or TypeError if these are not chances."""
    found = [float(value) for value in values]
    if not all(0.0 <= value <= 1.0 for value in found):
        raise ValueError("chances lie between 0 and 1")
    return found


def _shape_of(drafter: Drafter) -> str:
    """What tells drafters of one name apart, as far as time goes."""
    head = getattr(getattr(drafter, "head", None), "config", None)
    network = getattr(drafter, "network", None)
    parts = [type(drafter).__name__, repr(head), repr(getattr(network, "model", None))]
    parts += [str(getattr(drafter, name, None)) for name in ("depth", "width", "taps", "modules")]
    vocab = getattr(network, "vocab", None)
    if vocab is None:
        vocab = getattr(getattr(drafter, "head", None), "vocab", None)
    folder = getattr(drafter, "folder", None)
    if isinstance(folder, Path):  # how good a head is belongs to its weights
        with contextlib.suppress(OSError):
            parts.append(_print_of(folder, (folder / WEIGHTS).stat().st_mtime_ns))
    return " ".join([*parts, str(None if vocab is None else len(vocab))])


@cache
def _print_of(folder: Path, modified: int) -> str:
    """Engines are made for every request, files change seldom."""
    return weights_print(folder)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@cache
def _code() -> str:
    """A hash of the code that a round runs through."""
    digest = hashlib.sha256()
    for stage in _STAGES:
        for path in sorted((_PACKAGE / stage).iterdir()):
            if path.suffix in (".py", ".c", ".h"):
                digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()
