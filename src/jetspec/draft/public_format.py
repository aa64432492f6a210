"""`config.json` of block heads in the layouts that other programs write and read.

    dflash     z-lab DFlash and JetSpec: `dflash_config` holds taps and mask token
    specforge  DSpark by SpecForge: the same, with the path scorer and the confidence head in `dflash_config`
    deepspec   DSpark by DeepSpec: every key at the top level

What these cannot say (draft inputs of our own, format, provenance) is in one more object, `jet`, which other
readers ignore. Where two keys say the same thing they must agree, and a key that is not known is refused:
either would show only as low acceptance.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from jetspec.draft.config import HeadConfig
from jetspec.draft.config_keys import (
    NOTES,
    agree,
    causal,
    check_known,
    flag,
    rope_values,
    whole,
    window_values,
)
from jetspec.errors import HeadError, ModelError
from jetspec.target.config import ModelConfig

FORMAT_VERSION = 2  # 1 knew neither alignments nor confidence heads

_SHIFTED_KEYS = ("shift_label", "draft_shift", "sample_from_anchor", "dspark_bonus_anchor")
_DSPARK_KEYS = (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
    "confidence_head_alpha",
)
_BLOCK_KEYS = ("block_size", "mask_token_id", "target_layer_ids", "num_target_layers")
_INNER_KEYS = (
    *_BLOCK_KEYS,
    *_SHIFTED_KEYS,
    *_DSPARK_KEYS,
    *NOTES,
    "mask_token",
    "causal",
    "causal_head",
    "target_hidden_size",
    "projector_type",
    "attention_mode",
)
_TOP_KEYS = (*_INNER_KEYS, "is_causal", "dflash_config", "jet")
_JET_KEYS = (
    "format_version",
    "alignment",
    "mask",
    "layer_id_convention",
    "head_type",
    "rank",
    "direct",
    "slot_embedding",
    "confidence",
    "calibration",
    "manifest",
)


def to_public(config: HeadConfig) -> dict[str, Any]:
    """The `config.json` of a head in its layout, with causality written under all keys that readers know."""
    values = {**_layer_values(config.model), **_block_values(config)}
    values["jet"] = {
        "format_version": FORMAT_VERSION,
        "alignment": config.alignment,
        "mask": "causal" if config.causal else "bidirectional",
        "layer_id_convention": "output",
        "head_type": config.scorer,
        "rank": config.rank,
        "direct": config.direct,
        "slot_embedding": config.slot_embedding,
        "confidence": config.confidence,
    }
    return values


def _block_values(config: HeadConfig) -> dict[str, Any]:
    block = {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "target_layer_ids": list(config.taps),
        "num_target_layers": config.target_layers,
    }
    scorer = {
        "markov_rank": config.rank,
        "markov_head_type": config.scorer if config.rank else "vanilla",
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_with_markov,
    }
    notes = dict(config.notes)
    if config.layout == "deepspec":
        top = {"architectures": ["Qwen3DSparkModel"], "model_type": "qwen3"}
        return {**top, **block, **scorer, **notes, "is_causal": config.causal}
    shared = {
        "block_size": config.block_size,
        "num_target_layers": config.target_layers,
        "is_causal": config.causal,
        "model_type": "qwen3",
    }
    masks = {"causal": config.causal, "causal_head": config.causal}
    if config.layout == "specforge":
        spark = {"projector_type": "dspark", "shift_label": config.alignment == "shifted"}
        inner = {**block, **masks, **scorer, **spark, **notes}
        return {"architectures": ["DSparkDraftModel"], **shared, "dflash_config": inner}
    inner = {**{key: block[key] for key in _BLOCK_KEYS[:3]}, **masks, **notes}
    if config.alignment == "shifted":
        inner["shift_label"] = True
    auto = {"AutoModel": "dflash.DFlashDraftModel"}
    return {"architectures": ["DFlashDraftModel"], "auto_map": auto, **shared, "dflash_config": inner}


def _layer_values(model: ModelConfig) -> dict[str, Any]:
    return {
        "hidden_size": model.hidden_size,
        "intermediate_size": model.intermediate_size,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "vocab_size": model.vocab_size,
        "rms_norm_eps": model.rms_norm_eps,
        **rope_values(model.rope),
        "max_position_embeddings": model.max_positions,
        "hidden_act": "silu",
        "attention_bias": False,
        **window_values(model),
        "tie_word_embeddings": False,
    }


def from_public(values: dict[str, Any]) -> HeadConfig:
    """Read a `config.json` in any of the layouts.

    Raises HeadError for a missing or unknown key, for keys that contradict each other, and for heads of
    another kind.
    """
    inner, jet, layout = _parts(values)
    check_known("config.json", values, _TOP_KEYS, model_keys=True)
    check_known("dflash_config", inner, _INNER_KEYS)
    check_known("jet", jet, _JET_KEYS)
    try:
        model = ModelConfig.from_dict({**values, "model_type": "qwen3", "architectures": None})
    except ModelError as error:
        raise HeadError(f"the head's {error}") from None
    if layout != "dflash" and model.tie_embeddings:
        raise HeadError("config.json: tie_word_embeddings is true; a DSpark head has two tables of its own")
    found = _Keys(values, inner)
    width = found.get("target_hidden_size", model.hidden_size)
    if width != model.hidden_size:
        raise HeadError(
            f"target_hidden_size is {width} and hidden_size {model.hidden_size}; only heads as wide as their "
            "target can be run"
        )
    if jet.get("layer_id_convention", "output") != "output":
        raise HeadError(f"jet.layer_id_convention is {jet['layer_id_convention']!r}; valid: 'output'")
    taps = found.need("target_layer_ids")
    if not isinstance(taps, list):
        raise HeadError(f"config.json: target_layer_ids is {taps!r}; valid: a list of layer numbers")
    scorer, rank = _scorer(found, jet)
    return HeadConfig(
        model=model,
        block_size=whole("block_size", found.need("block_size")),
        taps=tuple(whole("target_layer_ids", n) for n in taps),
        mask_token_id=whole("mask_token_id", found.need("mask_token_id")),
        target_layers=whole("num_target_layers", found.need("num_target_layers")),
        causal=_causal(values, inner, jet, layout),
        direct=flag("jet.direct", jet.get("direct", False)),
        slot_embedding=flag("jet.slot_embedding", jet.get("slot_embedding", False)),
        scorer=scorer,
        rank=rank,
        alignment=_alignment(found, jet, layout),
        confidence=_confidence(found, jet, layout),
        confidence_with_markov=flag(
            "confidence_head_with_markov", found.get("confidence_head_with_markov", True)
        ),
        layout=layout,
        notes=tuple((key, found.get(key)) for key in NOTES if found.get(key) is not None),
    )


class _Keys:
    """Keys that stand at the top level, in `dflash_config`, or in both."""

    def __init__(self, *places: Mapping[str, Any]) -> None:
        self._places = places

    def need(self, key: str) -> Any:
        """The value. Raises HeadError if there is none or if there are two."""
        return agree(key, *(place.get(key) for place in self._places))

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or `default`. Raises HeadError if there are two."""
        return default if all(place.get(key) is None for place in self._places) else self.need(key)

    def any(self, keys: Iterable[str]) -> bool | None:
        """Whether one of some flags is set; None if none is there."""
        values = [self.get(key) for key in keys]
        present = [flag(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
        return any(present) if present else None


def _parts(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any], str]:
    """`dflash_config` and `jet` ({} if absent), and the layout."""
    values = values if isinstance(values, dict) else {}
    inner, jet = values.get("dflash_config"), values.get("jet") or {}
    names = values.get("architectures") or []
    if not isinstance(names, list):
        raise HeadError(f"config.json: architectures is {names!r}; valid: a list of class names")
    deepspec = inner is None and ("Qwen3DSparkModel" in names or "markov_rank" in values)
    if not deepspec and not isinstance(inner, dict):
        raise HeadError(
            "config.json has no dflash_config, so this is no DFlash, JetSpec or DSpark head; "
            "give the folder of one"
        )
    inner = inner if isinstance(inner, dict) else {}
    if not isinstance(jet, dict):
        raise HeadError(f"config.json: jet is {jet!r}; valid: an object")
    if whole("jet.format_version", jet.get("format_version", FORMAT_VERSION)) > FORMAT_VERSION:
        raise HeadError(
            f"the head was written in format {jet['format_version']}, this version reads up to "
            f"{FORMAT_VERSION}; upgrade jetspec"
        )
    if deepspec:
        return {}, jet, "deepspec"
    kind = inner.get("projector_type", values.get("projector_type")) or "dflash"
    if kind not in ("dflash", "dspark"):
        raise HeadError(f"projector_type {kind!r} cannot be run; valid: dflash, dspark")
    return inner, jet, "specforge" if kind == "dspark" or "DSparkDraftModel" in names else "dflash"


def _alignment(found: _Keys, jet: Mapping[str, Any], layout: str) -> str:
    """From all keys that writers use; without any, DSpark heads are shifted and others in place."""
    shifted = found.any(_SHIFTED_KEYS)
    stated = [shifted, None if jet.get("alignment") is None else jet["alignment"] == "shifted"]
    if jet.get("alignment") not in (None, "in_place", "shifted"):
        raise HeadError(f"jet.alignment is {jet['alignment']!r}; valid: in_place, shifted")
    if all(value is None for value in stated):
        return "in_place" if layout == "dflash" else "shifted"
    return "shifted" if agree("the slot alignment", *stated) else "in_place"


def _causal(values: dict[str, Any], inner: dict[str, Any], jet: dict[str, Any], layout: str) -> bool:
    mode = inner.get("attention_mode", values.get("attention_mode"))
    if mode not in (None, "causal", "bidirectional", "full"):
        raise HeadError(f"attention_mode {mode!r} cannot be run; valid: causal, bidirectional, full")
    return causal(values, inner, jet, None if mode is None else mode == "causal")


def _scorer(found: _Keys, jet: Mapping[str, Any]) -> tuple[str, int]:
    rank = found.get("markov_rank")
    kinds, ranks = [jet.get("head_type")], [jet.get("rank")]
    if rank is not None:
        ranks.append(rank)
        kinds.append(str(found.get("markov_head_type", "vanilla")) if rank else "none")
    if all(kind is None for kind in kinds):
        return "none", 0
    stated = [whole("markov_rank", value) for value in ranks if value is not None]
    return str(agree("head_type", *kinds)), agree("markov_rank", *(stated or [0]))


def _confidence(found: _Keys, jet: Mapping[str, Any], layout: str) -> bool:
    """DeepSpec says it outright, SpecForge by the weight of its loss."""
    stated = [jet.get("confidence"), found.get("enable_confidence_head")]
    alpha = found.get("confidence_head_alpha")
    if stated[1] is None and alpha is not None:
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise HeadError(f"config.json: confidence_head_alpha is {alpha!r}; valid: a number")
        stated.append(alpha > 0)
    present = [flag("enable_confidence_head", value) for value in stated if value is not None]
    return bool(agree("the confidence head", *present)) if present else False
