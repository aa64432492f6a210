"""The frozen target: one lean decoder for Llama, Mistral, Qwen2, Qwen3 and Qwen3-MoE.

A forward takes a packed plan, writes the cache, and returns logits only for the rows that want them, plus
taps (outputs of chosen layers). Families differ by configuration, never by code path: optional biases,
QK-norm, sliding windows, experts.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.target.attention import Visibility, attend
from jetspec.target.cache import KVCache
from jetspec.target.config import ModelConfig
from jetspec.target.linear import Linear
from jetspec.target.moe import Experts
from jetspec.target.native_decoder import NativeStack, native_output
from jetspec.target.packed import own_memory
from jetspec.target.plan import Plan
from jetspec.target.pooled_cache import new_cache
from jetspec.target.rope import RotaryTable, rotate


class ForwardOutput(NamedTuple):
    """What one forward returns; parts that were not asked for are None."""

    logits: Tensor | None  # [rows that want logits, V]
    taps: Tensor | None  # [M, taps * H], outputs of the chosen layers side by side
    hidden: Tensor | None  # [M, H], after the final norm: what the output matrix multiplies


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm over the last axis, computed in float32 like the models' own code."""
    if x.dtype == torch.float32:
        return F.rms_norm(x, (x.shape[-1],), weight, eps)
    return weight * unit_rms(x, eps)


def unit_rms(x: Tensor, eps: float) -> Tensor:
    """`rms_norm` without its weight."""
    return F.rms_norm(x.float(), (x.shape[-1],), None, eps).to(x.dtype)


class MLP:
    """down(silu(gate(x)) * up(x)), with gate and up as one product."""

    def __init__(self, gate_up: Linear, down: Linear) -> None:
        self.gate_up, self.down = gate_up, down

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.gate_up(x))


class Layer:
    """One decoder layer: attention and MLP, each behind a norm and around a residual.

    Args:
        prefix: what precedes `layers.` in the names of the weights.
    """

    def __init__(
        self, config: ModelConfig, index: int, weights: Mapping[str, Tensor], prefix: str = "model."
    ) -> None:
        self.config, self.index = config, index
        prefix = f"{prefix}layers.{index}."

        def weight(name: str) -> Tensor:
            return weights[prefix + name]

        def fused(block: str, names: tuple[str, ...], gated: bool = False) -> Linear:
            matrix = torch.cat([weight(f"{block}.{name}.weight") for name in names])
            biases = [weights.get(f"{prefix}{block}.{name}.bias") for name in names]
            present = [bias for bias in biases if bias is not None]
            return Linear(matrix, torch.cat(present) if present else None, gated=gated)

        self.input_norm = weight("input_layernorm.weight")
        self.post_norm = weight("post_attention_layernorm.weight")
        self.qkv = fused("self_attn", ("q_proj", "k_proj", "v_proj"))
        self.out = fused("self_attn", ("o_proj",))
        self.q_norm = weights.get(prefix + "self_attn.q_norm.weight")
        self.k_norm = weights.get(prefix + "self_attn.k_norm.weight")
        self.mlp: MLP | Experts
        if config.moe is not None and config.moe.sparse_layers[index]:
            self.mlp = Experts(config.moe, prefix + "mlp.", weights)
        else:
            gate_up = fused("mlp", ("gate_proj", "up_proj"), gated=True)
            self.mlp = MLP(gate_up, fused("mlp", ("down_proj",)))

    def __call__(
        self, x: Tensor, plan: Plan, cache: KVCache, rotary: tuple[Tensor, Tensor], visibility: Visibility
    ) -> Tensor:
        config = self.config
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = x.shape[0]
        qkv = self.qkv(rms_norm(x, self.input_norm, config.rms_norm_eps)).view(
            rows, heads + 2 * kv_heads, dim
        )
        if self.q_norm is None or self.k_norm is None:
            qk = rotate(qkv[:, : heads + kv_heads], *rotary)
            q, k = qk[:, :heads], qk[:, heads:]
        else:
            q = rotate(rms_norm(qkv[:, :heads], self.q_norm, config.rms_norm_eps), *rotary)
            k = rotate(rms_norm(qkv[:, heads : heads + kv_heads], self.k_norm, config.rms_norm_eps), *rotary)
        mixed = attend(q, k, qkv[:, heads + kv_heads :], plan, cache, self.index, visibility)
        x = x + self.out(mixed)
        return x + self.mlp(rms_norm(x, self.post_norm, config.rms_norm_eps))


class Transformer:
    """The decoder with its weights packed for inference.

    Args:
        weights: tensors under their Hugging Face names; `lm_head.weight` absent where embeddings are tied.
        dtype, device: of weights, activations and cache.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.config, self.dtype, self.device = config, dtype, torch.device(device)
        moved = _Moved(weights, dtype, self.device)
        self.embedding = moved["model.embed_tokens.weight"]  # [V, H]
        own_memory()
        self.layers = [Layer(config, index, moved) for index in range(config.num_layers)]
        self.norm = moved["model.norm.weight"]
        self.output_matrix = self.embedding if config.tie_embeddings else moved["lm_head.weight"]  # [V, H]
        self.output = Linear(self.output_matrix)
        own_memory()
        self.native = NativeStack.build(config, self.layers, dtype, self.device)
        self.output_seconds = 0.0  # of the compiled final norm and output matrix, for profiles
        self._rotary = RotaryTable(config.rope, config.head_dim, dtype, self.device)

    def new_cache(self) -> KVCache:
        """An empty cache that fits this model."""
        c = self.config
        return new_cache(c.num_layers, c.num_kv_heads, c.head_dim, dtype=self.dtype, device=self.device)

    def embed(self, ids: Tensor) -> Tensor:
        """Rows of the embedding table: ids [n] -> [n, H]."""
        return F.embedding(ids, self.embedding)

    @torch.inference_mode()
    def forward(
        self, plan: Plan, cache: KVCache, taps: tuple[int, ...] = (), hidden: bool = False
    ) -> ForwardOutput:
        """Run a plan. The cache holds its rows as pending afterwards: commit them with `cache.keep`.

        Args:
            taps: zero-based layers whose OUTPUT is returned, side by side in this order.
            hidden: also return the final normed state of every row.
        """
        config = self.config
        assert len(set(taps)) == len(taps) and all(0 <= n < config.num_layers for n in taps), taps
        x = self.embed(plan.ids)
        rotary = self._rotary.at(plan.positions, plan.last)
        if self.native is not None:
            tapped = self.native.run(x, plan, cache, rotary, taps)
            return self._native_output(x, plan, tapped, hidden)
        groups = config.num_heads // config.num_kv_heads
        masks = {w: Visibility(plan, cache, groups, w, self.dtype) for w in set(config.windows)}
        kept: dict[int, Tensor] = {}
        wanted = frozenset(taps)
        for layer in self.layers:
            x = layer(x, plan, cache, rotary, masks[config.windows[layer.index]])
            if layer.index in wanted:
                kept[layer.index] = x
        rows = plan.logit_rows()
        side_by_side = torch.cat([kept[n] for n in taps], dim=-1) if taps else None
        if rows is None and not hidden:
            return ForwardOutput(None, side_by_side, None)
        x = rms_norm(x, self.norm, config.rms_norm_eps)
        logits = None if rows is None else self.output(x[rows])
        return ForwardOutput(logits, side_by_side, x if hidden else None)

    def _native_output(self, x: Tensor, plan: Plan, taps: Tensor | None, hidden: bool) -> ForwardOutput:
        """Final norm and logits of the compiled path."""
        rows, eps = plan.logit_rows(), self.config.rms_norm_eps
        if rows is None and not hidden:
            return ForwardOutput(None, taps, None)
        chosen = None if hidden or not isinstance(rows, Tensor) else rows
        whole = rows is not None and (chosen is not None or not isinstance(rows, Tensor))
        start = time.perf_counter()
        normed, logits = native_output(x, self.norm, eps, self.output, chosen, logits=whole)
        self.output_seconds += time.perf_counter() - start
        if rows is not None and not whole:  # all rows are wanted normed, but only some of them as logits
            logits = self.output(normed[rows])
        return ForwardOutput(logits, taps, normed if hidden else None)


class _Moved(Mapping[str, Tensor]):
    """A view of the weights that casts and moves each tensor when it is read, so that two copies never
    coexist in full.
    """

    def __init__(self, weights: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> None:
        self._weights, self._dtype, self._device = weights, dtype, device

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)
