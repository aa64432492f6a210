"""Keys of a head's `config.json` that come in several places or spellings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jetspec.errors import HeadError
from jetspec.target.config import ModelConfig, RopeConfig


def agree(key: str, *found: Any) -> Any:
    """The one value that the given places hold. Raises HeadError if none does or if two differ."""
    present = [value for value in found if value is not None]
    if not present:
        raise HeadError(f"config.json lacks {key}, without which the head cannot be run")
    for value in present:
        if value != present[0]:
            raise HeadError(
                f"config.json names {key} twice, as {present[0]} and {value}; correct one of them"
            )
    return present[0]


def whole(key: str, value: Any) -> int:
    """A value that must be a whole number. Raises HeadError."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise HeadError(f"config.json: {key} is {value!r}; valid: a whole number")
    return value


def rope_values(rope: RopeConfig) -> dict[str, Any]:
    """The keys of a rotary embedding as older and newer readers know them."""
    values: dict[str, Any] = {"rope_theta": rope.theta}
    if rope.kind != "default":
        numbers = {
            "factor": rope.factor,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
            "original_max_position_embeddings": rope.original_max_positions,
            "attention_factor": rope.attention_factor,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "mscale": rope.mscale,
            "mscale_all_dim": rope.mscale_all_dim,
            "truncate": rope.truncate,
        }
        scaling = {key: number for key, number in numbers.items() if number is not None}
        values["rope_scaling"] = {"rope_type": rope.kind, **scaling}
    return values


def window_values(model: ModelConfig) -> dict[str, Any]:
    """The keys of sliding windows; the format knows one window for all layers that have any."""
    windows = {window for window in model.windows if window is not None}
    if not windows:
        return {"use_sliding_window": False}
    assert len(windows) == 1, windows
    types = ["full_attention" if window is None else "sliding_attention" for window in model.windows]
    return {"use_sliding_window": True, "sliding_window": windows.pop(), "layer_types": types}


def flag(key: str, value: Any) -> bool:
    """A value that must be true or false. Raises HeadError."""
    if not isinstance(value, bool):
        raise HeadError(f"config.json: {key} is {value!r}; valid: true or false")
    return value


def check_known(
    where: str, values: Mapping[str, Any], known: Iterable[str], *, model_keys: bool = False
) -> None:
    """Refuse a key whose meaning is not known. Raises HeadError naming it.

    model_keys: the keys that transformers writes for every model are known, too.
    """
    valid = set(known) | (_MODEL_KEYS if model_keys else set())
    unknown = sorted(key for key in values if key not in valid)
    if unknown:
        raise HeadError(
            f"{where} holds the key {unknown[0]!r}, whose meaning is not known, so the head might be run "
            f"wrongly; remove it if it does not matter (known, beside those of transformers: "
            f"{', '.join(sorted(known))})"
        )


# Keys of training that change nothing in drafting.
NOTES = ("num_anchors", "confidence_head_alpha", "ce_loss_alpha", "l1_loss_alpha", "loss_decay_gamma")

# What transformers writes into config.json of a Qwen3 model: read by ModelConfig, or without effect here.
_MODEL_KEYS_TEXT = """
_name_or_path _attn_implementation_autoset architectures attention_bias attention_dropout auto_map
bos_token_id chunk_size_feed_forward dtype eos_token_id head_dim hidden_act hidden_size id2label
initializer_range intermediate_size is_decoder is_encoder_decoder label2id layer_types
max_position_embeddings max_window_layers mlp_bias model_type num_attention_heads num_hidden_layers
num_key_value_heads original_max_position_embeddings output_attentions output_hidden_states
pad_token_id partial_rotary_factor pretraining_tp problem_type quantization_config return_dict
rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window tie_word_embeddings
tokenizer_class torch_dtype transformers_version use_cache use_sliding_window vocab_size
"""
_MODEL_KEYS = frozenset(_MODEL_KEYS_TEXT.split())


def causal(
    values: dict[str, Any], inner: dict[str, Any], jet: dict[str, Any], mode: bool | None = None
) -> bool:
    """Causality from all the keys that writers use (`mode`: one more); without any, DFlash's bidirectional
    mask.
    """
    mask = jet.get("mask")
    if mask not in (None, "causal", "bidirectional"):
        raise HeadError(f"jet.mask is {mask!r}; valid: causal, bidirectional")
    found = [
        values.get("is_causal"),
        inner.get("causal"),
        inner.get("causal_head"),
        None if mask is None else mask == "causal",
        mode,
    ]
    if all(value is None for value in found):
        return False
    return bool(agree("the causal mask", *found))
