"""From a model folder and a prompt file to a head, through the command line."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec.cli.main import main
from jetspec.draft.checkpoint import load_head
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.loading import load_drafter
from jetspec.errors import DataError, OptionError, StorageError
from jetspec.target.loading import load_target
from jetspec.train import corpus as corpus_module
from jetspec.train.block_family import BlockOptions, mask_token, tap_scale
from jetspec.train.checkpoint import read_state
from jetspec.train.features import shard_paths
from jetspec.train.loop import LoopOptions
from jetspec.train.pipeline import _products, folders_of_run, other_targets, resolve_products, train_head
from jetspec.train.recipe import Settings, default_settings
from jetspec.train.self_instruct import SelfCounts, SelfOptions
from tests.draft.tiny import TAPS, tiny_answers, tiny_target

COLD: Settings = replace(
    default_settings("jetspec"),
    head=BlockOptions(vocab=0, scorer="none", rank=0, warm=False),
    loop=LoopOptions(steps=1),
)


def command(model: Path, folder: Path, *more: str) -> list[str]:
    """`jetspec train` on four lines of text, with a batch and a head of a few rows."""
    prompts = folder / "prompts.txt"
    if not prompts.exists():
        prompts.write_text("".join(f"the quick brown fox jumps over {n} lazy dogs\n" for n in range(12)))
    small = "--tokens 60 --max-tokens 8 --batch 4 --answers-per-batch 4 --anchors 3 --vocab 90 --rank 4"
    given = ["--model", str(model), "--prompts", str(prompts), "--out", str(folder / "run"), "--threads", "1"]
    return ["train", *given, *small.split(), "--block", "4", *more]


@pytest.mark.parametrize(
    "more", [(), ("--plain", "--rank", "0", "--cold", "--bidirectional")], ids=["own", "plain"]
)
def test_train_through_the_command_line(
    model_folder: Path, tmp_path: Path, more: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the whole way: the head that `jetspec train` leaves is accepted for its target, says how it was
    made, and the same command again adds no step and no answer."""
    arguments = command(model_folder, tmp_path, "--steps", "3", *more)
    assert main(arguments) == 0, capsys.readouterr().err
    folder = tmp_path / "run" / "head"
    drafter = load_drafter(folder, load_target(str(model_folder)))
    assert isinstance(drafter, BlockDrafter)
    config, manifest = drafter.head.config, drafter.head.manifest
    assert config.causal == ("--bidirectional" not in more) and config.direct == ("--plain" not in more)
    assert config.block_size == 4 and config.scorer == ("none" if more else "gated")
    assert drafter.head.vocab is not None and len(drafter.head.vocab) == 90
    assert manifest["steps"] == 3 and manifest["validation"]["tau"]["best-first-16"] >= 1.0
    assert str(tmp_path) not in (folder / "config.json").read_text()
    before = sorted(path.name for path in (tmp_path / "run" / "answers").iterdir())
    weights = load_head(folder).weights
    assert main(arguments) == 0
    assert sorted(path.name for path in (tmp_path / "run" / "answers").iterdir()) == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in load_head(folder).weights.items())


def test_more_tokens_leave_self_written_prompts_alone(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the folder of a run: a larger --tokens wrote more prompts, and from then on every command, the
    first one too, was refused because its answers were made with others."""

    def write(target: Any, path: Path, options: SelfOptions, *_: Any) -> SelfCounts:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(f'{{"turns": ["quick fox number {n}"]}}\n' for n in range(options.count)))
        return SelfCounts(options.count)

    monkeypatch.setattr("jetspec.train.self_instruct.write_prompts", write)
    given = command(model_folder, tmp_path, "--steps", "1")
    place = given.index("--prompts")
    given[place : place + 2] = []
    for more, said in ((), False), (("--tokens", "300"), True), ((), False):
        assert main([*given, *more]) == 0
        assert ("the 32 prompts of" in capsys.readouterr().err) == said
    prompts = tmp_path / "run" / "answers" / "prompts.jsonl"
    assert len(prompts.read_text().splitlines()) == 32
    prompts.unlink()
    assert main(given) == 2
    assert "give the --prompts that were answered" in capsys.readouterr().err and not prompts.exists()


def test_limit_and_strict_reach_the_prompts(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards two options that the documentation offered to `train`, which did not have them."""
    given = command(model_folder, tmp_path, "--steps", "1", "--limit", "7")
    held = tmp_path / "eval.txt"
    held.write_text("the quick brown fox jumps over 3 lazy dogs\n")
    assert main([*given, "--exclude", str(held), "--strict"]) == 2
    assert "1 prompts are eval prompts" in capsys.readouterr().err
    assert main(given) == 0
    assert "7 prompts of 7 records" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (("--recipe", "dflash"), ("dflash", "none", "in_place", False, False)),
        (("--recipe", "dspark", "--scorer", "rnn"), ("dspark", "rnn", "shifted", False, True)),
        (("--recipe", "jetspec", "--scorer", "rnn"), ("jetspec", "rnn", "in_place", True, False)),
    ],
    ids=["dflash", "dspark-rnn", "jetspec-rnn"],
)
def test_every_block_method_through_the_command_line(
    model_folder: Path, tmp_path: Path, more: tuple[str, ...], expected: tuple[Any, ...]
) -> None:
    """Guards recipes on the way from the command line to a head's config.json, and a single changed key."""
    arguments = [*command(model_folder, tmp_path, "--steps", "2", *more), "--set", "head.taps=[1,3]"]
    if more[1] == "dflash":  # published without a scorer, so `--rank 4` asks for another head
        arguments[arguments.index("--rank") + 1] = "0"
    assert main([*arguments, "--optimizer", "muon", "--cold"]) == 0
    folder = tmp_path / "run" / "head"
    head = load_drafter(folder, load_target(str(model_folder))).head  # type: ignore[attr-defined]
    config = head.config
    found = (config.method, config.scorer, config.alignment, config.causal, config.confidence)
    assert found == expected and config.taps == (1, 3)
    assert head.manifest["options"]["optimizer"] == "muon" and head.manifest["method"] == expected[0]
    card = (folder / "README.md").read_text()
    assert str(tmp_path) not in card and "draft head for" in card


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--recipe", "medusa"), "recipe 'medusa' was not found"),
        (("--scorer", "lstm"), "none, vanilla, gated, rnn"),
        (("--set", "head.depth=3"), "unknown key 'depth'"),
        (("--optimizer", "sgd"), "adamw, muon"),
        (("--products", "int8"), "products 'int8' is unknown"),
        (("--set", "head.confidence=true"), "head.confidence is true, but loss.confidence is 0"),
        (("--set", "loss.confidence=0.5"), "loss.confidence is 0.5, but the head has no confidence head"),
        (("--block", "1"), "block_size must be at least 2"),
        (("--threads", "0"), "threads"),
        (("--threads", "99999999999"), "threads"),
        (("--steps", "0"), "steps must be a number of at least 1"),
        (("--minutes", "nan"), "minutes must be a number"),
        (("--minutes", "0"), "minutes must be a number above 0, got 0"),
        (("--limit", "0"), "--limit must be at least 1"),
        (("--set", "training.betas=[9,9]"), "betas must be two numbers from 0 to below 1"),
        (("--rate", "-1"), "rate must be a number"),
        (("--decay", "inf"), "decay must be a number"),
        (("--answers-per-batch", "0"), "answers_per_batch must be"),
        (("--anchors", "0"), "anchors must be"),
        (("--seed", "-1"), "seed must be"),
    ],
)
def test_options_are_refused_before_any_work(
    tmp_path: Path, more: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards hours of answering prompts against a mistake that is known at the start."""
    assert main(command(Path("no-such-model"), tmp_path, *more)) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--exclude", "eval.txt"), ("--strict",), ("--limit", "3")])
def test_options_about_prompts_need_prompts(
    tmp_path: Path, option: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards `train --answers F --exclude E`, which trained on what E holds without a word."""
    assert main(["train", "--model", "none", "--answers", str(tmp_path), *option]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"jetspec: error: {option[0]} chooses among prompts") and said.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (("--rank", "17"), "rank must be at most 16, the target's hidden size, got 17"),
        (("--block", "129"), "block_size must be at most 128, the target's longest context, got 129"),
    ],
)
def test_what_the_target_cannot_have_is_refused_before_answers(
    model_folder: Path,
    tmp_path: Path,
    more: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Guards against a size mismatch after hours: a scorer's rank above the hidden size has no start. A block
    of more slots than the target has positions was trained, or killed for its memory."""
    assert main(command(model_folder, tmp_path, *more)) == 2
    assert capsys.readouterr().err == f"jetspec: error: {message}\n"
    assert not (tmp_path / "run").exists()


def test_a_run_folder_that_is_a_file_is_refused_before_training(tmp_path: Path) -> None:
    """Guards the training that would be lost at its first checkpoint."""
    target = tiny_target()
    tiny_answers(target, tmp_path / "answers")
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="choose another folder"):
        train_head(target, [tmp_path / "answers"], tmp_path / "file", COLD)


def test_answers_need_prompts(model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `jetspec answers`: without prompts or with a broken part it says what to give."""
    arguments = ["answers", "--model", str(model_folder), "--out", str(tmp_path / "a")]
    assert main(arguments) == 2
    assert "--prompts FILE" in capsys.readouterr().err
    assert main([*arguments, "--prompts", str(tmp_path / "none.txt")]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1  # and no line of a progress bar
    prompts = tmp_path / "p.txt"
    prompts.write_text("the quick fox\nthe lazy dog\n")
    assert main([*arguments, "--prompts", str(prompts), "--part", "2/2"]) == 2
    assert "0 <= I < N" in capsys.readouterr().err
    assert main([*arguments, "--prompts", str(prompts), "--max-tokens", "3", "--part", "1/2"]) == 0
    assert (tmp_path / "a" / "features-00000.safetensors").exists()


def test_answers_of_another_target_are_refused(tmp_path: Path) -> None:
    """Guards against a failing matrix product deep inside when widths differ."""
    tiny_answers(tiny_target(hidden_size=32), tmp_path / "answers", tokens=4)
    with pytest.raises(DataError, match="width 32, but tiny has 64"):
        train_head(tiny_target(), [tmp_path / "answers"], tmp_path / "run", COLD)


def test_short_answers_give_a_usable_start(tmp_path: Path) -> None:
    """Guards the warm start against the mean of no rows, a NaN that would fill the direct input."""
    corpus = tiny_answers(tiny_target(), tmp_path, tokens=6)
    corpus.training.sort(key=lambda entry: entry.length)
    for length in (corpus.training[0].length, 5, 4):
        entry = corpus.training[0]
        corpus.training[0] = type(entry)(entry.path, entry.start, length, entry.prompt_len, 0.0)
        assert 0.1 < tap_scale(corpus) < 100 and corpus.taps == TAPS


def test_a_run_that_goes_on_needs_its_answers(tmp_path: Path) -> None:
    """Guards resuming: folders in another order would give other batches, fewer or more would end in a
    message that names none of them."""
    answers = [tmp_path / name for name in "abc"]
    for folder, shards in zip(answers, (1, 2, 1), strict=True):
        folder.mkdir()
        for n in range(shards):
            (folder / f"features-{n:05}.safetensors").write_bytes(b"")
    a, b, c = answers
    state = {"folders": [str(a), str(b)], "shards": [1, 2]}
    run = tmp_path / "run"
    assert folders_of_run(run, {}, [b, a]) == [b, a] and folders_of_run(run, state, [b, a]) == [a, b]
    (tmp_path / "moved").mkdir()
    moved = b.rename(tmp_path / "moved" / "b")
    assert folders_of_run(run, state, [a, moved]) == [a, moved]
    for given, message in (
        ([a], f"began with the answers in {b}, which are not given now; add --answers {b}"),
        ([moved, c], f"began with the answers in {a}, which are not given now"),
        ([a, moved, c], f"began without the answers in {c}; leave them out"),
    ):
        with pytest.raises(DataError, match=re.escape(message)):
            folders_of_run(run, state, given)
    (moved / "features-00001.safetensors").unlink()
    with pytest.raises(DataError, match=re.escape(f"{moved} holds 1 of the 2 shards")):
        folders_of_run(run, state, [a, moved])


def test_answers_that_name_another_target_are_said(tmp_path: Path) -> None:
    """Guards against the answers of another target of the same shape, which were taken without a word; a
    folder and an id may be the same target."""
    for name, made in ("a", "org/Tiny"), ("b", "org/other"), ("c", "else"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "answers.json").write_text(json.dumps({"target": made}))
    a, b, c = (tmp_path / name for name in "abc")
    assert not other_targets("/models/tiny", [a, tmp_path / "none"])
    (line,) = other_targets("/models/tiny", [a, b, c])
    assert f"{b} and 1 more of the folders say that org/other made them" in line and "is /models/tiny" in line
    tiny_answers(target := tiny_target(), tmp_path / "d")
    (tmp_path / "d" / "answers.json").write_text(json.dumps({"target": "else"}))
    said: list[str] = []
    train_head(target, [tmp_path / "d"], tmp_path / "run", COLD, say=said.append)
    assert len(said) == 1 and "else made them" in said[0]


def test_an_older_run_keeps_what_it_holds_out(tmp_path: Path) -> None:
    """Guards exact resume of runs that began before a greedy answer was exchanged for a sampled one that was
    held out: with the exchange they would see other batches, or be refused for other answers."""
    target = tiny_target()
    tiny_answers(target, tmp_path / "answers", tokens=5)
    (shard,) = shard_paths(tmp_path / "answers")
    tensors = load_file(shard)
    tensors["temperatures"][0] = 1.0  # the only one that is held out
    save_file(tensors, shard, {"taps": json.dumps(TAPS)})

    def tau(run: str, steps: int) -> dict[str, float]:
        settings = replace(COLD, loop=LoopOptions(steps=steps, answers=2, anchors=2))
        head = train_head(target, [tmp_path / "answers"], tmp_path / run, settings)
        return load_head(head).manifest["validation"]["tau"]

    assert tau("new", 1) and tau("new", 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus_module, "_held_out", lambda entries, *_: [0])
        assert not tau("old", 1)
    state = read_state(tmp_path / "old")
    assert state is not None and state.pop("hold_greedy")
    path = tmp_path / "old" / "checkpoint.safetensors"  # as a version wrote it that knew no exchange
    save_file(load_file(path), path, {"state": json.dumps(state)})
    assert not tau("old", 2)
    assert not tau("old", 3)


def test_mask_token_is_one_that_text_does_not_hold() -> None:
    """Guards the choice of the mask: a special token that does not end texts, or the last id."""

    def chosen(special: set[int], eos: set[int]) -> int:
        tokenizer = SimpleNamespace(special_ids=frozenset(special), eos_ids=frozenset(eos))
        target: Any = SimpleNamespace(tokenizer=tokenizer, config=SimpleNamespace(vocab_size=50))
        return mask_token(target)

    assert chosen({0, 4, 7}, {7}) == 4
    assert chosen({7}, {7}) == 49
    assert chosen({3, 60}, set()) == 3


def test_arithmetic_of_products_is_restored() -> None:
    """Guards the rest of the process against the setting that training uses, also after an error."""
    before = torch.get_float32_matmul_precision()
    with pytest.raises(RuntimeError), _products("bfloat16"):
        assert torch.get_float32_matmul_precision() == "medium"
        raise RuntimeError
    assert torch.get_float32_matmul_precision() == before
    assert resolve_products("float32") == "float32" and resolve_products("auto") in ("float32", "bfloat16")
    with pytest.raises(OptionError):
        resolve_products("half")
