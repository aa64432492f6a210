"""From logits to the ranked children that tree builders expect."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from jetspec.errors import NAN_LOGPS, HeadError

CANDIDATES = 64  # children offered per node


def ranked_children(logits: Tensor, vocab: Tensor, count: int) -> list[tuple[list[int], list[float]]]:
    """The `count` most probable tokens of each row with their log-probs, normalised over the draft
    vocabulary.

    logits [n, Vd]; vocab [Vd], ascending ids. Equal log-probs are ordered by token id; values above 0
    (rounding) count as 0, and tokens of probability 0 are left out. Raises HeadError for NaN.
    """
    precise = logits if logits.dtype == torch.float64 else logits.float()
    top, index = precise.log_softmax(-1).topk(min(count, logits.shape[-1]), dim=-1)
    scores = top.clamp(max=0.0).cpu().numpy()
    tokens = vocab[index].cpu().numpy()
    if np.isnan(scores).any():
        raise HeadError(NAN_LOGPS)
    order = np.lexsort((tokens, -scores), axis=-1)
    scores, tokens = np.take_along_axis(scores, order, -1), np.take_along_axis(tokens, order, -1)
    kept = np.isfinite(scores).sum(-1).tolist()
    return [(t[:n], s[:n]) for t, s, n in zip(tokens.tolist(), scores.tolist(), kept, strict=True)]
