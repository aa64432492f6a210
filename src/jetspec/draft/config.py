"""What a draft head is: the shape of its layers, its block, its taps, and which optional parts it has.

Read from and written to the public DFlash/JetSpec `config.json` plus one object
`jet` for what that format cannot say. Where two keys say the same thing they must agree: a silent
disagreement shows only as low acceptance.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jetspec.draft.config_keys import agree, causal, rope_values, whole, window_values
from jetspec.errors import HeadError, ModelError
from jetspec.target.config import ModelConfig

FORMAT_VERSION = 1
SCORERS = ("none", "vanilla", "gated")


def default_tap_layers(num_layers: int, count: int = 5) -> tuple[int, ...]:
    """Layers to tap in a target of `num_layers`, by the rule of the DFlash code (arXiv 2602.06036);
    fewer in tiny targets.

    The last layer is never among them: its output is normed in other implementations.
    """
    if num_layers < 5 or count == 1:
        return (max(0, min(num_layers // 2, num_layers - 2)),)
    last = num_layers - 3
    count = min(count, last)
    return tuple(dict.fromkeys(round(1 + i * (last - 1) / (count - 1)) for i in range(count)))


@dataclass(frozen=True)
class HeadConfig:
    """A draft head in the in-place alignment: slot k of a block predicts the token at root + k; slot 0 is
    the root itself.

    model          shape of the draft layers (Qwen3 style: QK-norm, no biases)
    block_size     slots per block, root included; depth = block_size - 1
    taps           zero-based target layers whose OUTPUTS are read, in this order
    mask_token_id  the token whose embedding fills the open slots
    target_layers  layers of the target it belongs to
    causal         slots see only earlier slots of their block (JetSpec) or all of them (DFlash)
    direct         every slot also gets one linear map of the root's embedding and the last taps
    slot_embedding every slot also gets a learned vector of its own
    scorer         what a child's log-prob knows of its parent's token: "none", "vanilla" or "gated"
                   (DSpark's names)
    rank           of the scorer; 0 with "none"
    """

    model: ModelConfig
    block_size: int
    taps: tuple[int, ...]
    mask_token_id: int
    target_layers: int
    causal: bool = True
    direct: bool = False
    slot_embedding: bool = False
    scorer: str = "none"
    rank: int = 0

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise HeadError(f"block_size is {self.block_size}; a head needs at least 2 slots")
        if self.scorer not in SCORERS:
            raise HeadError(f"head_type {self.scorer!r} is unknown; valid: {', '.join(SCORERS)}")
        if (self.rank > 0) != (self.scorer != "none"):
            raise HeadError(f"rank {self.rank} does not go with head_type {self.scorer!r}")
        if list(self.taps) != sorted(set(self.taps)) or not self.taps:
            raise HeadError(f"target_layer_ids {list(self.taps)} must be strictly increasing")
        if self.taps[-1] > max(0, self.target_layers - 2) or self.taps[0] < 0:
            last = max(0, self.target_layers - 2)
            raise HeadError(
                f"target_layer_ids {list(self.taps)} must lie in 0..{last} for {self.target_layers} layers: "
                "ids count layer OUTPUTS from 0, and the last layer of the target is not allowed"
            )
        if not 0 <= self.mask_token_id < self.model.vocab_size:
            raise HeadError(
                f"mask_token_id {self.mask_token_id} lies outside the vocabulary of {self.model.vocab_size}"
            )

    @staticmethod
    def for_target(
        target: ModelConfig,
        *,
        layers: int = 2,
        block_size: int = 8,
        taps: tuple[int, ...] | None = None,
        mask_token_id: int,
        causal: bool = True,
        direct: bool = True,
        slot_embedding: bool = True,
        scorer: str = "gated",
        rank: int = 64,
    ) -> HeadConfig:
        """A head with the target's own widths. `taps` None follows `default_tap_layers`."""
        model = replace(
            target,
            family="qwen3",
            num_layers=layers,
            tie_embeddings=False,
            qkv_bias=False,
            o_bias=False,
            mlp_bias=False,
            qk_norm=True,
            windows=(None,) * layers,
            moe=None,
            eos_ids=frozenset(),
        )
        taps = taps if taps is not None else default_tap_layers(target.num_layers)
        return HeadConfig(
            model,
            block_size,
            taps,
            mask_token_id,
            target.num_layers,
            causal,
            direct,
            slot_embedding,
            scorer,
            rank,
        )

    @property
    def depth(self) -> int:
        """Deepest node that one block can draft."""
        return self.block_size - 1

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Name and shape of every tensor of such a head, the public ones first (a draft vocabulary is
        optional and not listed).
        """
        m = self.model
        h, ffn = m.hidden_size, m.intermediate_size
        heads, kv = m.num_heads * m.head_dim, m.num_kv_heads * m.head_dim
        shapes: dict[str, tuple[int, ...]] = {
            "fc.weight": (h, len(self.taps) * h),
            "hidden_norm.weight": (h,),
        }
        for i in range(m.num_layers):
            layer = f"layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (h,)
            shapes[layer + "post_attention_layernorm.weight"] = (h,)
            shapes[layer + "self_attn.q_proj.weight"] = (heads, h)
            shapes[layer + "self_attn.k_proj.weight"] = (kv, h)
            shapes[layer + "self_attn.v_proj.weight"] = (kv, h)
            shapes[layer + "self_attn.o_proj.weight"] = (h, heads)
            shapes[layer + "self_attn.q_norm.weight"] = (m.head_dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (m.head_dim,)
            shapes[layer + "mlp.gate_proj.weight"] = (ffn, h)
            shapes[layer + "mlp.up_proj.weight"] = (ffn, h)
            shapes[layer + "mlp.down_proj.weight"] = (h, ffn)
        shapes["norm.weight"] = (h,)
        if self.direct:
            shapes["direct_proj.weight"] = (h, (1 + len(self.taps)) * h)
        if self.slot_embedding:
            shapes["slot_embed.weight"] = (self.block_size, h)
        if self.scorer != "none":
            shapes["markov_head.markov_w1.weight"] = (m.vocab_size, self.rank)
            shapes["markov_head.markov_w2.weight"] = (m.vocab_size, self.rank)
        if self.scorer == "gated":
            shapes["markov_head.gate_proj.weight"] = (self.rank, h + self.rank)
            shapes["markov_head.gate_proj.bias"] = (self.rank,)
        return shapes

    def to_dict(self) -> dict[str, Any]:
        """The public `config.json`, with causality written under all keys that readers know, plus `jet`."""
        m = self.model
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
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
            "attention_bias": False,
            **window_values(m),
            "tie_word_embeddings": False,
            "block_size": self.block_size,
            "num_target_layers": self.target_layers,
            "is_causal": self.causal,
            "dflash_config": {
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.taps),
                "block_size": self.block_size,
                "causal": self.causal,
                "causal_head": self.causal,
            },
            "jet": {
                "format_version": FORMAT_VERSION,
                "alignment": "in_place",
                "mask": "causal" if self.causal else "bidirectional",
                "layer_id_convention": "output",
                "head_type": self.scorer,
                "rank": self.rank,
                "direct": self.direct,
                "slot_embedding": self.slot_embedding,
            },
        }

    @staticmethod
    def from_dict(values: dict[str, Any]) -> HeadConfig:
        """Read a public or own `config.json`.

        Raises HeadError for a missing key, for keys that contradict each other, and for heads of another
        kind.
        """
        inner = values.get("dflash_config") if isinstance(values, dict) else None
        if not isinstance(inner, dict):
            raise HeadError(
                "config.json has no dflash_config, so this is not a DFlash/JetSpec head; "
                "give the folder of one"
            )
        jet = values.get("jet") or {}
        if not isinstance(jet, dict):
            raise HeadError(f"config.json: jet is {jet!r}; valid: an object")
        if whole("jet.format_version", jet.get("format_version", FORMAT_VERSION)) > FORMAT_VERSION:
            raise HeadError(
                f"the head was written in format {jet['format_version']}, this version reads up to "
                f"{FORMAT_VERSION}; upgrade jetspec"
            )
        if jet.get("alignment", "in_place") != "in_place" or any(
            values.get(key) or inner.get(key)
            for key in ("shift_label", "draft_shift", "sample_from_anchor", "dspark_bonus_anchor")
        ):
            raise HeadError(
                "the head is trained in the shifted alignment (DSpark), which this drafter cannot run; "
                "valid: in_place"
            )
        try:
            model = ModelConfig.from_dict({**values, "model_type": "qwen3", "architectures": None})
        except ModelError as error:
            raise HeadError(f"the head's {error}") from None
        taps = agree("target_layer_ids", inner.get("target_layer_ids"), values.get("target_layer_ids"))
        if not isinstance(taps, list):
            raise HeadError(f"config.json: target_layer_ids is {taps!r}; valid: a list of layer numbers")

        def number(key: str) -> int:
            return whole(key, agree(key, values.get(key), inner.get(key)))

        return HeadConfig(
            model=model,
            block_size=number("block_size"),
            taps=tuple(whole("target_layer_ids", n) for n in taps),
            mask_token_id=number("mask_token_id"),
            target_layers=number("num_target_layers"),
            causal=causal(values, inner, jet),
            direct=bool(jet.get("direct", False)),
            slot_embedding=bool(jet.get("slot_embedding", False)),
            scorer=str(jet.get("head_type", "none")),
            rank=whole("jet.rank", jet.get("rank", 0)),
        )
