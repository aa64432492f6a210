"""Training that begins with the weights of an existing head instead of untrained ones."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from jetspec.draft.checkpoint import Head, load_head
from jetspec.draft.eagle3_format import Eagle3Head, load_eagle3
from jetspec.draft.head_files import WEIGHTS
from jetspec.draft.loading import PACKAGED, find_head, head_kind
from jetspec.draft.mtp_format import MTPHead, load_mtp
from jetspec.errors import DataError, HeadError, OptionError
from jetspec.target.target import Target
from jetspec.train.families import find_family

if TYPE_CHECKING:
    from jetspec.train.recipe import Settings


@dataclass(frozen=True)
class SourceHead:
    """A head that a run begins from.

    folder, head   where it is, and as its family reads it
    method         of its family
    name           what manifest and card call it; no path of this machine
    sha256         of its weights file: tells heads apart when a run goes on
    """

    folder: Path
    head: Head | Eagle3Head | MTPHead
    method: str
    name: str
    sha256: str

    @property
    def supervised_blocks(self) -> int | None:
        """How many blocks it was trained on, in all runs that led to it; None if it does not say so."""
        manifest = self.head.manifest
        own, before = manifest.get("supervised_blocks"), manifest.get("started_from")
        earlier = before.get("supervised_blocks") if isinstance(before, Mapping) else 0
        return own + earlier if isinstance(own, int) and isinstance(earlier, int) else None

    def record(self) -> dict[str, Any]:
        """What the manifest of the new head says about this one."""
        return {"name": self.name, "sha256": self.sha256, "supervised_blocks": self.supervised_blocks}

    def adopt(self, settings: Settings) -> Settings:
        """A recipe with this head's shape. Raises OptionError if it is one of another method."""
        if settings.method != self.method:
            raise OptionError(
                f"the recipe is one of the method {settings.method}, but the head in {self.folder} is of "
                f"{self.method}; leave --recipe out, or give one of {self.method}"
            )
        return replace(settings, head=find_family(self.method).adopt(self.head, settings.head))

    def check_options(self, settings: Settings) -> None:
        """Refuse options that ask for another shape than this head's. Raises OptionError naming the first."""
        own = self.adopt(settings).head
        for field in fields(own):
            asked, has = getattr(settings.head, field.name), getattr(own, field.name)
            grows = field.name in getattr(own, "grows", ())
            if asked != has and not (grows and asked > has):
                raise OptionError(
                    f"{field.name} is {asked!r}, but the head in {self.folder} has {has!r}, which training "
                    f"from a head {'may only enlarge' if grows else 'keeps'}; leave it out, or train without "
                    "--from-head"
                )

    def check(self, target: Target, run: Path) -> None:
        """Refuse a target that this head does not fit, and a run that would overwrite it. Raises HeadError or
        OptionError.
        """
        find_family(self.method).check_head(self.head, target)
        if (run / "head").resolve() == self.folder.resolve():
            raise OptionError(f"the run in {run} would overwrite the head it begins from; give another --out")


def read_source(place: str | Path, model: str) -> SourceHead:
    """The head in a folder, or, for "default" and "auto", the one that is packaged for `model`.

    Raises HeadError if there is none or it cannot be read.
    """
    folder = find_head(str(place), model)
    if folder is None:
        raise HeadError(f"no head is packaged for {model}; give --from-head the folder of one")
    if str(place) in PACKAGED:
        name = f"packaged {folder.name}"
    else:
        whole = folder.resolve()
        name = f"{whole.parent.name}/{whole.name}" if whole.name == "head" else whole.name
    head, method = _read(folder)
    with (folder / WEIGHTS).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    return SourceHead(folder, head, method, name, digest)


def _read(folder: Path) -> tuple[Head | Eagle3Head | MTPHead, str]:
    kind = head_kind(folder)
    if kind == "eagle3":
        return load_eagle3(folder), kind
    if kind == "mtp":
        return load_mtp(folder), kind
    head = load_head(folder)
    return head, head.config.method


def check_start(run: Path, state: Mapping[str, Any], source: SourceHead | None) -> None:
    """Refuse to go on with a run that began from another head. Raises DataError naming both beginnings."""
    if "run" not in state:
        return
    began, now = state["run"].get("from_head"), None if source is None else source.sha256
    if began != now:
        raise DataError(
            f"the run in {run} began from {_beginning(began)}, and not from {_beginning(now)}; give the same "
            "--from-head as then, or another --out"
        )


def _beginning(sha256: str | None) -> str:
    return "untrained weights" if sha256 is None else f"the head with the weights {sha256[:16]}"


class Trainable(Protocol):
    """A module whose tensors go by their public names."""

    names: list[str]

    def weight(self, name: str) -> Tensor:
        """A tensor by its public name."""
        ...


@torch.no_grad()
def copy_weights(module: Trainable, weights: Mapping[str, Tensor]) -> None:
    """Set every tensor of a module to that of a head; those of layers that the head has not stay."""
    for name in module.names:
        if name in weights:
            module.weight(name).copy_(weights[name])
