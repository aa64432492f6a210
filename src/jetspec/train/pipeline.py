"""From a model and a prompt file to a head folder: answers with features, then training. Every stage
resumes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from jetspec.errors import OptionError, StorageError
from jetspec.target.target import Target
from jetspec.train.checkpoint import read_state
from jetspec.train.data import Corpus
from jetspec.train.distributed import ALONE, Processes
from jetspec.train.families import find_family
from jetspec.train.loop import Report, train
from jetspec.train.recipe import Settings
from jetspec.train.validate import unigram_coverage


def train_head(
    target: Target,
    answers: Many[Path],
    folder: Path,
    settings: Settings,
    *,
    on_report: Callable[[Report], None] = lambda report: None,
    processes: Processes = ALONE,
    pause: Callable[[], bool] | None = None,
    resident: bool = False,
) -> Path:
    """Train a head for `target` on folders of its answers; returns the head's folder, `folder/head`.

    Args:
        processes, pause: see `train`.
        resident: keep all features on the target's device, which must have room for them.

    Raises DataError if the answers are unusable, OptionError for what the target cannot have.
    """
    chosen = resolve_products(settings.products, target.device)
    family = find_family(settings.method)
    family.check(target, settings.head)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # now, and not at the first checkpoint
    except OSError as error:
        raise StorageError(f"the run cannot be kept in {folder} ({error}); choose another folder") from None
    corpus = Corpus(answers, shards=(read_state(folder) or {}).get("shards"))
    taps = family.taps(target, settings.head)
    if taps is not None:
        corpus = corpus.with_taps(taps)
    if resident:
        corpus = corpus.resident(target.device)
    method = family.build(target, corpus, settings.head, settings.loss, settings.loop.seed)
    manifest = provenance(target, corpus, settings, chosen)
    manifest["processes"] = processes.size
    vocab = getattr(method, "vocab", None)
    if vocab is not None:
        manifest["vocabulary_coverage"] = round(unigram_coverage(corpus, vocab), 5)
    # The CPU's instructions take float32 and round inside; CUDA's want bfloat16 tensors.
    mixed = torch.bfloat16 if chosen == "bfloat16" and target.device.type == "cuda" else None
    with _products(chosen):
        return train(
            method,
            corpus,
            folder,
            settings.loop,
            manifest,
            on_report,
            device=target.device,
            processes=processes,
            autocast=mixed,
            pause=pause,
        )


def resolve_products(products: str, device: torch.device | str = "cpu") -> str:
    """The arithmetic that `products` asks for on a device of this machine. Raises OptionError."""
    if products not in ("auto", "float32", "bfloat16"):
        raise OptionError(f"products {products!r} is unknown; valid: auto, float32, bfloat16")
    if products == "auto":
        on_gpu = torch.device(device).type == "cuda"
        return "bfloat16" if on_gpu or torch.cpu._is_avx512_bf16_supported() else "float32"
    return products


class _products:
    """Within the block, float32 matrix products may use bfloat16 instructions (sums stay float32)."""

    def __init__(self, products: str) -> None:
        self._wanted = "medium" if products == "bfloat16" else "highest"

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._wanted)

    def __exit__(self, *exception: object) -> None:
        torch.set_float32_matmul_precision(self._before)


def provenance(target: Target, corpus: Corpus, settings: Settings, products: str) -> dict[str, Any]:
    """What a reader of the head needs to know about how it was made."""
    return {
        "target": {
            "name": target.name if not Path(target.name).exists() else Path(target.name).name,
            "tokenizer_hash": target.tokenizer.hash,
            "template_hash": target.tokenizer.template_hash,
        },
        "method": settings.method,
        "data": {
            "answers": len(corpus.training) + len(corpus.held_out),
            "answer_tokens": corpus.answer_tokens,
            "held_out": len(corpus.held_out),
        },
        "loss": settings.loss.describe(),
        "head_options": json.loads(json.dumps(asdict(settings.head))),
        "products": products,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the code, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
