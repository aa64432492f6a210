"""Top-k, top-p and min-p: which tokens of a law may still be drawn.

`native_cut.h` is the compiled form: the same sets in less time, for a wide nucleus in a tenth of it. Masses
of top-p are float64 in both and may differ in the last bits, so a border that lies on a token to that
precision can fall on either side of it.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from jetspec.native import library

_NUCLEUS_FIRST = 1024  # top-p looks at so many tokens first, and sorts a row only if their mass is too small


def keep_likely(scores: Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """Set the scores [n, V], float32 and contiguous, of all other tokens to -inf, in place: of all but the
    `top_k` largest (0 is off), then the smallest set whose mass reaches `top_p` (1 is off), then those at
    least `min_p` times as probable as the best (0 is off).

    Top-k and min-p keep all tokens equal to the last one kept, top-p keeps the lowest ids among them. The
    best token always stays.
    """
    lib = library() if scores.device.type == "cpu" else None
    if lib is None:
        _keep_likely(scores, top_k, top_p, min_p)
        return
    assert scores.dtype == torch.float32 and scores.is_contiguous() and scores.ndim == 2
    log_min_p = math.log(min_p) if min_p > 0.0 else -math.inf
    if lib.jetspec_cut(scores.data_ptr(), *scores.shape, top_k, top_p, log_min_p):
        raise MemoryError("no memory for the candidates of a pick")


def _keep_likely(scores: Tensor, top_k: int, top_p: float, min_p: float) -> None:
    """The readable version."""
    if 0 < top_k < scores.shape[-1]:
        kth = scores.topk(top_k, dim=-1).values[:, -1:]
        scores.masked_fill_(scores < kth, -math.inf)
    if top_p < 1.0:
        scores.masked_fill_(~_nucleus(scores, top_p), -math.inf)
    if min_p > 0.0:
        floor = scores.amax(dim=-1, keepdim=True) + math.log(min_p)
        scores.masked_fill_(scores < floor, -math.inf)


def _nucleus(scores: Tensor, top_p: float) -> Tensor:
    """Which tokens top-p keeps, bool [n, V]: those that have less than top_p of mass before them in falling
    order.

    Masses are float64, so that the border does not move with the order in which a device or a batch shape
    adds them up. Only sorted values are used and never sorted ids: the order of equal values in topk is not
    defined, and half-precision logits have many.
    """
    total = torch.logsumexp(scores.to(torch.float64), dim=-1, keepdim=True)  # [n, 1]
    values = scores.topk(min(_NUCLEUS_FIRST, scores.shape[-1]), dim=-1).values  # [n, k], falling
    mass = (values - total).exp().cumsum(dim=-1)
    if bool((mass[:, -1] < top_p).any()):
        values = scores.sort(dim=-1, descending=True).values  # [n, V]
        mass = (values - total).exp().cumsum(dim=-1)
    kept = (mass[:, :-1] < top_p).sum(dim=-1, keepdim=True) + 1  # [n, 1]; the first token is always in
    last = values.gather(-1, kept - 1)  # the smallest kept value
    above = scores > last
    equal = scores == last
    return above | (equal & (equal.cumsum(dim=-1) <= kept - above.sum(dim=-1, keepdim=True)))
