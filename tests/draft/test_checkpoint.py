"""Heads on disk: the public layout, strictly read, and every error one line that names what is wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec.decode.engine import Engine
from jetspec.draft.checkpoint import load_head, save_head
from jetspec.draft.config import HeadConfig, default_tap_layers
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.loading import load_drafter
from jetspec.errors import HeadError, StorageError
from jetspec.sequence import Limits
from jetspec.target.config import RopeConfig
from jetspec.target.target import Target
from jetspec.train.from_head import read_source
from tests.draft.tiny import MASK, PLAIN_PARTS, TAPS, VOCAB, random_head, tiny_target


@pytest.fixture(autouse=True)
def _one_thread(_same_start: None) -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


@pytest.mark.parametrize(
    "options",
    [
        {},
        PLAIN_PARTS,
        {"causal": False},
        {"scorer": "vanilla", "rank": 3},
        {"scorer": "rnn", "alignment": "shifted", "block_size": 1, "confidence": True},
        {"layout": "specforge", "alignment": "shifted", "confidence": True},
        {"layout": "deepspec", "alignment": "shifted", "causal": False, "notes": (("num_anchors", 9),)},
        {**PLAIN_PARTS, "confidence": True, "confidence_with_markov": False, "layout": "specforge"},
        {"direct": False, "block_size": 2, "layers": 1},
    ],
)
def test_configuration_survives_a_round_trip(target: Target, options: dict[str, Any]) -> None:
    """Guards every key that is written but not read, or read from elsewhere."""
    config = random_head(target, **options).config
    assert HeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(theta=5e5, kind="llama3", factor=8.0, original_max_positions=128),
        RopeConfig(kind="yarn", factor=4.0, original_max_positions=128, mscale=0.7, truncate=False),
        RopeConfig(kind="linear", factor=2.0, original_max_positions=512),
    ],
)
def test_rotary_scaling_and_windows_survive_a_round_trip(target: Target, rope: RopeConfig) -> None:
    """Guards heads of scaled or windowed models, whose acceptance falls to 1 when these are lost on saving
    (speculators #613)."""
    config = random_head(target).config
    config = replace(config, model=replace(config.model, rope=rope, windows=(None, 64)))
    assert HeadConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def public_folder(target: Target, folder: Path, dtype: torch.dtype = torch.bfloat16) -> dict[str, Any]:
    """A head as z-lab writes it: no `jet`, block size inside `dflash_config` only. Returns config.json."""
    config = random_head(target, **PLAIN_PARTS).config
    values = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "num_target_layers": 5,
        "dflash_config": {
            "mask_token_id": MASK,
            "target_layer_ids": list(TAPS),
            "block_size": 5,
            "causal_head": True,
        },
    }
    dice = torch.Generator().manual_seed(1)
    weights = {n: torch.randn(s, generator=dice).to(dtype) * 0.1 for n, s in config.shapes().items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(weights, folder / "model.safetensors")
    return values


def test_a_public_head_loads_drafts_and_saves_back(target: Target, tmp_path: Path) -> None:
    """Guards exchange with other programs: a folder in the public layout works as it is, and what is saved
    holds the same tensors and means the same."""
    public_folder(target, tmp_path / "public")
    head = load_head(tmp_path / "public")
    assert head.config.causal and head.config.block_size == 5 and head.config.scorer == "none"
    drafter = load_drafter(tmp_path / "public", target)
    limits = Limits(max_tokens=12, ignore_eos=True)
    drafted = Engine(target, drafter, budget=8).generate([[4, 5, 6]], None, limits)
    assert drafted[0].emitted == Engine(target).generate([[4, 5, 6]], None, limits)[0].emitted
    save_head(tmp_path / "saved", head, torch.bfloat16)
    assert load_head(tmp_path / "saved").config == head.config
    public, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("public", "saved"))
    assert public.keys() == saved.keys()
    assert all(torch.equal(public[name], saved[name]) for name in public)


def test_an_own_head_survives_a_round_trip(target: Target, tmp_path: Path) -> None:
    """Guards the optional parts, draft vocabulary and manifest; only rounding to the dtype is lost."""
    vocab = torch.arange(0, VOCAB, 7)
    head = replace(random_head(target, vocab=vocab), manifest={"steps": 3})
    save_head(tmp_path, head)
    loaded = load_head(tmp_path)
    assert loaded.config == head.config and loaded.manifest == {"steps": 3}
    assert loaded.vocab is not None and torch.equal(loaded.vocab, vocab)
    assert all(torch.equal(loaded.weights[n], t.half()) for n, t in head.weights.items())
    assert not list(tmp_path.glob("*.tmp"))


def config_edit(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """A fault in config.json."""

    def apply(folder: Path) -> None:
        values = json.loads((folder / "config.json").read_text())
        edit(values)
        (folder / "config.json").write_text(json.dumps(values))

    return apply


def tensor_edit(edit: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Path], None]:
    """A fault in the weights."""

    def apply(folder: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        edit(tensors)
        save_file(tensors, folder / "model.safetensors")

    return apply


def truncate(folder: Path) -> None:
    """Half a download."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickle_only(folder: Path) -> None:
    """A folder of the old kind."""
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


FAULTS: dict[str, tuple[Callable[[Path], None], str]] = {
    "missing tensor": (tensor_edit(lambda t: t.pop("norm.weight")), "lacks norm.weight"),
    "unexpected tensor": (
        tensor_edit(lambda t: t.update({"model.norm.weight": torch.ones(64)})),
        "unexpected model.norm.weight",
    ),
    "misshaped tensor": (
        tensor_edit(lambda t: t.update({"norm.weight": torch.ones(63)})),
        r"norm.weight .*63",
    ),
    "NaN": (
        tensor_edit(lambda t: t.update({"fc.weight": t["fc.weight"] * float("nan")})),
        "fc.weight .*not finite",
    ),
    "truncated": (truncate, "truncated"),
    "pickle only": (pickle_only, "pytorch_model.bin.*pickle"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "no model.safetensors"),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "has no config.json; give the folder of a draft",
    ),
    "no JSON": (lambda folder: (folder / "config.json").write_text("{"), "config.json.*cannot be read"),  # type: ignore[dict-item,return-value]
    "a list": (lambda folder: (folder / "config.json").write_text("[]"), "holds no object"),  # type: ignore[dict-item,return-value]
    "another kind": (config_edit(lambda c: c.pop("dflash_config")), "dflash_config"),
    "no block size": (config_edit(lambda c: c["dflash_config"].pop("block_size")), "block_size"),
    "two block sizes": (config_edit(lambda c: c.update(block_size=8)), "block_size twice, as 8 and 5"),
    "block size 1": (config_edit(lambda c: c["dflash_config"].update(block_size=1)), "block_size is 1"),
    "a block beyond the context": (
        config_edit(lambda c: c["dflash_config"].update(block_size=10**6)),
        "block_size is 1000000, but the context holds only",
    ),
    "two masks": (config_edit(lambda c: c.update(is_causal=False)), "causal mask twice, as False and True"),
    "jet mask": (config_edit(lambda c: c.update(jet={"mask": "bidirectional"})), "causal mask twice"),
    "unknown mask": (config_edit(lambda c: c.update(jet={"mask": "odd"})), "jet.mask"),
    "taps out of range": (
        config_edit(lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 9])),
        r"target_layer_ids .* 0\.\.3",
    ),
    "last layer": (
        config_edit(lambda c: c["dflash_config"].update(target_layer_ids=[0, 1, 4])),
        "last layer of the target is not allowed",
    ),
    "negative tap": (
        config_edit(lambda c: c["dflash_config"].update(target_layer_ids=[-1, 1, 2])),
        "target_layer_ids",
    ),
    "unsorted taps": (
        config_edit(lambda c: c["dflash_config"].update(target_layer_ids=[1, 0, 2])),
        "increasing",
    ),
    "taps are text": (
        config_edit(lambda c: c["dflash_config"].update(target_layer_ids="0,1,2")),
        "target_layer_ids is '0,1,2'",
    ),
    "mask token": (config_edit(lambda c: c["dflash_config"].update(mask_token_id=VOCAB)), "mask_token_id"),
    "mask token is text": (
        config_edit(lambda c: c["dflash_config"].update(mask_token_id="<m>")),
        "mask_token_id is '<m>'",
    ),
    "alignment": (config_edit(lambda c: c.update(jet={"alignment": "upwards"})), "in_place, shifted"),
    "two alignments": (
        config_edit(lambda c: c.update(shift_label=True, jet={"alignment": "in_place"})),
        "slot alignment twice",
    ),
    "unknown key": (config_edit(lambda c: c.update(rope_twist=2)), "'rope_twist'"),
    "unknown inner key": (
        config_edit(lambda c: c["dflash_config"].update(markov_order=2)),
        "dflash_config holds the key 'markov_order'",
    ),
    "unknown own key": (config_edit(lambda c: c.update(jet={"branches": 2})), "jet holds the key 'branches'"),
    "another projector": (
        config_edit(lambda c: c["dflash_config"].update(projector_type="domino")),
        "projector_type 'domino'",
    ),
    "another width": (
        config_edit(lambda c: c["dflash_config"].update(target_hidden_size=32)),
        "target_hidden_size is 32",
    ),
    "layer convention": (
        config_edit(lambda c: c.update(jet={"layer_id_convention": "input"})),
        "layer_id_convention is 'input'",
    ),
    "flag as text": (config_edit(lambda c: c.update(shift_label="yes")), "shift_label is 'yes'"),
    "newer format": (config_edit(lambda c: c.update(jet={"format_version": 99})), "format 99"),
    "unknown scorer": (config_edit(lambda c: c.update(jet={"head_type": "lstm", "rank": 4})), "lstm"),
    "no rank": (config_edit(lambda c: c.update(jet={"head_type": "gated"})), "rank 0"),
    "bad size": (config_edit(lambda c: c.update(hidden_size="wide")), "hidden_size"),
    "vocabulary": (
        tensor_edit(lambda t: t.update({"draft_vocab": torch.tensor([3, 2])})),
        "draft_vocab must be ascending",
    ),
    "big vocabulary": (
        tensor_edit(lambda t: t.update({"draft_vocab": torch.tensor([3, VOCAB])})),
        "draft_vocab",
    ),
    "vocabulary of two axes": (
        tensor_edit(lambda t: t.update({"draft_vocab": torch.zeros(2, 2, dtype=torch.int64)})),
        "draft_vocab",
    ),
    "vocabulary of none": (tensor_edit(lambda t: t.update({"draft_vocab": torch.tensor(3)})), "draft_vocab"),
    "manifest": (config_edit(lambda c: c.update(jet={"manifest": "x"})), "manifest"),
    "manifest of a target": (config_edit(lambda c: c.update(jet={"manifest": {"target": "x"}})), "manifest"),
    "architectures": (config_edit(lambda c: c.update(architectures=5)), "architectures is 5; valid: a list"),
    "float8": (
        tensor_edit(lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.float8_e4m3fn)})),
        "norm.weight in .*model.safetensors is stored as float8_e4m3fn",
    ),
    "integers": (
        tensor_edit(lambda t: t.update({"norm.weight": t["norm.weight"].to(torch.int8)})),
        "norm.weight in .* is stored as int8",
    ),
    "end ids": (config_edit(lambda c: c.update(eos_token_id="x")), "eos_token_id is 'x'"),
    "deep JSON": (
        lambda folder: (folder / "config.json").write_text("[" * 10**5),  # type: ignore[dict-item,return-value]
        "cannot be read",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_in_one_line(target: Target, tmp_path: Path, fault: str) -> None:
    """Guards against a head that loads although something is wrong: it would only show as low acceptance."""
    public_folder(target, tmp_path, torch.float32)
    load_head(tmp_path)
    apply, message = FAULTS[fault]
    apply(tmp_path)
    with pytest.raises(HeadError, match=message) as caught:
        load_head(tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_folders(target: Target, tmp_path: Path) -> None:
    """Guards names that are mistyped: the valid ones are listed."""
    with pytest.raises(HeadError, match="does not exist"):
        load_head(tmp_path / "none")
    with pytest.raises(HeadError, match="valid: auto, default, off, random, echo, decoy"):
        load_drafter("of", target)


def test_the_folder_of_a_training_names_its_head(target: Target, tmp_path: Path) -> None:
    """Guards `--head runs/first`: the error was the system's own, and did not say where the head is."""
    save_head(tmp_path / "first" / "head", random_head(target))
    with pytest.raises(HeadError, match=r"first is the folder of a training.*give its head: .*first/head$"):
        load_drafter(tmp_path / "first", target)
    (tmp_path / "second").mkdir()
    with pytest.raises(HeadError, match=r"second has no config\.json; give the folder of a draft head"):
        load_drafter(tmp_path / "second", target)


def test_the_packaged_head_has_two_names(
    target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards `--head default` and `--from-head auto`, each of which only the other option knew."""
    save_head(tmp_path / "packaged", random_head(target))
    for name in ("auto", "default"):
        with monkeypatch.context() as patched:
            patched.setattr("jetspec.draft.loading.packaged_head", lambda name: tmp_path / "packaged")
            assert getattr(load_drafter(name, target), "folder", None) == tmp_path / "packaged"
            assert read_source(name, "tiny").folder == tmp_path / "packaged"
            assert read_source(name, "tiny").name == "packaged packaged"
            patched.setattr("jetspec.draft.loading.packaged_head", lambda name: None)
            assert load_drafter(name, target).name == "off"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 32, "head_dim": 16}, "hidden size is 64, tiny has 32"),
        ({"vocab_size": 201}, "vocabulary is 200, tiny has 201"),
        ({"num_hidden_layers": 6}, "number of target layers is 5, tiny has 6"),
    ],
)
def test_heads_of_other_targets_are_refused(target: Target, change: dict[str, Any], message: str) -> None:
    """Guards against a head that runs on the wrong target, where it only costs time."""
    with pytest.raises(HeadError, match=message):
        BlockDrafter(random_head(target), tiny_target(**change))


def test_another_tokenizer_is_refused(target: Target) -> None:
    """Guards against equal shapes with other tokens; a head that does not say is taken."""
    for found, good in ((target.tokenizer.hash, True), ("other", False)):
        head = replace(random_head(target), manifest={"target": {"tokenizer_hash": found}})
        if good:
            BlockDrafter(head, target)
        else:
            with pytest.raises(HeadError, match="another tokenizer"):
                BlockDrafter(head, target)


def test_a_folder_that_cannot_be_written(target: Target, tmp_path: Path) -> None:
    """Guards the message when a file stands where the folder should be."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="cannot be written"):
        save_head(tmp_path / "file", random_head(target))


@pytest.mark.parametrize("layers", range(1, 40))
def test_default_taps_fit_their_target(target: Target, layers: int) -> None:
    """Guards the rule for taps at every depth: increasing, and never the last layer unless it is alone."""
    config = random_head(target).config
    taps = default_tap_layers(layers)
    replace(config, taps=taps, target_layers=layers)
    assert default_tap_layers(30) == (1, 8, 14, 20, 27) and default_tap_layers(36) == (1, 9, 17, 25, 33)
