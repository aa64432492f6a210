"""What a Hugging Face `config.json` says about a decoder, read once and checked.

Five families share one network and differ only in switches: Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.
`ModelConfig.from_dict` turns the dictionary of any of them (as older releases wrote it or as transformers 5
writes it) into one frozen record, so that the rest of the package never looks at a Hugging Face key. What
cannot be computed faithfully is refused here, by name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jetspec.errors import ModelError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_moe")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3", "yarn")
_ROPE_REQUIRED: dict[str, tuple[str, ...]] = {
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}

# What transformers assumes when config.json lacks the key (None: num_heads, or hidden_size // num_heads).
_KV_HEADS = {"llama": None, "mistral": 8, "qwen2": 32, "qwen3": 32, "qwen3_moe": 4}
_HEAD_DIM = {"llama": None, "mistral": None, "qwen2": None, "qwen3": 128, "qwen3_moe": None}
_MOST_LAYERS = 4096
_MAX_POSITIONS = {"llama": 2048, "mistral": 131072, "qwen2": 32768, "qwen3": 32768, "qwen3_moe": 32768}


@dataclass(frozen=True)
class RopeConfig:
    """The rotary position embedding: base, kind of scaling and the numbers of that kind.

    "dynamic" equals "default" up to the longest context, which is as far as a sequence may grow here.
    """

    theta: float = 10000.0
    kind: str = "default"  # one of ROPE_KINDS
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_positions: int = 0  # llama3, yarn: context length before the scaling
    attention_factor: float | None = None  # yarn; None = derived from factor, mscale and mscale_all_dim
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    mscale: float | None = None  # yarn
    mscale_all_dim: float | None = None  # yarn
    truncate: bool = True  # yarn: whether the ramp's bounds are rounded to whole dimensions
    partial_rotary_factor: float = 1.0  # share of head_dim that is rotated; these families rotate all of it

    @staticmethod
    def from_dict(values: Mapping[str, Any], max_positions: int) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` and `rope_scaling` (older releases).

        Raises ModelError for an unknown kind and for a missing or unusable number.
        """
        _number(values, "rope_theta", 1.0)  # also where the value in `rope_parameters` takes precedence
        given = dict(_rope_values(values))
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in ROPE_KINDS:
            raise ModelError(f"rotary scaling {kind!r} is not supported; valid: {', '.join(ROPE_KINDS)}")
        for key in ("rope_theta", "partial_rotary_factor"):
            if given.get(key) is None:
                given[key] = values.get(key)
        original_key = "original_max_position_embeddings"
        if values.get(original_key) is not None:  # a value outside the dictionary takes precedence
            given[original_key] = values[original_key]
        original = _positive(given, original_key, max_positions)
        if kind == "yarn" and given.get("factor") is None:
            given["factor"] = max_positions / original
        lacking = [key for key in _ROPE_REQUIRED.get(kind, ()) if given.get(key) is None]
        if lacking:
            raise ModelError(f"config.json: rotary scaling {kind!r} needs {', '.join(lacking)}")
        partial = _number(given, "partial_rotary_factor", 1.0)
        if partial != 1.0:
            raise ModelError(f"config.json: partial_rotary_factor {partial} is not supported; valid: 1.0")
        return RopeConfig(
            theta=_number(given, "rope_theta", 10000.0),
            kind=kind,
            factor=_number(given, "factor", 1.0),
            low_freq_factor=_number(given, "low_freq_factor", 1.0),
            high_freq_factor=_number(given, "high_freq_factor", 4.0),
            original_max_positions=original,
            attention_factor=_optional_number(given, "attention_factor"),
            beta_fast=_number(given, "beta_fast", 32.0),
            beta_slow=_number(given, "beta_slow", 1.0),
            mscale=_optional_number(given, "mscale"),
            mscale_all_dim=_optional_number(given, "mscale_all_dim"),
            truncate=bool(given.get("truncate", True)),
        )


@dataclass(frozen=True)
class MoeConfig:
    """The experts of Qwen3-MoE: a router picks `experts_per_token` of `num_experts` MLPs for each token."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of one expert
    norm_topk_prob: bool  # whether the chosen experts' weights are rescaled to sum to 1
    sparse_layers: tuple[bool, ...]  # per layer: True = experts, False = an ordinary MLP


@dataclass(frozen=True)
class ModelConfig:
    """The shape and the switches of one decoder. Build it with `from_dict`."""

    family: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    max_positions: int  # longest context, in tokens
    tie_embeddings: bool  # the output matrix is the embedding
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool  # RMS norm over head_dim of every query and key head, before the rotation
    windows: tuple[int | None, ...]  # per layer: q sees keys k <= q with q - k < window; None: no limit
    moe: MoeConfig | None
    eos_ids: frozenset[int]

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> ModelConfig:
        """Read the dictionary of a `config.json`.

        Raises ModelError for a family, a rotary scaling, an activation or a quantisation that is not
        supported, and for missing or contradictory sizes.
        """
        family = _family(values)
        heads = _positive(values, "num_attention_heads")
        hidden = _positive(values, "hidden_size")
        layers = _positive(values, "num_hidden_layers")
        if layers > _MOST_LAYERS:  # their tensors are counted up before any is looked for
            raise ModelError(
                f"config.json: num_hidden_layers is {layers}; valid: an integer from 1 to {_MOST_LAYERS}"
            )
        kv_heads = _positive(values, "num_key_value_heads", _KV_HEADS[family] or heads)
        head_dim = _positive(values, "head_dim", _HEAD_DIM[family] or hidden // heads)
        max_positions = _positive(values, "max_position_embeddings", _MAX_POSITIONS[family])
        if heads % kv_heads:
            raise ModelError(
                f"config.json: {heads} query heads cannot be shared out among {kv_heads} key-value heads"
            )
        if head_dim % 2:
            raise ModelError(
                f"config.json: head_dim is {head_dim}, but the rotary embedding needs an even number"
            )
        if values.get("hidden_act", "silu") != "silu":
            raise ModelError(
                f"config.json: hidden_act {values['hidden_act']!r} is not supported; valid: 'silu'"
            )
        attention_bias = family != "mistral" and bool(values.get("attention_bias", False))
        return ModelConfig(
            family=family,
            hidden_size=hidden,
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            intermediate_size=_positive(values, "intermediate_size"),
            vocab_size=_positive(values, "vocab_size"),
            rms_norm_eps=_number(values, "rms_norm_eps", 1e-6),
            rope=RopeConfig.from_dict(values, max_positions),
            max_positions=max_positions,
            tie_embeddings=bool(values.get("tie_word_embeddings", False)),
            qkv_bias=family == "qwen2" or attention_bias,
            o_bias=family != "qwen2" and attention_bias,
            mlp_bias=family == "llama" and bool(values.get("mlp_bias", False)),
            qk_norm=family in ("qwen3", "qwen3_moe"),
            windows=_windows(values, family, layers),
            moe=_moe(values, layers) if family == "qwen3_moe" else None,
            eos_ids=token_ids(values.get("eos_token_id")),
        )


def token_ids(value: Any) -> frozenset[int]:
    """`eos_token_id` as a set: the key may be missing, null, one id or a list of ids. Raises ModelError."""
    if value is None:
        return frozenset()
    ids = value if isinstance(value, (list, tuple)) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ModelError(f"eos_token_id is {value!r}; valid: a token id or a list of token ids")
    return frozenset(ids)


def _family(values: Mapping[str, Any]) -> str:
    """The model family, after refusing what no family of ours can compute."""
    family = values.get("model_type")
    if family not in FAMILIES:
        raise ModelError(f"model_type {family!r} is not supported; valid: {', '.join(FAMILIES)}")
    quantised = values.get("quantization_config")
    if quantised:
        method = quantised.get("quant_method", "unknown") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"the weights are quantised ({method}), which is not supported;"
            " use the float16, bfloat16 or float32 release of the model, or a .gguf file"
        )
    return str(family)


def _positive(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = values.get(key)
    if value is None:
        value = default
    if value is None:
        raise ModelError(f"config.json lacks {key}, without which the model cannot be built")
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelError(f"config.json: {key} is {value!r}; valid: a whole number of at least 1")
    return value


def _whole(values: Mapping[str, Any], key: str, default: int) -> int:
    """A whole number that may be 0; the default where the key is missing."""
    value = values.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"config.json: {key} is {value!r}; valid: a whole number")
    return value


def _optional_number(values: Mapping[str, Any], key: str) -> float | None:
    """A float that may be missing, null or 0 (which transformers reads as missing)."""
    return _number(values, key, 1.0) if values.get(key) else None


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    value = values.get(key)
    if value is None:
        return default
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not math.isfinite(value) or value <= 0:
        raise ModelError(f"config.json: {key} is {value!r}; valid: a finite number above 0")
    return float(value)


def _rope_values(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The dictionary that holds the rotary numbers, whichever release wrote it."""
    given = values.get("rope_scaling") or values.get("rope_parameters") or {}
    if not isinstance(given, Mapping):
        raise ModelError(f"config.json: the rotary scaling is {given!r}; valid: an object")
    nested = [inner for inner in given.values() if isinstance(inner, Mapping)]
    if not nested:
        return given
    # One dictionary per layer type. These families have one rotary table, so the dictionaries have to agree.
    if any(inner != nested[0] for inner in nested):
        raise ModelError(
            "config.json: different rotary embeddings per layer type are not supported; valid: one for all"
        )
    return nested[0]


def _windows(values: Mapping[str, Any], family: str, layers: int) -> tuple[int | None, ...]:
    """The sliding window of each layer, where the family has one and the configuration turns it on."""
    if values.get("sliding_window") is not None:  # checked where it has no effect, too: the file is damaged
        _positive(values, "sliding_window")
    if family == "llama":
        return (None,) * layers
    on = family == "mistral" or bool(values.get("use_sliding_window", False))
    window = values.get("sliding_window", 4096) if on else None
    if family in ("mistral", "qwen3_moe"):  # layer_types and max_window_layers have no effect there
        return (window,) * layers
    types = values.get("layer_types")
    if types is None:
        full = _whole(values, "max_window_layers", 28)
        return tuple(window if layer >= full else None for layer in range(layers))
    known = ("full_attention", "sliding_attention")
    if not isinstance(types, list) or len(types) != layers or any(kind not in known for kind in types):
        raise ModelError(
            f"config.json: layer_types must name {layers} layers; valid: full_attention, sliding_attention"
        )
    if window is None and "sliding_attention" in types:
        raise ModelError(
            "config.json: layer_types asks for sliding_attention, but the sliding window is turned off"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _moe(values: Mapping[str, Any], layers: int) -> MoeConfig | None:
    """The experts of Qwen3-MoE, or None where no layer has any."""
    # transformers 5 renamed num_experts to num_local_experts.
    experts = _whole(values, "num_local_experts" if "num_local_experts" in values else "num_experts", 128)
    step = _positive(values, "decoder_sparse_step", 1)
    dense = values.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise ModelError(f"config.json: mlp_only_layers is {dense!r}; valid: a list of layer numbers")
    sparse = tuple(experts > 0 and layer not in dense and (layer + 1) % step == 0 for layer in range(layers))
    if not any(sparse):
        return None
    chosen = _positive(values, "num_experts_per_tok", 8)
    if chosen > experts:
        raise ModelError(
            f"config.json: num_experts_per_tok is {chosen}, but there are only {experts} experts"
        )
    return MoeConfig(
        num_experts=experts,
        experts_per_token=chosen,
        intermediate_size=_positive(values, "moe_intermediate_size", 768),
        norm_topk_prob=bool(values.get("norm_topk_prob", False)),
        sparse_layers=sparse,
    )
