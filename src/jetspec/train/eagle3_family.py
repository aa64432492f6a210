"""EAGLE-3 heads as a family: options, published defaults, and the untrained head."""

from __future__ import annotations

from dataclasses import dataclass, replace

from jetspec.config import check_least
from jetspec.draft.eagle3 import check_fits as check_head
from jetspec.draft.eagle3_format import DEPTH, Eagle3Config, Eagle3Head, default_eagle3_taps
from jetspec.errors import HeadError, OptionError
from jetspec.target.loading import read_model
from jetspec.target.target import Target
from jetspec.train.block_family import check_widths, draft_size
from jetspec.train.corpus import Corpus
from jetspec.train.eagle3 import LM_HEAD, Eagle3Method, Eagle3Module, initialise_eagle3
from jetspec.train.families import Family
from jetspec.train.from_head import copy_weights
from jetspec.train.mtp import decay_of
from jetspec.train.weighting import LossOptions


@dataclass(frozen=True)
class Eagle3Options:
    """Shape of an EAGLE-3 head, and how it is unrolled in training.

    taps          target layers whose outputs it reads; none given: 1, L // 2 - 1 and L - 4 (the states that
                  enter layers 2, L // 2 and L - 3)
    vocab         size of its vocabulary: the most frequent ids of the answers; 0 = all
    steps         steps of the training-time test; step k is weighted 0.8^(k-1) by the published loss
    depth         deepest node that it drafts; it may go beyond the steps it was trained on
    train_output  train an output matrix of its own, as published, or draft with the target's rows
    warm          start from the target's last layer
    """

    taps: tuple[int, ...] = ()
    vocab: int = 8192
    steps: int = 5
    depth: int = DEPTH
    train_output: bool = True
    warm: bool = True

    def __post_init__(self) -> None:
        check_least(1, steps=self.steps, depth=self.depth)
        check_least(0, vocab=self.vocab)


def check_fits(target: Target, options: Eagle3Options) -> None:
    """Refuse taps that this target cannot have. Raises OptionError."""
    last = max(0, target.config.num_layers - 2)
    taps = options.taps
    if taps and not (list(taps) == sorted(set(taps)) and taps[0] >= 0 and taps[-1] <= last):
        raise OptionError(
            f"taps must be strictly increasing layers from 0 to {last} (the last layer of the target is not "
            f"allowed), got {list(taps)}"
        )


def taps_of(target: Target, options: Eagle3Options) -> tuple[int, ...]:
    """The layers that were asked for, or the published ones."""
    return options.taps or default_eagle3_taps(target.config.num_layers)


def build(
    target: Target, corpus: Corpus, options: Eagle3Options, loss: LossOptions, seed: int
) -> Eagle3Method:
    """An untrained head. Raises DataError if the answers were made by a target of another width."""
    check_widths(corpus, len(corpus.taps), target)
    vocab = corpus.frequent_ids(draft_size(target, options.vocab), target.config.vocab_size)
    try:
        config = Eagle3Config.for_target(
            target.config, draft_vocab=len(vocab), taps=corpus.taps, depth=options.depth
        )
    except HeadError as error:
        raise OptionError(str(error)) from None
    rows = target.transformer.output_matrix[vocab.to(target.device)].float()
    frozen = None if options.train_output else rows
    module = Eagle3Module(config, target.transformer.embedding.float(), frozen)
    weights = read_model(target.name).weights if options.warm else None
    initialise_eagle3(module, rows, weights, target_layers=target.config.num_layers, seed=seed)
    return Eagle3Method(module, target, vocab, loss, options.steps)


def adopt(head: Eagle3Head, options: Eagle3Options) -> Eagle3Options:
    """The options with the shape of a head."""
    config = head.config
    whole = config.draft_vocab == config.model.vocab_size
    return replace(
        options,
        taps=config.taps or (),
        vocab=0 if whole else config.draft_vocab,
        depth=config.depth,
        warm=True,
    )


def build_from(
    target: Target, corpus: Corpus, options: Eagle3Options, loss: LossOptions, head: Eagle3Head
) -> Eagle3Method:
    """A head to be trained further; an embedding of its own stays as it is. Raises DataError as `build`
    does.
    """
    config = replace(head.config, taps=head.config.resolve_taps(target.config.num_layers))
    check_widths(corpus, len(corpus.taps), target)
    device = target.device
    embedding = head.weights["embed_tokens.weight"] if config.own_embedding else target.transformer.embedding
    frozen = None if options.train_output else head.weights[LM_HEAD].to(device).float()
    module = Eagle3Module(config, embedding.to(device).float(), frozen)
    copy_weights(module, head.weights)
    return Eagle3Method(module, target, head.vocab, loss, options.steps)


FAMILIES = {
    "eagle3": Family(
        Eagle3Options,
        LossOptions(decay=decay_of(0.8)),
        check_fits,
        taps_of,
        build,
        adopt,
        check_head,
        build_from,
    ),
}
