"""Optimisers by name: AdamW for everything, or Muon for matrices with AdamW for the rest.

Muon replaces the momentum of a matrix by the nearest matrix with orthonormal rows or columns, so every
direction of a layer moves by the same amount (K. Jordan et al., "Muon: an optimizer for hidden layers in
neural networks", 2024). The singular values are brought near 1 by five steps of a Newton-Schulz iteration,
which needs matrix products only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

OPTIMIZERS = ("adamw", "muon")
_STEP_SIZE = 0.2  # root mean square of a step of Muon at rate 1, about AdamW's own (arXiv 2502.16982)


def make_optimizer(
    module: nn.Module, name: str, rate: float, betas: tuple[float, float]
) -> torch.optim.Optimizer:
    """The optimiser `name` of all parameters of `module`, without weight decay.

    With "muon" tables that are looked up by token or slot, output matrices and everything that is no matrix
    stay with AdamW: each of their rows is learnt by itself.
    """
    if name == "adamw":
        return torch.optim.AdamW(module.parameters(), lr=rate, betas=betas, weight_decay=0.0, fused=True)
    assert name == "muon", name
    named: list[tuple[str, Tensor]] = list(module.named_parameters())
    matrices = [tensor for key, tensor in named if tensor.ndim == 2 and not _is_table(key)]
    others = [tensor for key, tensor in named if tensor.ndim != 2 or _is_table(key)]
    return Muon(matrices, others, rate, betas)


def _is_table(name: str) -> bool:
    return any(part in name for part in ("embed", "markov_w", "lm_head"))


class Muon(torch.optim.Optimizer):
    """Muon for `matrices`, AdamW for `others`, in one optimiser, so that a checkpoint holds one state."""

    def __init__(
        self,
        matrices: list[Tensor],
        others: list[Tensor],
        rate: float,
        betas: tuple[float, float],
        momentum: float = 0.95,
    ) -> None:
        groups: list[dict[str, Any]] = []
        if matrices:
            groups.append({"params": matrices, "muon": True})
        if others:
            groups.append({"params": others, "muon": False})
        super().__init__(groups, {"lr": rate, "betas": betas, "eps": 1e-8, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Move every tensor that has a gradient."""
        assert closure is None
        for group in self.param_groups:
            for tensor in group["params"]:
                if tensor.grad is not None:
                    (self._orthogonal if group["muon"] else self._adam)(tensor, group)

    def _orthogonal(self, tensor: Tensor, group: dict[str, Any]) -> None:
        state = self.state[tensor]
        if not state:
            state["momentum"] = torch.zeros_like(tensor)
        average, keep = state["momentum"], group["momentum"]
        assert tensor.grad is not None
        average.lerp_(tensor.grad, 1 - keep)
        ahead = tensor.grad.lerp(average, keep)  # Nesterov
        # An orthonormal matrix has entries of size 1 / sqrt(longer side); one rate then serves both groups.
        size = _STEP_SIZE * math.sqrt(max(tensor.shape))
        tensor.add_(orthogonalise(ahead), alpha=-group["lr"] * size)

    def _adam(self, tensor: Tensor, group: dict[str, Any]) -> None:
        state = self.state[tensor]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(tensor), torch.zeros_like(tensor)
        assert tensor.grad is not None
        state["step"] += 1
        step, (first, second) = float(state["step"]), group["betas"]
        state["exp_avg"].lerp_(tensor.grad, 1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(tensor.grad, tensor.grad, value=1 - second)
        root = (state["exp_avg_sq"] / (1 - second**step)).sqrt_().add_(group["eps"])
        tensor.addcdiv_(state["exp_avg"], root, value=-group["lr"] / (1 - first**step))


def orthogonalise(matrix: Tensor, steps: int = 5) -> Tensor:
    """`matrix` with its singular values moved to about 1 (0.7 to 1.2), its singular vectors kept.

    A quintic iteration x -> a x + b x^3 + c x^5 on the singular values, with the published coefficients, that
    rises steeply near 0 and stays near 1.
    """
    a, b, c = 3.4445, -4.7750, 2.0315
    wide = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if wide else matrix
    x = x / (x.norm() + 1e-7)
    for _ in range(steps):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x.T if wide else x
