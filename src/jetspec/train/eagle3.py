"""Training of EAGLE-3 heads (arXiv 2503.01840)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.draft.eagle3 import eagle3_drafter
from jetspec.draft.eagle3_format import Eagle3Config, Eagle3Head, save_eagle3, vocab_maps
from jetspec.draft.sequential import SequentialDrafter
from jetspec.target.target import Target
from jetspec.train.data import Batch
from jetspec.train.elementwise import silu_gate
from jetspec.train.sequential import SequentialMethod, SequentialModule
from jetspec.train.weighting import LossOptions

LM_HEAD = "lm_head.weight"


class Eagle3Module(SequentialModule):
    """The trainable form of `draft.eagle3.Eagle3Network`.

    Args:
        embedding: frozen, [V, H]; the target's, or the head's own.
        output: rows of the target's output matrix [Vd, H] to draft with, frozen; None trains the head's own.
    """

    def __init__(self, config: Eagle3Config, embedding: Tensor, output: Tensor | None = None) -> None:
        shapes = {name: shape for name, shape in config.shapes().items() if name not in ("d2t", "t2d")}
        shapes.pop("embed_tokens.weight", None)  # the head's own is not trained
        if output is not None:
            del shapes[LM_HEAD]
        super().__init__(config.model, shapes, embedding)
        self.config, self.frozen_output = config, output

    @property
    def output(self) -> Tensor:
        """The head's output matrix [Vd, H]."""
        return self.weight(LM_HEAD) if self.frozen_output is None else self.frozen_output

    def features(self, batch: Batch) -> Tensor:
        """Tapped states through `fc`."""
        return self.wide(F.linear(batch.taps.to(self.embedding.dtype), self.weight("fc.weight")))

    def join(self, module: int, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """[normed embedding ; normed feature]; the residual runs along the feature."""
        token = self.norm(tokens, "midlayer.input_layernorm.weight")
        return torch.cat([token, self.norm(features, "midlayer.hidden_norm.weight")], dim=-1), features

    def project(self, module: int, x: Tensor, part: str) -> Tensor:
        """One of the three projections."""
        y = F.linear(x, self.weight(f"midlayer.self_attn.{part}_proj.weight"))
        return y.unflatten(-1, (-1, self.model.head_dim))

    def finish(self, module: int, residual: Tensor, mixed: Tensor) -> Tensor:
        """Output projection and MLP, each around a residual."""
        x = residual + F.linear(mixed, self.weight("midlayer.self_attn.o_proj.weight"))
        h = self.norm(x, "midlayer.post_attention_layernorm.weight")
        gate = F.linear(h, self.weight("midlayer.mlp.gate_proj.weight"))
        up = F.linear(h, self.weight("midlayer.mlp.up_proj.weight"))
        return x + F.linear(silu_gate(gate, up), self.weight("midlayer.mlp.down_proj.weight"))

    def last_norm(self, module: int, states: Tensor) -> Tensor:
        """The norm before the output matrix."""
        return self.norm(states, "norm.weight")


class Eagle3Method(SequentialMethod):
    """An EAGLE-3 head in training."""

    name = "eagle3"
    module: Eagle3Module

    def __init__(
        self, module: Eagle3Module, target: Target, vocab: Tensor, loss: LossOptions, steps: int
    ) -> None:
        super().__init__(module, target, vocab, loss, steps)

    @property
    def own_output(self) -> Tensor:
        """The head's output matrix, which is trained unless it was frozen."""
        return self.module.output

    def identity(self) -> dict[str, Any]:
        """As for every sequential head, and the tapped layers."""
        return {**super().identity(), "taps": self.module.config.taps}

    def head(self, manifest: dict[str, Any] | None = None) -> Eagle3Head:
        """A snapshot of the tensors."""
        module = self.module
        weights = {name: module.weight(name).detach().clone() for name in module.names}
        weights[LM_HEAD] = module.output.detach().clone()
        if module.config.own_embedding:
            weights["embed_tokens.weight"] = module.embedding
        weights |= vocab_maps(self.vocab, module.model.vocab_size)
        return Eagle3Head(module.config, weights, dict(manifest or {}))

    def drafter(self) -> SequentialDrafter:
        """The head as it is now, on its target."""
        return eagle3_drafter(self.head(), self.target)

    def save(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the head's folder in the public layout, in half precision."""
        save_eagle3(folder, self.head(manifest), torch.float16)


@torch.no_grad()
def initialise_eagle3(
    module: Eagle3Module,
    output: Tensor,
    target: Mapping[str, Tensor] | None = None,
    *,
    target_layers: int = 0,
    seed: int = 0,
) -> None:
    """Set the first weights.

    Random: normal matrices, norms at 1, the output matrix that of the target for the draft vocabulary,
    `output` [Vd, H]. With the tensors of a `target` of so many layers, a warm start follows: the layer works
    like the target's last one on the newest tap, so that the output's geometry is in place.
    """
    generator = torch.Generator().manual_seed(seed)
    for name in module.names:
        tensor = module.weight(name)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        else:
            tensor.copy_(torch.empty(tensor.shape).normal_(0.0, 0.02, generator=generator))
    if module.frozen_output is None:
        module.weight(LM_HEAD).copy_(output)
    if target is None:
        return
    width = module.config.target_hidden
    if width == module.model.hidden_size:
        module.weight("fc.weight")[:, -width:].add_(torch.eye(width, device=module.embedding.device))
    module.weight("norm.weight").copy_(target["model.norm.weight"])
    base = f"model.layers.{target_layers - 1}."
    pairs = {
        "midlayer.hidden_norm.weight": "input_layernorm.weight",
        "midlayer.post_attention_layernorm.weight": "post_attention_layernorm.weight",
        "midlayer.self_attn.o_proj.weight": "self_attn.o_proj.weight",
        **{f"midlayer.mlp.{p}_proj.weight": f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")},
    }
    for own, theirs in pairs.items():
        source = target.get(base + theirs)
        if source is not None and source.shape == module.weight(own).shape:
            module.weight(own).copy_(source)
    for part in "qkv":
        feature_half = module.weight(f"midlayer.self_attn.{part}_proj.weight")[:, module.model.hidden_size :]
        source = target.get(f"{base}self_attn.{part}_proj.weight")
        if source is not None and source.shape == feature_half.shape:
            feature_half.copy_(source)
