"""From a name to a drafter: the packaged head of a target, a head folder, or a stub."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from jetspec.draft.base import Drafter
from jetspec.draft.checkpoint import load_head
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.stubs import Decoy, Echo, Off, Random
from jetspec.errors import HeadError
from jetspec.target.storage import user_path
from jetspec.target.target import Target

NAMES = ("auto", "off", "random", "echo", "decoy")
_STUB_DEPTH = 6


def load_drafter(head: str | Path, target: Target) -> Drafter:
    """The drafter that `head` names.

    head: "auto" (the head packaged for this target, or none if there is none), "off", a stub ("random",
    "echo", "decoy"), or the folder of a head.

    Raises HeadError if the name is unknown, or the head cannot be read or belongs to another target.
    """
    name = str(head)
    if name == "off":
        return Off()
    if name == "auto":
        folder = packaged_head(target.name)
        return Off() if folder is None else BlockDrafter(load_head(folder), target)
    if name == "random":
        return Random(seed=0, vocab=target.config.vocab_size, depth=_STUB_DEPTH, width=3)
    if name == "echo":
        return Echo(target, depth=_STUB_DEPTH)
    if name == "decoy":
        return Decoy(target, depth=_STUB_DEPTH, width=2)
    folder = user_path(name)
    if not folder.exists():
        raise HeadError(f"head {name!r} was not found; valid: {', '.join(NAMES)}, or the folder of a head")
    return BlockDrafter(load_head(folder), target)


def packaged_head(target_name: str) -> Path | None:
    """The folder of the head that ships with jetspec for a target, or None."""
    if not target_name.replace("-", "").replace(".", "").replace("_", "").isalnum():
        return None
    folder = Path(str(resources.files("jetspec"))) / "heads" / target_name
    return folder if (folder / "config.json").is_file() else None
