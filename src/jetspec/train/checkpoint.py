"""Training state on disk: weights and optimiser moments as safetensors, counters as JSON; written whole or
not at all.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from jetspec.errors import DataError, StorageError

NAME = "checkpoint"


def save_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]
) -> None:
    """Write weights, moments and `state`. One file holds all, so weights and counters can never be of
    different steps.
    """
    tensors = {f"weight.{name}": tensor.detach() for name, tensor in module.named_parameters()}
    for name, tensor in module.named_parameters():
        for key, value in optimizer.state.get(tensor, {}).items():
            tensors[f"optimizer.{key}.{name}"] = torch.as_tensor(value)
    path = folder / f"{NAME}.safetensors"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(
            {k: v.contiguous() for k, v in tensors.items()},
            path.with_suffix(".tmp"),
            {"state": json.dumps(state)},
        )
        os.replace(path.with_suffix(".tmp"), path)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the checkpoint cannot be written to {folder} ({error}); free space, then run again"
        ) from None


def read_state(folder: Path) -> dict[str, Any] | None:
    """The saved state alone; None if there is no checkpoint. Raises DataError if the file is damaged."""
    path = folder / f"{NAME}.safetensors"
    if not path.exists():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return dict(json.loads(file.metadata()["state"]))
    except Exception as error:
        raise DataError(f"{path} is damaged ({error}); delete it to start again") from None


def load_checkpoint(
    folder: Path, module: nn.Module, optimizer: torch.optim.Optimizer
) -> dict[str, Any] | None:
    """Restore weights and moments in place and return the saved state; None if there is no checkpoint.

    Raises DataError if the file is damaged or belongs to a head of another shape.
    """
    path = folder / f"{NAME}.safetensors"
    state = read_state(folder)
    if state is None:
        return None
    try:
        tensors = load_file(path)
    except Exception as error:
        raise DataError(f"{path} is damaged ({error}); delete it to start again") from None
    parameters = dict(module.named_parameters())
    wanted = {f"weight.{name}": tuple(tensor.shape) for name, tensor in parameters.items()}
    found = {name: tuple(tensor.shape) for name, tensor in tensors.items() if name.startswith("weight.")}
    if wanted != found:
        raise DataError(f"{path} is of a head of another shape; use another folder or delete it")
    with torch.no_grad():
        for name, tensor in parameters.items():
            tensor.copy_(tensors[f"weight.{name}"])
            keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"optimizer.{key}.{name}" in tensors]
            if keys:
                optimizer.state[tensor] = {key: tensors[f"optimizer.{key}.{name}"] for key in keys}
    return state
