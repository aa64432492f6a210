"""Training goes on exactly where it stopped, learns, and refuses to go on from something else."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from jetspec.draft.checkpoint import load_head
from jetspec.errors import DataError, OptionError
from jetspec.target.target import Target
from jetspec.train import block as block_module
from jetspec.train import loop as loop_module
from jetspec.train.block import BlockMethod
from jetspec.train.checkpoint import load_checkpoint
from jetspec.train.data import Corpus, batches_at
from jetspec.train.features import shard_paths
from jetspec.train.log import read_log
from jetspec.train.loop import LoopOptions, Report, train
from jetspec.train.model import HeadModule, initialise
from jetspec.train.optim import make_optimizer
from jetspec.train.validate import SETTINGS
from jetspec.train.weighting import LossOptions
from tests.draft.tiny import TAPS, random_head, tiny_answers, tiny_target

OPTIONS = LoopOptions(steps=8, answers=4, anchors=4, part=3, checkpoint_minutes=0.0, validate_minutes=1e6)


class Killed(Exception):
    """Stands for a kill at any moment."""


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Twelve short greedy answers."""
    torch.set_num_threads(1)
    return tiny_answers(target, tmp_path_factory.mktemp("answers"))


def new_module(target: Target, seed: int = 0, **options: Any) -> HeadModule:
    """A head before training."""
    module = HeadModule(random_head(target, **options).config, target.transformer.embedding)
    initialise(module, seed=seed)
    return module


def run(
    target: Target,
    corpus: Corpus,
    folder: Path,
    options: LoopOptions = OPTIONS,
    seed: int = 0,
    watch: Callable[[Report], None] = lambda report: None,
    loss: LossOptions = LossOptions(),  # noqa: B008 (frozen)
    products: str | None = None,
    **head: Any,
) -> HeadModule:
    """Train a new module in a folder."""
    method = BlockMethod(new_module(target, seed, **head), target, corpus.frequent_ids(60, 200), loss)
    train(method, corpus, folder, options, {} if products is None else {"products": products}, watch)
    return method.module


def save_every(monkeypatch: pytest.MonkeyPatch, steps: int) -> None:
    """Checkpoints by steps instead of by time."""
    save = loop_module._Run.save

    def sometimes(self: Any) -> None:
        if self.step % steps == 0:
            save(self)

    monkeypatch.setattr(loop_module._Run, "save", sometimes)


def kill_at(step: int) -> Callable[[Report], None]:
    """Ends the process, as it were, after a step and before its checkpoint."""

    def watch(report: Report) -> None:
        if report.step == step and report.by_depth:
            raise Killed

    return watch


JETSPEC: dict[str, Any] = {}
DFLASH: dict[str, Any] = {"causal": False, "scorer": "none", "rank": 0}
DSPARK: dict[str, Any] = {"alignment": "shifted", "causal": False, "scorer": "vanilla", "confidence": True}
RECURRENT: dict[str, Any] = {"scorer": "rnn"}
KL, CE = LossOptions(), LossOptions(kl=0.0, ce=1.0)
SPARK = LossOptions(kl=0.0, ce=0.1, l1=0.9, confidence=1.0, weighting="expected-length")


@pytest.mark.parametrize(
    ("kills", "head", "loss", "optimizer"),
    [
        ([4], JETSPEC, KL, "adamw"),
        ([5], JETSPEC, KL, "muon"),
        ([1, 5, 7], RECURRENT, KL, "adamw"),
        ([5], DFLASH, CE, "adamw"),
        ([3, 5], DSPARK, SPARK, "muon"),
    ],
    ids=["at-checkpoint", "muon", "thrice-recurrent", "dflash", "dspark-muon"],
)
def test_resume_is_bitwise_exact(
    target: Target,
    corpus: Corpus,
    tmp_path: Path,
    kills: list[int],
    head: dict[str, Any],
    loss: LossOptions,
    optimizer: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Guards the promise that a killed run ends with the weights of one that was not: same batches, rates,
    moments and step counts. A new module starts from other weights, so they must all come from the file."""
    save_every(monkeypatch, 2)
    given: dict[str, Any] = {"options": replace(OPTIONS, optimizer=optimizer), "loss": loss, **head}
    whole = run(target, corpus, tmp_path / "whole", **given)
    for step in kills:
        seed = step if (tmp_path / "killed" / "checkpoint.safetensors").exists() else 0
        with pytest.raises(Killed):
            run(target, corpus, tmp_path / "killed", seed=seed, watch=kill_at(step), **given)
    resumed = run(target, corpus, tmp_path / "killed", seed=99, **given)
    start = new_module(target, **head)
    for name in whole.names:
        assert torch.equal(whole.weight(name), resumed.weight(name)), name
    assert not torch.equal(whole.weight("fc.weight"), start.weight("fc.weight"))
    logs = [(tmp_path / name / "log.jsonl").read_text().splitlines() for name in ("whole", "killed")]
    assert [json.loads(line)["step"] for line in logs[0]] == [json.loads(line)["step"] for line in logs[1]]


def test_a_schedule_in_minutes_survives_a_restart(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the length of a schedule that was measured: a restart must not measure it again."""
    monkeypatch.setattr(loop_module, "PROBE_STEPS", 3)
    options = replace(OPTIONS, steps=None, minutes=1.0, checkpoint_minutes=1e6)
    lengths: list[int] = []

    def watch(report: Report) -> None:
        lengths.append(report.steps)
        if report.step == 5:
            raise Killed

    for _ in range(2):
        with pytest.raises(Killed):
            run(target, corpus, tmp_path, options, watch=watch)
    assert lengths[:2] == [0, 0]
    assert len(lengths) == 5 + 2  # steps 1..5, then 4 and 5 from the checkpoint of step 3
    assert len(set(lengths[2:])) == 1 and lengths[2] > 5


def test_other_minutes_do_not_change_a_schedule_that_was_measured(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards what manifest and card say: minutes given to a run that had begun were ignored silently, and
    then stated beside the steps of the old ones. Steps do change it."""
    monkeypatch.setattr(loop_module, "PROBE_STEPS", 3)
    options = replace(OPTIONS, steps=None, minutes=1e-9, checkpoint_minutes=1e6)
    run(target, corpus, tmp_path, options)
    for changes, said, steps, minutes in (
        ({}, 0, 3, 1e-9),
        ({"minutes": 5.0}, 1, 3, 1e-9),
        ({"minutes": 5.0, "steps": 4}, 0, 4, 5.0),
        ({"minutes": 7.0}, 1, 4, 5.0),
    ):
        lines: list[str] = []
        method = BlockMethod(new_module(target), target, corpus.frequent_ids(60, 200), LossOptions())
        train(method, corpus, tmp_path, replace(options, **changes), {}, say=lines.append)
        assert len(lines) == said and all(f"schedule of {steps} steps, which stays" in line for line in lines)
        manifest = load_head(tmp_path / "head").manifest
        assert (manifest["steps"], manifest["options"]["minutes"]) == (steps, minutes)
        stated = f"| minutes | {minutes} |" if steps == 3 else f"| steps | {steps} |"
        assert stated in (tmp_path / "head" / "README.md").read_text()


def test_a_clip_of_zero_is_no_limit(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    """Guards `clip = 0`, which made every gradient zero, so that nothing was learnt."""
    off, wide = (
        run(target, corpus, tmp_path / str(clip), replace(OPTIONS, steps=2, clip=clip)) for clip in (0.0, 1e9)
    )
    assert all(torch.equal(off.weight(name), wide.weight(name)) for name in off.names)


@pytest.mark.parametrize("betas", [(9.0, 9.0), (0.9, 1.0), (-0.1, 0.9), (0.9, float("nan"))])
def test_betas_are_checked(betas: tuple[float, float]) -> None:
    """Guards against torch's ValueError after hours of answers."""
    with pytest.raises(OptionError, match="betas must be two numbers from 0 to below 1"):
        LoopOptions(betas=betas)


@pytest.mark.parametrize(
    "options",
    [
        {"checkpoint_minutes": float("nan")},
        {"checkpoint_minutes": -1.0},
        {"validate_minutes": float("nan")},
        {"validate_minutes": -1.0},
        {"validate_answers": 0},
    ],
)
def test_what_is_due_and_when_is_checked(options: dict[str, Any]) -> None:
    """Guards a run that never saves: NaN minutes between checkpoints were accepted."""
    (name,) = options
    with pytest.raises(OptionError, match=f"{name} must be a number of at least"):
        LoopOptions(**options)


@pytest.mark.parametrize("options", [{"warmup_share": 3.0}, {"final_share": 10.0}])
def test_shares_are_at_most_one(options: dict[str, Any]) -> None:
    """Guards a rate that never reaches its peak, or rises to ten times of it: both were accepted."""
    (name,) = options
    with pytest.raises(OptionError, match=f"{name} must be a number from 0 to 1"):
        LoopOptions(**options)


def test_features_that_are_not_finite_are_named(target: Target, tmp_path: Path) -> None:
    """Guards the advice: with NaN in the features a lower learning rate does not help."""
    corpus = tiny_answers(target, tmp_path / "answers")
    method = BlockMethod(new_module(target), target, corpus.frequent_ids(60, 200), LossOptions())
    (path,) = shard_paths(tmp_path / "answers")
    tensors = load_file(path)
    tensors["hidden"][:] = float("nan")
    save_file(tensors, path, {"taps": json.dumps(TAPS)})
    broken = Corpus([tmp_path / "answers"], holdout=4)
    broken._resident = {path: tensors}  # the map of the old file may be open still
    with pytest.raises(DataError, match=r"features-00000\.safetensors holds hidden that are not finite"):
        train(method, broken, tmp_path / "run", OPTIONS, {})


def test_other_runs_are_refused(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    """Guards against a mixture of two runs in one folder: other options, mask, shape or damaged file."""
    run(target, corpus, tmp_path, replace(OPTIONS, steps=2))
    with pytest.raises(DataError, match="learning_rate"):
        run(target, corpus, tmp_path, replace(OPTIONS, learning_rate=5.0))
    with pytest.raises(DataError, match="another head"):
        run(target, corpus, tmp_path, causal=False)
    with pytest.raises(DataError, match="another head"):
        run(target, corpus, tmp_path, loss=CE)
    with pytest.raises(DataError, match="optimizer"):
        run(target, corpus, tmp_path, replace(OPTIONS, optimizer="muon"))
    with pytest.raises(DataError, match="another shape"):
        run(target, corpus, tmp_path, block_size=6)
    fewer = Corpus([corpus.training[0].path.parent], holdout=3)
    with pytest.raises(DataError, match="other answers"):
        run(target, fewer, tmp_path)
    path = tmp_path / "checkpoint.safetensors"
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(DataError, match="damaged"):
        run(target, corpus, tmp_path)


def test_products_and_smoothing_stay_what_they_were(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    """Guards exact resume: a run went on with products in another type, or another smoothing of its
    expected-length weights. A checkpoint that does not know its products goes on with any."""
    few = replace(OPTIONS, steps=1)
    lengths = LossOptions(weighting="expected-length")
    run(target, corpus, tmp_path / "a", few, loss=lengths, products="float32")
    with pytest.raises(DataError, match="products in float32, not bfloat16; give --products float32"):
        run(target, corpus, tmp_path / "a", loss=lengths, products="bfloat16")
    with pytest.raises(DataError, match="another head"):
        run(target, corpus, tmp_path / "a", loss=replace(lengths, smoothing=0.9), products="float32")
    run(target, corpus, tmp_path / "b", few)
    run(target, corpus, tmp_path / "b", replace(few, steps=2), products="bfloat16")
    assert (
        replace(lengths, weighting="uniform", smoothing=0.9).describe()
        == "1 forward KL; uniform depth weights"
    )


def test_a_finished_run_can_be_given_again(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    """Guards the same command given twice: no further step, the same head."""
    first = run(target, corpus, tmp_path)
    seen: list[int] = []
    second = run(target, corpus, tmp_path, seed=1, watch=lambda report: seen.append(report.step))
    assert seen == [8]
    assert all(torch.equal(first.weight(name), second.weight(name)) for name in first.names)
    head = load_head(tmp_path / "head")
    assert head.manifest["steps"] == 8 and head.vocab is not None
    assert (tmp_path / "curves.png").exists() and "8 steps" in (tmp_path / "head" / "README.md").read_text()
    for name, tensor in head.weights.items():
        assert torch.equal(tensor, first.weight(name).detach().half())


def test_the_end_tells_what_was_learnt_by_heart(target: Target, tmp_path: Path) -> None:
    """Guards the tau on answers of the training: of other answers than the held-out ones, as many, at the end
    only, and in manifest, log and card."""
    corpus = tiny_answers(target, tmp_path / "answers")
    options = replace(OPTIONS, steps=3, validate_minutes=1e-9, validate_answers=2)
    run(target, corpus, tmp_path / "run", options)
    method = BlockMethod(new_module(target), target, corpus.frequent_ids(60, 200), LossOptions())
    load_checkpoint(tmp_path / "run", method.module, make_optimizer(method.module, "adamw", 1.0, (0.9, 0.95)))
    count = len(corpus.training)
    expected = method.validation(corpus, [corpus.training[0], corpus.training[count // 2]], SETTINGS).tau
    found = load_head(tmp_path / "run" / "head").manifest["validation"]
    assert found["seen"] == expected != found["tau"] and found["answers"] == 2
    logged = [line["validation"]["seen"] for line in read_log(tmp_path / "run" / "log.jsonl")]
    assert logged == [{}, {}, {}, expected]
    assert "on answers of the training" in (tmp_path / "run" / "head" / "README.md").read_text()


def test_others_may_read_what_a_run_leaves(target: Target, tmp_path: Path) -> None:
    """Guards runs that are shared: the tensors of features, checkpoint and head were their owner's alone,
    while the files beside them followed the umask."""
    corpus = tiny_answers(target, tmp_path / "answers", prompts=5, tokens=4)
    run(target, corpus, tmp_path / "run", replace(OPTIONS, steps=1))
    beside = (tmp_path / "run" / "log.jsonl").stat().st_mode
    written = sorted(tmp_path.rglob("*.safetensors"))
    assert [path.parent.name for path in written] == ["answers", "run", "head"]
    assert all(path.stat().st_mode == beside for path in written)


@pytest.mark.parametrize(
    ("head", "loss", "optimizer", "share"),
    [
        (JETSPEC, KL, "adamw", 0.5),
        ({"causal": False}, KL, "adamw", 0.5),
        (DFLASH, CE, "muon", 0.5),
        (DSPARK, SPARK, "adamw", 0.85),  # confidences cost at least the entropy of their labels
        ({**RECURRENT, "alignment": "shifted"}, CE, "adamw", 0.5),
    ],
    ids=["causal", "bidirectional", "dflash-muon", "dspark", "recurrent"],
)
def test_the_loss_goes_down(
    target: Target,
    corpus: Corpus,
    tmp_path: Path,
    head: dict[str, Any],
    loss: LossOptions,
    optimizer: str,
    share: float,
) -> None:
    """Guards against a head that does not learn: nine answers are nearly known by heart after 60 steps."""
    losses: list[float] = []
    options = replace(OPTIONS, steps=60, checkpoint_minutes=1e6, learning_rate=1e-2, optimizer=optimizer)
    watch: Callable[[Report], None] = lambda report: losses.append(report.loss) if report.by_depth else None  # noqa: E731
    run(target, corpus, tmp_path, options, watch=watch, loss=loss, **head)
    assert sum(losses[-5:]) < share * sum(losses[:5])


@pytest.mark.parametrize("where", ["loss", "gradient"])
def test_what_is_not_finite_stops_the_run(
    target: Target, corpus: Corpus, tmp_path: Path, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the last good checkpoint: a NaN must end the run before it reaches the weights. At step 0 the
    advice was a lower learning rate, which had not done anything yet."""
    module = new_module(target)
    broken = {"step": 0}
    real = block_module.fused_loss

    def sometimes(*args: Any, **kwargs: Any) -> Any:
        result = real(*args, **kwargs)
        if broken["step"] < 3:
            return result
        factor = float("nan") if where == "loss" else 1.0
        loss = result.loss * factor
        if where == "gradient":
            loss.register_hook(lambda gradient: gradient * float("inf"))
        return result._replace(loss=loss)

    def watch(report: Report) -> None:
        broken["step"] = report.step

    monkeypatch.setattr(block_module, "fused_loss", sometimes)
    method = BlockMethod(module, target, torch.arange(200), LossOptions())
    with pytest.raises(DataError, match=r"step 3 is .*failed-step-3\.safetensors; train with a lower"):
        train(method, corpus, tmp_path, OPTIONS, {}, watch)
    broken["step"] = 3
    with pytest.raises(DataError, match=r"step 0 is .*; no step was taken yet, .* features .* \[loss\]"):
        train(method, corpus, tmp_path / "at-once", OPTIONS, {})
    with safe_open(tmp_path / "failed-step-3.safetensors", framework="pt") as file:
        record = json.loads(file.metadata()["batch"])
        kept = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a mapping)
    again = list(batches_at(corpus, 3, seed=0, answers=4, anchors=4, weights=method.weights, part=3))
    assert (record["step"] == 3 and "nan" in (record["loss"] + record["gradient"])) or where == "gradient"
    for n, batch in enumerate(again):
        assert torch.equal(kept[f"part.{n}.anchors"], batch.anchors)
        assert torch.equal(kept[f"part.{n}.tokens"], batch.tokens)
        assert [answer["row"] for answer in record["answers"][n]] == [e.start for e in batch.entries]
    assert all(bool(module.weight(name).isfinite().all()) for name in module.names)
    assert (tmp_path / "checkpoint.safetensors").exists() and not (tmp_path / "head").exists()
