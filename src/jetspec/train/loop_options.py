"""How long and how fast a head is trained."""

from __future__ import annotations

from dataclasses import dataclass

from jetspec.config import check_least, check_train_seed
from jetspec.errors import OptionError
from jetspec.train.optim import OPTIMIZERS


@dataclass(frozen=True)
class LoopOptions:
    """How long and how fast to train.

    steps        length of the schedule; None derives it from `epochs`, or else from `minutes` once the speed
                 of a step is known
    epochs       how often every answer is used
    minutes      of training, above 0
    answers, anchors   a batch is `answers` answers with `anchors` blocks in each
    part         answers that are worked on at once; a batch is split into such parts and gradients add up
    learning_rate, final_share   peak, and the share of it that the cosine ends at, at most 1
    optimizer    "adamw", or "muon" for matrices with AdamW for the rest
    betas        of AdamW's two moments, each from 0 up to but not including 1
    warmup_share, clip   share of the steps, at most 1, in which the rate rises from 0; largest norm of the
                 gradient, 0 for no limit
    validate_minutes, validate_answers   minutes of training between validations, and held-out greedy answers
                 that one of them uses
    checkpoint_minutes   minutes of training between checkpoints; 0 saves after every step
    """

    steps: int | None = None
    epochs: float | None = None
    minutes: float = 30.0
    answers: int = 8
    anchors: int = 32
    learning_rate: float = 1e-3
    final_share: float = 0.02
    warmup_share: float = 0.03
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    optimizer: str = "adamw"
    part: int = 2
    seed: int = 0
    validate_minutes: float = 10.0
    validate_answers: int = 40
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        check_least(1, steps=self.steps, answers_per_batch=self.answers, anchors=self.anchors, part=self.part)
        check_least(0, epochs=self.epochs, minutes=self.minutes, rate=self.learning_rate, clip=self.clip)
        check_least(0, warmup_share=self.warmup_share, final_share=self.final_share)
        check_least(0, validate_minutes=self.validate_minutes, checkpoint_minutes=self.checkpoint_minutes)
        check_least(1, validate_answers=self.validate_answers)
        for name in ("warmup_share", "final_share"):
            if getattr(self, name) > 1:
                raise OptionError(f"{name} must be a number from 0 to 1, got {getattr(self, name)!r}")
        if not self.minutes:
            raise OptionError("minutes must be a number above 0, got 0; --steps gives the length in steps")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise OptionError(f"betas must be two numbers from 0 to below 1, got {list(self.betas)}")
        if self.optimizer not in OPTIMIZERS:
            raise OptionError(f"optimizer {self.optimizer!r} is unknown; valid: {', '.join(OPTIMIZERS)}")
        check_train_seed(self.seed)
