from __future__ import annotations

import math
from typing import Any

import pytest

from jetspec.errors import ModelError
from jetspec.target.config import FAMILIES, ROPE_KINDS, ModelConfig
from jetspec.target.weights import expected_tensors
from tests.target.tiny import per_expert, tiny_config, tiny_model

MINIMAL: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 32,
    "intermediate_size": 8,
    "vocab_size": 10,
}


def read(family: str = "llama", **values: Any) -> ModelConfig:
    """The record of a minimal configuration with some values changed."""
    return ModelConfig.from_dict({"model_type": family, **MINIMAL, **values})


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("llama", {"tie_word_embeddings": True}),
        ("mistral", {}),
        ("qwen2", {}),
        ("qwen3", {}),
        ("qwen3", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen3_moe", {}),
        ("qwen3_moe", {"mlp_only_layers": [0], "attention_bias": True}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
    ],
)
def test_tensors_match_transformers(family: str, changes: dict[str, Any]) -> None:
    """A bias, norm, tie or expert switched wrongly for a family loads nothing or computes something else."""
    model = tiny_model(family, **changes)
    config = ModelConfig.from_dict(model.config.to_dict())
    state = per_expert(model.state_dict())
    if config.tie_embeddings:
        del state["lm_head.weight"]
    assert expected_tensors(config) == {name: tuple(tensor.shape) for name, tensor in state.items()}


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_match_transformers(family: str) -> None:
    """Old config.json files lack keys; a default unlike transformers' changes the shape of the network."""
    from transformers import AutoConfig

    reference = AutoConfig.for_model(family, **MINIMAL)
    config = read(family)
    head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    assert config.head_dim == head_dim
    assert config.max_positions == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.rope.theta == reference.rope_parameters["rope_theta"]
    assert config.tie_embeddings == reference.tie_word_embeddings
    window = reference.sliding_window if family == "mistral" else None
    assert config.windows == (window,) * 4


@pytest.mark.parametrize(
    ("kind", "numbers"),
    [
        ("default", {}),
        ("linear", {"factor": 4.0}),
        ("dynamic", {"factor": 2.0}),
        (
            "llama3",
            {
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        ),
        (
            "yarn",
            {"factor": 2.0, "original_max_position_embeddings": 64, "beta_fast": 16.0, "truncate": False},
        ),
    ],
)
def test_old_and_new_rope_keys_agree(kind: str, numbers: dict[str, float]) -> None:
    """transformers 5 moved rope_theta and rope_scaling into rope_parameters; both have to be read."""
    new = read(max_position_embeddings=128, rope_parameters={"rope_type": kind, "rope_theta": 5e5, **numbers})
    old = read(max_position_embeddings=128, rope_theta=5e5, rope_scaling={"type": kind, **numbers})
    saved = tiny_config("llama", rope_parameters={"rope_type": kind, "rope_theta": 5e5, **numbers})
    assert new.rope == old.rope == ModelConfig.from_dict(saved.to_dict()).rope
    assert (new.rope.kind, new.rope.theta) == (kind, 5e5)
    assert new.rope.factor == numbers.get("factor", 1.0)
    assert new.rope.original_max_positions == numbers.get("original_max_position_embeddings", 128)


def test_rope_details() -> None:
    """The original length outside the dictionary wins, a missing YaRN factor follows, mscale 0 means none."""
    values = {"rope_type": "yarn", "mscale": 0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 7}
    config = read(max_position_embeddings=256, original_max_position_embeddings=64, rope_parameters=values)
    assert config.rope.factor == 4.0
    assert config.rope.original_max_positions == 64
    assert (config.rope.mscale, config.rope.mscale_all_dim) == (None, 1.0)
    same = {"rope_type": "default", "rope_theta": 77.0}
    nested = read("qwen3", rope_parameters={"full_attention": same, "sliding_attention": dict(same)})
    assert nested.rope.theta == 77.0
    with pytest.raises(ModelError, match="different"):
        read("qwen3", rope_parameters={"full_attention": same, "sliding_attention": {"rope_theta": 78.0}})


@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_windows_match_transformers(family: str) -> None:
    """A window on the wrong layers, or not turned off, changes only long answers and is easily missed."""
    for on in (False, True):
        for first in (0, 1, 3):
            reference = tiny_config(family, use_sliding_window=on, sliding_window=16, max_window_layers=first)
            expected = tuple(16 if kind == "sliding_attention" else None for kind in reference.layer_types)
            values = reference.to_dict()
            assert ModelConfig.from_dict(values).windows == expected
            # Older files have no layer_types, and state a window that use_sliding_window turns off.
            del values["layer_types"]
            assert ModelConfig.from_dict({**values, "sliding_window": 16}).windows == expected
    alternating = ["sliding_attention", "full_attention", "sliding_attention", "full_attention"]
    config = read(family, use_sliding_window=True, sliding_window=8, layer_types=alternating)
    assert config.windows == (8, None, 8, None)


def test_windows_of_other_families() -> None:
    """Mistral and Qwen3-MoE have one window for all layers; a null window is no window of size 0."""
    assert read("mistral", sliding_window=32).windows == (32,) * 4
    assert read("mistral", sliding_window=None).windows == (None,) * 4
    assert read("llama", sliding_window=32).windows == (None,) * 4
    moe = {"use_sliding_window": True, "sliding_window": 32, "max_window_layers": 2}
    assert read("qwen3_moe", **moe).windows == (32,) * 4
    assert read("qwen3_moe", **{**moe, "use_sliding_window": False}).windows == (None,) * 4


def test_experts() -> None:
    """Layers are counted from 1 in decoder_sparse_step, and both spellings of the number of experts occur."""
    values = {"num_experts": 9, "decoder_sparse_step": 2, "mlp_only_layers": [3], "norm_topk_prob": True}
    config = read("qwen3_moe", **values)
    assert config.moe is not None
    assert config.moe.sparse_layers == (False, True, False, False)
    assert (config.moe.num_experts, config.moe.experts_per_token, config.moe.norm_topk_prob) == (9, 8, True)
    renamed = read("qwen3_moe", num_local_experts=12, num_experts_per_tok=3)
    assert renamed.moe is not None
    assert (renamed.moe.num_experts, renamed.moe.experts_per_token) == (12, 3)
    assert read("qwen3_moe", mlp_only_layers=[0, 1, 2, 3]).moe is None


def test_end_ids() -> None:
    """Some models end an answer with any of several ids; keeping only one lets an answer run on."""
    assert read(eos_token_id=None).eos_ids == frozenset()
    assert read(eos_token_id=7).eos_ids == {7}
    assert read(eos_token_id=[7, 9]).eos_ids == {7, 9}


@pytest.mark.parametrize(
    ("family", "values", "parts"),
    [
        ("gpt2", {}, ["gpt2", *FAMILIES]),
        ("llama", {"rope_scaling": {"rope_type": "longrope"}}, ["longrope", *ROPE_KINDS]),
        ("llama", {"rope_scaling": {"rope_type": "linear"}}, ["linear", "factor"]),
        ("llama", {"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, ["low_freq_factor"]),
        ("llama", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ("llama", {"rope_theta": math.nan}, ["rope_theta", "nan"]),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, ["awq", "float16", ".gguf"]),
        ("llama", {"hidden_act": "gelu"}, ["gelu", "silu"]),
        ("llama", {"num_key_value_heads": 5}, ["32", "5"]),
        ("llama", {"head_dim": 7}, ["head_dim", "7"]),
        ("llama", {"vocab_size": None}, ["vocab_size"]),
        ("llama", {"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
        ("llama", {"num_hidden_layers": "4"}, ["num_hidden_layers", "'4'"]),
        ("llama", {"num_hidden_layers": 10**9}, ["num_hidden_layers", "1000000000", "from 1 to"]),
        ("llama", {"rope_theta": 0.0}, ["rope_theta", "0.0"]),
        ("llama", {"rope_theta": -1.0, "rope_parameters": {"rope_theta": 1e4}}, ["rope_theta", "-1.0"]),
        ("qwen3", {"rope_parameters": {"rope_theta": -2.0}}, ["rope_theta", "-2.0"]),
        ("llama", {"sliding_window": -3}, ["sliding_window", "-3"]),
        ("qwen2", {"sliding_window": 0}, ["sliding_window", "0"]),
        ("mistral", {"sliding_window": 0}, ["sliding_window", "0"]),
        ("qwen3", {"layer_types": ["full_attention"]}, ["layer_types", "4"]),
        ("qwen3", {"layer_types": ["sliding_attention"] * 4}, ["layer_types"]),
        ("qwen3_moe", {"num_experts": 4, "num_experts_per_tok": 5}, ["num_experts_per_tok", "5", "4"]),
        ("qwen3_moe", {"num_experts": "4"}, ["num_experts", "'4'"]),
        ("qwen3_moe", {"mlp_only_layers": 5}, ["mlp_only_layers", "5"]),
        ("qwen3", {"layer_types": 5}, ["layer_types"]),
        ("qwen3", {"layer_types": [["x"], 1, 2, 3]}, ["layer_types"]),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": "x"}, ["max_window_layers", "'x'"]),
        ("llama", {"rope_scaling": "linear"}, ["rotary scaling", "'linear'"]),
        ("llama", {"eos_token_id": "</s>"}, ["eos_token_id", "</s>"]),
        ("llama", {"eos_token_id": [[2]]}, ["eos_token_id"]),
    ],
)
def test_refusals(family: str, values: dict[str, Any], parts: list[str]) -> None:
    """What cannot be computed must be refused by name on one line, never half-understood."""
    with pytest.raises(ModelError) as caught:
        read(family, **values)
    message = str(caught.value)
    assert "\n" not in message
    assert all(part in message for part in parts), message
