"""MTP heads on disk: a folder of their own around DeepSeek-V3's tensor names (arXiv 2412.19437).

Public MTP modules lie inside their target's checkpoint, as layers behind its last one. Here they are a head
like any other: `config.json` with the keys of the target's family, and the tensors of module k as

    layers.k.enorm.weight, layers.k.hnorm.weight   norms of the token's embedding and of the state
    layers.k.eh_proj.weight [H, 2H]                the projection of both
    layers.k.self_attn.*, layers.k.mlp.*, ...      one decoder layer of the target's family
    layers.k.shared_head.norm.weight               the norm before the target's output matrix

which are DeepSeek-V3's names with layers counted from 0 and the prefix `model.` left out. Embedding and
output matrix are the target's and are not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.draft.config_keys import rope_values, whole, window_values
from jetspec.draft.head_files import (
    check_tensors,
    manifest_of,
    model_of,
    own_values,
    read_folder,
    write_folder,
)
from jetspec.errors import HeadError
from jetspec.target.config import FAMILIES, ModelConfig
from jetspec.target.weights import expected_tensors

DEPTH = 4
ORDERS = ("embedding_first", "hidden_first")
DRAFT_VOCAB = "draft_vocab"  # optional int64 [Vd]: ids that the drafter proposes, ascending


@dataclass(frozen=True)
class MTPConfig:
    """Shape of an MTP head.

    model   of the modules' layers, of the target's family; `num_layers` is the number of modules
    order   how `eh_proj` reads its input: [embedding ; state] ("embedding_first", as engines and public
            checkpoints have it) or [state ; embedding] ("hidden_first", as the paper writes it)
    depth   deepest node that it drafts; the last module serves every depth from its own on
    """

    model: ModelConfig
    order: str = ORDERS[0]
    depth: int = DEPTH

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise HeadError(f"jet.order is {self.order!r}; valid: {', '.join(ORDERS)}")
        if self.depth < self.model.num_layers:
            raise HeadError(
                f"jet.depth is {self.depth}; valid: {self.model.num_layers} (the modules) or more"
            )

    @staticmethod
    def for_target(
        target: ModelConfig, *, modules: int = 1, depth: int = DEPTH, order: str = ORDERS[0]
    ) -> MTPConfig:
        """Modules of the same kind as the target's last layer, experts included."""
        moe = target.moe
        if moe is not None:
            moe = replace(moe, sparse_layers=(True,) * modules) if moe.sparse_layers[-1] else None
        model = replace(
            target,
            num_layers=modules,
            tie_embeddings=False,
            windows=(target.windows[-1],) * modules,
            moe=moe,
            eos_ids=frozenset(),
        )
        return MTPConfig(model, order, depth)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor; a draft vocabulary is optional and not listed."""
        h = self.model.hidden_size
        layers = {
            name.removeprefix("model."): shape
            for name, shape in expected_tensors(self.model).items()
            if name.startswith("model.layers.")
        }
        for n in range(self.model.num_layers):
            layers |= {
                f"layers.{n}.enorm.weight": (h,),
                f"layers.{n}.hnorm.weight": (h,),
                f"layers.{n}.eh_proj.weight": (h, 2 * h),
                f"layers.{n}.shared_head.norm.weight": (h,),
            }
        return layers

    def to_dict(self) -> dict[str, Any]:
        """`config.json`: the target family's own keys, the number of modules, and `jet`."""
        return {
            "architectures": ["MTPDraftModel"],
            **_model_values(self.model),
            "num_nextn_predict_layers": self.model.num_layers,
            "jet": own_values("mtp", order=self.order, hidden_state="after_final_norm", depth=self.depth),
        }

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> MTPConfig:
        """Read `config.json`. Raises HeadError for missing, contradictory and unknown values."""
        jet = values.get("jet")
        if not isinstance(jet, Mapping) or jet.get("head") != "mtp":
            raise HeadError("config.json: jet.head is not 'mtp', so this is not an MTP head's folder")
        state = jet.get("hidden_state", "after_final_norm")
        if state != "after_final_norm":
            raise HeadError(
                f"jet.hidden_state is {state!r}; valid: after_final_norm (the target's last state)"
            )
        family = values.get("model_type")
        if family not in FAMILIES:
            raise HeadError(f"config.json: model_type is {family!r}; valid: {', '.join(FAMILIES)}")
        modules = whole("num_nextn_predict_layers", values.get("num_nextn_predict_layers"))
        if values.get("num_hidden_layers") != modules:
            raise HeadError(
                f"config.json names {modules} modules in num_nextn_predict_layers and "
                f"{values.get('num_hidden_layers')} in num_hidden_layers; correct one of them"
            )
        model = model_of(values, str(family), "an MTP head")
        return MTPConfig(model, str(jet.get("order", ORDERS[0])), whole("jet.depth", jet.get("depth", DEPTH)))


def _model_values(m: ModelConfig) -> dict[str, Any]:
    """A model's shape as a Hugging Face `config.json` says it; `ModelConfig.from_dict` reads it back."""
    values: dict[str, Any] = {
        "model_type": m.family,
        "hidden_size": m.hidden_size,
        "intermediate_size": m.intermediate_size,
        "num_hidden_layers": m.num_layers,
        "num_attention_heads": m.num_heads,
        "num_key_value_heads": m.num_kv_heads,
        "head_dim": m.head_dim,
        "vocab_size": m.vocab_size,
        "rms_norm_eps": m.rms_norm_eps,
        **rope_values(m.rope),
        "max_position_embeddings": m.max_positions,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        **window_values(m),
    }
    if m.family == "mistral":
        values["sliding_window"] = m.windows[0]
    elif m.family != "qwen2":
        values["attention_bias"] = m.o_bias
    if m.family == "llama":
        values["mlp_bias"] = m.mlp_bias
    if m.family == "qwen3_moe":
        values |= (
            {"num_experts": 0}
            if m.moe is None
            else {
                "num_experts": m.moe.num_experts,
                "num_experts_per_tok": m.moe.experts_per_token,
                "moe_intermediate_size": m.moe.intermediate_size,
                "norm_topk_prob": m.moe.norm_topk_prob,
                "decoder_sparse_step": 1,
                "mlp_only_layers": [],
            }
        )
    return values


@dataclass(frozen=True)
class MTPHead:
    """An MTP head as read.

    vocab     int64 [Vd], the ids it may draft, ascending, or None for all
    manifest  what is known of its training
    """

    config: MTPConfig
    weights: dict[str, Tensor]
    vocab: Tensor | None = None
    manifest: dict[str, Any] = field(default_factory=dict)


def load_mtp(folder: Path) -> MTPHead:
    """Read a folder. Raises HeadError naming what is wrong."""
    values, tensors = read_folder(folder)
    config = MTPConfig.from_dict(values)
    vocab = tensors.pop(DRAFT_VOCAB, None)
    check_tensors(config.shapes(), tensors, folder)
    if vocab is not None:
        usable = vocab.dtype == torch.int64 and vocab.ndim == 1 and len(vocab) > 0
        usable = usable and int(vocab[0]) >= 0 and int(vocab[-1]) < config.model.vocab_size
        if not usable or not bool((vocab[1:] > vocab[:-1]).all()):
            raise HeadError(f"{DRAFT_VOCAB} must be ascending ids inside 0..{config.model.vocab_size - 1}")
    return MTPHead(config, tensors, vocab, manifest_of(values, folder))


def save_mtp(folder: Path, head: MTPHead, dtype: torch.dtype | None = None) -> None:
    """Write a folder, in `dtype` or as the tensors are. Raises StorageError."""
    tensors = dict(head.weights)
    if head.vocab is not None:
        tensors[DRAFT_VOCAB] = head.vocab.to(torch.int64)
    write_folder(folder, head.config.to_dict(), tensors, head.manifest, dtype)
