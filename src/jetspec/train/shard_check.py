"""Whether a shard of features holds what it says: a broken one would train silently on the wrong rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from torch import Tensor

from jetspec.errors import DataError
from jetspec.train.features import open_shard, shard_taps

_COLUMNS = ("lengths", "prompt_lens", "temperatures")


class ShardShape(NamedTuple):
    """The width H of a shard's states, and the largest token id in it (-1 without tokens)."""

    width: int
    largest_id: int


def check_shard(path: Path) -> ShardShape:
    """Check everything about a shard but the numbers of its taps and states, which are not read.

    Raises DataError naming the shard and what is wrong with it.
    """
    taps = shard_taps(path)
    with open_shard(path) as file:
        try:
            columns = [file.get_tensor(name) for name in _COLUMNS]
            tokens = file.get_tensor("tokens")
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in ("taps", "hidden")}
        except SafetensorError as error:
            raise _broken(path, error) from None
    wrong = _columns_fault(*columns) or _rows_fault(int(columns[0].sum()), tokens, shapes, len(taps))
    if wrong:
        raise _broken(path, wrong)
    return ShardShape(shapes["hidden"][1], int(tokens.max()) if len(tokens) else -1)


def _broken(path: Path, reason: object) -> DataError:
    return DataError(f"{path} is not a feature shard ({reason}); delete it and run again")


def _columns_fault(lengths: Tensor, prompt_lens: Tensor, temperatures: Tensor) -> str:
    if not lengths.shape == prompt_lens.shape == temperatures.shape or lengths.ndim != 1:
        return f"of its {' and '.join(_COLUMNS)} there are not equally many"
    if lengths.is_floating_point() or prompt_lens.is_floating_point():
        return "lengths are not whole numbers"
    if bool((prompt_lens < 1).any()):
        return "a prompt has no tokens"
    if bool((prompt_lens > lengths).any()):
        return "a prompt is longer than it is with its answer"
    if not bool((torch.isfinite(temperatures) & (temperatures >= 0)).all()):
        return "a temperature is not a number of at least 0"
    return ""


def _rows_fault(rows: int, tokens: Tensor, shapes: dict[str, Any], taps: int) -> str:
    if tokens.ndim != 1 or tokens.is_floating_point() or any(len(shape) != 2 for shape in shapes.values()):
        return "tokens, taps or hidden have another shape than rows"
    for name, found in {"tokens": len(tokens), **{name: shape[0] for name, shape in shapes.items()}}.items():
        if found != rows:
            return f"it has {found} rows of {name}, and its lengths say {rows}"
    if shapes["taps"][1] != taps * shapes["hidden"][1]:
        return f"taps are {shapes['taps'][1]} wide, not {taps} times {shapes['hidden'][1]}"
    return "a token id is negative" if rows and int(tokens.min()) < 0 else ""
