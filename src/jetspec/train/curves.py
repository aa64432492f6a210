"""The curves of a run as a picture: loss by depth, and validation tau of chains and trees, against time."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from jetspec.errors import StorageError
from jetspec.train.log import read_log

_SMOOTH = 20  # most logged steps that a point of a loss curve averages over


def draw_curves(log: Path, picture: Path) -> bool:
    """Draw what `log` holds as a PNG; False, and no picture, where matplotlib is not installed or nothing has
    been logged yet.

    Raises StorageError if the picture cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    records = read_log(log)
    losses = [record for record in records if record.get("by_depth")]
    taus = [record for record in records if record.get("validation")]
    if not losses and not taus:
        return False
    figure = Figure(figsize=(11, 4.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    window = max(1, min(_SMOOTH, len(losses) // 3))
    for depth in range(len(losses[0]["by_depth"]) if losses else 0):
        values = [record["by_depth"][depth] for record in losses]
        left.plot(_minutes(losses), _smooth(values, window), label=f"depth {depth + 1}", linewidth=1.2)
    left.set(xlabel="minutes of training", ylabel="loss", title=_title(window))
    for name in taus[0]["validation"]["tau"] if taus else ():
        values = [record["validation"]["tau"].get(name) for record in taus]
        right.plot(_minutes(taus), values, marker=".", label=name)
    right.set(xlabel="minutes of training", ylabel="τ", title="validation: tokens per target forward")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        if axes.get_legend_handles_labels()[0]:
            axes.legend(fontsize=8)
    temporary = picture.with_name(picture.name + ".tmp")
    try:
        figure.savefig(temporary, format="png", dpi=120)
        os.replace(temporary, picture)
    except OSError as error:
        raise StorageError(f"{picture} cannot be written ({error}); free space, then run again") from None
    return True


def _minutes(records: list[dict[str, Any]]) -> list[float]:
    return [record["seconds"] / 60 for record in records]


def _title(window: int) -> str:
    return "loss by depth" if window == 1 else f"loss by depth, mean of the last {window} logged steps"


def _smooth(values: list[float], window: int) -> list[float]:
    """Means over the last points, fewer at the start."""
    windows = (values[max(0, n + 1 - window) : n + 1] for n in range(len(values)))
    return [sum(window) / len(window) for window in windows]
