"""Several processes train the head that one would have trained, resume it, and end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.draft.checkpoint import load_head
from jetspec.errors import DataError, OptionError, ProcessError
from jetspec.target.target import Target
from jetspec.train import distributed
from jetspec.train.data import Corpus, batches_at
from jetspec.train.distributed import ALONE, Copies, Processes, join_processes
from jetspec.train.families import find_family
from jetspec.train.loop import LoopOptions, Paused, Report, train
from jetspec.train.method import TrainingMethod
from jetspec.train.weighting import LossOptions
from tests.draft.tiny import tiny_answers, tiny_target
from tests.train.processes import together
from tests.train.test_pipeline import command

OPTIONS = LoopOptions(
    steps=5, answers=5, anchors=4, part=2, checkpoint_minutes=1e6, validate_minutes=1e6, validate_answers=1
)
SPARK = LossOptions(kl=0.0, ce=0.1, l1=0.9, confidence=1.0, weighting="expected-length")
METHODS: dict[str, tuple[str, LossOptions, str]] = {
    "jetspec": ("jetspec", LossOptions(), "adamw"),
    "dflash-muon": ("dflash", LossOptions(kl=0.0, ce=1.0), "muon"),
    "dspark": ("dspark", SPARK, "adamw"),
    "eagle3": ("eagle3", LossOptions(), "adamw"),
    "mtp": ("mtp", LossOptions(kl=0.0, ce=1.0), "adamw"),
}


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


@pytest.fixture(scope="module")
def corpus(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    """Twelve short greedy answers."""
    torch.set_num_threads(1)
    return tiny_answers(target, tmp_path_factory.mktemp("answers"))


def new_method(target: Target, corpus: Corpus, name: str = "jetspec", seed: int = 0) -> TrainingMethod:
    """An untrained head with a draft vocabulary that leaves out a third of all tokens."""
    method, loss, _ = METHODS[name]
    family = find_family(method)
    sizes: dict[str, Any] = {"vocab": 120, "warm": False}
    if method in ("jetspec", "dspark"):
        sizes |= {"rank": 8, "layers": 1}
    if method == "eagle3":
        sizes["taps"] = corpus.taps
    options = family.options(**sizes)
    wanted = family.taps(target, options)
    chosen = corpus if wanted is None else corpus.with_taps(wanted)
    return family.build(target, chosen, options, loss, seed)


def corpus_of(corpus: Corpus, name: str) -> Corpus:
    """What a method of this name is trained on."""
    return corpus.with_taps(()) if name == "mtp" else corpus


def run(
    target: Target,
    corpus: Corpus,
    folder: Path,
    processes: Processes = ALONE,
    *,
    name: str = "jetspec",
    options: LoopOptions = OPTIONS,
    seed: int = 0,
    stop_at: int | None = None,
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps (none in processes that do not report) and the final weights."""
    method = new_method(target, corpus, name, seed)
    losses: list[float] = []

    def watch(report: Report) -> None:
        if report.by_depth:
            losses.append(report.loss)

    pause = None if stop_at is None else lambda: len(losses) >= stop_at
    options = replace(options, optimizer=METHODS[name][2])
    train(method, corpus_of(corpus, name), folder, options, {}, watch, processes=processes, pause=pause)
    weights = method.module.named_parameters()
    return losses, {key: distributed.whole_tensor(x.detach()).clone() for key, x in weights}


def assert_close(
    one: tuple[list[float], dict[str, Tensor]], many: tuple[list[float], dict[str, Tensor]]
) -> None:
    """Equal but for the order of sums. A gradient near 0 may then change its sign, and the first steps of
    AdamW and Muon go by signs; the rate is 1e-3, so weights of a wrong sum (of half the batch, say) differ by
    hundreds of times the bound."""
    assert many[0] == pytest.approx(one[0], rel=2e-5) and len(one[0]) == OPTIONS.steps
    apart = [float((one[1][key] - many[1][key]).abs().mean()) for key in one[1]]
    assert max(apart) < 2e-6, dict(zip(one[1], apart, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_two_processes_train_what_one_does(target: Target, corpus: Corpus, tmp_path: Path, name: str) -> None:
    """Guards the sum of gradients, the division by the whole batch's weight and each process's share, for
    every family: the same loss at every step, the same weights, bit for bit the same in both processes."""
    one = run(target, corpus, tmp_path / "one", name=name)
    found = together(2, tmp_path, lambda p: run(target, corpus, tmp_path / "two", p, name=name))
    assert [code for code, _ in found] == [0, 0]
    (_, first), (_, second) = found
    assert_close(one, first)
    assert second[0] == [] and all(torch.equal(x, second[1][key]) for key, x in first[1].items())
    curves = [
        [json.loads(line) for line in (tmp_path / where / "log.jsonl").read_text().splitlines()]
        for where in ("one", "two")
    ]
    assert [record["step"] for record in curves[0]] == [record["step"] for record in curves[1]]
    assert (tmp_path / "two" / "head" / "config.json").exists()


def test_sharded_weights_train_what_copies_do(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    """Guards FSDP: shards that no process divides evenly, the mean that it takes where sums are wanted, a
    checkpoint that goes on without it, and a head that is saved whole."""
    one = run(target, corpus, tmp_path / "one", options=replace(OPTIONS, clip=0.05))

    def halves(processes: Processes) -> Any:
        options = replace(OPTIONS, clip=0.05)
        with pytest.raises(Paused):
            run(target, corpus, tmp_path / "two", processes, options=options, stop_at=2)
        return run(target, corpus, tmp_path / "two", processes, options=options, seed=7)

    found = together(2, tmp_path, halves, fsdp=True)
    assert [code for code, _ in found] == [0, 0]
    losses, weights = found[0][1]
    assert_close(one, (one[0][:2] + losses, weights))
    head = load_head(tmp_path / "two" / "head")
    assert all(
        torch.equal(x, weights[f"tensors.{k.replace('.', '__')}"].half()) for k, x in head.weights.items()
    )
    again = run(target, corpus, tmp_path / "two", options=replace(OPTIONS, clip=0.05), seed=9)[1]
    assert all(torch.equal(x, weights[key]) for key, x in again.items())


def test_many_processes_resume(target: Target, corpus: Corpus, tmp_path: Path) -> None:
    """Guards exact resume where each process restores its own optimiser; another number of processes may take
    over, and the steps that one process did are not done again by the others."""
    whole = together(2, tmp_path, lambda p: run(target, corpus, tmp_path / "whole", p))[0][1]

    def halves(processes: Processes) -> Any:
        for stop, seed in ((2, 0), (1, 5)):
            with pytest.raises(Paused):
                run(target, corpus, tmp_path / "halves", processes, stop_at=stop, seed=seed)
        return run(target, corpus, tmp_path / "halves", processes, seed=9)

    (code, (losses, weights)), _ = together(2, tmp_path, halves)
    assert code == 0 and losses == whole[0][3:]
    assert all(torch.equal(x, weights[key]) for key, x in whole[1].items())

    def begin(processes: Processes) -> Any:
        with pytest.raises(Paused):
            run(target, corpus, tmp_path / "other", processes, stop_at=3)
        return None

    together(2, tmp_path, begin)
    losses, weights = run(target, corpus, tmp_path / "other", seed=3)
    assert_close(whole, (whole[0][:3] + losses, weights))


def test_a_process_that_dies_ends_the_others(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against survivors that wait for ever, or that end in a page of internals: they raise one line
    that says to start again."""
    monkeypatch.setattr(distributed, "_GRACE", 0.0)

    def member(processes: Processes) -> Any:
        method = new_method(target, corpus)
        learn = method.accumulate

        def sometimes(*arguments: Any) -> Any:
            if processes.rank == 1 and steps[0] == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            steps[0] += 1
            return learn(*arguments)

        steps = [0]
        method.accumulate = sometimes  # type: ignore[method-assign]
        with pytest.raises(ProcessError) as caught:
            train(method, corpus, tmp_path / "run", OPTIONS, {}, processes=processes)
        (tmp_path / "message").write_text(str(caught.value))
        os._exit(3)

    codes = [code for code, _ in together(2, tmp_path, member)]
    assert codes == [3, -signal.SIGKILL]
    message = (tmp_path / "message").read_text()
    assert len(message.splitlines()) == 1 and "goes on from the last checkpoint" in message


def test_shares_make_up_the_batch(corpus: Corpus) -> None:
    """Guards against an answer that two processes have, or none, or that gets other anchors than alone."""
    given: dict[str, Any] = {"seed": 3, "answers": 5, "anchors": 4, "weights": torch.ones(3), "part": 2}

    def rows(share: tuple[int, int]) -> list[tuple[int, tuple[int, ...]]]:
        batches = list(batches_at(corpus, 2, share=share, **given))
        return [
            (entry.start, tuple(anchors.tolist()))
            for batch in batches
            for entry, anchors in zip(batch.entries, batch.anchors, strict=True)
        ]

    whole = rows((0, 1))
    assert len(whole) == 5 and len({start for start, _ in whole}) == 5
    assert sorted(rows((0, 3)) + rows((1, 3)) + rows((2, 3))) == sorted(whole)


def test_resident_features_are_those_on_disk(corpus: Corpus) -> None:
    """Guards rows and columns of features that are kept on a device, in an order of taps that is not the
    recorded one."""
    chosen = corpus.with_taps((2, 0))
    for used in (chosen.resident("cpu"), corpus.resident("cpu").with_taps((2, 0))):
        for entry in (*corpus.training, *corpus.held_out):
            assert torch.equal(used.taps_of(entry), chosen.taps_of(entry))
            assert torch.equal(used.hidden_of(entry), chosen.hidden_of(entry))


def test_what_does_not_go_together_is_refused(
    target: Target, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the first minute of a large run: one line instead of a failure inside a collective."""
    method = new_method(target, corpus)
    with pytest.raises(OptionError, match="too few for 6 processes"):
        train(method, corpus, tmp_path, OPTIONS, {}, processes=Processes(0, 6))
    with pytest.raises(OptionError, match="valid with --fsdp: adamw"):
        train(
            method,
            corpus,
            tmp_path,
            replace(OPTIONS, optimizer="muon"),
            {},
            processes=Processes(0, 2, 0, True),
        )
    with pytest.raises(OptionError, match="torchrun"), join_processes(fsdp=True):
        pass
    monkeypatch.setenv("WORLD_SIZE", "4")  # some schedulers set it for their own ends
    with join_processes() as alone:
        assert alone == ALONE
    with pytest.raises(OptionError, match="give 'cuda'"):
        Processes(1, 2, 1).place("cuda:0")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert Processes(3, 4, 1).place("cuda") == "cuda:1" and Processes(1, 2, 1).place("cpu") == "cpu"


@pytest.mark.parametrize(("seen", "place"), [(1, "cuda:0"), (4, "cuda:3"), (8, "cuda:3")])
def test_a_process_computes_on_a_gpu_that_it_sees(
    seen: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards launchers that show each process one GPU: the current device was 0, but tensors went to 3."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: seen)
    assert Processes(3, 4, 3).place("cuda") == place


def test_more_processes_than_gpus_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message: two took one GPU, and it was said that another process had ended."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(OptionError, match="there are 2; start as many processes as there are GPUs"):
        Processes(3, 4, 3).place("cuda")


def test_processes_that_find_different_checkpoints_stop(
    target: Target, corpus: Corpus, tmp_path: Path
) -> None:
    """Guards runs over machines without shared storage: training on would mix two runs."""

    def member(processes: Processes) -> Any:
        with pytest.raises(DataError, match="the same checkpoint"):
            run(target, corpus, tmp_path / f"run-{processes.rank}", processes)
        return None

    run(target, corpus, tmp_path / "run-1", options=replace(OPTIONS, steps=1))
    assert [code for code, _ in together(2, tmp_path, member)] == [0, 0]


def test_half_precision_products_keep_float32_sums(target: Target, corpus: Corpus) -> None:
    """Guards mixed precision: weights and gradients stay float32, the loss hardly changes, and no product of
    two types fails, in any family. bfloat16 has 8 bits, so losses of order 1 agree to about 1 %."""
    for name, (_, loss, _) in METHODS.items():
        used = corpus_of(corpus, name)
        losses = []
        for autocast in (None, torch.bfloat16):
            method = new_method(target, corpus, name)
            parts = list(batches_at(used, 0, seed=0, answers=4, anchors=4, weights=method.weights, part=2))
            losses.append(Copies(method, autocast=autocast).learn(parts).loss)
            for key, tensor in method.module.named_parameters():
                assert tensor.dtype == torch.float32, key
                assert tensor.grad is None or bool(tensor.grad.isfinite().all()), key
        assert losses[0] != losses[1], f"{name}: no product was in bfloat16"
        assert losses[1] == pytest.approx(losses[0], rel=0.02), (name, loss)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_torchrun_trains_from_prompts(model_folder: Path, tmp_path: Path) -> None:
    """Guards the command line under a launcher: each process answers its part of the prompts, one head is
    written, and the same command in one process goes on with the parts of two and adds nothing."""
    arguments = command(model_folder, tmp_path, "--steps", "3")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "jetspec"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *launcher, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("head saved to") == 1
    folder = tmp_path / "run"
    parts = sorted(path.name for path in folder.glob("answers*"))
    assert parts == ["answers-0-of-2", "answers-1-of-2"]
    steps = [json.loads(line)["step"] for line in (folder / "log.jsonl").read_text().splitlines()]
    assert steps == [3]
    assert load_head(folder / "head").manifest["processes"] == 2
    done = subprocess.run([sys.executable, "-m", "jetspec", *arguments], capture_output=True, env=environment)
    assert done.returncode == 0 and sorted(path.name for path in folder.glob("answers*")) == parts
    assert len((folder / "log.jsonl").read_text().splitlines()) == 1
