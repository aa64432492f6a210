"""Rounding a head's output matrix to half precision."""

from __future__ import annotations

import torch

from jetspec.sampling import best_ids
from jetspec.target.linear import in_half


def test_the_nearest_half_is_kept_in_float32() -> None:
    """Guards against truncation, and against a type that the packed product does not take."""
    weight = torch.tensor([[1.0 + 2**-11, 0.1, -3.0]])
    rounded = in_half(weight)
    assert rounded.dtype == torch.float32
    assert torch.equal(rounded, weight.half().float()) and not torch.equal(rounded, weight)


def test_what_half_precision_cannot_hold_stays() -> None:
    """Guards against infinities from large weights, and against a change of other types."""
    large = torch.tensor([[1e6, 0.1]])
    assert in_half(large) is large
    other = torch.tensor([[0.1]], dtype=torch.bfloat16)
    assert in_half(other) is other


def test_the_best_id_is_the_lowest_of_equal_ones() -> None:
    """Guards the two ways to find it against each other, ties included; NaN and infinities give none."""
    scores = torch.randn(50, 33, generator=torch.Generator().manual_seed(1)).round()
    scores[3, 5:9] = torch.inf
    scores[4] = -torch.inf
    scores[6, 20] = torch.nan
    expected = scores.argmax(-1)
    expected[[3, 4, 6]] = -1
    assert torch.equal(best_ids(scores), expected)
    assert torch.equal(best_ids(scores.bfloat16()), expected)
    assert best_ids(scores[:0]).shape == (0,)
