"""The block drafter: one forward of a small head drafts every depth of a tree.

One class for JetSpec (arXiv 2606.18394), DFlash (arXiv 2602.06036) and DSpark (arXiv 2607.05147) heads.
"""

from __future__ import annotations

import time
from collections.abc import Sequence as Many
from pathlib import Path

import torch
from torch import Tensor

from jetspec.draft.backbone import Backbone
from jetspec.draft.checkpoint import Head
from jetspec.draft.confidence import ConfidentScorer
from jetspec.draft.fit import check_fits_target
from jetspec.draft.path_scorer import Marginals, MarkovScorer, Scorer
from jetspec.draft.recurrent import RecurrentScorer
from jetspec.draft.shared_noise import NoiseWeights, SharedNoise
from jetspec.errors import HeadError
from jetspec.sequence import Sequence
from jetspec.target.target import Target
from jetspec.tree.proposal import Proposal


class BlockDrafter:
    """A block head on a target: causal or bidirectional, in place or shifted, with or without a path scorer.

    name          "jetspec", "dflash" or "dspark"
    default_grow  the builder that the family was published with: "best-first" or "chain". A best-first tree
                  over a DFlash head's marginals is DDTree (arXiv 2604.12989)
    shared_noise  whether requests above temperature 0 are drafted with the target's own noise in view; the
                  text is the same either way, see `jetspec.draft.shared_noise`

    Args:
        confidence_threshold: nodes below which the confidence head sees less than this chance of acceptance
            get no children, so a chain ends at its first doubtful depth; 0 drafts whole blocks. It has no
            effect on a head without a confidence head.

    Raises HeadError if the head was made for a target of another shape or its manifest is malformed,
    OptionError if the threshold is not in 0..1.
    """

    needs_hidden = False
    folder: Path | None = None  # where the head was read from

    def __init__(
        self, head: Head, target: Target, *, confidence_threshold: float = 0.0, shared_noise: bool = True
    ) -> None:
        check_fits(head, target)
        self.name = head.config.method
        self.default_grow = "best-first" if self.name == "jetspec" else "chain"
        self.head = head
        vocab = head.vocab if head.vocab is not None else torch.arange(target.config.vocab_size)
        vocab = vocab.to(target.device)
        self.backbone = Backbone(head, target.transformer, vocab)
        self.scorer = make_scorer(head, vocab, target.dtype, target.device, confidence_threshold)
        self.scorer_seconds = 0.0  # from logits to proposals, for profiles
        self.shared_noise = shared_noise
        weights, size = NoiseWeights.of(head.manifest), target.config.vocab_size
        self.noise = SharedNoise(vocab, head.config.depth, size, weights)

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the head reads."""
        return self.head.config.taps

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Newly committed rows of a sequence."""
        assert taps is not None
        self.backbone.observe(key, taps)

    @property
    def whole_depth(self) -> int | None:
        """Depth of a whole block, if fewer may be drafted: of a causal head, whose slots do not see later
        ones.
        """
        return self.head.config.depth if self.head.config.causal else None

    def propose(
        self, sequences: Many[Sequence], depth: int | None = None, *, shared: bool = True
    ) -> list[Proposal]:
        """One forward for the batch; one proposal per sequence, down to `depth` at most where there is a
        `whole_depth`: the same as that part of a whole one, for less time.

        shared: False leaves the noise out of this call, for rules that need the head's own law.
        """
        if self.whole_depth is None:
            depth = None
        roots = [s.root for s in sequences]
        hidden, logits = self.backbone.forward([s.id for s in sequences], roots, depth)
        start = time.perf_counter()
        draws = self.noise.draws(sequences, depth) if shared and self.shared_noise else None
        proposals = self.scorer.proposals(hidden, logits, roots, draws)
        self.scorer_seconds += time.perf_counter() - start
        return proposals

    def free(self, key: int) -> None:
        """Forget a sequence."""
        self.backbone.free(key)


def make_scorer(
    head: Head, vocab: Tensor, dtype: torch.dtype, device: torch.device, confidence_threshold: float = 0.0
) -> Scorer:
    """What turns the states and logits of a head's block into proposals."""
    scorer: Scorer
    if head.config.scorer == "none":
        scorer = Marginals(vocab)
    elif head.config.scorer == "rnn":
        scorer = RecurrentScorer(head, vocab, dtype, device)
    else:
        scorer = MarkovScorer(head, vocab, dtype, device)
    if head.config.confidence:
        scorer = ConfidentScorer(head, scorer, confidence_threshold, dtype, device)
    return scorer


def check_fits(head: Head, target: Target) -> None:
    """Refuse a head made for another target, naming what differs. Raises HeadError."""
    model = head.config.model
    check_fits_target(target, head.manifest, hidden=model.hidden_size, vocab=model.vocab_size)
    wanted, found = head.config.target_layers, target.config.num_layers
    if wanted != found:
        raise HeadError(
            f"the head was made for another target: its number of target layers is {wanted}, {target.name} "
            f"has {found}; give a head trained for this target, or --head off"
        )
