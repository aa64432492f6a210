"""The target as everything else holds it: a frozen decoder and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from jetspec.target.cache import KVCache
from jetspec.target.config import ModelConfig
from jetspec.target.plan import Plan
from jetspec.target.tokenizer import Tokenizer
from jetspec.target.transformer import ForwardOutput, Transformer


class Target:
    """A frozen language model with its tokenizer.

    Args:
        name: what the user called it.
        weights: tensors under their Hugging Face names.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        tokenizer: Tokenizer,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        self.name, self.config, self.tokenizer = name, config, tokenizer
        self.transformer = Transformer(config, weights, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        """Of weights, activations and cache."""
        return self.transformer.dtype

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.transformer.device

    def forward(
        self, plan: Plan, cache: KVCache, taps: tuple[int, ...] = (), hidden: bool = False
    ) -> ForwardOutput:
        """Run a packed plan; see `Transformer.forward`."""
        return self.transformer.forward(plan, cache, taps, hidden)

    def new_cache(self) -> KVCache:
        """An empty cache that fits this target."""
        return self.transformer.new_cache()
