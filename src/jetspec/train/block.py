"""Training of block heads: JetSpec, DFlash and DSpark differ in mask, alignment, scorer and loss only."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.draft.checkpoint import Head, save_head
from jetspec.draft.jetspec import BlockDrafter, make_scorer
from jetspec.target.target import Target
from jetspec.train.corpus import Corpus, Entry
from jetspec.train.data import Batch, make_batch
from jetspec.train.loss import confidence_loss, fused_loss, fused_overlap
from jetspec.train.method import StepSums
from jetspec.train.model import HeadModule, ScorerTables
from jetspec.train.validate import Setting, Tally, Validation
from jetspec.train.weighting import LossOptions, expected_length_weights

_VALIDATION_LOGITS = 2**26  # held at once, 256 MB: those of all roots of a long answer would be gigabytes


class BlockMethod:
    """A block head in training; see `jetspec.train.method.TrainingMethod`.

    Args:
        vocab: ids [Vd] that the head may draft, ascending; the loss is over them.
        reveal: share of the anchors whose first slots show what was written, see `BlockOptions`.
    """

    def __init__(
        self, module: HeadModule, target: Target, vocab: Tensor, loss: LossOptions, reveal: float = 0.0
    ) -> None:
        self.module, self.target, self.loss, self.reveal = module, target, loss, reveal
        self.name = module.config.method
        self.vocab = vocab.cpu()
        self._ids = vocab.to(target.device)
        self.output = target.transformer.output_matrix[self._ids].float()  # [Vd, H]
        self.weights = loss.depth_weights(module.config.depth)

    def identity(self) -> dict[str, Any]:
        """Mask, alignment, scorer, loss and draft vocabulary; shapes are told apart by the tensors."""
        config = self.module.config
        return {
            "causal": config.causal,
            "alignment": config.alignment,
            "scorer": config.scorer,
            "mask_token_id": config.mask_token_id,
            "loss": self.loss.describe(),
            "vocab": hashlib.sha256(self.vocab.numpy().tobytes()).hexdigest(),
            **({"reveal": self.reveal} if self.reveal else {}),  # runs from before it existed go on
        }

    def accumulate(self, parts: Many[Batch], total: float) -> StepSums:
        """One batch: every part forward and backward, then the scorer's tables."""
        tables = ScorerTables(self.module, parts, self._ids)
        loss, sums = 0.0, torch.zeros(3, len(self.weights))
        for batch in parts:
            value, own = self._part(batch, tables, total)
            loss, sums = loss + value, sums + own
        tables.backward()
        return StepSums(loss, sums)

    def _part(self, batch: Batch, tables: ScorerTables, total: float) -> tuple[float, Tensor]:
        hidden = self.module(batch)  # [n, A, D, H]
        pairs = [(hidden.flatten(0, 2), self.output)]
        terms = tables.terms(hidden, batch.parents)
        if terms is not None and tables.child_rows is not None:
            pairs.append((terms.flatten(0, 2), tables.child_rows))
        teacher, rows = batch.teacher, batch.teacher_row.flatten()
        weight = self._weight(batch, pairs, rows)
        sure = self.loss.confidence > 0 and self.module.config.confidence
        labels = self._labels(batch) if self.loss.ce else None
        result = fused_loss(
            pairs, teacher, self.output, rows, weight, self.loss, labels, total=total, overlap=sure
        )
        objective = result.loss
        if sure:
            stated = self.module.confidence(hidden, tables.parent_rows(batch.parents)).flatten()
            share = self.loss.confidence * weight
            objective = objective + confidence_loss(stated, result.overlap, share, total)
        objective.backward()
        present = (batch.weight > 0).flatten(0, 1).float()  # [n * A, D]
        own = (result.per_row.view_as(present), result.agree.view_as(present), torch.ones_like(present))
        return float(objective.detach()), torch.stack([(row * present).sum(0) for row in own]).cpu()

    def _weight(self, batch: Batch, pairs: list[tuple[Tensor, Tensor]], rows: Tensor) -> Tensor:
        """Weights of the slots [n * A * D]; their sum does not depend on the head."""
        if self.loss.weighting != "expected-length":
            return batch.weight.flatten()
        present = (batch.weight > 0).to(batch.weight.dtype)
        overlap = fused_overlap(pairs, batch.teacher, self.output, rows, present.flatten())
        overlap = overlap.view_as(present)
        if batch.revealed is None:
            return expected_length_weights(overlap, present, self.loss.smoothing).flatten()
        # What is revealed counts as accepted, so the first supervised depth takes the place of the first.
        depth = present.shape[-1]
        order = (torch.arange(depth, device=present.device) + batch.revealed.unsqueeze(-1)) % depth
        turned = overlap.gather(-1, order), present.gather(-1, order)
        weight = expected_length_weights(turned[0], turned[1], self.loss.smoothing)
        return torch.zeros_like(weight).scatter_(-1, order, weight).flatten()

    def _labels(self, batch: Batch) -> Tensor:
        """Place of every written token in the draft vocabulary, -1 if it is not there: [n * A * D]."""
        labels = batch.labels.flatten()
        place = torch.searchsorted(self._ids, labels).clamp(max=len(self._ids) - 1)
        return torch.where(self._ids[place] == labels, place, -1)

    @torch.no_grad()
    def validation(self, corpus: Corpus, entries: Many[Entry], settings: Many[Setting]) -> Validation:
        """Many roots of an answer in one forward; the same numbers as `validate_drafter` gives."""
        head, device = self.head(), self.output.device
        scorer = make_scorer(head, self._ids, torch.float32, device)
        tally = Tally(settings, self.module.config.depth)
        size = max(1, _VALIDATION_LOGITS // (len(self.weights) * len(self.vocab)))  # roots at once
        for entry in entries:
            follower = tally.start(corpus.tokens(entry).tolist(), entry.prompt_len)
            while (first := follower.position) is not None:
                anchors = torch.arange(first, min(first + size, entry.length - 1)).unsqueeze(0)
                batch = make_batch(corpus, [entry], anchors, torch.ones(len(self.weights))).to(device)
                hidden = self.module(batch)[0]  # [A, D, H]
                proposals = scorer.proposals(hidden, hidden @ self.output.T, batch.roots[0].tolist())
                while (at := follower.position) is not None and at < first + size:
                    follower.take(at, proposals[at - first])
        return tally.result()

    def head(self, manifest: dict[str, Any] | None = None) -> Head:
        """A snapshot of the tensors."""
        return self.module.to_head(self.vocab, manifest)

    def drafter(self) -> BlockDrafter:
        """The head as it is now, on its target."""
        return BlockDrafter(self.head(), self.target)

    def save(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the head's folder, in half precision."""
        save_head(folder, self.head(manifest))
