"""Whether a checkpoint belongs to the run that wants to go on from it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from jetspec.errors import DataError
from jetspec.train.loop_options import LoopOptions

# What may change on the way: how often to look and to save, and how long to train.
_FREE = ("validate", "checkpoint", "minutes", "steps", "epochs")


def check_same_run(
    folder: Path,
    state: Mapping[str, Any],
    options: LoopOptions,
    identity: Mapping[str, Any],
    products: str | None,
) -> None:
    """Raise DataError, naming what differs, unless the checkpoint `state` in `folder` is of a run with these
    options, this head and these answers (`identity`), and matrix products of this type.
    """
    before = state["options"]
    different = [
        f"{key} {before.get(key)}, not {value}"
        for key, value in json.loads(json.dumps(asdict(options))).items()
        if before.get(key) != value and not key.startswith(_FREE)
    ]
    if different:
        raise DataError(
            f"{folder} holds a run with other options ({'; '.join(different)}); give the same ones "
            "(--set training.NAME=VALUE), use another folder, or delete it"
        )
    if state.get("run", identity) != identity:
        raise DataError(
            f"{folder} holds a run with another head, draft vocabulary or other answers; "
            "use another folder or delete it"
        )
    kept = state.get("products")
    if None not in (kept, products) and kept != products:  # older runs did not keep them
        raise DataError(
            f"{folder} holds a run with products in {kept}, not {products}; give "
            f"--products {kept}, or use another folder"
        )
