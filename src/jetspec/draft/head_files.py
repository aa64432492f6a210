"""Reading and writing a head's folder, `config.json` and `model.safetensors`, for families with a layout of
their own.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec.draft.config_keys import whole
from jetspec.errors import HeadError, ModelError, StorageError
from jetspec.storage import follow_umask
from jetspec.target.config import ModelConfig

WEIGHTS = "model.safetensors"
FORMAT_VERSION = 1
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_IDS = ("d2t", "t2d")  # of EAGLE-3: offsets of ids, and which ids are drafted


def read_folder(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """`config.json` and all tensors. Raises HeadError if a file is missing, damaged or a pickle."""
    path = folder / "config.json"
    try:
        values = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise HeadError(_no_config(folder)) from None
    except (OSError, ValueError, RecursionError) as error:
        raise HeadError(f"{path} cannot be read ({error}); give the folder of a draft head") from None
    if not isinstance(values, dict):
        raise HeadError(f"{path} holds no object; give the folder of a draft head")
    weights = folder / WEIGHTS
    if not weights.is_file():
        pickles = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if pickles:
            raise HeadError(
                f"{folder} holds only {pickles[0]}, a pickle, which could run code when read; "
                f"convert it to {WEIGHTS} first"
            )
        raise HeadError(f"{folder} has no {WEIGHTS}; give the folder of a draft head")
    try:
        return values, load_file(weights)
    except Exception as error:
        raise HeadError(
            f"{weights} is truncated or not a safetensors file ({error}); fetch it again"
        ) from None


def _no_config(folder: Path) -> str:
    """Of a folder that is none of a head; the one of a training is what is given most often instead."""
    inner = folder / "head"
    if (inner / "config.json").is_file():
        return f"{folder} is the folder of a training, not of a head; give its head: {inner}"
    return f"{folder} has no config.json; give the folder of a draft head (a training puts it into RUN/head)"


def check_tensors(shapes: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Raise HeadError, naming the tensor that is missing, unexpected, misshaped, quantised or not finite."""
    missing = [name for name in shapes if name not in tensors]
    unexpected = [name for name in tensors if name not in shapes]
    if missing or unexpected:
        parts = [f"lacks {missing[0]}"] if missing else []
        parts += [f"holds an unexpected {unexpected[0]}"] if unexpected else []
        more = len(missing) + len(unexpected) - len(parts)
        raise HeadError(
            f"{folder / WEIGHTS} {' and '.join(parts)}{f' (and {more} more)' if more else ''}; "
            "config.json does not describe these weights"
        )
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            raise HeadError(f"{name} has shape {list(found)}, but config.json asks for {list(shape)}")
        dtype = tensors[name].dtype
        if dtype not in _FLOATS and (name not in _IDS or dtype.is_floating_point):
            raise HeadError(
                f"{name} in {folder / WEIGHTS} is stored as {str(dtype).removeprefix('torch.')}, which "
                "cannot be run; valid: float32, bfloat16, float16, float64"
            )
        if not bool(torch.isfinite(tensors[name]).all()):
            raise HeadError(
                f"{name} holds values that are not finite; the head is damaged, fetch or train it again"
            )


def write_folder(
    folder: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    manifest: Mapping[str, Any],
    dtype: torch.dtype | None,
) -> None:
    """Write both files, each of which appears whole or not at all. Integer and bool tensors keep their type,
    the others become `dtype`, or stay as they are with None. Raises StorageError.
    """
    written = {
        name: tensor.detach()
        .to("cpu", dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in tensors.items()
    }
    kinds = {tensor.dtype for tensor in written.values() if tensor.is_floating_point()}
    record = {**values, "dtype": str(max(kinds, key=str)).removeprefix("torch.")}
    record["jet"] = {**values["jet"], "manifest": dict(manifest)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        save_file(written, folder / (WEIGHTS + ".tmp"), metadata={"format": "pt"})
        follow_umask(folder / (WEIGHTS + ".tmp"))
        (folder / "config.json.tmp").write_text(json.dumps(record, indent=2) + "\n", "utf-8")
        for name in (WEIGHTS, "config.json"):
            os.replace(folder / (name + ".tmp"), folder / name)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the head cannot be written to {folder} ({error}); free space or choose another folder"
        ) from None


def own_values(head: str, **more: Any) -> dict[str, Any]:
    """The object `jet` of a `config.json`: what the public layout cannot say."""
    return {"format_version": FORMAT_VERSION, "head": head, **more}


def manifest_of(values: Mapping[str, Any], folder: Path, newest: int = FORMAT_VERSION) -> dict[str, Any]:
    """The manifest of a head's training, {} if there is none. Raises HeadError for a newer format."""
    jet = values.get("jet") or {}
    if not isinstance(jet, Mapping):
        raise HeadError(f"{folder / 'config.json'}: jet is {jet!r}; valid: an object")
    if whole("jet.format_version", jet.get("format_version", newest)) > newest:
        raise HeadError(
            f"the head was written in format {jet['format_version']}, this version reads up to "
            f"{newest}; upgrade jetspec"
        )
    manifest = jet.get("manifest") or {}
    if not isinstance(manifest, dict) or not isinstance(manifest.get("target") or {}, dict):
        raise HeadError(f"{folder / 'config.json'}: jet.manifest and its target must be objects")
    return manifest


def model_of(values: Mapping[str, Any], family: str, what: str) -> ModelConfig:
    """The shape of a head's layers. Raises HeadError if they are of another family or cannot be computed."""
    found = values.get("model_type")
    if found != family:
        raise HeadError(f"config.json: model_type is {found!r}; valid for {what}: {family!r}")
    try:
        return ModelConfig.from_dict(values)
    except ModelError as error:
        raise HeadError(f"the head's {error}") from None
