"""Training that begins from an existing head: what is kept of it, what is refused, and how a run goes on."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.cli.main import main
from jetspec.draft.checkpoint import load_head, save_head
from jetspec.draft.config import HeadConfig
from jetspec.draft.eagle3_format import save_eagle3
from jetspec.draft.head_files import read_folder
from jetspec.draft.loading import load_drafter
from jetspec.draft.mtp_format import save_mtp
from jetspec.errors import DataError, HeadError, OptionError
from jetspec.target.target import Target
from jetspec.train import pipeline
from jetspec.train.data import Corpus
from jetspec.train.from_head import SourceHead, read_source
from jetspec.train.log import read_log
from jetspec.train.loop import LoopOptions, Report
from jetspec.train.pipeline import train_head
from jetspec.train.recipe import Settings, default_settings
from jetspec.train.validate import SETTINGS, validate_drafter
from tests.draft.sequential_tiny import random_eagle3, random_mtp
from tests.draft.tiny import PLAIN_PARTS, VOCAB, random_head, tiny_answers, tiny_target

PART = torch.arange(0, VOCAB, 2)
LOOP = LoopOptions(steps=1, answers=4, anchors=4, part=3, validate_minutes=1e6, checkpoint_minutes=0.0)
SHIFTED = {"alignment": "shifted", "causal": False, "scorer": "vanilla", "confidence": True}
HEADS = ("jetspec", "dflash", "dspark-rnn", "deepspec", "eagle3", "eagle3-own-embedding", "mtp", "mtp-two")


def write(name: str, target: Target, folder: Path, seed: int = 5) -> Path:
    """A head of a kind as a folder."""
    if name.startswith("eagle3"):
        own = name != "eagle3"
        head = random_eagle3(target, vocab=PART, own_embedding=own, taps=None if own else (0, 2), seed=seed)
        save_eagle3(folder, head, torch.float16)
    elif name.startswith("mtp"):
        modules = 2 if name == "mtp-two" else 1
        save_mtp(folder, random_mtp(target, vocab=PART, modules=modules, seed=seed), torch.float16)
    else:
        parts: dict[str, dict[str, Any]] = {
            "jetspec": {"vocab": PART},
            "dflash": {**PLAIN_PARTS, "causal": False, "layers": 1, "taps": (0, 2)},
            "dspark-rnn": {**SHIFTED, "scorer": "rnn", "layout": "specforge", "vocab": PART},
            "deepspec": {**SHIFTED, "layout": "deepspec", "direct": False, "slot_embedding": False},
        }
        made = random_head(target, seed=seed, **parts[name])
        weights = {key: x.half() for key, x in made.weights.items()}
        if name == "deepspec":  # its copies of the target's ends draft in its place
            transformer = target.transformer
            weights |= {
                "embed_tokens.weight": transformer.embedding,
                "lm_head.weight": transformer.output_matrix,
            }
        manifest = {"supervised_blocks": 100, "started_from": {"supervised_blocks": 11}}
        save_head(folder, replace(made, weights=weights, manifest=manifest), None)
    return folder


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


@pytest.fixture(scope="module")
def answers(target: Target, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of short greedy answers."""
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("answers")
    tiny_answers(target, folder, prompts=48, tokens=12)
    return folder


def settings_of(source: SourceHead, **loop: Any) -> Settings:
    """The method's defaults with the shape of a head."""
    method = replace(default_settings(source.method), loop=replace(LOOP, **loop), products="float32")
    return source.adopt(method)


def tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of a head's folder."""
    return read_folder(folder)[1]


def test_a_new_vocabulary_is_chosen_from_the_answers(target: Target, answers: Path, tmp_path: Path) -> None:
    """Guards a head that moves to other text: tokens of the new answers could never be drafted otherwise."""
    source = read_source(write("jetspec", target, tmp_path / "source"), "tiny")
    settings = settings_of(source)
    count = len(PART) + 3
    settings = replace(settings, head=replace(settings.head, new_vocab=True, vocab=count))
    source.check_options(settings)  # another size is no other shape
    folder = train_head(target, [answers], tmp_path / "run", settings, source=source)
    wanted = Corpus([answers]).frequent_ids(count, VOCAB)
    after = load_head(folder).vocab
    assert after is not None and torch.equal(after, wanted) and not torch.equal(after, PART)
    with pytest.raises(DataError, match="another head, draft vocabulary or other answers"):
        train_head(target, [answers], tmp_path / "run", settings_of(source, steps=2), source=source)


@pytest.mark.parametrize("name", HEADS)
def test_nothing_is_lost_on_the_way(
    name: str, target: Target, answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards every tensor, switch, tap and draft token of each family: before the first step the head in
    training reaches exactly what the folder reaches when it drafts, and a rate of 0 leaves the same head."""
    monkeypatch.setattr(pipeline, "Corpus", partial(Corpus, holdout=4))  # a random head is seldom right
    source = read_source(write(name, target, tmp_path / "source"), "tiny")
    reports: list[Report] = []
    run = tmp_path / "run"
    settings = settings_of(source, learning_rate=0.0)
    folder = train_head(target, [answers], run, settings, source=source, on_report=reports.append)
    drafter: Any = load_drafter(source.folder, target)
    corpus = Corpus([answers], holdout=4).with_taps(drafter.taps)
    depth = drafter.head.config.depth if hasattr(drafter, "head") else drafter.depth
    entries = corpus.held_out[: LOOP.validate_answers]
    expected = validate_drafter(drafter, corpus, entries, SETTINGS, depth=depth)
    assert expected.tau["best-first-32"] > 1.0, "a head that is never right proves little"
    assert reports[0].step == 0 and reports[0].validation == expected
    assert read_log(run / "log.jsonl")[0]["validation"]["tau"] == expected.tau
    before, after = tensors(source.folder), tensors(folder)
    if name == "deepspec":  # the copies of the target's ends are left behind
        before = {key: x for key, x in before.items() if key not in ("lm_head.weight", "embed_tokens.weight")}
        after.pop("draft_vocab")  # all ids
    if name == "dflash":
        after.pop("draft_vocab")
    assert set(after) == set(before)
    assert all(torch.equal(tensor, before[key]) for key, tensor in after.items())
    again: Any = load_drafter(folder, target)
    assert again.taps == drafter.taps and again.name == drafter.name
    if hasattr(drafter, "head"):
        layout = {"deepspec": "specforge"}.get(drafter.head.config.layout, drafter.head.config.layout)
        assert again.head.config == replace(drafter.head.config, layout=layout)


def test_the_new_head_says_what_it_began_from(target: Target, answers: Path, tmp_path: Path) -> None:
    """Guards provenance: name and hash of the head before, the blocks of all its runs, and no path of this
    machine; the weights are other ones after a step."""
    folder = write("jetspec", target, tmp_path / "mine" / "head")
    source = read_source(folder, "tiny")
    settings = settings_of(source)
    done = train_head(target, [answers], tmp_path / "run", settings, source=source)
    manifest = json.loads((done / "config.json").read_text())["jet"]["manifest"]
    digest = hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert manifest["started_from"] == {"name": "mine/head", "sha256": digest, "supervised_blocks": 111}
    assert manifest["supervised_blocks"] == 16 and manifest["head_options"]["layers"] == 2
    assert read_source(done, "tiny").supervised_blocks == 127
    card = (done / "README.md").read_text()
    line = f"- it began from the head mine/head (weights {digest[:16]}), trained on 111 blocks before"
    assert line in card.splitlines() and str(tmp_path) not in card
    before, after = tensors(folder), tensors(done)
    assert any(not torch.equal(before[key], after[key]) for key in before)
    assert torch.equal(before["draft_vocab"], after["draft_vocab"])


def test_a_killed_run_goes_on_exactly(target: Target, answers: Path, tmp_path: Path) -> None:
    """Guards resuming: the checkpoint's weights count and not the head's, the first validation is logged
    once, and a run that began from another head, or from none, is refused with both beginnings."""
    source = read_source(write("eagle3", target, tmp_path / "source"), "tiny")
    settings = settings_of(source, steps=4)

    def kill(report: Report) -> None:
        if report.step == 2 and report.by_depth:
            raise KeyboardInterrupt

    whole = train_head(target, [answers], tmp_path / "whole", settings, source=source)
    with pytest.raises(KeyboardInterrupt):
        train_head(target, [answers], tmp_path / "run", settings, source=source, on_report=kill)
    done = train_head(target, [answers], tmp_path / "run", settings, source=source)
    assert all(torch.equal(x, tensors(whole)[key]) for key, x in tensors(done).items())
    assert [line["step"] for line in read_log(tmp_path / "run" / "log.jsonl")].count(0) == 1

    other = read_source(write("eagle3", target, tmp_path / "other", seed=6), "tiny")
    began = f"began from the head with the weights {source.sha256[:16]}, and not from "
    for start, now in (
        (other, f"the head with the weights {other.sha256[:16]}"),
        (None, "untrained weights"),
    ):
        with pytest.raises(DataError, match=re.escape(began + now)):
            train_head(target, [answers], tmp_path / "run", settings, source=start)
    fresh = replace(settings, head=replace(settings.head, warm=False))
    train_head(target, [answers], tmp_path / "fresh", fresh)
    with pytest.raises(DataError, match="began from untrained weights, and not from the head with"):
        train_head(target, [answers], tmp_path / "fresh", settings, source=source)
    with pytest.raises(OptionError, match="would overwrite the head it begins from"):
        train_head(
            target, [answers], tmp_path / "run", settings, source=read_source(tmp_path / "run" / "head", "x")
        )


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("jetspec", {"hidden_size": 32, "head_dim": 8}, "its hidden size is 64, tiny has 32"),
        ("jetspec", {"num_hidden_layers": 6}, "its number of target layers is 5, tiny has 6"),
        ("eagle3", {"vocab_size": 150}, "its vocabulary is 200, tiny has 150"),
        ("eagle3", {"num_hidden_layers": 3}, "must lie in 0..1"),
        ("mtp", {"model_type": "qwen3"}, "modules are llama layers, but tiny is of the family qwen3"),
    ],
)
def test_another_target_is_refused_as_when_drafting(
    name: str, changes: dict[str, Any], message: str, target: Target, tmp_path: Path
) -> None:
    """Guards hours of answers against a head that does not fit: refused before the answers are looked for."""
    source = read_source(write(name, target, tmp_path / "source"), "tiny")
    with pytest.raises(HeadError, match=re.escape(message)):
        train_head(tiny_target(**changes), [], tmp_path / "run", settings_of(source), source=source)


def test_ends_of_its_own_are_refused(target: Target, tmp_path: Path) -> None:
    """Guards DeepSpec folders, which bring an embedding and an output matrix: training has the target's, so
    only copies of them (rounded to half precision) will do."""
    source = read_source(write("deepspec", target, tmp_path / "source"), "tiny")
    for name in ("embed_tokens.weight", "lm_head.weight"):
        weights = dict(source.head.weights)
        weights[name] = weights[name].bfloat16()
        replace(source, head=replace(source.head, weights=weights)).check(target, tmp_path)  # type: ignore[type-var]
        weights[name] = weights[name] + 0.1 * weights[name].flip(0)
        with pytest.raises(HeadError, match=f"{name} of the head is no copy of the target's"):
            replace(source, head=replace(source.head, weights=weights)).check(target, tmp_path)  # type: ignore[type-var]


def test_windows_are_refused(target: Target, tmp_path: Path) -> None:
    """Guards against training another network than the one that drafts."""
    head = random_head(target, **PLAIN_PARTS)
    config: HeadConfig = replace(head.config, model=replace(head.config.model, windows=(None, 4)))
    save_head(tmp_path / "source", replace(head, config=config))
    source = read_source(tmp_path / "source", "tiny")
    with pytest.raises(HeadError, match="have sliding windows, which training does not compute"):
        source.check(target, tmp_path)


def test_through_the_command_line(
    model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards the user's way: a head is trained, then trained on with nothing but --from-head; recipe, shape
    and vocabulary come from it, options that agree are taken, and those that contradict it are one line."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the quick brown fox jumps over {n} lazy dogs\n" for n in range(12)))
    model = ["--model", str(model_folder), "--threads", "1"]
    small = ["--answers-per-batch", "4", "--anchors", "3", "--steps", "2"]
    answered = ["--tokens", "60", "--max-tokens", "8", "--batch", "4"]
    shape = ["--vocab", "90", "--block", "4", "--layers", "1"]
    first = tmp_path / "first"
    given = ["train", *model, *small, "--prompts", str(prompts), "--out", str(first), "--recipe", "dflash"]
    assert main([*given, *answered, *shape]) == 0, capsys.readouterr().err
    head = first / "head"
    again = ["train", *model, *small, "--answers", str(first / "answers"), "--from-head", str(head)]
    out = ["--out", str(tmp_path / "second")]
    capsys.readouterr()
    assert main([*again, *out, "--rate", "0", "--layers", "1", "--set", "head.causal=false"]) == 0
    shown = capsys.readouterr().err
    assert re.search(r"^step 0, 0\.0 min: tau chain-3 \d", shown, re.M)
    assert all(torch.equal(x, tensors(head)[key]) for key, x in tensors(tmp_path / "second" / "head").items())
    recipe = tmp_path / "mine.toml"
    recipe.write_text('method = "dflash"\n[head]\nblock_size = 3\n')
    for more, message in (
        (
            ["--block", "6"],
            f"block_size is 6, but the head in {head} has 4, which training from a head keeps",
        ),
        (["--scorer", "gated"], "scorer is 'gated', but the head in"),
        (["--vocab", "80"], "vocab is 80, but the head in"),
        (["--set", "head.taps=[1]"], "taps is (1,), but the head in"),
        (["--cold"], "warm is False, but the head in"),
        (["--recipe", "jetspec"], "the recipe is one of the method jetspec, but the head in"),
        (["--recipe", str(recipe)], "block_size is 3, but the head in"),
        (
            ["--from-head", "nowhere"],
            "head 'nowhere' was not found; valid: auto, default, or the folder of a head",
        ),
        (["--from-head", str(first)], f"{first} is the folder of a training, not of a head; give its head"),
        (["--from-head", "default"], f"no head is packaged for {model_folder}; give --from-head the folder"),
    ):
        assert main([*again, *out, *more]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"jetspec: error: {message}") and error.count("\n") == 1, error


@pytest.mark.parametrize("recipe", ["jetspec", "dspark"])
def test_a_head_grows(
    recipe: str, model_folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Guards layers that are added: the head is at first what it was, to the bit, although none of their
    other weights is zero, and learns in them from the first step on. Fewer layers are refused."""
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("".join(f"the quick brown fox jumps over {n} lazy dogs\n" for n in range(12)))
    model = ["--model", str(model_folder), "--threads", "1", "--answers-per-batch", "4", "--anchors", "3"]
    answered = ["--prompts", str(prompts), "--tokens", "60", "--max-tokens", "8", "--batch", "4"]
    shape = ["--vocab", "90", "--rank", "4", "--layers", "2", "--steps", "2", "--recipe", recipe]
    first = tmp_path / "first"
    assert main(["train", *model, *answered, *shape, "--out", str(first)]) == 0, capsys.readouterr().err
    own = tensors(first / "head")
    again = ["train", *model, "--answers", str(first / "answers"), "--from-head", str(first / "head")]
    for rate, steps in (("0", "1"), ("1e-3", "2")):
        run = tmp_path / rate
        options = ["--layers", "3", "--rate", rate, "--steps", steps, "--out", str(run)]
        assert main([*again, *options]) == 0, capsys.readouterr().err
    still, grown = tensors(tmp_path / "0" / "head"), tensors(tmp_path / "1e-3" / "head")
    assert all(torch.equal(still[key], tensor) for key, tensor in own.items())
    added = set(still) - set(own)
    silent = {f"layers.2.{name}.weight" for name in ("self_attn.o_proj", "mlp.down_proj")}
    assert added == {key.replace("layers.1.", "layers.2.") for key in own if key.startswith("layers.1.")}
    assert {key for key in added if not still[key].any()} == silent
    assert all(grown[key].any() for key in added)
    before = read_log(tmp_path / "0" / "log.jsonl")[0]["validation"]["tau"]
    assert before == read_log(first / "log.jsonl")[-1]["validation"]["tau"]
    capsys.readouterr()
    assert main([*again, "--layers", "1", "--out", str(tmp_path / "less")]) == 2
    assert "layers is 1, but the head in" in (error := capsys.readouterr().err)
    assert "has 2, which training from a head may only enlarge" in error
