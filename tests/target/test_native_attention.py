"""The compiled attention against the portable one, and its promise that a row does not depend on its
company.
"""

from __future__ import annotations

import ctypes
import sys
from pathlib import Path

import pytest
import torch

from jetspec.native import bindings, build, native_available
from jetspec.target import native_attention
from jetspec.target.attention import Visibility, attend
from jetspec.target.cache import KVCache
from jetspec.target.plan import Plan, Segment, chunk, pack
from jetspec.tree import Tree

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel to test")
BUSHY = Tree.of([5, 6, 7, 8, 9, 10], [-1, 0, 0, 1, 1, 3])


def _caches(dim: int, kv_heads: int, lengths: list[int]) -> tuple[KVCache, KVCache]:
    caches = KVCache(2, kv_heads, dim), KVCache(2, kv_heads, dim)
    for key, length in enumerate(lengths):
        rows = torch.randn(2, 2, kv_heads, length, dim)
        for cache in caches:
            cache.add(key)
            cache.extend(key, length)
            cache.block(key)[:, :, :, :length] = rows
            cache.keep(key, range(length))
    return caches


def _run(
    plan: Plan, cache: KVCache, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, native: bool
) -> torch.Tensor:
    groups = q.shape[1] // k.shape[1]
    visibility = Visibility(plan, cache, groups, None, torch.float32)
    if not native:
        visibility.native = None
    assert (visibility.native is not None) == native
    return attend(q, k, v, plan, cache, 1, visibility)


@pytest.mark.parametrize(("dim", "kv_heads", "groups"), [(16, 1, 4), (64, 3, 3), (80, 2, 1), (128, 2, 2)])
def test_equals_the_portable_path(dim: int, kv_heads: int, groups: int) -> None:
    """Wrong strides, masks, groups or tails of the vector loop: trees, chunks and single rows of several
    sequences in one plan.

    2e-6 is some tens of float32 roundings of values near 1.
    """
    fast, slow = _caches(dim, kv_heads, [0, 1, 37, 70])
    plans = []
    for cache in (fast, slow):
        trees = pack([(0, BUSHY), (2, Tree.root_only(3)), (3, BUSHY)], cache)
        run = chunk([(1, [1, 2, 3, 4])], cache)
        moved = [s.__class__(s.key, s.start + trees.size, s.count, s.mask, s.logits) for s in run.segments]
        ids, positions = torch.cat([trees.ids, run.ids]), torch.cat([trees.positions, run.positions])
        plans.append(Plan(ids, positions, (*trees.segments, *moved), max(trees.last, run.last)))
    rows = plans[0].size
    # q, k and v are slices of one product, as the layers pass them.
    fused = torch.randn(rows, kv_heads * (groups + 2), dim)
    heads = kv_heads * groups
    q, k, v = fused[:, :heads], fused[:, heads : heads + kv_heads], fused[:, heads + kv_heads :]
    got = _run(plans[0], fast, q, k, v, native=True)
    wanted = _run(plans[1], slow, q, k, v, native=False)
    assert got.shape == (rows, heads * dim)
    assert (got - wanted).abs().max() < 2e-6
    for key in range(4):
        assert torch.equal(fast.rows(key, 1), slow.rows(key, 1)), "both write the same keys and values"


def test_a_row_has_the_same_bits_alone_and_in_a_tree() -> None:
    """A result that depends on the number of rows would make speculation differ from plain decoding at near
    ties.
    """
    alone, together = _caches(64, 3, [50])
    tree = Tree.of(list(range(20)), [-1, *([0] * 19)])
    q, k, v = torch.randn(20, 9, 64), torch.randn(20, 3, 64), torch.randn(20, 3, 64)
    many = _run(pack([(0, tree)], together), together, q, k, v, native=True)
    one = _run(pack([(0, Tree.root_only(0))], alone), alone, q[:1], k[:1], v[:1], native=True)
    assert torch.equal(many[:1], one)


def test_a_bidirectional_block_sees_later_rows() -> None:
    """A DFlash head's slots see all of their block; a kernel that stops at the diagonal lowers acceptance
    without an error.
    """
    fast, slow = _caches(64, 1, [7])
    q, k, v = torch.randn(5, 3, 64), torch.randn(5, 1, 64), torch.randn(5, 1, 64)
    outs = []
    for cache, native in ((fast, True), (slow, False)):
        segment = Segment(0, 0, 5, torch.ones(5, 5, dtype=torch.bool), True)
        cache.extend(0, 5)
        outs.append(_run(Plan(torch.zeros(5), torch.arange(7, 12), (segment,), 11), cache, q, k, v, native))
    assert (outs[0] - outs[1]).abs().max() < 2e-6


def test_large_scores_do_not_overflow() -> None:
    """exp of a large score: the maximum has to be taken off first, and far smaller scores must give exactly
    0.
    """
    fast, slow = _caches(64, 1, [9])
    q = torch.randn(1, 1, 64) * 200
    k, v = torch.randn(1, 1, 64), torch.randn(1, 1, 64)
    got = _run(pack([(0, Tree.root_only(0))], fast), fast, q, k, v, native=True)
    wanted = _run(pack([(0, Tree.root_only(0))], slow), slow, q, k, v, native=False)
    assert torch.isfinite(got).all()
    assert (got - wanted).abs().max() < 1e-4  # scores near 1000 carry an error of 1e-4 themselves


def test_other_shapes_take_the_portable_path() -> None:
    """A head size that the kernel's vectors do not divide, or float64, must not reach it."""
    odd = KVCache(1, 1, 24)
    odd.add(0)
    assert native_attention.native_segments(pack([(0, BUSHY)], odd), odd) is None
    double = KVCache(1, 1, 64, dtype=torch.float64)
    double.add(0)
    assert native_attention.native_segments(pack([(0, BUSHY)], double), double) is None


def test_no_compiler_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a C compiler decodes through the portable path."""
    monkeypatch.setattr(build.shutil, "which", lambda name: None)
    assert build.load_library.__wrapped__("native") is None


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel is built on Linux only")
@pytest.mark.parametrize(
    "script", ["exit 1", 'while [ "$1" != -o ]; do shift; done; echo junk > "$2"', "exit 0"]
)
def test_a_broken_compiler_is_no_error(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards machines whose `cc` fails, writes rubbish, or writes nothing and says that all is well."""
    compiler = tmp_path / "cc"
    compiler.write_text(f"#!/bin/sh\n{script}\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(build.shutil, "which", lambda name: str(compiler))
    assert build.load_library.__wrapped__("native") is None


def test_a_library_without_the_kernel_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against an AttributeError for a library that holds something else."""
    monkeypatch.setattr(bindings, "load_library", lambda name: ctypes.CDLL(None))
    assert bindings.library.__wrapped__() is None
