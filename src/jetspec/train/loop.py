"""The training loop: batches that depend on the step alone, checkpoints, exact resume, curves.

A run killed at any moment and started again ends with the same weights as one that was never killed, on the
same machine and with the same number of threads: batches are a function of the step, and a checkpoint holds
weights, moments and counters of one step.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from jetspec.errors import DataError, OptionError
from jetspec.train.card import write_card
from jetspec.train.checkpoint import load_checkpoint, save_batch, save_checkpoint
from jetspec.train.corpus import Corpus
from jetspec.train.curves import draw_curves
from jetspec.train.data import Batch, batches_at
from jetspec.train.distributed import ALONE, Processes, make_learner, whole_tensor
from jetspec.train.folder_lock import locked
from jetspec.train.log import append_log, read_log, trim_log
from jetspec.train.loop_options import LoopOptions
from jetspec.train.method import StepSums, TrainingMethod
from jetspec.train.optim import make_optimizer
from jetspec.train.same_run import check_same_run
from jetspec.train.schedule import PROBE_STEPS, measured_steps, planned_steps, rate_at
from jetspec.train.validate import SETTINGS, Validation

__all__ = ["LoopOptions", "Paused", "Report", "train"]


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


class Paused(Exception):
    """Training stopped before its end, as it was asked to, and a checkpoint holds all of it."""


def train(
    method: TrainingMethod,
    corpus: Corpus,
    folder: Path,
    options: LoopOptions,
    manifest: dict[str, Any],
    on_report: Callable[[Report], None] = lambda report: None,
    *,
    device: torch.device | str = "cpu",
    processes: Processes = ALONE,
    autocast: torch.dtype | None = None,
    pause: Callable[[], bool] | None = None,
    source: str | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Train to the end of the schedule and save the head to `folder/head`; returns that folder.

    Args:
        device: where the method's tensors are.
        processes: who trains this head; each calls this with the same arguments, and the first one writes
            and reports.
        autocast: type of matrix products in the forward and backward pass; see `Copies`.
        pause: asked before every step whether to stop here for now.
        source: hash of the head whose weights `method` begins with, if it was trained before: what it reaches
            is logged before the first step, and a run that began from another one does not go on.
        say: called with what somebody should know who gave other options than apply.

    Raises DataError on a loss that is not finite (the step and the file with its batch are named, or the
    shard if its features are to blame, and the last checkpoint stays), StorageError if another process trains
    into `folder`, and Paused.
    """
    run = _Run(
        method, corpus, folder, options, manifest, on_report, torch.device(device), processes, autocast
    )
    run.source, run.say = source, say
    with locked(folder) if processes.first else nullcontext():
        run.resume()
        if source is not None:
            run.begin()
        while run.steps is None or run.step < run.steps:
            if pause is not None and processes.agree(float(pause())):
                run.save()
                raise Paused(f"step {run.step} is saved; the same command goes on from there")
            run.advance()
        return run.finish()


class _Run:
    def __init__(
        self,
        method: TrainingMethod,
        corpus: Corpus,
        folder: Path,
        options: LoopOptions,
        manifest: dict[str, Any],
        on_report: Callable[[Report], None],
        device: torch.device,
        processes: Processes,
        autocast: torch.dtype | None,
    ) -> None:
        self.method, self.corpus, self.device, self.processes = method, corpus, device, processes
        self.folder, self.options, self.manifest, self.on_report = folder, options, manifest, on_report
        self._check_share()
        self.learner = make_learner(method, processes, autocast)  # before the optimiser: it may shard weights
        self.optimizer = make_optimizer(
            method.module, options.optimizer, options.learning_rate, options.betas
        )
        self.step, self.steps, self.seconds = 0, planned_steps(self.options, len(corpus.training)), 0.0
        self.validated = self.saved = 0.0
        self.source: str | None = None
        self.say: Callable[[str], None] = lambda line: None

    @property
    def _log_path(self) -> Path:
        return self.folder / "log.jsonl"

    def _check_share(self) -> None:
        """Every process needs an answer of each batch, and Muon whole matrices. Raises OptionError."""
        answers = min(self.options.answers, len(self.corpus.training))
        if answers < self.processes.size:
            raise OptionError(
                f"a batch has {answers} answers, too few for {self.processes.size} processes; start fewer "
                "processes, or raise --answers-per-batch"
            )
        if self.processes.fsdp and self.options.optimizer != "adamw":
            raise OptionError(
                f"optimizer {self.options.optimizer!r} needs whole matrices; valid with --fsdp: adamw"
            )

    def resume(self) -> None:
        """Continue from the checkpoint of an earlier run in this folder, if there is one."""
        state = load_checkpoint(self.folder, self.method.module, self.optimizer)
        step = 0 if state is None else state["step"]
        self.processes.check_same(step, "checkpoint")  # and nobody writes before all have read
        if self.processes.first:
            trim_log(self._log_path, step)
        if state is None:
            return
        check_same_run(self.folder, state, self.options, self._identity(), self.manifest.get("products"))
        self.step, self.seconds = state["step"], state["seconds"]
        self.steps = planned_steps(self.options, len(self.corpus.training))
        if self.steps is None and state["steps"] is not None:
            self._keep_schedule(state["steps"], state["options"])
        self.validated = self.saved = self.seconds

    def _keep_schedule(self, steps: int, before: dict[str, Any]) -> None:
        """Go on with the length that the run has, which a wish for other minutes does not change, and with
        the options that it came from, so that manifest and card tell what was done.
        """
        self.steps = steps
        length = {key: before[key] for key in ("steps", "epochs", "minutes") if key in before}
        kept = replace(self.options, **length)
        if kept != self.options and self.processes.first:
            self.say(
                f"the run in {self.folder} has begun with a schedule of {steps} steps, which stays "
                "(--minutes does not change it); give --steps for another length"
            )
        self.options = kept

    def begin(self) -> None:
        """Report what a head that was trained before reaches on this run's held-out answers."""
        if self.step:
            return
        validation = self.validation()
        if validation is None:
            return
        report = Report(0, self.steps or 0, 0.0, math.nan, [], [], 0.0, validation)
        if any(line["step"] == 0 for line in read_log(self._log_path)):
            self.on_report(report)  # this run has been started before
        else:
            self._log(report)

    def _identity(self) -> dict[str, Any]:
        """What must be the same for a run to go on, beside the shapes of tensors and the options."""
        return {
            "method": self.method.name,
            "head": json.loads(json.dumps(self.method.identity())),
            "taps": list(self.corpus.taps),
            "answers": len(self.corpus.training),
            "answer_tokens": self.corpus.answer_tokens,
            **({} if self.source is None else {"from_head": self.source}),
        }

    def advance(self) -> None:
        """One step, then whatever is due."""
        start = time.perf_counter()
        rate = rate_at(self.options, self.step, self.steps)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        sums = self._learn()
        self.step += 1
        self.seconds += self.processes.agree(time.perf_counter() - start)
        measured = self.steps is None and self.step >= PROBE_STEPS
        if measured:
            self.steps = measured_steps(self.options, self.step, self.seconds)
        report = Report(self.step, self.steps or 0, self.seconds, sums.loss, sums.by_depth, sums.agree, rate)
        if self.seconds - self.validated >= self.options.validate_minutes * 60:
            self.validated = self.seconds
            report.validation = self.validation()
        if self.processes.first:
            self._log(report)
        # A measured length is saved at once: measured again after a restart it would be another one.
        if measured or self.seconds - self.saved >= self.options.checkpoint_minutes * 60:
            self.save()

    def _learn(self) -> StepSums:
        """One optimiser step. The batch is worked off in parts, whose gradients add up."""
        processes = self.processes
        share = (processes.rank, processes.size)
        batches = [batch.to(self.device) for batch in self._batches(share)]
        self.optimizer.zero_grad(set_to_none=True)
        sums = self.learner.learn(batches)
        limit = self.options.clip or math.inf
        norm = float(whole_tensor(torch.nn.utils.clip_grad_norm_(self.method.module.parameters(), limit)))
        if not (math.isfinite(sums.loss) and math.isfinite(norm)):
            for batch in self._batches():  # all of it in every process, so that all say the same
                self.corpus.check_finite(batch.entries)
            found = {"loss": sums.loss, "gradient": norm}
            kept = save_batch(self.folder, self.step, batches, found, processes.rank)
            # No step has been taken before step 0, so the learning rate has not done anything yet.
            advice = (
                "train with a lower learning rate in another folder"
                if self.step
                else "no step was taken yet, so check the features (make these answers again) and the "
                "settings in [loss] and [head]"
            )
            raise DataError(
                f"the loss of step {self.step} is {sums.loss} and its gradient {norm}; its answers and "
                f"anchors are in {kept}; {advice}"
            )
        self.optimizer.step()
        return sums

    def _batches(self, share: tuple[int, int] = (0, 1)) -> Iterator[Batch]:
        """The parts of this step's batch, or of a process's share of it."""
        return batches_at(
            self.corpus,
            self.step,
            seed=self.options.seed,
            answers=self.options.answers,
            anchors=self.options.anchors,
            weights=self.method.weights,
            part=self.options.part,
            share=share,
            reveal=getattr(self.method, "reveal", 0.0),  # block heads only
        )

    def validation(self, *, seen: bool = False) -> Validation | None:
        """tau on held-out answers that were made greedily, an empty one if there are none; None in all
        processes but the first.

        seen: walk as many answers of the training, too.
        """
        count, corpus = self.options.validate_answers, self.corpus
        held_out, training = (
            [entry for entry in entries if entry.temperature == 0.0]
            for entries in (corpus.held_out, corpus.training)
        )
        with self.learner.whole():
            if not self.processes.first:
                return None
            if not held_out:  # 1.00, the mean of nothing, would read like a head that is never right
                return Validation()
            found = self.method.validation(corpus, held_out[:count], SETTINGS)
            found.answers = len(held_out[:count])
            if seen and training:
                spread = training[:: max(1, len(training) // count)][:count]  # some of every folder
                found.seen = self.method.validation(corpus, spread, SETTINGS).tau
            return found

    def save(self) -> None:
        """Write a checkpoint of this step."""
        self.saved = self.seconds
        state = {
            "step": self.step,
            "steps": self.steps,
            "seconds": self.seconds,
            "options": asdict(self.options),
            "shards": self.corpus.shards,
            "folders": self.corpus.folders,
            "hold_greedy": self.corpus.hold_greedy,
            "run": self._identity(),
            "products": self.manifest.get("products"),
        }
        write = self.processes.first
        save_checkpoint(self.folder, self.method.module, self.optimizer, state, write=write)

    def finish(self) -> Path:
        """Save checkpoint and head; the manifest says how long it was trained and what it reached."""
        self.save()
        validation = self.validation(seen=True)
        with self.learner.whole():
            if validation is not None:
                self._write_head(validation)
        return self.folder / "head"

    def _write_head(self, validation: Validation) -> None:
        report = Report(self.step, self.step, self.seconds, math.nan, [], [], 0.0, validation)
        if any(line["step"] == self.step and not line.get("by_depth") for line in read_log(self._log_path)):
            self.on_report(report)  # this run had come to its end before
        else:
            self._log(report)
        manifest = {
            **self.manifest,
            "steps": self.step,
            "training_seconds": round(self.seconds, 1),
            "supervised_blocks": self.step * self.options.answers * self.options.anchors,
            "options": json.loads(json.dumps(asdict(self.options))),
            "validation": asdict(validation),
        }
        self.method.save(self.folder / "head", manifest)
        write_card(self.folder / "head", manifest, self._log_path)

    def _log(self, report: Report) -> None:
        self.on_report(report)
        if self.step % 10 and report.validation is None:
            return
        record = asdict(report)
        record["seconds"] = round(report.seconds, 1)
        record["loss"] = None if math.isnan(report.loss) else report.loss
        if report.validation is None:
            del record["validation"]
        append_log(self._log_path, record)
        if report.validation is not None:
            draw_curves(self._log_path, self.folder / "curves.png")
