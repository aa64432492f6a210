"""From a name to a drafter: the packaged head of a target, a head folder, or a stub."""

from __future__ import annotations

import json
from collections.abc import Sequence as Many
from importlib import resources
from pathlib import Path
from typing import Any

from jetspec.draft.base import Drafter
from jetspec.draft.checkpoint import load_head
from jetspec.draft.config import HeadConfig
from jetspec.draft.eagle3 import eagle3_drafter
from jetspec.draft.eagle3_format import load_eagle3
from jetspec.draft.head_files import read_folder
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.mtp import mtp_drafter
from jetspec.draft.mtp_format import load_mtp
from jetspec.draft.sequential import SequentialDrafter
from jetspec.draft.stubs import Decoy, Echo, Off, Random
from jetspec.errors import LONGEST_NAME, HeadError, brief
from jetspec.sampling import checked_number
from jetspec.storage import path_kind, user_path
from jetspec.target.target import Target

PACKAGED = ("auto", "default")  # both mean the head that ships with jetspec for the target
NAMES = (*PACKAGED, "off", "random", "echo", "decoy")
_STUB_DEPTH = 6


def load_drafter(
    head: str | Path, target: Target, *, shared_noise: bool = True, confidence_threshold: float = 0.0
) -> Drafter:
    """The drafter that `head` names.

    head: "auto" or "default" (the head packaged for this target, or none if there is none), "off", a stub
    ("random", "echo", "decoy"), or the folder of a head.
    shared_noise: of a head, see `jetspec.draft.shared_noise`.
    confidence_threshold: of a head with a confidence head, see `BlockDrafter`.

    Raises HeadError if the name is unknown, the head cannot be read or belongs to another target, or there is
    a threshold and no confidence head; OptionError if the threshold is not in 0..1.
    """
    confidence_threshold = checked_number("the confidence threshold", confidence_threshold, 0, 1)
    drafter = _named_drafter(str(head), target, shared_noise, confidence_threshold)
    if confidence_threshold and not (isinstance(drafter, BlockDrafter) and drafter.head.config.confidence):
        raise HeadError(
            f"the confidence threshold {confidence_threshold:g} needs a head with a confidence head, which "
            f"{head} has not (DSpark heads have one); leave it out"
        )
    return drafter


def _named_drafter(name: str, target: Target, shared_noise: bool, confidence_threshold: float) -> Drafter:
    if name == "off":
        return Off()
    if name == "random":
        return Random(seed=0, vocab=target.config.vocab_size, depth=_STUB_DEPTH, width=3)
    if name == "echo":
        return Echo(target, depth=_STUB_DEPTH)
    if name == "decoy":
        return Decoy(target, depth=_STUB_DEPTH, width=2)
    folder = find_head(name, target.name, NAMES)
    if folder is None:
        return Off()
    return folder_drafter(
        folder, target, shared_noise=shared_noise, confidence_threshold=confidence_threshold
    )


def find_head(name: str, target_name: str, valid: Many[str] = PACKAGED) -> Path | None:
    """The folder of a head: for "auto" and "default" that of the head packaged for the target, None if there
    is none; else `name` itself.

    valid: names that the error lists.
    Raises HeadError if there is no such folder.
    """
    if name in PACKAGED:
        return packaged_head(target_name)
    names, shown = f"valid: {', '.join(valid)}, or the folder of a head", brief(name, LONGEST_NAME)
    if not name:  # as a path it would be the current folder
        raise HeadError(f"the name of the head is empty; {names}")
    folder = user_path(name)
    try:
        kind = path_kind(folder)
    except OSError as error:
        raise HeadError(f"head {shown} cannot be looked up ({error.strerror}); {names}") from error
    if kind != "folder":
        raise HeadError(f"head {shown} {'was not found' if kind is None else 'is no folder'}; {names}")
    return folder


def folder_drafter(
    folder: Path, target: Target, *, confidence_threshold: float = 0.0, shared_noise: bool = True
) -> Drafter:
    """The drafter of a head's folder, of any family.

    confidence_threshold: of a DSpark head, see `BlockDrafter`; other heads ignore it.
    shared_noise: draft with the target's own noise in view, see `jetspec.draft.shared_noise`.

    Raises HeadError if the head cannot be read or belongs to another target.
    """
    kind = head_kind(folder)
    drafter: BlockDrafter | SequentialDrafter
    if kind == "eagle3":
        drafter = eagle3_drafter(load_eagle3(folder), target)
    elif kind == "mtp":
        drafter = mtp_drafter(load_mtp(folder), target)
    else:
        drafter = BlockDrafter(load_head(folder), target, confidence_threshold=confidence_threshold)
    drafter.shared_noise = shared_noise
    drafter.folder = folder
    return drafter


def head_kind(folder: Path) -> str:
    """Which layout a head's folder is in: "eagle3", "mtp", or "block" (JetSpec, DFlash, DSpark), which also
    stands for a folder that cannot be read: its loader says what is wrong.
    """
    try:
        values: Any = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return "block"
    if not isinstance(values, dict) or "dflash_config" in values or "markov_rank" in values:
        return "block"
    jet = values.get("jet")
    names = values.get("architectures")
    stated = jet.get("head") if isinstance(jet, dict) else None
    if stated == "mtp":
        return "mtp"
    eagle = isinstance(names, list) and any("eagle3" in str(name).lower() for name in names)
    if stated == "eagle3" or eagle or "draft_vocab_size" in values or "eagle_config" in values:
        return "eagle3"
    return "block"


def head_family(folder: Path) -> str:
    """The family of the head in a folder: jetspec, dflash, dspark, eagle3 or mtp. Raises HeadError."""
    kind = head_kind(folder)
    return HeadConfig.from_dict(read_folder(folder)[0]).method if kind == "block" else kind


def packaged_head(target_name: str) -> Path | None:
    """The folder of the head that ships with jetspec for a target, or None."""
    if not target_name.replace("-", "").replace(".", "").replace("_", "").isalnum():
        return None
    folder = Path(str(resources.files("jetspec"))) / "heads" / target_name
    return folder if (folder / "config.json").is_file() else None
