"""Draft heads on disk: a folder with `config.json` and `model.safetensors`, read strictly and written
atomically.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec.draft.config import HeadConfig
from jetspec.errors import HeadError, StorageError

WEIGHTS = "model.safetensors"
DRAFT_VOCAB = "draft_vocab"  # optional int64 [Vd]: ids that the drafter proposes, ascending


@dataclass(frozen=True)
class Head:
    """A head as read: configuration, tensors under their public names, and the manifest of its training.

    vocab     int64 [Vd], the ids it may draft, or None for all
    manifest  target, tokenizer and template hashes, data, steps, commit: whatever the writer knew
    """

    config: HeadConfig
    weights: dict[str, Tensor]
    vocab: Tensor | None = None
    manifest: dict[str, Any] = field(default_factory=dict)


def load_head(folder: Path) -> Head:
    """Read a head folder.

    Raises HeadError naming what is wrong: no folder, a pickle instead of safetensors, a truncated file, a
    missing, unexpected or misshaped tensor, a value that is not finite.
    """
    if not folder.is_dir():
        raise HeadError(
            f"the head folder {folder} does not exist; give a folder with config.json and {WEIGHTS}"
        )
    try:
        values = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise HeadError(
            f"{folder / 'config.json'} cannot be read ({error}); give the folder of a draft head"
        ) from None
    config = HeadConfig.from_dict(values)
    tensors = _read_tensors(folder)
    vocab = tensors.pop(DRAFT_VOCAB, None)
    _check_tensors(config, tensors, folder)
    if vocab is not None:
        _check_vocab(vocab, config)
    manifest = (values.get("jet") or {}).get("manifest") or {}
    if not isinstance(manifest, dict) or not isinstance(manifest.get("target") or {}, dict):
        raise HeadError(f"{folder / 'config.json'}: jet.manifest and its target must be objects")
    return Head(config, tensors, vocab, manifest)


def save_head(folder: Path, head: Head, dtype: torch.dtype = torch.float16) -> None:
    """Write a head folder; each file appears whole or not at all. Raises StorageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {
            name: tensor.detach().to("cpu", dtype).contiguous() for name, tensor in head.weights.items()
        }
        if head.vocab is not None:
            tensors[DRAFT_VOCAB] = head.vocab.to("cpu", torch.int64).contiguous()
        save_file(tensors, folder / (WEIGHTS + ".tmp"), metadata={"format": "pt"})
        values = head.config.to_dict()
        values["dtype"] = str(dtype).removeprefix("torch.")
        values["jet"]["manifest"] = head.manifest
        (folder / "config.json.tmp").write_text(json.dumps(values, indent=2) + "\n", "utf-8")
        for name in (WEIGHTS, "config.json"):
            os.replace(folder / (name + ".tmp"), folder / name)
    except (OSError, SafetensorError) as error:
        raise StorageError(
            f"the head cannot be written to {folder} ({error}); free space or choose another folder"
        ) from None


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    path = folder / WEIGHTS
    if not path.is_file():
        pickles = [p.name for p in folder.iterdir() if p.suffix in (".bin", ".pt", ".pth", ".ckpt")]
        if pickles:
            raise HeadError(
                f"{folder} holds only {pickles[0]}, a pickle, which could run code when read; "
                f"convert it to {WEIGHTS} first"
            )
        raise HeadError(f"{folder} has no {WEIGHTS}; give the folder of a draft head")
    try:
        return load_file(path)
    except Exception as error:
        raise HeadError(f"{path} is truncated or not a safetensors file ({error}); fetch it again") from None


def _check_tensors(config: HeadConfig, tensors: dict[str, Tensor], folder: Path) -> None:
    shapes = config.shapes()
    missing = [name for name in shapes if name not in tensors]
    unexpected = [name for name in tensors if name not in shapes]
    if missing or unexpected:
        parts = [
            f"lacks {missing[0]}" if missing else "",
            f"holds an unexpected {unexpected[0]}" if unexpected else "",
        ]
        more = len(missing) + len(unexpected) - sum(bool(part) for part in parts)
        raise HeadError(
            f"{folder / WEIGHTS} {' and '.join(part for part in parts if part)}"
            f"{f' (and {more} more)' if more else ''}; config.json does not describe these weights"
        )
    for name, shape in shapes.items():
        found = tuple(tensors[name].shape)
        if found != shape:
            raise HeadError(f"{name} has shape {list(found)}, but config.json asks for {list(shape)}")
        if not bool(torch.isfinite(tensors[name]).all()):
            raise HeadError(
                f"{name} holds values that are not finite; the head is damaged, fetch or train it again"
            )


def _check_vocab(vocab: Tensor, config: HeadConfig) -> None:
    usable = vocab.dtype == torch.int64 and vocab.ndim == 1 and len(vocab) > 0
    if usable:
        usable = int(vocab[0]) >= 0 and int(vocab[-1]) < config.model.vocab_size
        usable = usable and bool((vocab[1:] > vocab[:-1]).all())
    if not usable:
        raise HeadError(f"{DRAFT_VOCAB} must be ascending ids inside 0..{config.model.vocab_size - 1}")
