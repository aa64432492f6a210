"""Training of heads that draft depth by depth: the training-time test (EAGLE-3, arXiv 2503.01840).

The head is unrolled as it will draft: step j reads its own output of step j - 1 in place of a feature, with
the token that was really written. A root's steps see the committed rows before it, with the target's
features, and one row of each later step on their own path; that is the network of `draft.sequential` along a
chain. With one layer, committed rows need keys and values only, so a root costs its own steps and nothing
else.
"""

from __future__ import annotations

import hashlib
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.nn.functional as F
from torch import Tensor, nn

from jetspec.draft.sequential import SequentialDrafter
from jetspec.target.config import ModelConfig
from jetspec.target.rope import RotaryTable, rotate
from jetspec.target.target import Target
from jetspec.train.corpus import Corpus, Entry
from jetspec.train.data import Batch
from jetspec.train.elementwise import rms_norm
from jetspec.train.loss import fused_loss, fused_overlap
from jetspec.train.method import StepSums
from jetspec.train.validate import Setting, Validation, validate_drafter
from jetspec.train.weighting import LossOptions, expected_length_weights

_CHUNK_LOGITS = 2**24  # logits held at once where the target's whole law is needed

Keys = tuple[Tensor, Tensor]  # keys and values


class SequentialModule(nn.Module, ABC):
    """Trainable tensors of a head under their public names (dots replaced), and its unrolled forward.

    Args:
        model: shape of the modules' layers.
        shapes: of the trainable tensors.
        embedding: the target's frozen embedding table [V, H].
    """

    def __init__(self, model: ModelConfig, shapes: Mapping[str, tuple[int, ...]], embedding: Tensor) -> None:
        super().__init__()
        self.model, self.embedding = model, embedding
        self.names = list(shapes)
        kind: dict[str, Any] = {"device": embedding.device, "dtype": embedding.dtype}
        self.tensors = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.zeros(shape, **kind)) for name, shape in shapes.items()}
        )
        self._rotary = RotaryTable(model.rope, model.head_dim, embedding.dtype, embedding.device)

    def weight(self, name: str) -> Tensor:
        """A tensor by its public name."""
        return self.tensors[_key(name)]

    @abstractmethod
    def features(self, batch: Batch) -> Tensor:
        """Features of the committed rows [n, T, H]."""

    @abstractmethod
    def join(self, module: int, features: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """Features and embeddings [..., H] to the input of the projections and the residual."""

    @abstractmethod
    def project(self, module: int, x: Tensor, part: str) -> Tensor:
        """Queries, keys or values ("q", "k", "v") before the rotation: [..., heads, head_dim]."""

    @abstractmethod
    def finish(self, module: int, residual: Tensor, mixed: Tensor) -> Tensor:
        """What follows attention: outputs [..., H], which are the next step's features."""

    @abstractmethod
    def last_norm(self, module: int, states: Tensor) -> Tensor:
        """Outputs as the output matrix reads them."""

    def forward(self, batch: Batch) -> Tensor:
        """States of depths 1..D of every root, as the output matrix reads them: [n, A, D, H].

        A root at position 0 has no row before it; its states mean nothing.
        """
        features = self.features(batch)  # [n, T, H]
        rows = (batch.anchors - 1).clamp(min=0)  # [n, A], the row that holds the root's token
        which = torch.arange(len(rows), device=rows.device).unsqueeze(-1)
        parents, modules = batch.parents, self.model.num_layers
        depth = parents.shape[-1]
        longest = features.shape[1] + depth
        context = [self._context(n, features, batch.tokens, longest) for n in range(min(modules, depth))]
        state = features[which, rows]  # [n, A, H]
        drafted: list[Keys] = []  # rows of later steps in the same module
        states: list[Tensor] = []
        for step in range(depth):
            module = min(step, modules - 1)
            if step < modules:
                drafted = []
            x, residual = self.join(module, state, F.embedding(parents[..., step], self.embedding))
            cos, sin = self._at(rows + step, longest)
            q = rotate(self.project(module, x, "q"), cos, sin)  # [n, A, heads, dim]
            if step:  # the root's own row is among the committed ones
                k = rotate(self.project(module, x, "k"), cos, sin)
                drafted = [*drafted, (k, self.project(module, x, "v"))]
            mixed = self._attend(module, q, context[module], drafted, rows, step)
            state = self.finish(module, residual, mixed)
            states.append(self.last_norm(module, state))
        return torch.stack(states, dim=2)

    def _context(self, module: int, features: Tensor, tokens: Tensor, longest: int) -> Keys:
        """Keys and values of the committed rows: [n, T, kv_heads, head_dim]."""
        length = features.shape[1]
        x, _ = self.join(module, features, F.embedding(tokens[:, 1 : length + 1], self.embedding))
        cos, sin = self._at(torch.arange(length, device=x.device), longest)
        return rotate(self.project(module, x, "k"), cos, sin), self.project(module, x, "v")

    def _at(self, positions: Tensor, longest: int) -> tuple[Tensor, Tensor]:
        """Cosine and sine of positions [...]: [..., 1, head_dim]."""
        cos, sin = self._rotary.at(positions, longest)
        return cos.squeeze(1).unsqueeze(-2), sin.squeeze(1).unsqueeze(-2)

    def _attend(
        self, module: int, q: Tensor, context: Keys, drafted: list[Keys], rows: Tensor, step: int
    ) -> Tensor:
        """q [n, A, heads, dim] over the committed rows up to `rows` [n, A] and the drafted ones of its
        path.
        """
        model = self.model
        n, anchors, _, dim = q.shape
        kv, window = model.num_kv_heads, model.windows[module]
        groups = model.num_heads // kv
        keys, values = context
        flat = (q * dim**-0.5).view(n, anchors, kv, groups, dim)
        far = torch.einsum("nakgd,ntkd->nakgt", flat, keys)  # [n, A, kv, groups, T]
        places = torch.arange(keys.shape[1], device=q.device)
        hidden = places > rows.unsqueeze(-1)  # [n, A, T]
        if window is not None:
            hidden = hidden | (rows.unsqueeze(-1) + step - places >= window)
            drafted = drafted[-window:]
        far = far.masked_fill(hidden[:, :, None, None], -math.inf)
        if not drafted:
            mixed = torch.einsum("nakgt,ntkd->nakgd", far.softmax(-1), values)
            return mixed.reshape(n, anchors, -1)
        near_keys = torch.stack([k for k, _ in drafted], dim=-2)  # [n, A, kv, steps, dim]
        near_values = torch.stack([v for _, v in drafted], dim=-2)
        weights = torch.cat([far, flat @ near_keys.transpose(-1, -2)], dim=-1).softmax(-1)
        length = keys.shape[1]
        mixed = torch.einsum("nakgt,ntkd->nakgd", weights[..., :length], values)
        return (mixed + weights[..., length:] @ near_values).reshape(n, anchors, -1)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """Norm with the weight of that name, in the weight's type: autocast makes products of half
        precision, but no norms. In float32 it is what decoding computes.
        """
        weight = self.weight(name)
        return rms_norm(x.to(weight.dtype), weight, self.model.rms_norm_eps)

    def wide(self, x: Tensor) -> Tensor:
        """What a residual begins with, in the type of the weights, so that sums along it keep that."""
        return x.to(self.embedding.dtype)


class SequentialMethod(ABC):
    """A head that drafts depth by depth, in training; see `jetspec.train.method.TrainingMethod`.

    The loss is that of block heads, over the draft vocabulary and at the same roots. With a reduced draft
    vocabulary, tokens that the target would choose outside it are not supervised: the law that is left says
    nothing about them (EAGLE-3's code); the mean runs over supervised tokens only.

    Args:
        vocab: ids [Vd] that the head may draft, ascending.
        steps: how far the head is unrolled.
    """

    name: str
    module: SequentialModule

    def __init__(
        self, module: SequentialModule, target: Target, vocab: Tensor, loss: LossOptions, steps: int
    ) -> None:
        self.module, self.target, self.loss, self.steps = module, target, loss, steps
        self.vocab = vocab.cpu()
        self._ids = vocab.to(target.device)
        self.output = target.transformer.output_matrix[self._ids].to(module.embedding.dtype)  # [Vd, H]
        self.weights = loss.depth_weights(steps)
        self._inside: dict[tuple[Path, int], Tensor] = {}

    @property
    def own_output(self) -> Tensor:
        """The head's output matrix [Vd, H]."""
        return self.output

    @abstractmethod
    def drafter(self) -> SequentialDrafter:
        """The head as it is now, on its target."""

    @abstractmethod
    def save(self, folder: Path, manifest: dict[str, Any]) -> None:
        """Write the head's folder, in half precision."""

    def identity(self) -> dict[str, Any]:
        """Loss, steps and draft vocabulary; shapes are told apart by the tensors."""
        return {
            "loss": self.loss.describe(),
            "steps": self.steps,
            "vocab": hashlib.sha256(self.vocab.numpy().tobytes()).hexdigest(),
        }

    def accumulate(self, parts: Many[Batch], total: float) -> StepSums:
        """One batch, part by part; gradients add up."""
        weights = [batch.weight * self.supervised(batch) for batch in parts]
        kept = self._sum_over_processes(weights)
        given = self._sum_over_processes([batch.weight for batch in parts])
        share = kept / given if kept > 0 else 1.0
        loss, sums = 0.0, torch.zeros(3, self.steps)
        for batch, weight in zip(parts, weights, strict=True):
            value, own = self._part(batch, weight, total * share)
            loss, sums = loss + value, sums + own
        return StepSums(loss, sums)

    def validation(self, corpus: Corpus, entries: Many[Entry], settings: Many[Setting]) -> Validation:
        """tau on held-out greedy answers, drafted as in decoding."""
        drafter, target = self.drafter(), self.target
        return validate_drafter(
            drafter,
            corpus,
            entries,
            settings,
            depth=drafter.depth,
            dtype=target.dtype,
            device=target.device,
        )

    def supervised(self, batch: Batch) -> Tensor:
        """Which tokens are supervised [n, A, D]: those behind a root that has a row before it, where the
        target's own choice lies in the draft vocabulary.
        """
        after_a_row = (batch.anchors > 0).unsqueeze(-1)
        if len(self.vocab) == self.module.model.vocab_size:
            return after_a_row.expand_as(batch.weight)
        inside = torch.zeros(batch.tokens.shape, dtype=torch.bool)
        for row, own in zip(
            inside, (self._inside_of(batch, n) for n in range(len(batch.entries))), strict=True
        ):
            row[: len(own)] = own
        rows = batch.anchors.unsqueeze(-1) + torch.arange(self.steps, device=batch.anchors.device)
        which = torch.arange(len(rows), device=rows.device)[:, None, None]
        return inside.to(rows.device)[which, rows] & after_a_row

    def _part(self, batch: Batch, weight: Tensor, total: float) -> tuple[float, Tensor]:
        states = self.module(batch).flatten(0, 2)  # [n * A * D, H]
        pairs = [(states, self.own_output)]
        rows = batch.teacher, self.output, batch.teacher_row.flatten()
        if self.loss.weighting == "expected-length":
            present = (weight > 0).to(weight.dtype)
            overlap = fused_overlap(pairs, *rows, present.flatten()).view_as(present)
            weight = expected_length_weights(overlap, present, self.loss.smoothing) * present
        labels = self._labels(batch) if self.loss.ce else None
        result = fused_loss(pairs, *rows, weight.flatten(), self.loss, labels, total=total)
        result.loss.backward()
        present = (weight > 0).flatten(0, 1).float()  # [n * A, D]
        own = (result.per_row.view_as(present), result.agree.view_as(present), torch.ones_like(present))
        return float(result.loss.detach()), torch.stack([(row * present).sum(0) for row in own]).cpu()

    def _sum_over_processes(self, weights: Many[Tensor]) -> float:
        """The sum of all weights, over all processes of a run; one of them may have no part of a batch."""
        total = torch.zeros((), dtype=torch.float64, device=self.output.device)
        for weight in weights:
            total += weight.sum()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.all_reduce(total)
        return float(total)

    def _labels(self, batch: Batch) -> Tensor:
        """Place of every written token in the draft vocabulary, -1 if it is not there: [n * A * D]."""
        labels = batch.labels.flatten()
        place = torch.searchsorted(self._ids, labels).clamp(max=len(self._ids) - 1)
        return torch.where(self._ids[place] == labels, place, -1)

    @torch.no_grad()
    def _inside_of(self, batch: Batch, n: int) -> Tensor:
        """Whether the target's choice behind each token of an answer is in the draft vocabulary, bool
        [length]; worked out once per answer.
        """
        entry = batch.entries[n]
        key = (entry.path, entry.start)
        if key not in self._inside:
            if entry.temperature == 0.0:  # the choice is the token that was written
                chosen = batch.tokens[n, 1 : entry.length + 1]
            else:
                matrix = self.target.transformer.output_matrix
                states = batch.hidden[n, : entry.length].to(matrix.dtype)
                pieces = states.split(max(1, _CHUNK_LOGITS // len(matrix)))
                with torch.autocast(states.device.type, enabled=False):  # half precision picks other tokens
                    chosen = torch.cat([(piece @ matrix.T).argmax(-1) for piece in pieces])
            self._inside[key] = torch.isin(chosen, self._ids).cpu()
        return self._inside[key]


def _key(name: str) -> str:
    return name.replace(".", "__")
