"""EAGLE-3 and MTP heads on disk: public folders come back tensor by tensor, and what is wrong is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from jetspec.draft.eagle3_format import IDS, default_eagle3_taps, load_eagle3, save_eagle3
from jetspec.draft.loading import load_drafter
from jetspec.draft.mtp_format import MTPConfig, load_mtp, save_mtp
from jetspec.draft.sequential import SequentialDrafter
from jetspec.errors import HeadError, StorageError
from jetspec.target.config import ModelConfig
from tests.draft.sequential_tiny import random_eagle3, random_mtp
from tests.draft.tiny import VOCAB, tiny_target

H, V, VD, HEADS, KV, DIM, FFN = 64, VOCAB, 50, 4, 2, 16, 96
PUBLIC: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "num_hidden_layers": 1,
    "hidden_size": H,
    "intermediate_size": FFN,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "vocab_size": V,
    "draft_vocab_size": VD,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
}


def public_tensors(taps: int = 3, whole: bool = False) -> dict[str, Tensor]:
    """A folder's tensors as the public code writes them, in bfloat16."""
    size = V if whole else VD
    shapes = {
        "fc.weight": (H, taps * H),
        "midlayer.self_attn.q_proj.weight": (HEADS * DIM, 2 * H),
        "midlayer.self_attn.k_proj.weight": (KV * DIM, 2 * H),
        "midlayer.self_attn.v_proj.weight": (KV * DIM, 2 * H),
        "midlayer.self_attn.o_proj.weight": (H, HEADS * DIM),
        "midlayer.mlp.gate_proj.weight": (FFN, H),
        "midlayer.mlp.up_proj.weight": (FFN, H),
        "midlayer.mlp.down_proj.weight": (H, FFN),
        "midlayer.hidden_norm.weight": (H,),
        "midlayer.input_layernorm.weight": (H,),
        "midlayer.post_attention_layernorm.weight": (H,),
        "norm.weight": (H,),
        "lm_head.weight": (size, H),
        "embed_tokens.weight": (V, H),
    }
    tensors = {name: torch.randn(shape).bfloat16() for name, shape in shapes.items()}
    if not whole:
        ids = torch.randperm(V)[:VD].sort().values
        tensors["d2t"] = ids - torch.arange(VD)
        tensors["t2d"] = torch.zeros(V, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def write(folder: Path, values: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    """A head's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    save_file(tensors, folder / "model.safetensors")
    return folder


def same(folder: Path, tensors: dict[str, Tensor]) -> None:
    """The folder holds just these tensors, bit for bit and in their types."""
    found = load_file(folder / "model.safetensors")
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize("taps", [3, 5])
@pytest.mark.parametrize("whole", [False, True], ids=["part", "whole"])
def test_public_eagle3_folders_come_back_the_same(tmp_path: Path, taps: int, whole: bool) -> None:
    """Guards against tensors that are renamed, cast or lost, and against d2t read as ids: a public folder is
    loaded, drafts, and is written back with the same tensors, and again."""
    tensors = public_tensors(taps, whole)
    values = {**PUBLIC, "draft_vocab_size": V if whole else VD}
    if taps == 5:
        values["eagle_config"] = {IDS: [0, 1, 2, 3, 4], "use_aux_hidden_state": True}
        values[IDS] = [1, 2, 3, 4, 5]
    head = load_eagle3(write(tmp_path / "public", values, tensors))
    assert head.config.taps == (None if taps == 3 else (0, 1, 2, 3, 4))
    save_eagle3(tmp_path / "own", head)
    same(tmp_path / "own", tensors)
    again = load_eagle3(tmp_path / "own")
    assert again.config == head.config and again.manifest == {}
    save_eagle3(tmp_path / "third", again)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "own" / name).read_bytes() == (tmp_path / "third" / name).read_bytes()
    expected = torch.arange(V) if whole else tensors["t2d"].nonzero().squeeze(-1)
    assert torch.equal(head.vocab, expected)
    target = tiny_target(num_hidden_layers=9)
    drafter = load_drafter(tmp_path / "own", target)
    assert isinstance(drafter, SequentialDrafter) and drafter.name == "eagle3"
    assert drafter.taps == ((1, 3, 5) if taps == 3 else (0, 1, 2, 3, 4))


def test_taps_follow_the_layer_convention() -> None:
    """Guards the most common silent fault, ids off by one: the layout's default is the states ENTERING layers
    2, L // 2 and L - 3, which are the outputs of the layers before."""
    assert default_eagle3_taps(36) == (1, 17, 32)
    assert default_eagle3_taps(30) == (1, 14, 26)
    for layers in range(2, 9):
        taps = default_eagle3_taps(layers)
        assert list(taps) == sorted(set(taps)) and taps[-1] <= layers - 2


def test_both_conventions_are_written(tmp_path: Path) -> None:
    """Guards other readers of our folders: outputs under eagle_config, entering states at the top level."""
    save_eagle3(tmp_path, random_eagle3(tiny_target(), taps=(0, 1, 3)))
    values = json.loads((tmp_path / "config.json").read_text())
    assert values["eagle_config"][IDS] == [0, 1, 3]
    assert values[IDS] == [1, 2, 4]
    assert values["jet"]["target_layer_ids"] == [0, 1, 3]


Edit = Callable[[dict[str, Any], dict[str, Tensor]], object]
EAGLE_FAULTS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda c, t: t.pop("midlayer.hidden_norm.weight"), "lacks midlayer.hidden_norm.weight"),
    "no fc": (lambda c, t: t.pop("fc.weight"), "lacks fc.weight"),
    "extra": (lambda c, t: t.update({"module.norm.weight": torch.ones(H)}), "unexpected module.norm.weight"),
    "shape": (lambda c, t: t.update({"norm.weight": torch.ones(H + 1)}), r"norm.weight has shape \[65\]"),
    "narrow fc": (lambda c, t: t.update({"fc.weight": torch.ones(H, 3 * H + 1)}), "multiple of 64"),
    "one-wide q": (
        lambda c, t: t.update({"midlayer.self_attn.q_proj.weight": torch.ones(64, H)}),
        r"q_proj.weight has shape \[64, 64\], but config.json asks for \[64, 128\]",
    ),
    "nan": (
        lambda c, t: t["lm_head.weight"].view(-1)[3:4].fill_(float("nan")),
        "lm_head.weight holds values",
    ),
    "ids as d2t": (lambda c, t: t.update({"d2t": t["d2t"] + torch.arange(VD) + 150}), "strictly increasing"),
    "float d2t": (lambda c, t: t.update({"d2t": t["d2t"].float()}), "int64 offsets"),
    "other t2d": (lambda c, t: t.update({"t2d": ~t["t2d"]}), "t2d does not name"),
    "lost t2d": (lambda c, t: t.pop("t2d"), "lacks t2d"),
    "vocab": (lambda c, t: c.update(draft_vocab_size=V + 1), "draft_vocab_size is 201"),
    "conventions": (
        lambda c, t: c.update({"eagle_config": {IDS: [1, 2, 3]}, IDS: [1, 2, 3]}),
        "contradicts itself on the layer convention",
    ),
    "declared": (
        lambda c, t: c.update({"eagle_config": {IDS: [1, 2, 3]}, "jet": {"layer_id_convention": "entering"}}),
        "layer_id_convention is 'entering'",
    ),
    "count": (lambda c, t: c.update({IDS: [1, 2, 3, 4]}), "reads 3 tapped layers, but config.json names 4"),
    "order": (lambda c, t: c.update({IDS: [3, 2, 1]}), "strictly increasing, from 0"),
    "zero": (lambda c, t: c.update({IDS: [0, 1, 2]}), "strictly increasing, from 0"),
    "text": (lambda c, t: c.update({IDS: "1,2"}), "a list of layer numbers"),
    "layers": (lambda c, t: c.update(num_hidden_layers=2), "an EAGLE-3 head has 1"),
    "variant": (lambda c, t: c.update(norm_output=True), "norm_output, a variant"),
    "speculators": (lambda c, t: c.update(speculators_model_type="eagle3"), "speculators layout"),
    "eagle-1": (lambda c, t: c.update(eagle_config={"use_aux_hidden_state": False}), "EAGLE-1"),
    "family": (lambda c, t: c.update(model_type="qwen3"), "model_type is 'qwen3'"),
    "bias": (lambda c, t: c.update(attention_bias=True), "no biases"),
    "newer": (lambda c, t: c.update(jet={"format_version": 9}), "upgrade jetspec"),
}


@pytest.mark.parametrize("name", EAGLE_FAULTS)
def test_faults_of_eagle3_folders_are_named(tmp_path: Path, name: str) -> None:
    """Guards strict reading: whatever would only show as low acceptance is an error that names it."""
    values, tensors = dict(PUBLIC), public_tensors()
    edit, message = EAGLE_FAULTS[name]
    edit(values, tensors)
    with pytest.raises(HeadError, match=message) as caught:
        load_eagle3(write(tmp_path, values, tensors))
    assert "\n" not in str(caught.value)


def test_ids_of_the_entering_convention_do_not_fit_as_outputs(tmp_path: Path) -> None:
    """Guards ids that were copied from the other convention: L - 1 as an output is the last layer, refused
    with the other reading named; and five taps without names are refused, too."""
    values = {**PUBLIC, "eagle_config": {IDS: [2, 4, 8]}}
    folder = write(tmp_path / "a", values, public_tensors())
    with pytest.raises(HeadError, match="counts the states that ENTER layers"):
        load_drafter(folder, tiny_target(num_hidden_layers=9))
    folder = write(tmp_path / "b", PUBLIC, public_tensors(taps=5))
    with pytest.raises(HeadError, match="reads 5 tapped layers"):
        load_drafter(folder, tiny_target(num_hidden_layers=9))


def test_damaged_and_pickled_folders(tmp_path: Path) -> None:
    """Guards against reading a pickle, and against tracebacks for a truncated file."""
    folder = write(tmp_path, PUBLIC, public_tensors())
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-7])
    with pytest.raises(HeadError, match="truncated"):
        load_eagle3(folder)
    path.rename(folder / "pytorch_model.bin")
    with pytest.raises(HeadError, match="a pickle"):
        load_eagle3(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(HeadError, match="holds no object"):
        load_eagle3(folder)
    with pytest.raises(StorageError, match="cannot be written"):
        save_eagle3(path.parent / "pytorch_model.bin" / "x", random_eagle3(tiny_target()))


TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"model_type": "mistral", "sliding_window": 32},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3", "rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
    },
}


@pytest.mark.parametrize("family", TARGETS)
@pytest.mark.parametrize("modules", [1, 2])
def test_mtp_folders_come_back_the_same(tmp_path: Path, family: str, modules: int) -> None:
    """Guards every switch of the block's family: configuration and tensors survive the folder."""
    target = tiny_target(**TARGETS[family])
    head = random_mtp(target, modules=modules, vocab=torch.arange(3, 90), order="hidden_first")
    head.manifest["steps"] = 7
    save_mtp(tmp_path, head)
    same(tmp_path, {**head.weights, "draft_vocab": head.vocab})  # type: ignore[dict-item]
    again = load_mtp(tmp_path)
    assert again.config == head.config and again.manifest == {"steps": 7}
    drafter = load_drafter(tmp_path, target)
    assert isinstance(drafter, SequentialDrafter) and drafter.name == "mtp" and drafter.needs_hidden


def test_a_module_copies_the_kind_of_the_last_layer() -> None:
    """Guards targets whose layers differ: a dense last layer gives dense modules, its window is theirs."""
    values = {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [4],
        "use_sliding_window": True,
        "sliding_window": 16,
    }
    config: ModelConfig = tiny_target(**values).config
    head = MTPConfig.for_target(config, modules=2)
    assert head.model.moe is None and head.model.windows == (16, 16)
    assert MTPConfig.from_dict(head.to_dict()) == head


MTP_FAULTS: dict[str, tuple[Edit, str]] = {
    "missing": (lambda c, t: t.pop("layers.0.enorm.weight"), "lacks layers.0.enorm.weight"),
    "extra": (lambda c, t: t.update({"model.norm.weight": torch.ones(H)}), "unexpected model.norm.weight"),
    "shape": (
        lambda c, t: t.update({"layers.0.eh_proj.weight": torch.ones(H, H)}),
        "eh_proj.weight has shape",
    ),
    "nan": (lambda c, t: t["layers.0.hnorm.weight"].fill_(float("inf")), "hnorm.weight holds values"),
    "vocab": (lambda c, t: t.update({"draft_vocab": torch.tensor([3, 2])}), "draft_vocab must be ascending"),
    "order": (lambda c, t: c["jet"].update(order="both"), "jet.order is 'both'"),
    "state": (lambda c, t: c["jet"].update(hidden_state="before"), "jet.hidden_state is 'before'"),
    "modules": (lambda c, t: c.update(num_nextn_predict_layers=2), "names 2 modules"),
    "family": (lambda c, t: c.update(model_type="gpt2"), "model_type is 'gpt2'"),
    "depth": (lambda c, t: c["jet"].update(depth=0), "jet.depth is 0"),
    "kind": (lambda c, t: c["jet"].pop("head"), "jet.head is not 'mtp'"),
}


@pytest.mark.parametrize("name", MTP_FAULTS)
def test_faults_of_mtp_folders_are_named(tmp_path: Path, name: str) -> None:
    """Guards strict reading of our own layout."""
    save_mtp(tmp_path, random_mtp(tiny_target()))
    values = json.loads((tmp_path / "config.json").read_text())
    tensors = load_file(tmp_path / "model.safetensors")
    edit, message = MTP_FAULTS[name]
    edit(values, tensors)
    with pytest.raises(HeadError, match=message):
        load_mtp(write(tmp_path / "broken", values, tensors))
