"""The head as a trainable module: the same network as `draft.backbone`, over many anchors of whole answers
at once.

All blocks of an answer share its context; a block sees only rows before its own anchor and itself (DFlash,
arXiv 2602.06036, appendix A). Context and block scores are computed apart and normalised together, so nothing
of size anchors x anchors is ever built.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.draft.backbone import split_norm
from jetspec.draft.checkpoint import Head
from jetspec.draft.config import HeadConfig
from jetspec.draft.recurrent import recurrence
from jetspec.target.rope import RotaryTable, rotate
from jetspec.train.attention import Anchors, block_attention
from jetspec.train.data import Batch
from jetspec.train.elementwise import rms_norm, silu_gate


class HeadModule(nn.Module):
    """Trainable tensors of a head under their public names (dots replaced), in float32.

    Args:
        embedding: the target's frozen embedding table [V, H].
    """

    def __init__(self, config: HeadConfig, embedding: Tensor) -> None:
        super().__init__()
        self.config, self.model = config, config.model
        self.embedding = embedding
        shapes = config.shapes()
        device = embedding.device
        self.tensors = nn.ParameterDict(
            {_key(n): nn.Parameter(torch.zeros(s, device=device)) for n, s in shapes.items()}
        )
        self.names = list(shapes)
        self._rotary = RotaryTable(self.model.rope, self.model.head_dim, torch.float32, device)

    def weight(self, name: str) -> Tensor:
        """A tensor by its public name."""
        return self.tensors[_key(name)]

    def to_head(self, vocab: Tensor | None, manifest: dict[str, object] | None = None) -> Head:
        """A snapshot that can be saved or drafted with."""
        weights = {name: self.weight(name).detach().clone() for name in self.names}
        return Head(self.config, weights, vocab, dict(manifest or {}))

    def forward(self, batch: Batch) -> Tensor:
        """Normed states of the slots that predict depths 1..D of every anchor: [n, A, D, H]."""
        model, device = self.model, batch.taps.device
        fused = F.linear(batch.taps, self.weight("fc.weight"))
        context = self._norm(fused, "hidden_norm.weight")  # [n, T, H]
        x = self._slots(batch)  # [n, A, block, H]
        slots = torch.arange(self.config.block_size, device=device)
        positions = batch.anchors.unsqueeze(-1) + slots  # [n, A, block]
        longest = batch.taps.shape[1] + self.config.block_size
        cos, sin = self._rotary.at(positions, longest)
        block_rotary = cos.squeeze(1).unsqueeze(-2), sin.squeeze(1).unsqueeze(-2)  # [n, A, block, 1, dim]
        rows = torch.arange(batch.taps.shape[1], device=device)
        context_rotary = self._rotary.at(rows, longest)
        anchors = Anchors.of(batch.anchors)
        for index in range(model.num_layers):
            first = self.config.first_slot if index == model.num_layers - 1 else 0
            x = self._layer(index, x, context, block_rotary, context_rotary, anchors, first)
        return self._norm(x, "norm.weight")

    def terms(self, hidden: Tensor, rows: Tensor) -> Tensor:
        """What the path scorer's child rows are multiplied with: from the slots' states [..., D, H] and the
        rows [..., D, r] of their parents, which are the tokens that were really written.
        """
        if self.config.scorer == "vanilla":
            return rows
        if self.config.scorer == "rnn":
            joint = self.weight("markov_head.joint_proj.weight")  # [3r, 2r + H]
            path, slot = joint.split([2 * self.config.rank, hidden.shape[-1]], dim=1)
            return recurrence(rows, F.linear(hidden, slot, self.weight("markov_head.joint_proj.bias")), path)
        gate = F.linear(
            torch.cat([hidden, rows], dim=-1),
            self.weight("markov_head.gate_proj.weight"),
            self.weight("markov_head.gate_proj.bias"),
        )
        return rows * torch.sigmoid(gate)

    def confidence(self, hidden: Tensor, rows: Tensor | None) -> Tensor:
        """Logits [..., D] of the confidence head, from the slots' states and the rows of their parents."""
        joined = (
            torch.cat([hidden, rows], dim=-1)
            if self.config.confidence_with_markov and rows is not None
            else hidden
        )
        weight, bias = (self.weight(f"confidence_head.proj.{part}") for part in ("weight", "bias"))
        return F.linear(joined, weight, bias).squeeze(-1)

    def _slots(self, batch: Batch) -> Tensor:
        config = self.config
        root = F.embedding(batch.roots, self.embedding)  # [n, A, H]
        mask = self.embedding[config.mask_token_id]
        rest = mask.expand(*root.shape[:2], config.block_size - 1, -1)
        if batch.revealed is not None:
            assert config.causal and config.alignment == "in_place", "slots would see what is to be drafted"
            slots = torch.arange(1, config.block_size, device=root.device)
            shown = slots <= batch.revealed.unsqueeze(-1)  # [n, A, D]
            rest = torch.where(shown.unsqueeze(-1), F.embedding(batch.labels, self.embedding), rest)
        x = torch.cat([root.unsqueeze(2), rest], dim=2)
        if config.slot_embedding:
            x = x + self.weight("slot_embed.weight")
        if config.direct:
            last = split_norm(batch.last_taps, len(config.taps), self.model.rms_norm_eps)
            direct = F.linear(torch.cat([root, last], dim=-1), self.weight("direct_proj.weight"))
            x = x + direct.unsqueeze(2)
        return x

    def _layer(
        self,
        index: int,
        x: Tensor,
        context: Tensor,
        block_rotary: tuple[Tensor, ...],
        context_rotary: tuple[Tensor, Tensor],
        anchors: Anchors,
        first: int,
    ) -> Tensor:
        """The slots from `first` on: of the last layer nobody needs the others."""
        name = f"layers.{index}."
        h = self._norm(x, name + "input_layernorm.weight")
        rotary = tuple(table[:, :, first:] for table in block_rotary)
        q = self._heads(h[:, :, first:], name, "q", rotary)  # [n, A, block - first, heads, dim]
        k = self._heads(h, name, "k", block_rotary)
        v = self._project(h, name, "v")
        ck = self._heads(context, name, "k", context_rotary)  # [n, T, kv, dim]
        cv = self._project(context, name, "v")
        mixed = block_attention(q, ck, cv, k, v, anchors, self.config.causal)
        x = x[:, :, first:] + F.linear(mixed.flatten(3), self.weight(name + "self_attn.o_proj.weight"))
        h = self._norm(x, name + "post_attention_layernorm.weight")
        gate = F.linear(h, self.weight(name + "mlp.gate_proj.weight"))
        up = F.linear(h, self.weight(name + "mlp.up_proj.weight"))
        return x + F.linear(silu_gate(gate, up), self.weight(name + "mlp.down_proj.weight"))

    def _project(self, x: Tensor, name: str, part: str) -> Tensor:
        y = F.linear(x, self.weight(f"{name}self_attn.{part}_proj.weight"))
        return y.view(*y.shape[:-1], -1, self.model.head_dim)

    def _heads(self, x: Tensor, name: str, part: str, rotary: tuple[Tensor, ...]) -> Tensor:
        y = self._norm(self._project(x, name, part), f"{name}self_attn.{part}_norm.weight")
        return rotate(y, rotary[0], rotary[1])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        weight = self.weight(name)  # float32 where products are in half precision
        return rms_norm(x.to(weight.dtype), weight, self.model.rms_norm_eps)


class ScorerTables:
    """The path scorer's rows that one step needs, taken out of the big tables once.

    A batch is worked off in parts, and a gradient of the size of a table [V, r] per part would cost more
    than the part itself. The parts use small leaves; `backward` carries their gradients over to the tables.
    """

    def __init__(self, module: HeadModule, batches: Many[Batch], vocab: Tensor) -> None:
        self._module = module
        self.child_rows: Tensor | None = None  # [Vd, r]
        if module.config.scorer == "none":
            return
        self._ids = torch.cat([batch.parents.reshape(-1) for batch in batches]).unique()
        self._source = (
            module.weight("markov_head.markov_w1.weight")[self._ids],
            module.weight("markov_head.markov_w2.weight")[vocab],
        )
        self._parents, self.child_rows = (rows.detach().requires_grad_() for rows in self._source)

    def parent_rows(self, parents: Tensor) -> Tensor | None:
        """Rows [n, A, D, r] of parents' tokens; None without a scorer."""
        if self.child_rows is None:
            return None
        return F.embedding(torch.searchsorted(self._ids, parents), self._parents)

    def terms(self, hidden: Tensor, parents: Tensor) -> Tensor | None:
        """What each slot's scorer multiplies the child rows with: [n, A, D, r]; None without a scorer."""
        rows = self.parent_rows(parents)
        return None if rows is None else self._module.terms(hidden, rows)

    def backward(self) -> None:
        """Add the gradients of all parts to the tables' own."""
        if self.child_rows is not None:
            leaves = (self._parents, self.child_rows)
            torch.autograd.backward(self._source, [leaf.grad for leaf in leaves])


def _key(name: str) -> str:
    return name.replace(".", "__")


@torch.no_grad()
def initialise(
    module: HeadModule, target: Mapping[str, Tensor] | None = None, *, seed: int = 0, tap_scale: float = 1.0
) -> None:
    """Set the first weights.

    Random: normal matrices, norms at 1, the scorer's child rows at 0 (its recurrence hands the parent's row
    through), confidences at one half. With the tensors of a `target` of the
    same width, a warm start follows: draft layers, the context's norm and the final norm come from the
    target's last layers, and every slot starts from the last tap (times `tap_scale`, its size in the
    residual stream). The untrained head then predicts about what the target predicted one token earlier,
    with the output's geometry already in place.
    """
    generator = torch.Generator().manual_seed(seed)
    config, model = module.config, module.model
    for name in module.names:
        tensor = module.weight(name)
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
        elif tensor.ndim == 1 or name.endswith("markov_w2.weight") or name.startswith("confidence_head."):
            tensor.zero_()
        elif name.endswith("markov_w1.weight"):
            tensor.copy_(_compressed(module.embedding, config.rank))
        else:
            scale = (
                0.02 / math.sqrt(2 * model.num_layers)
                if name.endswith(("o_proj.weight", "down_proj.weight"))
                else 0.02
            )
            tensor.copy_(torch.empty(tensor.shape).normal_(0.0, scale, generator=generator))
    if config.direct:
        module.weight("direct_proj.weight").mul_(0.1)
    if config.scorer == "rnn":
        rank = config.rank
        for first in (rank, 2 * rank):  # candidate and output read the parent's row
            place = slice(first, first + rank), slice(rank, 2 * rank)
            module.weight("markov_head.joint_proj.weight")[place].add_(
                torch.eye(rank, device=module.embedding.device)
            )
    if target is not None:
        _warm_start(module, target, tap_scale)


@torch.no_grad()
def silence(module: HeadModule, first: int) -> None:
    """Let the layers from `first` on add nothing to what they read, so that a head of more layers begins as
    the one it grew from: their output projections become zero, and learn at once, since what they multiply
    is not.
    """
    for index in range(first, module.model.num_layers):
        for name in ("self_attn.o_proj", "mlp.down_proj"):
            module.weight(f"layers.{index}.{name}.weight").zero_()


def _warm_start(module: HeadModule, target: Mapping[str, Tensor], tap_scale: float) -> None:
    model, hidden = module.model, module.model.hidden_size
    first = module.config.target_layers - model.num_layers
    for name in module.names:
        if name.startswith("layers."):
            _, index, rest = name.split(".", 2)
            source = target.get(f"model.layers.{first + int(index)}.{rest}")
            if source is not None and source.shape == module.weight(name).shape:
                module.weight(name).copy_(source)
    module.weight("norm.weight").copy_(target["model.norm.weight"])
    module.weight("hidden_norm.weight").copy_(module.weight("layers.0.input_layernorm.weight"))
    eye = torch.eye(hidden, device=module.embedding.device)
    module.weight("fc.weight")[:, -hidden:].add_(eye)
    if module.config.direct:
        module.weight("direct_proj.weight")[:, -hidden:].add_(eye * tap_scale)


def _compressed(table: Tensor, rank: int) -> Tensor:
    """Rows of `table` [V, H] in its `rank` strongest directions, scaled to unit size: tokens that mean
    alike start alike. The directions come from the processor whatever the device is, because solvers choose
    their signs differently.
    """
    centred = table.float() - table.float().mean(0)
    covariance = centred.T @ centred / centred.shape[0]
    _, vectors = torch.linalg.eigh(covariance.cpu())
    strongest = vectors[:, -rank:]
    strongest = strongest * strongest.gather(0, strongest.abs().argmax(0, keepdim=True)).sign()
    rows = centred @ strongest.to(table.device)
    return rows / rows.pow(2).mean().sqrt()
