"""Draft heads on disk: a folder with `config.json` and `model.safetensors`, read strictly and written
atomically.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.draft.config import HeadConfig
from jetspec.draft.head_files import WEIGHTS, check_tensors, manifest_of, read_folder, write_folder
from jetspec.draft.public_format import FORMAT_VERSION
from jetspec.errors import HeadError

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
        fault = f"{folder} is no folder" if folder.exists() else f"the head folder {folder} does not exist"
        raise HeadError(f"{fault}; give a folder with config.json and {WEIGHTS}")
    values, tensors = read_folder(folder)
    config = HeadConfig.from_dict(values)
    vocab = tensors.pop(DRAFT_VOCAB, None)
    check_tensors({**config.shapes(), **config.copied_shapes()}, tensors, folder)
    if vocab is not None:
        _check_vocab(vocab, config)
    return Head(config, tensors, vocab, manifest_of(values, folder, FORMAT_VERSION))


def save_head(folder: Path, head: Head, dtype: torch.dtype | None = torch.float16) -> None:
    """Write a head folder in its layout; each file appears whole or not at all. Raises StorageError.

    dtype: of the tensors; None keeps each as it is.
    """
    tensors = dict(head.weights)
    if head.vocab is not None:
        tensors[DRAFT_VOCAB] = head.vocab.to(torch.int64)
    write_folder(folder, head.config.to_dict(), tensors, head.manifest, dtype)


def _check_vocab(vocab: Tensor, config: HeadConfig) -> None:
    usable = vocab.dtype == torch.int64 and vocab.ndim == 1 and len(vocab) > 0
    if usable:
        usable = int(vocab[0]) >= 0 and int(vocab[-1]) < config.model.vocab_size
        usable = usable and bool((vocab[1:] > vocab[:-1]).all())
    if not usable:
        raise HeadError(f"{DRAFT_VOCAB} must be ascending ids inside 0..{config.model.vocab_size - 1}")
