"""The training loop: batches that depend on the step alone, checkpoints, exact resume, curves.

A run killed at any moment and started again ends with the same weights as one that was never killed, on the
same machine and with the same number of threads: batches are a function of the step, and a checkpoint holds
weights, moments and counters of one step.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jetspec.config import check_least, check_train_seed
from jetspec.draft.checkpoint import save_head
from jetspec.errors import DataError
from jetspec.train.checkpoint import load_checkpoint, save_checkpoint
from jetspec.train.data import Corpus, batches_at
from jetspec.train.log import append_log, trim_log
from jetspec.train.loss import depth_weights, fused_kl
from jetspec.train.model import HeadModule, ScorerTables
from jetspec.train.validate import Validation, validate
from jetspec.tree import GROW

VALIDATION = [("chain", GROW["chain"], 16), *(("best-first", GROW["best-first"], n) for n in (4, 8, 16, 32))]


@dataclass(frozen=True)
class LoopOptions:
    """How long and how fast to train.

    steps        length of the schedule; None derives it from `minutes` once the speed of a step is known
    answers, anchors   a batch is `answers` answers with `anchors` blocks in each
    part         answers that are worked on at once; a batch is split into such parts and gradients add up
    learning_rate, final_share   peak, and the share of it that the cosine ends at
    decay        depth weights exp(-(k - 1) / decay); 0 is uniform
    """

    steps: int | None = None
    minutes: float = 30.0
    answers: int = 16
    anchors: int = 64
    learning_rate: float = 1e-3
    final_share: float = 0.02
    warmup_share: float = 0.03
    betas: tuple[float, float] = (0.9, 0.95)
    clip: float = 1.0
    decay: float = 4.0
    part: int = 2
    seed: int = 0
    validate_minutes: float = 10.0
    validate_answers: int = 40
    checkpoint_minutes: float = 5.0

    def __post_init__(self) -> None:
        check_least(1, steps=self.steps, answers_per_batch=self.answers, anchors=self.anchors)
        check_least(0, minutes=self.minutes, rate=self.learning_rate, decay=self.decay)
        check_train_seed(self.seed)


@dataclass
class Report:
    """What a callback sees: after every step, and with `validation` set after a validation."""

    step: int
    steps: int
    seconds: float  # of training so far, over all starts, validation and checkpoints excluded
    loss: float
    by_depth: list[float]
    agree: list[float]
    rate: float
    validation: Validation | None = None


# Steps that measure the speed before a schedule in minutes is fixed; they count as training.
_PROBE_STEPS = 12


def train(
    module: HeadModule,
    corpus: Corpus,
    vocab: torch.Tensor,
    output: torch.Tensor,
    folder: Path,
    options: LoopOptions,
    manifest: dict[str, Any],
    on_report: Callable[[Report], None] = lambda report: None,
) -> Path:
    """Train to the end of the schedule and save the head to `folder/head`; returns that folder.

    Raises DataError on a loss that is not finite (the step is named and the last checkpoint stays).
    """
    run = _Run(module, corpus, vocab, output, folder, options, manifest, on_report)
    run.resume()
    while run.steps is None or run.step < run.steps:
        run.advance()
    return run.finish()


class _Run:
    def __init__(
        self,
        module: HeadModule,
        corpus: Corpus,
        vocab: torch.Tensor,
        output: torch.Tensor,
        folder: Path,
        options: LoopOptions,
        manifest: dict[str, Any],
        on_report: Callable[[Report], None],
    ) -> None:
        self.module, self.corpus, self.vocab, self.output = module, corpus, vocab, output
        self.folder, self.options, self.manifest, self.on_report = folder, options, manifest, on_report
        self.weights = depth_weights(module.config.depth, options.decay)
        self.optimizer = torch.optim.AdamW(
            module.parameters(), lr=options.learning_rate, betas=options.betas, weight_decay=0.0, fused=True
        )
        self.step, self.steps, self.seconds = 0, options.steps, 0.0
        self.validated = self.saved = 0.0

    def resume(self) -> None:
        """Continue from the checkpoint of an earlier run in this folder, if there is one."""
        state = load_checkpoint(self.folder, self.module, self.optimizer)
        trim_log(self.folder / "log.jsonl", 0 if state is None else state["step"])
        if state is None:
            return
        wanted = json.loads(json.dumps(asdict(self.options)))
        different = [
            key
            for key, value in wanted.items()
            if state["options"].get(key) != value
            and not key.startswith(("validate", "checkpoint", "minutes", "steps"))
        ]
        if different:
            raise DataError(
                f"{self.folder} holds a run with other options ({', '.join(different)}); "
                "use another folder or delete it"
            )
        if state.get("run", self._identity()) != self._identity():
            raise DataError(
                f"{self.folder} holds a run with another head, draft vocabulary or other answers; "
                "use another folder or delete it"
            )
        self.step, self.seconds = state["step"], state["seconds"]
        self.steps = state["steps"] if self.options.steps is None else self.options.steps
        self.validated = self.saved = self.seconds

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on, beside the shapes of tensors and the options."""
        config = self.module.config
        return {
            "head": [config.causal, config.mask_token_id, list(config.taps)],
            "vocab": hashlib.sha256(self.vocab.numpy().tobytes()).hexdigest(),
            "answers": len(self.corpus.training),
            "answer_tokens": self.corpus.answer_tokens,
        }

    def advance(self) -> None:
        """One step, then whatever is due."""
        start = time.perf_counter()
        rate = self._rate()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss, by_depth, agree = self._learn()
        self.step += 1
        self.seconds += time.perf_counter() - start
        measured = self.steps is None and self.step >= _PROBE_STEPS
        if measured:
            per_step = self.seconds / self.step
            self.steps = max(self.step, round(self.options.minutes * 60 / per_step))
        report = Report(self.step, self.steps or 0, self.seconds, loss, by_depth, agree, rate)
        if self.seconds - self.validated >= self.options.validate_minutes * 60:
            self.validated = self.seconds
            report.validation = self.validation()
        self._log(report)
        # A measured length is saved at once: measured again after a restart it would be another one.
        if measured or self.seconds - self.saved >= self.options.checkpoint_minutes * 60:
            self.save()

    def _rate(self) -> float:
        """Linear warm-up, then a cosine; while the length is not known yet, the warm-up of a thousand
        steps.
        """
        options, steps = self.options, self.steps or 1000
        warm = max(1, round(options.warmup_share * steps))
        if self.step < warm:
            return options.learning_rate * (self.step + 1) / warm
        progress = min(1.0, (self.step - warm) / max(1, steps - warm))
        low = options.final_share
        return options.learning_rate * (low + (1 - low) * 0.5 * (1 + math.cos(math.pi * progress)))

    def _learn(self) -> tuple[float, list[float], list[float]]:
        """One optimiser step. The batch is worked off in parts, whose gradients add up."""
        options, module = self.options, self.module
        batches = list(
            batches_at(
                self.corpus,
                self.step,
                seed=options.seed,
                answers=options.answers,
                anchors=options.anchors,
                weights=self.weights,
                part=options.part,
            )
        )
        total = float(sum(batch.weight.sum() for batch in batches))
        tables = ScorerTables(module, batches, self.vocab)
        self.optimizer.zero_grad(set_to_none=True)
        loss = 0.0
        sums = torch.zeros(3, module.config.depth)  # per depth: KL, agreement, count
        for batch in batches:
            hidden = module(batch)  # [n, A, D, H]
            terms = tables.terms(hidden, batch.parents)
            result = fused_kl(
                hidden.reshape(-1, hidden.shape[-1]),
                None if terms is None else terms.reshape(-1, terms.shape[-1]),
                tables.child_rows,
                self.output,
                batch.teacher,
                batch.teacher_row.reshape(-1),
                batch.weight.reshape(-1),
                total,
            )
            result.loss.backward()
            loss += float(result.loss.detach())
            present = (batch.weight > 0).view(-1, batch.weight.shape[-1]).float()  # [n * A, D]
            rows = (result.per_row.view_as(present), result.agree.view_as(present), torch.ones_like(present))
            sums += torch.stack([(row * present).sum(0) for row in rows])
        tables.backward()
        norm = float(torch.nn.utils.clip_grad_norm_(module.parameters(), options.clip))
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise DataError(
                f"the loss of step {self.step} is {loss} and its gradient {norm}; "
                "train with a lower learning rate in another folder"
            )
        self.optimizer.step()
        by_depth, agree = sums[0] / sums[2].clamp(min=1), sums[1] / sums[2].clamp(min=1)
        return loss, by_depth.tolist(), agree.tolist()

    def validation(self) -> Validation:
        """tau on held-out answers that were made greedily."""
        greedy = [entry for entry in self.corpus.held_out if entry.temperature == 0.0]
        chosen = greedy[: self.options.validate_answers]
        return validate(self.module, self.corpus, chosen, self.vocab, self.output, VALIDATION)

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self.saved = self.seconds
        state = {
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "options": asdict(self.options),
            "shards": self.corpus.shards,
            "run": self._identity(),
        }
        save_checkpoint(self.folder, self.module, self.optimizer, state)

    def finish(self) -> Path:
        """Save checkpoint and head; the manifest says how long it was trained and what it reached."""
        self.save()
        validation = self.validation()
        report = Report(self.step, self.step, self.seconds, math.nan, [], [], 0.0, validation)
        self._log(report)
        manifest = {
            **self.manifest,
            "steps": self.step,
            "training_seconds": round(self.seconds, 1),
            "supervised_blocks": self.step * self.options.answers * self.options.anchors,
            "options": json.loads(json.dumps(asdict(self.options))),
            "validation": {"tau": validation.tau, "survival": validation.survival},
        }
        save_head(self.folder / "head", self.module.to_head(self.vocab, manifest))
        return self.folder / "head"

    def _log(self, report: Report) -> None:
        self.on_report(report)
        if self.step % 10 and report.validation is None:
            return
        record = asdict(report)
        record["seconds"] = round(report.seconds, 1)
        record["loss"] = None if math.isnan(report.loss) else report.loss
        if report.validation is None:
            del record["validation"]
        append_log(self.folder / "log.jsonl", record)
