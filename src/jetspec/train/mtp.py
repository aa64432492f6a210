"""Training of MTP heads (DeepSeek-V3, arXiv 2412.19437), recursively as FastMTP does (arXiv 2509.18362).

The paper trains a module per depth together with its target; here the target is frozen, and the last module
learns to read its own output, so that one module serves any depth. FastMTP's weights of the depths,
beta^(k-1) over their sum, are the "exponential" ones with decay -1 / log beta (`decay_of`); the loss divides
by their sum.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.draft.mtp import mtp_drafter
from jetspec.draft.mtp_format import MTPConfig, MTPHead, save_mtp
from jetspec.draft.sequential import SequentialDrafter
from jetspec.train.data import Batch
from jetspec.train.elementwise import silu_gate
from jetspec.train.sequential import SequentialMethod, SequentialModule


def decay_of(ratio: float) -> float:
    """The `decay` of exponential depth weights ratio^(k-1), 0 < ratio < 1."""
    return -1.0 / math.log(ratio)


class MTPModule(SequentialModule):
    """The trainable form of `draft.mtp.MTPNetwork`: layers of the target's own kind, experts included."""

    def __init__(self, config: MTPConfig, embedding: Tensor) -> None:
        super().__init__(config.model, config.shapes(), embedding)
        self.config = config
        self._names = frozenset(self.names)

    def features(self, batch: Batch) -> Tensor:
        """The target's final normed states."""
        return batch.hidden.to(self.embedding.dtype)

    def join(self, module: int, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """The projection of both, behind the layer's first norm; the residual is the projection itself."""
        base = f"layers.{module}."
        token, state = self.norm(tokens, base + "enorm.weight"), self.norm(features, base + "hnorm.weight")
        parts = [token, state] if self.config.order == "embedding_first" else [state, token]
        x = self.wide(F.linear(torch.cat(parts, dim=-1), self.weight(base + "eh_proj.weight")))
        return self.norm(x, base + "input_layernorm.weight"), x

    def project(self, module: int, x: Tensor, part: str) -> Tensor:
        """One of the three projections, with bias and head norm where the family has them."""
        base = f"layers.{module}.self_attn."
        y = self._linear(x, f"{base}{part}_proj").unflatten(-1, (-1, self.model.head_dim))
        return self.norm(y, f"{base}{part}_norm.weight") if self.model.qk_norm and part != "v" else y

    def finish(self, module: int, residual: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and MLP or experts, each around a residual."""
        base = f"layers.{module}."
        x = residual + self._linear(mixed, base + "self_attn.o_proj")
        h = self.norm(x, base + "post_attention_layernorm.weight")
        if self.model.moe is None or not self.model.moe.sparse_layers[module]:
            return x + self._mlp(h, base + "mlp.")
        return x + self._experts(h.flatten(0, -2), base + "mlp.").view_as(h)

    def last_norm(self, module: int, states: Tensor) -> Tensor:
        """The norm before the target's output matrix."""
        return self.norm(states, f"layers.{module}.shared_head.norm.weight")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        bias = self.weight(name + ".bias") if name + ".bias" in self._names else None
        return F.linear(x, self.weight(name + ".weight"), bias)

    def _mlp(self, h: Tensor, base: str) -> Tensor:
        gated = silu_gate(self._linear(h, base + "gate_proj"), self._linear(h, base + "up_proj"))
        return self._linear(gated, base + "down_proj")

    def _experts(self, h: Tensor, base: str) -> Tensor:
        """Rows [n, H] through the experts that the router prefers, as `target.moe` computes it."""
        moe = self.model.moe
        assert moe is not None
        scores = self._linear(h, base + "gate").softmax(-1, dtype=torch.float32)
        weights, chosen = scores.topk(moe.experts_per_token, dim=-1)
        if moe.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(h.dtype)
        out = torch.zeros_like(h)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            y = self._mlp(h[rows], f"{base}experts.{expert}.")
            out = out.index_add(0, rows, y * weights[rows, place, None])
        return out


class MTPMethod(SequentialMethod):
    """An MTP head in training."""

    name = "mtp"
    module: MTPModule

    def identity(self) -> dict[str, Any]:
        """As for every sequential head, and the order of the projection's input."""
        return {**super().identity(), "order": self.module.config.order}

    def head(self, manifest: dict[str, Any] | None = None) -> MTPHead:
        """A snapshot of the tensors."""
        module = self.module
        weights = {name: module.weight(name).detach().clone() for name in module.names}
        whole = len(self.vocab) == module.model.vocab_size
        return MTPHead(module.config, weights, None if whole else self.vocab, dict(manifest or {}))

    def drafter(self) -> SequentialDrafter:
        """The head as it is now, on its target."""
        return mtp_drafter(self.head(), self.target)

    def save(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the head's folder, in half precision."""
        save_mtp(folder, self.head(manifest), torch.float16)


@torch.no_grad()
def initialise_mtp(module: MTPModule, *, seed: int = 0, warm: bool = True) -> None:
    """Set the first weights: normal matrices, norms at 1.

    With `warm` the projection passes the state on, and the layer adds little to it, so that the untrained
    head predicts what the target predicted one token earlier, through the target's own output matrix.
    (Copying the target's last layer, too, starts from overconfident laws and learns more slowly: a layer that
    has been passed through already is not one to pass through again.)
    """
    generator = torch.Generator().manual_seed(seed)
    for name in module.names:
        tensor = module.weight(name)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif tensor.ndim == 1:
            tensor.zero_()
        else:
            scale = 0.01 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            tensor.copy_(torch.empty(tensor.shape).normal_(0.0, scale, generator=generator))
    if warm:
        width = module.model.hidden_size
        state = slice(0, width) if module.config.order == "hidden_first" else slice(width, 2 * width)
        for n in range(module.model.num_layers):
            eye = torch.eye(width, device=module.embedding.device)
            module.weight(f"layers.{n}.eh_proj.weight")[:, state].add_(eye)
