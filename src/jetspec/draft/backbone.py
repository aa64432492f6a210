"""The head's layers at inference: taps become context once, slots run through a few layers, and logits come
out per depth.

Context keys and values are projected once per committed token and kept in a cache of the head's own; a
block's own rows never persist (DFlash, arXiv 2602.06036; JetSpec, arXiv 2606.18394). All sequences of a
round go through one forward.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from jetspec.draft.checkpoint import Head
from jetspec.target.attention import Visibility
from jetspec.target.linear import Linear, in_half
from jetspec.target.native_decoder import NativeStack, native_place
from jetspec.target.plan import Plan, Segment
from jetspec.target.pooled_cache import new_cache
from jetspec.target.rope import RotaryTable, rotate
from jetspec.target.transformer import Layer, Transformer, rms_norm, unit_rms

# Taps kept back until the next draft; more are projected at once. Requests that are never drafted for, as in
# large batches, mostly end before.
_FLUSH_ROWS = 512
_PREFILL_ROWS = 16  # so many at once are a prompt, and projected then, lest the first draft wait for it...
_DRAFTED, _NEWEST = 0.5, 1 / 128  # ...where at least such a share of rounds drafts, with the newest's weight


def split_norm(x: Tensor, parts: int, eps: float) -> Tensor:
    """Norm each of `parts` equal pieces of the last axis by itself, without weights: taps differ in scale
    by orders of magnitude.
    """
    pieces = x.view(*x.shape[:-1], parts, x.shape[-1] // parts)
    return torch.nn.functional.rms_norm(pieces, (pieces.shape[-1],), None, eps).reshape(x.shape)


class Backbone:
    """Layers, projections and draft cache of one head on one target.

    Args:
        transformer: the target; its embedding and (sliced) output matrix are the head's own ends.
        vocab: ids [Vd] that logits are computed for.
    """

    def __init__(self, head: Head, transformer: Transformer, vocab: Tensor) -> None:
        config, device, dtype = head.config, transformer.device, transformer.dtype
        weights = {name: tensor.to(device, dtype) for name, tensor in head.weights.items()}
        self.config, self.model, self.weights = config, config.model, weights
        model = self.model
        own_ends = [weights.get(name) for name in config.copied_shapes()]
        embedding, matrix = own_ends if own_ends else (None, transformer.output_matrix)
        assert matrix is not None
        self._embedding = embedding if embedding is not None else transformer.embedding
        self.fusion = Linear(weights["fc.weight"])
        context = [
            weights[f"layers.{i}.self_attn.{part}_proj.weight"]
            for part in "kv"
            for i in range(model.num_layers)
        ]
        self.context = Linear(torch.cat(context))  # every layer's keys, then their values, in one product
        self.layers = [Layer(model, index, weights, prefix="") for index in range(model.num_layers)]
        norms = [weights[f"layers.{i}.self_attn.k_norm.weight"] for i in range(model.num_layers)]
        self._k_norm = torch.stack(norms).repeat_interleave(
            model.num_kv_heads, 0
        )  # [layers * kv_heads, head_dim]
        self.native = NativeStack.build(model, self.layers, dtype, device)
        self.output = Linear(in_half(matrix[vocab]))
        self.direct = Linear(weights["direct_proj.weight"]) if config.direct else None
        self.mask_row = self.embed(torch.tensor([config.mask_token_id], device=device))  # [1, H]
        self._empty_block = self.mask_row.repeat(config.block_size, 1)  # [block, H], the root's row not in it
        self._empty_block[0] = 0.0
        if config.slot_embedding:
            self._empty_block += weights["slot_embed.weight"]
        self.rotary = RotaryTable(model.rope, model.head_dim, dtype, device)
        self.cache = new_cache(
            model.num_layers, model.num_kv_heads, model.head_dim, dtype=dtype, device=device
        )
        self._pending: dict[int, list[Tensor]] = {}
        self._waiting: dict[int, int] = {}  # their rows
        self._last: dict[int, Tensor] = {}  # the newest taps row [1, taps * H] of each sequence
        self._drafted = 1.0  # share of the rounds lately, of all sequences, that began with a draft

    def observe(self, key: int, taps: Tensor) -> None:
        """Newly committed rows [n, taps * H] of a sequence; the first call starts it."""
        if key not in self.cache:
            self.cache.add(key)
        rows = taps.shape[0]
        self._pending.setdefault(key, []).append(taps)
        self._last[key] = taps if rows == 1 else taps[-1:]
        waiting = self._waiting[key] = self._waiting.get(key, 0) + rows
        prompt = rows >= _PREFILL_ROWS
        if not prompt:
            self._drafted -= _NEWEST * self._drafted
        if waiting >= _FLUSH_ROWS or (prompt and self._drafted > _DRAFTED):
            self._project([key])

    def embed(self, ids: Tensor) -> Tensor:
        """Rows [..., H] of the embedding table: the target's, or the head's copy of it."""
        return self._embedding[ids]

    def free(self, key: int) -> None:
        """Forget a sequence."""
        self._pending.pop(key, None)
        self._waiting.pop(key, None)
        self._last.pop(key, None)
        if key in self.cache:
            self.cache.free(key)

    @torch.inference_mode()
    def forward(self, keys: Many[int], roots: Many[int], depth: int | None = None) -> tuple[Tensor, Tensor]:
        """Draft one block per sequence.

        Args:
            depth: leave out the slots that predict deeper ones. Only for causal heads, whose other slots do
                not see them.

        Returns:
            hidden [B, D, H], the normed states of the slots that predict depths 1..D, and their logits
            [B, D, Vd] before any path scorer.
        """
        assert depth is None or self.config.causal
        depth = self.config.depth if depth is None else min(depth, self.config.depth)
        for key in keys:
            if key not in self.cache:  # a prompt of one token has no context yet
                self.cache.add(key)
        self._project([key for key in keys if self._pending.get(key)])
        block = self.config.first_slot + depth
        x = self._slots(keys, roots, block)  # [B * block, H]
        plan = self._plan(keys, block)
        rotary = self.rotary.at(plan.positions, plan.last)
        groups = self.model.num_heads // self.model.num_kv_heads
        if self.native is not None:
            self.native.run(x, plan, self.cache, rotary)
        else:
            masks = {w: Visibility(plan, self.cache, groups, w, x.dtype) for w in set(self.model.windows)}
            for layer in self.layers:
                x = layer(x, plan, self.cache, rotary, masks[self.model.windows[layer.index]])
        for key in keys:
            self.cache.keep(key, [])  # the block's rows do not persist
            self._drafted = min(1.0, self._drafted + _NEWEST)  # `observe` takes as much where all draft
        x = x.view(len(keys), block, -1)[:, self.config.first_slot :]
        hidden = rms_norm(x, self.weights["norm.weight"], self.model.rms_norm_eps)
        logits = self.output(hidden.reshape(-1, hidden.shape[-1]))
        return hidden, logits.view(len(keys), depth, -1)

    def _slots(self, keys: Many[int], roots: Many[int], block: int) -> Tensor:
        """The block's input: the root's embedding, then mask embeddings, plus the optional parts."""
        config = self.config
        root = self.embed(torch.tensor(list(roots), device=self.mask_row.device))  # [B, H]
        x = self._empty_block[:block].expand(len(keys), block, -1).clone()
        x[:, 0] += root
        if self.direct is not None:
            count = len(config.taps)
            last = self._last_taps(keys, count * root.shape[1])
            joined = torch.cat([root, split_norm(last, count, self.model.rms_norm_eps)], dim=-1)
            x += self.direct(joined).unsqueeze(1)
        return x.view(len(keys) * block, -1)

    def _last_taps(self, keys: Many[int], width: int) -> Tensor:
        """The newest taps [B, width] of the sequences, zeros where there are none."""
        rows = [self._last.get(key) for key in keys]
        if len(rows) == 1 and rows[0] is not None:
            return rows[0]
        return torch.cat([self.mask_row.new_zeros(1, width) if row is None else row for row in rows])

    def _plan(self, keys: Many[int], block: int) -> Plan:
        mask = None if self.config.causal else torch.ones(block, block, dtype=torch.bool)
        segments: list[Segment] = []
        positions: list[int] = []
        for index, key in enumerate(keys):
            base = self.cache.extend(key, block)
            segments.append(Segment(key, index * block, block, mask, logits=True))
            positions.extend(range(base, base + block))
        return Plan.of(torch.empty(0), positions, segments, self.mask_row.device)

    @torch.inference_mode()
    def _project(self, keys: Many[int]) -> None:
        """Turn waiting taps into context keys and values, all sequences and layers in one product each."""
        if not keys:
            return
        model = self.model
        parts = [torch.cat(self._pending.pop(key)) for key in keys]
        for key in keys:
            self._waiting.pop(key, None)
        features = rms_norm(
            self.fusion(torch.cat(parts)), self.weights["hidden_norm.weight"], model.rms_norm_eps
        )
        rows = features.shape[0]
        both = self.context(features).view(rows, 2, -1, model.head_dim)  # keys of all layers, then values
        starts = [self.cache.extend(key, part.shape[0]) for key, part in zip(keys, parts, strict=True)]
        positions = [
            n for start, part in zip(starts, parts, strict=True) for n in range(start, start + part.shape[0])
        ]
        rotary = self.rotary.at(torch.tensor(positions, device=features.device), max(positions))
        counts = [part.shape[0] for part in parts]
        self._place(both, rotary, list(zip(keys, starts, counts, strict=True)))
        for key, part in zip(keys, parts, strict=True):
            self.cache.keep(key, range(part.shape[0]))

    def _place(self, rows: Tensor, rotary: tuple[Tensor, Tensor], places: list[tuple[int, int, int]]) -> None:
        """Norm and rotate keys, and write them and their values into the cache.

        rows: [n, 2, layers * kv_heads, head_dim], keys before values; rotary: cosine and sine [n, 1,
        rotary_dim]; places: sequence, first slot and number of rows, in the order of the rows.
        """
        eps, row = self.model.rms_norm_eps, 0
        if self.native is not None:
            for key, start, count in places:
                own = slice(row, row + count)
                turn = rotary[0][own], rotary[1][own]
                native_place(rows[own], self._k_norm, eps, turn, self.cache.block(key), start)
                row += count
            return
        k = rotate(unit_rms(rows[:, 0], eps) * self._k_norm, *rotary)
        stored = torch.stack([k, rows[:, 1]]).transpose(1, 2)  # [2, layers * kv_heads, n, head_dim]
        stored = stored.unflatten(1, (self.model.num_layers, -1)).transpose(0, 1)
        for key, start, count in places:
            self.cache.block(key)[:, :, :, start : start + count] = stored[:, :, :, row : row + count]
            row += count
