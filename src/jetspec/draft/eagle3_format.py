"""EAGLE-3 heads on disk, in the public layout (arXiv 2503.01840; SafeAILab/EAGLE, read by vLLM and SGLang).

The layout says which target layers are tapped in two places and two conventions: `eagle_config` counts layer
OUTPUTS, `eagle_aux_hidden_state_layer_ids` at the top level counts the state ENTERING a layer, one more. Both
become outputs here, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from jetspec.draft.config import default_tap_layers
from jetspec.draft.config_keys import agree, rope_values, whole
from jetspec.draft.head_files import (
    check_tensors,
    manifest_of,
    model_of,
    own_values,
    read_folder,
    write_folder,
)
from jetspec.errors import HeadError
from jetspec.target.config import ModelConfig

DEPTH = 8  # of the published dynamic tree: the root's children and seven further forwards
IDS = "eagle_aux_hidden_state_layer_ids"
_MAPS = ("d2t", "t2d")
# Variants of other releases that this network does not compute.
_UNSUPPORTED = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output", "parallel_drafting")


def default_eagle3_taps(num_layers: int) -> tuple[int, ...]:
    """The layout's default: the states entering layers 2, L // 2 and L - 3, as OUTPUT ids.

    In targets of so few layers that these coincide, three layers spread over it, or as many as there are.
    """
    ids = (1, num_layers // 2 - 1, num_layers - 4)
    return ids if 1 < ids[1] < ids[2] else default_tap_layers(num_layers, 3)


@dataclass(frozen=True)
class Eagle3Config:
    """Shape of an EAGLE-3 head.

    model          shape of its one Llama-style layer; `vocab_size` is the target's
    target_hidden  width of the target's states
    tap_count      tapped layers, whose outputs `fc` reads side by side
    taps           zero-based target layers whose OUTPUTS are read, in this order; None where the checkpoint
                   does not say, which means the layout's default (see `resolve_taps`)
    draft_vocab    size of its own vocabulary
    own_embedding  whether the folder holds a copy of the target's embedding
    depth          deepest node that it drafts
    """

    model: ModelConfig
    target_hidden: int
    tap_count: int
    draft_vocab: int
    taps: tuple[int, ...] | None = None
    own_embedding: bool = False
    depth: int = DEPTH

    def __post_init__(self) -> None:
        if self.model.num_layers != 1:
            raise HeadError(f"num_hidden_layers is {self.model.num_layers}; an EAGLE-3 head has 1")
        if not 1 <= self.draft_vocab <= self.model.vocab_size:
            raise HeadError(f"draft_vocab_size is {self.draft_vocab}; valid: 1..{self.model.vocab_size}")
        if self.depth < 1:
            raise HeadError(f"jet.depth is {self.depth}; valid: 1 or more")
        if not self.own_embedding and self.target_hidden != self.model.hidden_size:
            raise HeadError(
                f"the head is {self.model.hidden_size} wide, its target {self.target_hidden}, and the folder "
                "holds no embed_tokens.weight of the head's width; it cannot embed tokens"
            )
        if self.taps is not None:
            if len(self.taps) != self.tap_count:
                raise HeadError(
                    f"fc.weight reads {self.tap_count} tapped layers, but config.json names "
                    f"{len(self.taps)}: {list(self.taps)}"
                )
            if list(self.taps) != sorted(set(self.taps)) or self.taps[0] < 0:
                raise HeadError(f"the tapped layers {list(self.taps)} must be strictly increasing, from 0")

    @staticmethod
    def for_target(
        target: ModelConfig,
        *,
        draft_vocab: int,
        taps: tuple[int, ...] | None = None,
        depth: int = DEPTH,
    ) -> Eagle3Config:
        """A head with the target's own widths. `taps` None follows `default_eagle3_taps`."""
        model = replace(
            target,
            family="llama",
            num_layers=1,
            tie_embeddings=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=False,
            windows=(None,),
            moe=None,
            eos_ids=frozenset(),
        )
        taps = taps if taps is not None else default_eagle3_taps(target.num_layers)
        return Eagle3Config(model, target.hidden_size, len(taps), draft_vocab, taps, depth=depth)

    def resolve_taps(self, target_layers: int) -> tuple[int, ...]:
        """The tapped layers for a target of so many layers, as OUTPUT ids.

        Raises HeadError if the head does not name them and does not have the default number of taps, or if
        they do not lie in the target.
        """
        taps = self.taps
        if taps is None:
            taps = default_eagle3_taps(target_layers)
            if len(taps) != self.tap_count:
                raise HeadError(
                    f"fc.weight reads {self.tap_count} tapped layers, and config.json does not name them; "
                    f"add eagle_config.{IDS} (layer outputs, counted from 0)"
                )
        if taps[-1] > target_layers - 2:
            raise HeadError(
                f"the tapped layers {list(taps)} must lie in 0..{target_layers - 2} for {target_layers} "
                "layers: ids count layer OUTPUTS from 0, and the last layer of the target is not allowed; "
                f"{IDS} at the top level counts the states that ENTER layers, which is one more"
            )
        return taps

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor; d2t and t2d only where the draft vocabulary is a part."""
        m = self.model
        h, ffn = m.hidden_size, m.intermediate_size
        heads, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, self.tap_count * self.target_hidden),
            "midlayer.self_attn.q_proj.weight": (heads, 2 * h),
            "midlayer.self_attn.k_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.v_proj.weight": (kv, 2 * h),
            "midlayer.self_attn.o_proj.weight": (h, heads),
            "midlayer.mlp.gate_proj.weight": (ffn, h),
            "midlayer.mlp.up_proj.weight": (ffn, h),
            "midlayer.mlp.down_proj.weight": (h, ffn),
            "midlayer.hidden_norm.weight": (h,),
            "midlayer.input_layernorm.weight": (h,),
            "midlayer.post_attention_layernorm.weight": (h,),
            "norm.weight": (h,),
            "lm_head.weight": (self.draft_vocab, h),
        }
        if self.draft_vocab < m.vocab_size:
            shapes["d2t"] = (self.draft_vocab,)
            shapes["t2d"] = (m.vocab_size,)
        if self.own_embedding:
            shapes["embed_tokens.weight"] = (m.vocab_size, h)
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """The public `config.json` with the tapped layers in both conventions, plus `jet`."""
        m = self.model
        values: dict[str, Any] = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            "hidden_size": m.hidden_size,
            "intermediate_size": m.intermediate_size,
            "num_hidden_layers": 1,
            "num_attention_heads": m.num_heads,
            "num_key_value_heads": m.num_kv_heads,
            "head_dim": m.head_dim,
            "vocab_size": m.vocab_size,
            "draft_vocab_size": self.draft_vocab,
            "target_hidden_size": self.target_hidden,
            "rms_norm_eps": m.rms_norm_eps,
            **rope_values(m.rope),
            "max_position_embeddings": m.max_positions,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": False,
            "jet": own_values("eagle3", depth=self.depth, layer_id_convention="output"),
        }
        if self.taps is not None:
            values["eagle_config"] = {IDS: list(self.taps), "use_aux_hidden_state": True}
            values[IDS] = [n + 1 for n in self.taps]
            values["jet"]["target_layer_ids"] = list(self.taps)
        return values

    @staticmethod
    def from_dict(values: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Eagle3Config:
        """Read a public or own `config.json`; the number of taps follows from `fc.weight`.

        Raises HeadError for a missing key, keys that contradict each other, and variants that are not
        supported.
        """
        if "speculators_model_type" in values:
            raise HeadError(
                "config.json is in the speculators layout, not the native EAGLE-3 one; "
                "convert the head to the native layout first"
            )
        found = [key for key in _UNSUPPORTED if values.get(key)]
        if found:
            raise HeadError(f"config.json sets {found[0]}, a variant of EAGLE-3 that is not supported")
        inner = values.get("eagle_config") or {}
        jet = values.get("jet") or {}
        if not isinstance(inner, Mapping) or not isinstance(jet, Mapping):
            raise HeadError("config.json: eagle_config and jet must be objects")
        if inner.get("use_aux_hidden_state") is False:
            raise HeadError(
                "eagle_config.use_aux_hidden_state is false: the head reads the last state alone, as EAGLE-1 "
                "and EAGLE-2 do; valid: an EAGLE-3 head"
            )
        model = model_of(values, "llama", "EAGLE-3")
        if model.qkv_bias or model.o_bias or model.mlp_bias:
            raise HeadError("config.json sets attention_bias or mlp_bias; an EAGLE-3 head has no biases")
        target_hidden = whole("target_hidden_size", values.get("target_hidden_size") or model.hidden_size)
        fc = tensors.get("fc.weight")
        if fc is None:
            raise HeadError("model.safetensors lacks fc.weight; give the folder of an EAGLE-3 head")
        if fc.ndim != 2 or fc.shape[1] % target_hidden:
            raise HeadError(
                f"fc.weight has shape {list(fc.shape)}; its width must be a multiple of {target_hidden}, the "
                "width of the target"
            )
        vocab = values.get("draft_vocab_size")
        return Eagle3Config(
            model=model,
            target_hidden=target_hidden,
            tap_count=fc.shape[1] // target_hidden,
            draft_vocab=model.vocab_size if vocab is None else whole("draft_vocab_size", vocab),
            taps=_taps(values, inner, jet),
            own_embedding="embed_tokens.weight" in tensors,
            depth=whole("jet.depth", jet.get("depth", DEPTH)),
        )


def _taps(
    values: Mapping[str, Any], inner: Mapping[str, Any], jet: Mapping[str, Any]
) -> tuple[int, ...] | None:
    """Tapped layers as OUTPUT ids, from every place that names them, or None."""
    convention = jet.get("layer_id_convention", "output")
    if convention != "output":
        raise HeadError(f"jet.layer_id_convention is {convention!r}; valid: 'output'")
    outputs = [
        _ids(f"eagle_config.{IDS}", inner.get(IDS)),
        _ids("target_layer_ids", jet.get("target_layer_ids")),
    ]
    entering = _ids(IDS, values.get(IDS))
    shifted = None if entering is None else [n - 1 for n in entering]
    stated = [ids for ids in outputs if ids is not None]
    if shifted is not None and stated and shifted != stated[0]:
        raise HeadError(
            "config.json contradicts itself on the layer convention: the outputs "
            f"{stated[0]} in eagle_config or jet go with the entering states {[n + 1 for n in stated[0]]} "
            f"in {IDS}, which says {entering}; correct one of them"
        )
    present = [*stated, *([shifted] if shifted is not None else [])]
    return tuple(agree("the tapped layers", *present)) if present else None


def _ids(name: str, value: Any) -> list[int] | None:
    if value is None:
        return None
    if not isinstance(value, list) or not value:
        raise HeadError(f"config.json: {name} is {value!r}; valid: a list of layer numbers")
    return [whole(name, n) for n in value]


@dataclass(frozen=True)
class Eagle3Head:
    """An EAGLE-3 head as read: configuration, tensors under their public names, manifest of its training."""

    config: Eagle3Config
    weights: dict[str, Tensor]
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def vocab(self) -> Tensor:
        """Ids that it drafts, int64 [Vd], ascending."""
        ids = torch.arange(self.config.draft_vocab)
        return ids + self.weights["d2t"].cpu() if "d2t" in self.weights else ids


def vocab_maps(vocab: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """d2t (offsets: target id = draft id + d2t[draft id]) and t2d (membership) of ascending ids [Vd]; empty
    for a whole vocabulary.
    """
    if len(vocab) == vocab_size:
        return {}
    member = torch.zeros(vocab_size, dtype=torch.bool)
    member[vocab.cpu()] = True
    return {"d2t": vocab.cpu() - torch.arange(len(vocab)), "t2d": member}


def load_eagle3(folder: Path) -> Eagle3Head:
    """Read a folder in the public layout. Raises HeadError naming what is wrong."""
    values, tensors = read_folder(folder)
    config = Eagle3Config.from_dict(values, tensors)
    shapes = config.shapes()
    if "d2t" in tensors and "t2d" in tensors:  # some writers add them to a whole vocabulary, too
        shapes |= {"d2t": (config.draft_vocab,), "t2d": (config.model.vocab_size,)}
    check_tensors(shapes, tensors, folder)
    if "d2t" in tensors:
        _check_maps(tensors, config)
    return Eagle3Head(config, tensors, manifest_of(values, folder))


def save_eagle3(folder: Path, head: Eagle3Head, dtype: torch.dtype | None = None) -> None:
    """Write a folder in the public layout, in `dtype` or as the tensors are. Raises StorageError."""
    write_folder(folder, head.config.to_dict(), head.weights, head.manifest, dtype)


def _check_maps(tensors: Mapping[str, Tensor], config: Eagle3Config) -> None:
    d2t, t2d, size = tensors["d2t"], tensors["t2d"], config.model.vocab_size
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise HeadError(
            f"d2t is {d2t.dtype} and t2d {t2d.dtype}; the layout has int64 offsets and a bool membership mask"
        )
    ids = torch.arange(config.draft_vocab) + d2t
    if not bool((ids[1:] > ids[:-1]).all()) or int(ids[0]) < 0 or int(ids[-1]) >= size:
        raise HeadError(
            f"d2t must hold offsets: draft id + d2t has to be strictly increasing inside 0..{size - 1} "
            "(target ids themselves are not offsets)"
        )
    member = torch.zeros(size, dtype=torch.bool)
    member[ids] = True
    if not torch.equal(member, t2d):
        raise HeadError("t2d does not name the target ids that d2t leads to; the head is damaged")
