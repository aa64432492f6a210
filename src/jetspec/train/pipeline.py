"""From a model and a prompt file to a head folder: answers with features, then training. Every stage
resumes.
"""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jetspec.draft.config import HeadConfig
from jetspec.errors import DataError, OptionError, StorageError
from jetspec.target.loading import read_model
from jetspec.target.target import Target
from jetspec.train.checkpoint import read_state
from jetspec.train.data import Corpus
from jetspec.train.loop import LoopOptions, Report, train
from jetspec.train.model import HeadModule, initialise
from jetspec.train.validate import unigram_coverage


@dataclass(frozen=True)
class HeadOptions:
    """Shape of the head to train.

    layers, block_size   draft layers, and slots per block (root included)
    vocab                size of the draft vocabulary: the most frequent ids of the answers; 0 = all
    rank                 of the path scorer; 0 = none (the published head)
    plain                leave out the direct input and the slot embedding, as the published head does
    causal               causal slots (JetSpec) or bidirectional ones (DFlash)
    warm                 start from the target's last layers
    """

    layers: int = 2
    block_size: int = 8
    vocab: int = 8192
    rank: int = 64
    plain: bool = False
    causal: bool = True
    warm: bool = True

    def __post_init__(self) -> None:
        for name, low in (("layers", 1), ("block_size", 2), ("vocab", 0), ("rank", 0)):
            if getattr(self, name) < low:
                raise OptionError(f"{name} must be at least {low}, got {getattr(self, name)}")

    def check_fits(self, target: Target) -> None:
        """Refuse what this target cannot have, before hours of work. Raises OptionError."""
        width = target.config.hidden_size
        if self.rank > width:
            raise OptionError(f"rank must be at most {width}, the target's hidden size, got {self.rank}")


def train_head(
    target: Target,
    answers: Many[Path],
    folder: Path,
    head: HeadOptions,
    loop: LoopOptions,
    *,
    products: str = "auto",
    on_report: Callable[[Report], None] = lambda report: None,
) -> Path:
    """Train a head for `target` on folders of its answers; returns the head's folder, `folder/head`.

    products: arithmetic of matrix products: "float32", "bfloat16" (float32 sums), or "auto", which takes
    bfloat16 where the processor has instructions for it.

    Raises DataError if the answers are unusable; OptionError for `products` and for a rank above the hidden
    size.
    """
    chosen = resolve_products(products)
    head.check_fits(target)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # now, and not at the first checkpoint
    except OSError as error:
        raise StorageError(f"the run cannot be kept in {folder} ({error}); choose another folder") from None
    corpus = Corpus(answers, shards=(read_state(folder) or {}).get("shards"))
    config = HeadConfig.for_target(
        target.config,
        layers=head.layers,
        block_size=head.block_size,
        taps=corpus.taps,
        mask_token_id=mask_token(target),
        causal=head.causal,
        direct=not head.plain,
        slot_embedding=not head.plain,
        scorer="gated" if head.rank else "none",
        rank=head.rank,
    )
    _check_widths(corpus, config, target.name)
    module = HeadModule(config, target.transformer.embedding.float())
    weights = read_model(target.name).weights if head.warm else None
    initialise(module, weights, seed=loop.seed, tap_scale=_tap_scale(corpus))
    size = head.vocab if 0 < head.vocab < target.config.vocab_size else target.config.vocab_size
    vocab = corpus.frequent_ids(size, target.config.vocab_size)
    output = target.transformer.output_matrix[vocab].float()
    manifest = {
        **provenance(target, corpus, head, chosen),
        "vocabulary_coverage": round(unigram_coverage(corpus, vocab), 5),
    }
    with _products(chosen):
        return train(module, corpus, vocab, output, folder, loop, manifest, on_report)


def _check_widths(corpus: Corpus, config: HeadConfig, name: str) -> None:
    """Refuse answers of another target before a matrix product fails on them."""
    entry, hidden = corpus.training[0], config.model.hidden_size
    widths = corpus.taps_of(entry).shape[1], corpus.hidden_of(entry).shape[1]
    if widths != (len(config.taps) * hidden, hidden):
        raise DataError(
            f"the answers were made by a target of width {widths[1]}, but {name} has {hidden}; "
            "answer the prompts with this target"
        )


def resolve_products(products: str) -> str:
    """The arithmetic that `products` asks for on this machine."""
    if products not in ("auto", "float32", "bfloat16"):
        raise OptionError(f"products {products!r} is unknown; valid: auto, float32, bfloat16")
    if products == "auto":
        return "bfloat16" if torch.cpu._is_avx512_bf16_supported() else "float32"
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


def mask_token(target: Target) -> int:
    """An id that text can never produce: the last added special token that does not end a text; else the
    last id.

    The head adds its own slot embedding to it, so which one it is hardly matters.
    """
    specials = [n for n in target.tokenizer.special_ids if n < target.config.vocab_size]
    free = [n for n in specials if n not in target.tokenizer.eos_ids]
    return max(free) if free else target.config.vocab_size - 1


def provenance(target: Target, corpus: Corpus, head: HeadOptions, products: str) -> dict[str, Any]:
    """What a reader of the head needs to know about how it was made."""
    return {
        "target": {
            "name": target.name if not Path(target.name).exists() else Path(target.name).name,
            "tokenizer_hash": target.tokenizer.hash,
            "template_hash": target.tokenizer.template_hash,
        },
        "data": {
            "answers": len(corpus.training) + len(corpus.held_out),
            "answer_tokens": corpus.answer_tokens,
            "held_out": len(corpus.held_out),
        },
        "loss": "forward KL, temperature 1, over the draft vocabulary",
        "head_options": asdict(head),
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


def _tap_scale(corpus: Corpus) -> float:
    """Root mean square of the last tap over one answer, its first rows (attention sinks) left out."""
    taps = corpus.taps_of(corpus.training[0])
    width = taps.shape[1] // len(corpus.taps)
    rows = taps[4:] if taps.shape[0] > 5 else taps  # the last row is empty
    return float(rows[:, -width:].pow(2).mean().sqrt())
