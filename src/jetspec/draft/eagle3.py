"""The EAGLE-3 drafter (arXiv 2503.01840): one Llama-style layer over the target's tapped states."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.draft.eagle3_format import Eagle3Head
from jetspec.draft.fit import check_fits_target
from jetspec.draft.sequential import Context, SequentialDrafter
from jetspec.draft.shared_noise import NoiseWeights
from jetspec.target.attention import attend
from jetspec.target.linear import Linear
from jetspec.target.rope import rotate
from jetspec.target.target import Target
from jetspec.target.transformer import MLP, Transformer, rms_norm


class Eagle3Network:
    """Weights of an EAGLE-3 head, packed for inference.

    A row reads [input_layernorm(E(token i + 1)) ; hidden_norm(feature i)], twice as wide as the head; the
    residual runs along the feature alone. The output before the final norm is the next step's feature.

    Args:
        transformer: the target, whose embedding is used unless the head brings its own.
    """

    def __init__(self, head: Eagle3Head, transformer: Transformer) -> None:
        self.model = head.config.model
        self.dtype, self.device = transformer.dtype, transformer.device
        w = {
            name: tensor.to(self.device, self.dtype)
            for name, tensor in head.weights.items()
            if name not in ("d2t", "t2d")
        }
        self.vocab = head.vocab.to(self.device)
        self.embedding = w.get("embed_tokens.weight", transformer.embedding)
        self.fusion = Linear(w["fc.weight"])
        self.qkv = Linear(torch.cat([w[f"midlayer.self_attn.{part}_proj.weight"] for part in "qkv"]))
        self.out = Linear(w["midlayer.self_attn.o_proj.weight"])
        self.mlp = MLP(
            Linear(
                torch.cat([w["midlayer.mlp.gate_proj.weight"], w["midlayer.mlp.up_proj.weight"]]), gated=True
            ),
            Linear(w["midlayer.mlp.down_proj.weight"]),
        )
        self.input_norm = w["midlayer.input_layernorm.weight"]
        self.hidden_norm = w["midlayer.hidden_norm.weight"]
        self.post_norm = w["midlayer.post_attention_layernorm.weight"]
        self.norm = w["norm.weight"]
        self.output = Linear(w["lm_head.weight"])

    def features(self, rows: Tensor) -> Tensor:
        """Taps [n, taps * H] to features [n, H]."""
        return self.fusion(rows)

    def run(self, module: int, features: Tensor, ids: Tensor, context: Context) -> Tensor:
        """Rows through the layer: outputs [n, H]."""
        model, eps = self.model, self.model.rms_norm_eps
        token = rms_norm(F.embedding(ids, self.embedding), self.input_norm, eps)
        both = torch.cat([token, rms_norm(features, self.hidden_norm, eps)], dim=-1)  # [n, 2H]
        heads, kv_heads = model.num_heads, model.num_kv_heads
        qkv = self.qkv(both).view(len(ids), heads + 2 * kv_heads, model.head_dim)
        qk = rotate(qkv[:, : heads + kv_heads], *context.rotary)
        mixed = attend(
            qk[:, :heads],
            qk[:, heads:],
            qkv[:, heads + kv_heads :],
            context.plan,
            context.cache,
            0,
            context.visibility,
        )
        x = features + self.out(mixed)
        return x + self.mlp(rms_norm(x, self.post_norm, eps))

    def logits(self, module: int, states: Tensor) -> Tensor:
        """Outputs [n, H] to logits over the draft vocabulary [n, Vd]."""
        return self.output(rms_norm(states, self.norm, self.model.rms_norm_eps))


def eagle3_drafter(head: Eagle3Head, target: Target, *, depth: int | None = None) -> SequentialDrafter:
    """An EAGLE-3 head on its target.

    depth: deepest node; None takes the head's own.

    Raises HeadError if the head was made for a target of another shape or tokenizer.
    """
    check_fits(head, target)
    config = head.config
    taps = config.resolve_taps(target.config.num_layers)
    network = Eagle3Network(head, target.transformer)
    weights = NoiseWeights.of(head.manifest)
    return SequentialDrafter("eagle3", network, depth=depth or config.depth, taps=taps, weights=weights)


def check_fits(head: Eagle3Head, target: Target) -> None:
    """Refuse a head made for another target, naming what differs. Raises HeadError."""
    config = head.config
    check_fits_target(target, head.manifest, hidden=config.target_hidden, vocab=config.model.vocab_size)
    config.resolve_taps(target.config.num_layers)
