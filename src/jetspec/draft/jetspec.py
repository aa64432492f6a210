"""The block drafter: one forward of a small head drafts every depth of a tree (JetSpec, arXiv 2606.18394)."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from jetspec.draft.backbone import Backbone
from jetspec.draft.checkpoint import Head
from jetspec.draft.path_scorer import Marginals, MarkovScorer
from jetspec.errors import HeadError
from jetspec.sequence import Sequence
from jetspec.target.target import Target
from jetspec.tree.proposal import Proposal


class BlockDrafter:
    """A DFlash- or JetSpec-style head on a target: causal or bidirectional, with or without a path scorer.

    Raises HeadError if the head was made for a target of another shape.
    """

    needs_hidden = False

    def __init__(self, head: Head, target: Target) -> None:
        check_fits(head, target)
        self.name = "jetspec" if head.config.causal else "dflash"
        self.head = head
        vocab = head.vocab if head.vocab is not None else torch.arange(target.config.vocab_size)
        vocab = vocab.to(target.device)
        self.backbone = Backbone(head, target.transformer, vocab)
        self.scorer = (
            Marginals(vocab)
            if head.config.scorer == "none"
            else MarkovScorer(head, vocab, target.dtype, target.device)
        )

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the head reads."""
        return self.head.config.taps

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Newly committed rows of a sequence."""
        assert taps is not None
        self.backbone.observe(key, taps)

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """One forward for the batch; one proposal per sequence."""
        roots = [s.root for s in sequences]
        hidden, logits = self.backbone.forward([s.id for s in sequences], roots)
        return self.scorer.proposals(hidden, logits, roots)

    def free(self, key: int) -> None:
        """Forget a sequence."""
        self.backbone.free(key)


def check_fits(head: Head, target: Target) -> None:
    """Refuse a head made for another target, naming what differs. Raises HeadError."""
    ours, theirs = head.config, target.config
    pairs = [
        ("hidden size", ours.model.hidden_size, theirs.hidden_size),
        ("vocabulary", ours.model.vocab_size, theirs.vocab_size),
        ("number of target layers", ours.target_layers, theirs.num_layers),
    ]
    for what, wanted, found in pairs:
        if wanted != found:
            raise HeadError(
                f"the head was made for another target: its {what} is {wanted}, {target.name} has {found}; "
                "give a head trained for this target, or --head off"
            )
    recorded = (head.manifest.get("target") or {}).get("tokenizer_hash")
    if recorded and recorded != target.tokenizer.hash:
        raise HeadError(
            f"the head was trained with another tokenizer than that of {target.name}; "
            "give a head trained for this target, or --head off"
        )
