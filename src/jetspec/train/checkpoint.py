"""Training state on disk: weights and optimiser moments as safetensors, counters as JSON; written whole or
not at all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from jetspec.errors import DataError, StorageError
from jetspec.storage import follow_umask
from jetspec.train.data import Batch
from jetspec.train.distributed import shard_like, whole_tensor

NAME = "checkpoint"
MOMENTS = ("step", "exp_avg", "exp_avg_sq", "momentum")  # what the optimisers keep per tensor


def save_checkpoint(
    folder: Path,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    *,
    write: bool = True,
) -> None:
    """Write weights, moments and `state`. One file holds all, so weights and counters can never be of
    different steps.

    write: False in all processes but the first, which still take part, since each has its shards.
    """
    tensors: dict[str, Tensor] = {}

    def take(key: str, tensor: Tensor) -> None:
        whole = whole_tensor(tensor.detach())
        if write:
            tensors[key] = whole.cpu().contiguous()

    for name, tensor in module.named_parameters():
        take(f"weight.{name}", tensor)
        for key, value in optimizer.state.get(tensor, {}).items():
            take(f"optimizer.{key}.{name}", torch.as_tensor(value))
    if not write:
        return
    path = folder / f"{NAME}.safetensors"
    temporary = path.with_suffix(".tmp")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, temporary, {"state": json.dumps(state)})
        follow_umask(temporary)
        with temporary.open("rb") as file:
            os.fsync(file.fileno())  # or a machine that loses power may keep the new name without the data
        os.replace(temporary, path)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the checkpoint cannot be written to {folder} ({error}); free space, then run again"
        ) from None


def save_batch(
    folder: Path, step: int, batches: Many[Batch], found: dict[str, float], process: int = 0
) -> Path:
    """Keep the batch of a step that failed: which answers, which anchors, and their tokens. Each process
    keeps its share.

    The file holds `tokens`, `lengths`, `prompt_lens`, `anchors` and `weight` of every part (part.0.tokens,
    ..), and in its metadata the shard and row where each answer's features lie. Raises StorageError.
    """
    names = ("tokens", "lengths", "prompt_lens", "anchors", "weight")
    tensors = {
        f"part.{n}.{name}": getattr(batch, name).detach().cpu().contiguous()
        for n, batch in enumerate(batches)
        for name in names
    }
    answers = [
        [{"shard": f"{e.path.parent.name}/{e.path.name}", "row": e.start} for e in batch.entries]
        for batch in batches
    ]
    path = folder / f"failed-step-{step}{f'-process-{process}' if process else ''}.safetensors"
    record = {"step": step, **{key: str(value) for key, value in found.items()}, "answers": answers}
    try:
        save_file(tensors, path, {"batch": json.dumps(record)})
        follow_umask(path)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"step {step} failed ({found}), and its batch cannot be written to {folder} ({error})"
        ) from None
    return path


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
            tensor.copy_(shard_like(tensors[f"weight.{name}"], tensor))
            keys = [key for key in MOMENTS if f"optimizer.{key}.{name}" in tensors]
            if keys:
                moments = {key: tensors[f"optimizer.{key}.{name}"] for key in keys}
                # AdamW keeps its step count beside the moments; fused CUDA kernels want it on the device.
                optimizer.state[tensor] = {
                    key: shard_like(value, tensor) if value.ndim else value.to(tensor.device)
                    for key, value in moments.items()
                }
    return state
