"""JetSpec, DFlash and DSpark heads as families: options, published defaults, and the untrained head."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from jetspec.draft.checkpoint import Head
from jetspec.draft.config import ALIGNMENTS, SCORERS, HeadConfig
from jetspec.draft.jetspec import check_fits as check_head_fits
from jetspec.errors import DataError, HeadError, OptionError
from jetspec.target.loading import read_model
from jetspec.target.target import Target
from jetspec.train.block import BlockMethod
from jetspec.train.corpus import Corpus
from jetspec.train.families import Family
from jetspec.train.from_head import copy_weights
from jetspec.train.model import HeadModule, initialise, silence
from jetspec.train.weighting import LossOptions


@dataclass(frozen=True)
class BlockOptions:
    """Shape of a block head. The defaults are our own small JetSpec head.

    layers, block_size   draft layers, and slots per block (root included)
    taps                 target layers that it reads; none given: five, spread by DFlash's rule
    vocab                size of the draft vocabulary: the most frequent ids of the answers; 0 = all
    scorer, rank         path scorer: "none", "vanilla", "gated" or "rnn", and its rank
    plain                leave out the direct input and the slot embedding, as published heads do
    causal               slots see only earlier ones (JetSpec) or their whole block (DFlash, DSpark)
    alignment            "in_place", or "shifted", where the root's slot drafts, too (DSpark)
    confidence           whether there is a confidence head
    mask_token           id whose embedding fills the open slots; none given: one that text cannot hold
    warm                 start from the target's last layers
    new_vocab            a head that is trained further gets a draft vocabulary of `vocab` ids chosen anew,
                         from the answers that it is now trained on, instead of keeping its own
    reveal               share of the roots behind which the first slots (1 to all but one of them, at random)
                         hold the tokens that were really written and are not supervised: for a second pass
                         over drafted tokens. Causal heads in place only
    """

    layers: int = 2
    block_size: int = 8
    taps: tuple[int, ...] = ()
    vocab: int = 8192
    scorer: str = "gated"
    rank: int = 64
    plain: bool = False
    causal: bool = True
    alignment: str = "in_place"
    confidence: bool = False
    mask_token: int | None = None
    warm: bool = True
    new_vocab: bool = False
    reveal: float = 0.0
    grows: ClassVar[tuple[str, ...]] = ("layers",)  # what further training of a head may enlarge

    def __post_init__(self) -> None:
        lows = {"layers": 1, "block_size": 1 if self.alignment == "shifted" else 2, "vocab": 0, "rank": 0}
        for name, low in lows.items():
            if getattr(self, name) < low:
                raise OptionError(f"{name} must be at least {low}, got {getattr(self, name)}")
        for name, valid in (("scorer", SCORERS), ("alignment", ALIGNMENTS)):
            if getattr(self, name) not in valid:
                raise OptionError(f"{name} {getattr(self, name)!r} is unknown; valid: {', '.join(valid)}")
        if (self.rank > 0) != (self.scorer != "none"):
            raise OptionError(
                f"scorer {self.scorer!r} does not go with rank {self.rank}; give rank 0 with 'none' only"
            )
        if not 0 <= self.reveal <= 1:
            raise OptionError(f"reveal must be a number from 0 to 1, got {self.reveal}")
        if self.reveal and not (self.causal and self.alignment == "in_place" and self.block_size > 2):
            raise OptionError(
                f"reveal {self.reveal:g} needs a causal head with alignment 'in_place' and a block_size of "
                f"at least 3; got causal {str(self.causal).lower()}, alignment {self.alignment!r}, "
                f"block_size {self.block_size}; leave reveal at 0 for other heads"
            )


@dataclass(frozen=True)
class DFlashOptions(BlockOptions):
    """Shape of a DFlash head, as published: bidirectional, without a scorer."""

    scorer: str = "none"
    rank: int = 0
    plain: bool = True
    causal: bool = False


@dataclass(frozen=True)
class DSparkOptions(BlockOptions):
    """Shape of a DSpark head, as published: shifted, bidirectional, Markov head and confidence head."""

    block_size: int = 7
    scorer: str = "vanilla"
    plain: bool = True
    causal: bool = False
    alignment: str = "shifted"
    confidence: bool = True


def check_fits(target: Target, options: BlockOptions) -> None:
    """Refuse what this target cannot have. Raises OptionError."""
    width, vocab, longest = target.config.hidden_size, target.config.vocab_size, target.config.max_positions
    if options.block_size > longest:
        raise OptionError(
            f"block_size must be at most {longest}, the target's longest context, got {options.block_size}"
        )
    if options.rank > width:
        raise OptionError(f"rank must be at most {width}, the target's hidden size, got {options.rank}")
    if options.mask_token is not None and not 0 <= options.mask_token < vocab:
        raise OptionError(f"mask_token must be an id from 0 to {vocab - 1}, got {options.mask_token}")
    last = max(0, target.config.num_layers - 2)
    if options.taps and not (list(options.taps) == sorted(set(options.taps)) and options.taps[-1] <= last):
        raise OptionError(
            f"taps must be strictly increasing layers from 0 to {last} (the last layer of the target is not "
            f"allowed), got {list(options.taps)}"
        )


def taps_of(target: Target, options: BlockOptions) -> tuple[int, ...] | None:
    """The layers that were asked for, or all that the answers hold."""
    return options.taps or None


def build(target: Target, corpus: Corpus, options: BlockOptions, loss: LossOptions, seed: int) -> BlockMethod:
    """An untrained head. Raises DataError if the answers were made by a target of another width."""
    config = HeadConfig.for_target(
        target.config,
        layers=options.layers,
        block_size=options.block_size,
        taps=corpus.taps,
        mask_token_id=mask_token(target) if options.mask_token is None else options.mask_token,
        causal=options.causal,
        direct=not options.plain,
        slot_embedding=not options.plain,
        scorer=options.scorer,
        rank=options.rank,
        alignment=options.alignment,
        confidence=options.confidence,
        confidence_with_markov=options.scorer != "none",
        layout="specforge" if options.alignment == "shifted" else "dflash",
    )
    check_widths(corpus, len(config.taps), target)
    module = HeadModule(config, target.transformer.embedding.float())
    weights = read_model(target.name).weights if options.warm else None
    initialise(module, weights, seed=seed, tap_scale=tap_scale(corpus))
    vocab = corpus.frequent_ids(draft_size(target, options.vocab), target.config.vocab_size)
    return BlockMethod(module, target, vocab, loss, options.reveal)


def adopt(head: Head, options: BlockOptions) -> BlockOptions:
    """The options with the shape of a head."""
    config = head.config
    return replace(
        options,
        layers=config.model.num_layers,
        block_size=config.block_size,
        taps=config.taps,
        vocab=options.vocab if options.new_vocab else 0 if head.vocab is None else len(head.vocab),
        scorer=config.scorer,
        rank=config.rank,
        plain=not (config.direct or config.slot_embedding),
        causal=config.causal,
        alignment=config.alignment,
        confidence=config.confidence,
        mask_token=config.mask_token_id,
        warm=True,
    )


def check_head(head: Head, target: Target) -> None:
    """Refuse a head of another target, and one that training cannot compute. Raises HeadError."""
    check_head_fits(head, target)
    if any(window is not None for window in head.config.model.windows):
        raise HeadError(
            "the head's layers have sliding windows, which training does not compute; give a head without"
        )
    ends = {
        "embed_tokens.weight": target.transformer.embedding,
        "lm_head.weight": target.transformer.output_matrix,
    }
    for name in head.config.copied_shapes():
        if not _like(head.weights[name], ends[name]):
            raise HeadError(
                f"{name} of the head is no copy of the target's; such a head can draft but not be trained "
                "further, because training uses the target's own"
            )


def _like(copy: Tensor, own: Tensor) -> bool:
    """Whether a tensor is another one up to rounding to half precision, which moves it by 0.2 % at most."""
    size = distance = 0.0
    for a, b in zip(copy.split(8192), own.split(8192), strict=True):  # by rows: these are the largest tensors
        reference = b.float()
        distance += float((a.to(b.device).float() - reference).pow(2).sum())
        size += float(reference.pow(2).sum())
    return distance <= (0.01**2) * size


def build_from(
    target: Target, corpus: Corpus, options: BlockOptions, loss: LossOptions, head: Head
) -> BlockMethod:
    """A head to be trained further. A DeepSpec folder's copies of the target's ends are left behind, so it is
    written in SpecForge's layout, which has none. Layers beyond the head's own change nothing at first.
    Raises DataError as `build` does.
    """
    config = head.config
    if config.layout == "deepspec":
        config = replace(config, layout="specforge")
    own = config.model.num_layers
    config = config.with_layers(options.layers)
    check_widths(corpus, len(config.taps), target)
    module = HeadModule(config, target.transformer.embedding.float())
    if options.layers > own:
        initialise(module, read_model(target.name).weights, tap_scale=tap_scale(corpus))
        silence(module, own)
    copy_weights(module, head.weights)
    if options.new_vocab:  # the scorer's tables have rows for all ids, and those not drafted so far are zero
        vocab = corpus.frequent_ids(draft_size(target, options.vocab), target.config.vocab_size)
    else:
        vocab = head.vocab if head.vocab is not None else torch.arange(target.config.vocab_size)
    return BlockMethod(module, target, vocab, loss, options.reveal)


def check_widths(corpus: Corpus, taps: int, target: Target) -> None:
    """Refuse answers of another target before a matrix product fails on them. Raises DataError."""
    entry, hidden = corpus.training[0], target.config.hidden_size
    widths = corpus.taps_of(entry).shape[1], corpus.hidden_of(entry).shape[1]
    if widths != (taps * hidden, hidden):
        raise DataError(
            f"the answers were made by a target of width {widths[1]}, but {target.name} has {hidden}; "
            "answer the prompts with this target"
        )


def draft_size(target: Target, vocab: int) -> int:
    """Size of the draft vocabulary for an option where 0 means all."""
    return vocab if 0 < vocab < target.config.vocab_size else target.config.vocab_size


def mask_token(target: Target) -> int:
    """An id that text can never produce: the last added special token that does not end a text; else the
    last id.

    A head with a slot embedding adds it, so which one it is hardly matters there.
    """
    specials = [n for n in target.tokenizer.special_ids if n < target.config.vocab_size]
    free = [n for n in specials if n not in target.tokenizer.eos_ids]
    return max(free) if free else target.config.vocab_size - 1


def tap_scale(corpus: Corpus) -> float:
    """Root mean square of the last tap over one answer, its first rows (attention sinks) left out.

    Raises DataError if it is not finite: every weight that it scales would be NaN.
    """
    corpus.check_finite(corpus.training[:1])
    taps = corpus.taps_of(corpus.training[0])
    width = taps.shape[1] // len(corpus.taps)
    rows = taps[4:] if taps.shape[0] > 5 else taps  # the last row is empty
    return float(rows[:, -width:].pow(2).mean().sqrt())


_PARTS = (check_fits, taps_of, build, adopt, check_head, build_from)
FAMILIES = {
    "jetspec": Family(BlockOptions, LossOptions(), *_PARTS),
    "dflash": Family(DFlashOptions, LossOptions(kl=0.0, ce=1.0, decay=4.0), *_PARTS),
    "dspark": Family(
        DSparkOptions,
        LossOptions(kl=0.0, ce=0.1, l1=0.9, confidence=1.0, decay=4.0),
        *_PARTS,
    ),
}
