"""What a block head is: the shape of its layers, its block, its taps, and which optional parts it has.

One record for JetSpec, DFlash and DSpark heads, which differ in switches only. How it is written is in
`jetspec.draft.public_format`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jetspec.errors import HeadError
from jetspec.target.config import ModelConfig

SCORERS = ("none", "vanilla", "gated", "rnn")
ALIGNMENTS = ("in_place", "shifted")
LAYOUTS = ("dflash", "specforge", "deepspec")


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
    """A draft head: a block of slots, the root's first, through a few layers.

    model          shape of the draft layers (Qwen3 style: QK-norm, no biases)
    block_size     slots per block, root included
    taps           zero-based target layers whose OUTPUTS are read, in this order
    mask_token_id  the token whose embedding fills the open slots
    target_layers  layers of the target it belongs to
    causal         slots see only earlier slots of their block (JetSpec) or all of them (DFlash)
    direct         every slot also gets one linear map of the root's embedding and the last taps
    slot_embedding every slot also gets a learned vector of its own
    scorer         what a child's log-prob knows of its path: nothing ("none"), its parent's token ("vanilla",
                   "gated") or, through a recurrent state, all its ancestors ("rnn"); DSpark's names
    rank           of the scorer; 0 with "none"
    alignment      "in_place": slot k predicts the token at root + k, and slot 0 nothing, so the depth is
                   block_size - 1 (DFlash, JetSpec). "shifted": slot k predicts the token at root + k + 1, and
                   the depth is block_size (DSpark)
    confidence     a head that states, per slot and parent, the chance that the next token is accepted
    confidence_with_markov   whether it reads the parent's row of the scorer, too
    layout         how the folder is written: "dflash" (public DFlash/JetSpec), or for DSpark "specforge" or
                   "deepspec", which brings copies of the target's embedding and output matrix
    notes          keys of a public config.json that say how the head was trained; written back as found
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
    alignment: str = "in_place"
    confidence: bool = False
    confidence_with_markov: bool = True
    layout: str = "dflash"
    notes: tuple[tuple[str, Any], ...] = ()

    def __post_init__(self) -> None:
        if self.alignment not in ALIGNMENTS:
            raise HeadError(f"alignment {self.alignment!r} is unknown; valid: {', '.join(ALIGNMENTS)}")
        least = 2 if self.alignment == "in_place" else 1
        if self.block_size < least:
            raise HeadError(f"block_size is {self.block_size}; a head needs at least {least} slots")
        if self.block_size > self.model.max_positions:
            raise HeadError(
                f"block_size is {self.block_size}, but the context holds only {self.model.max_positions} "
                f"tokens; valid: {least} to {self.model.max_positions}"
            )
        if self.layout not in LAYOUTS:
            raise HeadError(f"layout {self.layout!r} is unknown; valid: {', '.join(LAYOUTS)}")
        if self.confidence and self.confidence_with_markov and self.scorer == "none":
            raise HeadError(
                "the confidence head reads rows of a path scorer that the head does not have; "
                "set confidence_head_with_markov to false, or give the head a scorer"
            )
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
        **parts: Any,
    ) -> HeadConfig:
        """A head with the target's own widths. `taps` None follows `default_tap_layers`; `parts` are further
        fields.
        """
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
            **parts,
        )

    def with_layers(self, layers: int) -> HeadConfig:
        """The same head with another number of draft layers, all of which see their whole context."""
        if layers == self.model.num_layers:
            return self
        return replace(self, model=replace(self.model, num_layers=layers, windows=(None,) * layers))

    @property
    def first_slot(self) -> int:
        """The slot that predicts depth 1."""
        return 1 if self.alignment == "in_place" else 0

    @property
    def depth(self) -> int:
        """Deepest node that one block can draft."""
        return self.block_size - self.first_slot

    @property
    def method(self) -> str:
        """The family that such heads belong to: "jetspec", "dflash" or "dspark"."""
        if self.alignment == "shifted":
            return "dspark"
        return "jetspec" if self.causal else "dflash"

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
        if self.scorer == "rnn":
            shapes["markov_head.joint_proj.weight"] = (3 * self.rank, 2 * self.rank + h)
            shapes["markov_head.joint_proj.bias"] = (3 * self.rank,)
        if self.confidence:
            width = h + (self.rank if self.confidence_with_markov else 0)
            shapes["confidence_head.proj.weight"] = (1, width)
            shapes["confidence_head.proj.bias"] = (1,)
        return shapes

    def copied_shapes(self) -> dict[str, tuple[int, ...]]:
        """Frozen copies of the target's ends that a DeepSpec folder brings along."""
        if self.layout != "deepspec":
            return {}
        ends = (self.model.vocab_size, self.model.hidden_size)
        return {"embed_tokens.weight": ends, "lm_head.weight": ends}

    def to_dict(self) -> dict[str, Any]:
        """The public `config.json`; see `jetspec.draft.public_format`."""
        from jetspec.draft.public_format import to_public

        return to_public(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> HeadConfig:
        """Read a public or own `config.json`; see `jetspec.draft.public_format`. Raises HeadError."""
        from jetspec.draft.public_format import from_public

        return from_public(values)
