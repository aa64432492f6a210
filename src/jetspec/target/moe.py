"""Mixture of experts (Qwen3-MoE): each row goes through the few experts that its router prefers."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jetspec.target.config import MoeConfig
from jetspec.target.linear import Linear


class Experts:
    """Router and experts of one layer. Rows are grouped by expert, so each expert in use is one product.

    Weights come per expert (`experts.3.gate_proj.weight`, as on the hub) or fused (`experts.gate_up_proj`
    [E, 2F, H] and `experts.down_proj` [E, H, F], as recent transformers saves them).
    """

    def __init__(self, config: MoeConfig, prefix: str, weights: Mapping[str, Tensor]) -> None:
        self.config = config
        self.router = Linear(weights[prefix + "gate.weight"])  # [E, H]
        self.gate_up: list[Linear] = []
        self.down: list[Linear] = []
        fused = prefix + "experts.gate_up_proj" in weights
        for expert in range(config.num_experts):
            if fused:
                gate_up = weights[prefix + "experts.gate_up_proj"][expert]
                down = weights[prefix + "experts.down_proj"][expert]
            else:
                name = f"{prefix}experts.{expert}."
                gate_up = torch.cat([weights[name + "gate_proj.weight"], weights[name + "up_proj.weight"]])
                down = weights[name + "down_proj.weight"]
            self.gate_up.append(Linear(gate_up, gated=True))
            self.down.append(Linear(down))

    def __call__(self, x: Tensor) -> Tensor:
        scores = self.router(x).softmax(-1, dtype=torch.float32)  # [M, E]
        weights, chosen = scores.topk(self.config.experts_per_token, dim=-1)
        if self.config.norm_topk_prob:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights.to(x.dtype)
        out = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            rows, place = (chosen == expert).nonzero(as_tuple=True)
            y = self.down[expert](self.gate_up[expert](x[rows]))
            out.index_add_(0, rows, y * weights[rows, place, None])
        return out
