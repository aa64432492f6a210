"""MTP heads as a family: options, published defaults, and the untrained head."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from jetspec.config import check_least
from jetspec.draft.mtp import check_fits as check_head
from jetspec.draft.mtp_format import DEPTH, ORDERS, MTPConfig, MTPHead
from jetspec.errors import OptionError
from jetspec.target.target import Target
from jetspec.train.block_family import check_widths, draft_size
from jetspec.train.corpus import Corpus
from jetspec.train.families import Family
from jetspec.train.from_head import copy_weights
from jetspec.train.mtp import MTPMethod, MTPModule, decay_of, initialise_mtp
from jetspec.train.weighting import LossOptions


@dataclass(frozen=True)
class MTPOptions:
    """Shape of an MTP head, and how it is unrolled in training.

    modules   one depth each; the last one serves all further depths
    vocab     size of the draft vocabulary: the most frequent ids of the answers; 0 = all
    steps     supervised depths; depth k is weighted 0.6^(k-1) by the published loss (FastMTP)
    depth     deepest node that it drafts
    order     input of the projection: "embedding_first" or "hidden_first"
    warm      start from a projection that passes the target's state on
    """

    modules: int = 1
    vocab: int = 8192
    steps: int = 3
    depth: int = DEPTH
    order: str = ORDERS[0]
    warm: bool = True

    def __post_init__(self) -> None:
        check_least(1, modules=self.modules, steps=self.steps, depth=self.depth)
        check_least(0, vocab=self.vocab)
        if self.order not in ORDERS:
            raise OptionError(f"order {self.order!r} is unknown; valid: {', '.join(ORDERS)}")
        if self.modules > min(self.steps, self.depth):
            raise OptionError(
                f"modules must be at most {min(self.steps, self.depth)}, the smaller of steps and depth, got "
                f"{self.modules}: others would not be trained or not be used"
            )


def check_fits(target: Target, options: MTPOptions) -> None:
    """Any target can have MTP modules: they are layers like its own."""


def taps_of(target: Target, options: MTPOptions) -> tuple[int, ...]:
    """None: an MTP head reads the target's last state."""
    return ()


def build(target: Target, corpus: Corpus, options: MTPOptions, loss: LossOptions, seed: int) -> MTPMethod:
    """An untrained head. Raises DataError if the answers were made by a target of another width."""
    check_widths(corpus, len(corpus.taps), target)
    config = MTPConfig.for_target(
        target.config, modules=options.modules, depth=options.depth, order=options.order
    )
    module = MTPModule(config, target.transformer.embedding.float())
    initialise_mtp(module, seed=seed, warm=options.warm)
    vocab = corpus.frequent_ids(draft_size(target, options.vocab), target.config.vocab_size)
    return MTPMethod(module, target, vocab, loss, options.steps)


def adopt(head: MTPHead, options: MTPOptions) -> MTPOptions:
    """The options with the shape of a head, and steps enough to train all of its modules."""
    config = head.config
    modules = config.model.num_layers
    return replace(
        options,
        modules=modules,
        vocab=0 if head.vocab is None else len(head.vocab),
        steps=max(options.steps, modules),
        depth=config.depth,
        order=config.order,
        warm=True,
    )


def build_from(
    target: Target, corpus: Corpus, options: MTPOptions, loss: LossOptions, head: MTPHead
) -> MTPMethod:
    """A head to be trained further. Raises DataError as `build` does."""
    check_widths(corpus, len(corpus.taps), target)
    module = MTPModule(head.config, target.transformer.embedding.float())
    copy_weights(module, head.weights)
    vocab = head.vocab if head.vocab is not None else torch.arange(target.config.vocab_size)
    return MTPMethod(module, target, vocab, loss, options.steps)


FAMILIES = {
    "mtp": Family(
        MTPOptions,
        LossOptions(kl=0.0, ce=1.0, decay=decay_of(0.6)),
        check_fits,
        taps_of,
        build,
        adopt,
        check_head,
        build_from,
    ),
}
