"""The compiled top-k, top-p and min-p against the readable ones."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec.cuts import _keep_likely, keep_likely
from jetspec.native import native_available

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")


def both(scores: Tensor, top_k: int, top_p: float, min_p: float) -> tuple[Tensor, Tensor]:
    """The scores that are left, compiled and readable."""
    own, other = scores.clone(), scores.clone()
    keep_likely(own, top_k, top_p, min_p)
    _keep_likely(other, top_k, top_p, min_p)
    return own, other


@given(
    st.integers(1, 3000),
    st.sampled_from([0.01, 0.5, 3.0, 40.0, 1e4]),
    st.sampled_from([0, 0, 1, 2, 7, 50, 1500]),
    st.one_of(st.just(1.0), st.floats(1e-6, 1.0)),
    st.one_of(st.just(0.0), st.floats(1e-9, 1.0)),
    st.booleans(),
    st.integers(0, 2**31),
)
@settings(max_examples=300, deadline=None)
def test_the_kernel_keeps_what_the_readable_code_keeps(
    vocab: int, spread: float, top_k: int, top_p: float, min_p: float, coarse: bool, seed: int
) -> None:
    """Guards every option alone and together: few and many tokens kept, equal scores, banned tokens, vectors
    that are not full.
    """
    dice = torch.Generator().manual_seed(seed)
    scores = torch.randn(3, vocab, generator=dice) * spread
    if coarse:  # many equal ones, as half precision makes
        scores = (scores * 2).round() / 2
    scores[:, torch.randperm(vocab, generator=dice)[: vocab // 3]] = -math.inf
    scores[:, int(torch.randint(vocab, (), generator=dice))] = 0.25  # no row without a token
    own, other = both(scores, top_k, top_p, min_p)
    differ = own != other
    if top_p == 1.0:
        assert not bool(differ.any())
    first, _ = both(scores, top_k, 1.0, 0.0)
    for row in differ.any(-1).nonzero().flatten().tolist():
        # The border lies on a token, to a float64's precision.
        masses = first[row].double().softmax(-1).sort(descending=True).values.cumsum(0)
        assert float((masses - top_p).abs().min()) < 1e-12


def test_equal_scores_at_the_border() -> None:
    """Guards the tie rules: top-k and min-p keep all equals, top-p the first."""
    flat = torch.zeros(1, 40)
    assert int(both(flat, 3, 1.0, 0.0)[0].isfinite().sum()) == 40
    own, other = both(flat, 0, 0.24, 0.0)
    assert own.isfinite().nonzero()[:, 1].tolist() == list(range(10)) and torch.equal(own, other)
    assert int(both(flat, 0, 1.0, 1.0)[0].isfinite().sum()) == 40
    for signs in ([0.0, -0.0, 1.0, -1.0], [-0.0, 0.25], [0.25, 0.0], [-0.0, 0.0]):
        for k in (1, 2):
            own, other = both(torch.tensor([signs]), k, 1.0, 0.0)
            assert torch.equal(own, other)


def test_a_wide_nucleus_is_found() -> None:
    """Guards the look at tokens far below the best one: most of the mass lies in 40,000 unlikely ones."""
    scores = torch.full((2, 49_152), -9.0)
    scores[:, 7], scores[0, 40_000:] = 0.0, -math.inf
    own, other = both(scores, 0, 0.8, 0.0)
    assert torch.equal(own, other) and int(own[0].isfinite().sum()) > 20_000


def test_rows_that_are_not_finite_stay_as_they_are() -> None:
    """Guards the fault's own message: a cut row would hide a NaN behind minus infinities."""
    scores = torch.randn(4, 50)
    scores[1, 49], scores[2, 0], scores[3] = math.nan, math.inf, -math.inf
    before = scores.clone()
    keep_likely(scores, 5, 0.5, 0.1)
    assert int(scores[0].isfinite().sum()) <= 5
    assert torch.equal(scores[1:].nan_to_num(7.0), before[1:].nan_to_num(7.0))


def test_rows_do_not_depend_on_their_company() -> None:
    """Guards losslessness: a row is cut alone as it is cut in a batch, for any number of threads."""
    scores = torch.randn(33, 5000) * 3
    threads = torch.get_num_threads()
    for options in ((0, 0.9, 0.0), (40, 1.0, 0.0), (40, 0.7, 0.02)):
        whole, alone = scores.clone(), scores.clone()
        keep_likely(whole, *options)
        torch.set_num_threads(1)
        for row in alone:
            keep_likely(row[None], *options)
        torch.set_num_threads(threads)
        assert torch.equal(whole, alone)
