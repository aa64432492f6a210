"""Random heads that draft depth by depth, and what their networks compute written out slowly."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from jetspec.draft.eagle3 import eagle3_drafter
from jetspec.draft.eagle3_format import Eagle3Config, Eagle3Head, vocab_maps
from jetspec.draft.mtp import mtp_drafter
from jetspec.draft.mtp_format import MTPConfig, MTPHead
from jetspec.draft.sequential import SequentialDrafter
from jetspec.target.config import ModelConfig
from jetspec.target.rope import RotaryTable, rotate
from jetspec.target.target import Target


def noise(name: str, shape: tuple[int, ...], dice: torch.Generator) -> Tensor:
    """A weight of order one at the output of its product."""
    values = torch.randn(shape, generator=dice, dtype=torch.float64)
    if "norm" in name:
        return 1.0 + 0.2 * values
    return values if len(shape) == 1 else values * (1.2 / shape[-1] ** 0.5)


def random_eagle3(
    target: Target,
    *,
    taps: tuple[int, ...] | None = (0, 1, 2),
    vocab: Tensor | None = None,
    own_embedding: bool = False,
    depth: int = 5,
    seed: int = 5,
) -> Eagle3Head:
    """A head with random weights."""
    size = target.config.vocab_size
    vocab = torch.arange(size) if vocab is None else vocab
    config = Eagle3Config.for_target(target.config, draft_vocab=len(vocab), taps=taps, depth=depth)
    if own_embedding:
        config = Eagle3Config(**{**vars(config), "own_embedding": True})
    maps = vocab_maps(vocab, size)
    dice = torch.Generator().manual_seed(seed)
    shapes = {name: shape for name, shape in config.shapes().items() if name not in maps}
    return Eagle3Head(config, {**{n: noise(n, s, dice) for n, s in shapes.items()}, **maps})


def random_mtp(target: Target, *, vocab: Tensor | None = None, seed: int = 6, **options: Any) -> MTPHead:
    """A head with random weights."""
    config = MTPConfig.for_target(target.config, **{"depth": 5, **options})
    dice = torch.Generator().manual_seed(seed)
    return MTPHead(config, {n: noise(n, s, dice) for n, s in config.shapes().items()}, vocab)


def drafter_of(head: Eagle3Head | MTPHead, target: Target) -> SequentialDrafter:
    """The drafter of either kind."""
    return eagle3_drafter(head, target) if isinstance(head, Eagle3Head) else mtp_drafter(head, target)


def slow_logits(
    head: Eagle3Head | MTPHead, target: Target, rows: Tensor, tokens: Many[int], path: Many[int]
) -> Tensor:
    """Logits [Vd] behind `path`, from scratch: no cache, no tree, one row at a time through plain torch.

    rows: taps or hidden states of tokens 0 .. n - 2, the committed ones; tokens: n ids, the root last.
    """
    kind: Any = _SlowEagle3(head, target) if isinstance(head, Eagle3Head) else _SlowMTP(head, target)
    modules = head.config.model.num_layers
    committed = list(kind.features(rows))
    state = kind.output(
        0,
        [(feature, tokens[i + 1], i) for i, feature in enumerate(committed)],
    )
    drafted: list[tuple[Tensor, int, int]] = []
    module = 0
    for depth, token in enumerate(path, start=1):
        module = min(depth, modules - 1)
        if module > min(depth - 1, modules - 1):
            drafted = []  # rows of other modules are not seen
        drafted.append((state, token, len(committed) - 1 + depth))
        context = [(feature, tokens[i + 1], i) for i, feature in enumerate(committed)]
        state = kind.output(module, context + drafted)
    return kind.logits(module, state)


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def _attention(model: ModelConfig, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The last row's attention: q [heads, d], k and v [n, kv, d]."""
    groups = model.num_heads // model.num_kv_heads
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    weights = (torch.einsum("hd,nhd->hn", q, k) * model.head_dim**-0.5).softmax(-1)
    return torch.einsum("hn,nhd->hd", weights, v).reshape(-1)


class _SlowEagle3:
    def __init__(self, head: Eagle3Head, target: Target) -> None:
        self.w, self.model = head.weights, head.config.model
        self.embedding = self.w.get("embed_tokens.weight", target.transformer.embedding)
        self.rotary = RotaryTable(self.model.rope, self.model.head_dim, torch.float64, torch.device("cpu"))

    def features(self, rows: Tensor) -> Tensor:
        return rows @ self.w["fc.weight"].T

    def output(self, module: int, rows: Many[tuple[Tensor, int, int]]) -> Tensor:
        w, m = self.w, self.model
        g = torch.stack([row[0] for row in rows])
        e = self.embedding[torch.tensor([row[1] for row in rows])]
        places = torch.tensor([row[2] for row in rows])
        e = _norm(e, w["midlayer.input_layernorm.weight"], m.rms_norm_eps)
        x = torch.cat([e, _norm(g, w["midlayer.hidden_norm.weight"], m.rms_norm_eps)], -1)
        q, k, v = (
            (x @ w[f"midlayer.self_attn.{p}_proj.weight"].T).unflatten(-1, (-1, m.head_dim)) for p in "qkv"
        )
        cos, sin = self.rotary.at(places, int(places.max()))
        mixed = _attention(m, rotate(q, cos, sin)[-1], rotate(k, cos, sin), v)
        y = g[-1] + w["midlayer.self_attn.o_proj.weight"] @ mixed
        h = _norm(y, w["midlayer.post_attention_layernorm.weight"], m.rms_norm_eps)
        up = w["midlayer.mlp.up_proj.weight"] @ h
        return y + w["midlayer.mlp.down_proj.weight"] @ (F.silu(w["midlayer.mlp.gate_proj.weight"] @ h) * up)

    def logits(self, module: int, state: Tensor) -> Tensor:
        return self.w["lm_head.weight"] @ _norm(state, self.w["norm.weight"], self.model.rms_norm_eps)


class _SlowMTP:
    def __init__(self, head: MTPHead, target: Target) -> None:
        self.w, self.model, self.order = head.weights, head.config.model, head.config.order
        self.embedding, self.matrix = target.transformer.embedding, target.transformer.output_matrix
        self.vocab = head.vocab if head.vocab is not None else torch.arange(self.model.vocab_size)
        self.rotary = RotaryTable(self.model.rope, self.model.head_dim, torch.float64, torch.device("cpu"))

    def features(self, rows: Tensor) -> Tensor:
        return rows

    def output(self, module: int, rows: Many[tuple[Tensor, int, int]]) -> Tensor:
        m, eps, base = self.model, self.model.rms_norm_eps, f"layers.{module}."
        w = {name.removeprefix(base): t for name, t in self.w.items() if name.startswith(base)}
        h = _norm(torch.stack([row[0] for row in rows]), w["hnorm.weight"], eps)
        e = _norm(self.embedding[torch.tensor([row[1] for row in rows])], w["enorm.weight"], eps)
        joined = torch.cat([e, h] if self.order == "embedding_first" else [h, e], -1)
        x = joined @ w["eh_proj.weight"].T
        a = _norm(x, w["input_layernorm.weight"], eps)
        q, k, v = (
            (a @ w[f"self_attn.{p}_proj.weight"].T + w.get(f"self_attn.{p}_proj.bias", 0.0)).unflatten(
                -1, (-1, m.head_dim)
            )
            for p in "qkv"
        )
        if m.qk_norm:
            q, k = _norm(q, w["self_attn.q_norm.weight"], eps), _norm(k, w["self_attn.k_norm.weight"], eps)
        places = torch.tensor([row[2] for row in rows])
        cos, sin = self.rotary.at(places, int(places.max()))
        seen = slice(None)
        if m.windows[module] is not None:
            seen = places[-1] - places < m.windows[module]
        mixed = _attention(m, rotate(q, cos, sin)[-1], rotate(k, cos, sin)[seen], v[seen])
        y = x[-1] + w["self_attn.o_proj.weight"] @ mixed
        h = _norm(y, w["post_attention_layernorm.weight"], eps)
        if m.moe is None:
            return y + _mlp(w, "mlp.", h)
        scores = (w["mlp.gate.weight"] @ h).softmax(-1, dtype=torch.float32)
        best, chosen = scores.topk(m.moe.experts_per_token)
        best = best / best.sum() if m.moe.norm_topk_prob else best
        parts = [
            s.double() * _mlp(w, f"mlp.experts.{n}.", h) for s, n in zip(best, chosen.tolist(), strict=True)
        ]
        return y + torch.stack(parts).sum(0)

    def logits(self, module: int, state: Tensor) -> Tensor:
        norm = self.w[f"layers.{module}.shared_head.norm.weight"]
        return self.matrix[self.vocab] @ _norm(state, norm, self.model.rms_norm_eps)


def _mlp(w: dict[str, Tensor], base: str, h: Tensor) -> Tensor:
    gate, up, down = (w[f"{base}{part}_proj.weight"] for part in ("gate", "up", "down"))
    return down @ (F.silu(gate @ h) * (up @ h))
