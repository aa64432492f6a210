"""The MTP drafter (DeepSeek-V3, arXiv 2412.19437): modules of the target's own kind, one depth each."""

from __future__ import annotations

import torch
from torch import Tensor

from jetspec.draft.fit import check_fits_target
from jetspec.draft.mtp_format import MTPHead
from jetspec.draft.sequential import Context, SequentialDrafter
from jetspec.draft.shared_noise import NoiseWeights
from jetspec.errors import HeadError
from jetspec.target.linear import Linear, in_half
from jetspec.target.target import Target
from jetspec.target.transformer import Layer, Transformer, rms_norm


class MTPNetwork:
    """Weights of an MTP head, packed for inference.

    Module k maps a row to layer_k(M_k [norm(E(token i + 1)) ; norm(state i)]); the first state is the
    target's, after its final norm. A module's output before its last norm is the next depth's state.

    Args:
        transformer: the target, whose embedding and output matrix are the head's own ends.
        vocab: ids [Vd] that logits are computed for.
    """

    def __init__(self, head: MTPHead, transformer: Transformer, vocab: Tensor) -> None:
        self.model = head.config.model
        self.dtype, self.device = transformer.dtype, transformer.device
        self.vocab = vocab.to(self.device)
        self.embed = transformer.embed
        self.hidden_first = head.config.order == "hidden_first"
        w = {name: tensor.to(self.device, self.dtype) for name, tensor in head.weights.items()}
        modules = range(self.model.num_layers)
        self.layers = [Layer(self.model, n, w, prefix="") for n in modules]
        self.join = [Linear(w[f"layers.{n}.eh_proj.weight"]) for n in modules]
        self.norms = [(w[f"layers.{n}.enorm.weight"], w[f"layers.{n}.hnorm.weight"]) for n in modules]
        self.last_norms = [w[f"layers.{n}.shared_head.norm.weight"] for n in modules]
        whole = len(vocab) == transformer.config.vocab_size
        self.output = transformer.output if whole else Linear(in_half(transformer.output_matrix[self.vocab]))

    def features(self, rows: Tensor) -> Tensor:
        """The target's final normed states are used as they are."""
        return rows

    def run(self, module: int, features: Tensor, ids: Tensor, context: Context) -> Tensor:
        """Rows through one module: outputs [n, H]."""
        eps = self.model.rms_norm_eps
        token_norm, state_norm = self.norms[module]
        parts = [rms_norm(self.embed(ids), token_norm, eps), rms_norm(features, state_norm, eps)]
        x = self.join[module](torch.cat(parts[::-1] if self.hidden_first else parts, dim=-1))
        return self.layers[module](x, context.plan, context.cache, context.rotary, context.visibility)

    def logits(self, module: int, states: Tensor) -> Tensor:
        """Outputs [n, H] of a module to logits over the draft vocabulary [n, Vd]."""
        return self.output(rms_norm(states, self.last_norms[module], self.model.rms_norm_eps))


def mtp_drafter(head: MTPHead, target: Target, *, depth: int | None = None) -> SequentialDrafter:
    """An MTP head on its target.

    depth: deepest node; None takes the head's own.

    Raises HeadError if the head was made for a target of another shape, family or tokenizer.
    """
    check_fits(head, target)
    model = head.config.model
    vocab = head.vocab if head.vocab is not None else torch.arange(model.vocab_size)
    network = MTPNetwork(head, target.transformer, vocab)
    weights = NoiseWeights.of(head.manifest)
    return SequentialDrafter(
        "mtp", network, depth=depth or head.config.depth, needs_hidden=True, weights=weights
    )


def check_fits(head: MTPHead, target: Target) -> None:
    """Refuse a head made for another target, naming what differs. Raises HeadError."""
    model = head.config.model
    if model.family != target.config.family:
        raise HeadError(
            f"the head's modules are {model.family} layers, but {target.name} is of the family "
            f"{target.config.family}; give a head trained for this target, or --head off"
        )
    check_fits_target(target, head.manifest, hidden=model.hidden_size, vocab=model.vocab_size)
