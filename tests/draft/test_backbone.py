"""The compiled parts of a draft head's backbone against the portable ones."""

from __future__ import annotations

import pytest
import torch

from jetspec.draft.backbone import Backbone
from jetspec.target.packed import native_available
from tests.draft.tiny import TAPS, VOCAB, random_head, tiny_target

needs_kernel = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")


@needs_kernel
def test_context_rows_equal_the_portable_path() -> None:
    """Guards keys and values of another layer, head, sequence or row, keys without their norm or with
    another position's rotation: several sequences of several lengths, in two steps.

    Values have size 1 and take some tens of float32 roundings: 1e-5.
    """
    target = tiny_target()
    head = random_head(target)
    backbones = [Backbone(head, target.transformer, torch.arange(VOCAB)) for _ in range(2)]
    assert backbones[0].native is not None
    backbones[1].native = None
    dice = torch.Generator().manual_seed(1)
    for lengths in ([3, 1, 130], [1, 7, 2]):
        taps = [torch.randn(n, len(TAPS) * 64, generator=dice) for n in lengths]
        for backbone in backbones:
            for key, rows in enumerate(taps):
                backbone.observe(key, rows)
            backbone.forward([0, 1, 2], [5, 6, 7])
    fast, slow = (backbone.cache for backbone in backbones)
    for key, length in enumerate([4, 8, 132]):
        assert fast.length(key) == slow.length(key) == length
        one, other = (cache.block(key)[:, :, :, :length] for cache in (fast, slow))
        assert (one - other).abs().max() < 1e-5
        assert one.abs().amax(dim=(1, 4)).min() > 0.1, "rows are missing"
