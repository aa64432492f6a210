"""DSpark heads in the layouts of other programs: loaded strictly, drafted with, and saved back unchanged."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from jetspec.decode.engine import Engine
from jetspec.draft.checkpoint import load_head, save_head
from jetspec.draft.jetspec import BlockDrafter
from jetspec.draft.loading import load_drafter
from jetspec.errors import HeadError
from jetspec.sequence import Limits
from jetspec.target.target import Target
from tests.draft.tiny import MASK, TAPS, VOCAB, tiny_target

HIDDEN, RANK, BLOCK = 64, 6, 4
EXTRA = {
    "vanilla": {},
    "gated": {
        "markov_head.gate_proj.weight": (RANK, HIDDEN + RANK),
        "markov_head.gate_proj.bias": (RANK,),
    },
    "rnn": {
        "markov_head.joint_proj.weight": (3 * RANK, 2 * RANK + HIDDEN),
        "markov_head.joint_proj.bias": (3 * RANK,),
    },
}


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


def public_config(layout: str, kind: str) -> dict[str, Any]:
    """config.json as DeepSpec or SpecForge writes it, with keys that transformers adds."""
    layers = {
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": VOCAB,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"] * 2,
        "attention_dropout": 0.0,
        "transformers_version": "5.0.0",
        "dtype": "bfloat16",
    }
    block = {
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "target_layer_ids": list(TAPS),
        "num_target_layers": 5,
    }
    scorer = {"markov_rank": RANK, "markov_head_type": kind, "confidence_head_with_markov": True}
    if layout == "deepspec":
        own = {"num_anchors": 512, "enable_confidence_head": True}
        return {"architectures": ["Qwen3DSparkModel"], **layers, **block, **scorer, **own}
    inner = {**block, **scorer, "projector_type": "dspark", "confidence_head_alpha": 1.0, "shift_label": True}
    return {"architectures": ["DSparkDraftModel"], **layers, "block_size": BLOCK, "dflash_config": inner}


def public_shapes(layout: str, kind: str) -> dict[str, tuple[int, ...]]:
    """Every tensor of such a folder, written out by hand."""
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (HIDDEN, 3 * HIDDEN),
        "hidden_norm.weight": (HIDDEN,),
        "norm.weight": (HIDDEN,),
        "markov_head.markov_w1.weight": (VOCAB, RANK),
        "markov_head.markov_w2.weight": (VOCAB, RANK),
        "confidence_head.proj.weight": (1, HIDDEN + RANK),
        "confidence_head.proj.bias": (1,),
        **EXTRA[kind],
    }
    for i in range(2):
        own = {
            "input_layernorm": (HIDDEN,),
            "post_attention_layernorm": (HIDDEN,),
            "self_attn.q_proj": (64, HIDDEN),
            "self_attn.k_proj": (32, HIDDEN),
            "self_attn.v_proj": (32, HIDDEN),
            "self_attn.o_proj": (HIDDEN, 64),
            "self_attn.q_norm": (16,),
            "self_attn.k_norm": (16,),
            "mlp.gate_proj": (96, HIDDEN),
            "mlp.up_proj": (96, HIDDEN),
            "mlp.down_proj": (HIDDEN, 96),
        }
        shapes.update({f"layers.{i}.{name}.weight": shape for name, shape in own.items()})
    if layout == "deepspec":
        shapes["embed_tokens.weight"] = shapes["lm_head.weight"] = (VOCAB, HIDDEN)
    return shapes


def write(folder: Path, layout: str, kind: str, dtype: torch.dtype = torch.bfloat16) -> None:
    """A random head as another program leaves it."""
    dice = torch.Generator().manual_seed(1)
    shapes = public_shapes(layout, kind)
    tensors = {name: (torch.randn(s, generator=dice) * 0.2).to(dtype) for name, s in shapes.items()}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(public_config(layout, kind)))
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", EXTRA)
@pytest.mark.parametrize("layout", ["deepspec", "specforge"])
def test_a_public_dspark_head_loads_drafts_and_saves_back(
    target: Target, tmp_path: Path, layout: str, kind: str
) -> None:
    """Guards exchange with other programs: the shifted alignment (a block of 4 drafts 4 tokens), the scorer
    and the confidence head are read from where each program puts them; saved back, tensors are bitwise the
    same and config.json means the same."""
    write(tmp_path / "public", layout, kind)
    head = load_head(tmp_path / "public")
    config = head.config
    assert (config.method, config.depth, config.layout) == ("dspark", BLOCK, layout)
    assert (config.scorer, config.rank, config.confidence, config.causal) == (kind, RANK, True, False)
    drafter = load_drafter(tmp_path / "public", target)
    assert isinstance(drafter, BlockDrafter) and drafter.default_grow == "chain"
    limits = Limits(max_tokens=12, ignore_eos=True)
    drafted = Engine(target, drafter, budget=8).generate([[4, 5, 6]], None, limits)
    assert drafted[0].emitted == Engine(target).generate([[4, 5, 6]], None, limits)[0].emitted
    save_head(tmp_path / "saved", head, None)
    assert load_head(tmp_path / "saved").config == config
    public, saved = (load_file(tmp_path / name / "model.safetensors") for name in ("public", "saved"))
    assert public.keys() == saved.keys()
    assert all(torch.equal(public[name], saved[name]) for name in public)
    given = public_config(layout, kind)
    written = json.loads((tmp_path / "saved" / "config.json").read_text())
    assert written["architectures"] == given["architectures"]
    for place in (given, given.get("dflash_config", {})):
        back = written if place is given else written.get("dflash_config", {})
        for key in ("block_size", "target_layer_ids", "markov_rank", "markov_head_type", "num_anchors"):
            assert back.get(key) == place.get(key) or key not in place, key


def test_a_copy_of_the_ends_is_used(target: Target, tmp_path: Path) -> None:
    """Guards DeepSpec heads: their own embedding and output matrix, which may have been kept in another
    precision, are what they were trained with."""
    write(tmp_path, "deepspec", "vanilla", torch.float32)
    head = load_head(tmp_path)
    network = BlockDrafter(head, target).backbone
    assert torch.equal(network.embed(torch.tensor([5])), head.weights["embed_tokens.weight"][5:6])
    hidden, logits = network.forward([0], [7])
    matrix = head.weights["lm_head.weight"]
    assert torch.allclose(logits, hidden @ matrix.half().float().T, atol=1e-4)  # see `in_half`
    assert not torch.allclose(logits, hidden @ target.transformer.output_matrix.T, atol=1e-2)


def edit(key: str, value: Any, inner: bool = False) -> Callable[[dict[str, Any]], None]:
    """A fault in config.json."""

    def apply(values: dict[str, Any]) -> None:
        place = values["dflash_config"] if inner else values
        if value is None:
            del place[key]
        else:
            place[key] = value

    return apply


FAULTS = {
    "last layer": ("deepspec", edit("target_layer_ids", [0, 1, 4]), r"0\.\.3 for 5 layers.*last layer"),
    "no taps": ("specforge", edit("target_layer_ids", None, True), "target_layer_ids"),
    "unknown key": ("deepspec", edit("markov_order", 2), "'markov_order'"),
    "unknown inner key": ("specforge", edit("layers", 2, True), "dflash_config holds the key 'layers'"),
    "unknown head": ("deepspec", edit("markov_head_type", "lstm"), "'lstm'"),
    "another rank": ("deepspec", edit("markov_rank", 5), "markov_w1.weight has shape"),
    "no rank": ("specforge", edit("markov_rank", 0, True), "path scorer that the head does not have"),
    "confidence off": ("deepspec", edit("enable_confidence_head", False), "unexpected confidence_head"),
    "loss weight": ("specforge", edit("confidence_head_alpha", "x", True), "confidence_head_alpha is 'x'"),
    "tied": ("deepspec", edit("tie_word_embeddings", True), "tie_word_embeddings"),
    "mask": ("specforge", edit("attention_mode", "banded", True), "'banded'"),
    "in place": ("specforge", edit("sample_from_anchor", False), None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_named_in_one_line(tmp_path: Path, fault: str) -> None:
    """Guards against a head that is run wrongly: nothing would show but low acceptance."""
    layout, apply, message = FAULTS[fault]
    write(tmp_path, layout, "vanilla")
    load_head(tmp_path)
    values = json.loads((tmp_path / "config.json").read_text())
    apply(values)
    (tmp_path / "config.json").write_text(json.dumps(values))
    if message is None:  # two flags of one kind: one set is enough
        assert load_head(tmp_path).config.alignment == "shifted"
        return
    with pytest.raises(HeadError, match=message) as caught:
        load_head(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("fault", ["missing", "unexpected", "shape", "NaN"])
def test_tensor_faults_are_named(tmp_path: Path, fault: str) -> None:
    """Guards the optional parts as the backbone is guarded."""
    write(tmp_path, "deepspec", "rnn")
    name = "markov_head.joint_proj.bias"
    tensors = load_file(tmp_path / "model.safetensors")
    if fault == "missing":
        del tensors[name]
    elif fault == "unexpected":
        name = "markov_head.gate_proj.bias"
        tensors[name] = torch.ones(RANK)
    elif fault == "shape":
        tensors[name] = torch.ones(2 * RANK)
    else:
        tensors[name][0] = float("nan")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(HeadError, match=name):
        load_head(tmp_path)
