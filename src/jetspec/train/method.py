"""What the training loop asks of a head family: to learn from a batch, to be validated, and to be saved.

The loop knows steps, rates, checkpoints and logs; a family knows its network, its loss and its drafter. Every
family learns from the same batches (answers and random roots in them), so that heads of different families
can be trained on the same positions in the same order and compared.

A family is a `TrainingMethod` and a builder in `train.families`. One that drafts step by step needs no
validation of its own: `validate_drafter` walks any drafter along recorded answers.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from jetspec.draft.base import Drafter
from jetspec.train.corpus import Corpus, Entry
from jetspec.train.data import Batch
from jetspec.train.validate import Setting, Validation


class StepSums(NamedTuple):
    """What one batch gave.

    loss       the weighted mean that was differentiated
    per_depth  [3, D]: sums over the supervised slots of each depth of the loss (unweighted), of the agreement
               of the head's top token with the target's, and of 1
    """

    loss: float
    per_depth: Tensor

    @property
    def by_depth(self) -> list[float]:
        """Mean loss of each depth."""
        return (self.per_depth[0] / self.per_depth[2].clamp(min=1)).tolist()

    @property
    def agree(self) -> list[float]:
        """Share of slots of each depth whose top token is the target's."""
        return (self.per_depth[1] / self.per_depth[2].clamp(min=1)).tolist()


class TrainingMethod(Protocol):
    """A head in training.

    name     of the family: "jetspec", "dflash", "dspark", "eagle3", "mtp"
    weights  [D], the weight of each supervised depth; its length is how many tokens behind a root are
             supervised
    """

    name: str
    weights: Tensor

    @property
    def module(self) -> nn.Module:
        """Every trainable tensor; the loop clips, steps and saves its parameters."""
        ...

    def identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on, beside tensor shapes and loop options; JSON values."""
        ...

    def accumulate(self, parts: Many[Batch], total: float) -> StepSums:
        """Forward and backward of all parts of one batch; gradients add up in `module`.

        total: sum of `Batch.weight` over the whole batch. Losses are divided by it, so that the parts (and
        the shares of several processes) add up to the loss of the whole.
        """
        ...

    def validation(self, corpus: Corpus, entries: Many[Entry], settings: Many[Setting]) -> Validation:
        """tau on held-out greedy answers; `validate_drafter(self.drafter(), ...)` unless there is a faster
        way to the same numbers.
        """
        ...

    def drafter(self) -> Drafter:
        """The head as it is now, drafting."""
        ...

    def save(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the head's folder. Raises StorageError."""
        ...
