"""The compiled path scorer against the portable one, and its promise that a sequence does not depend on its
company or on the threads.

Tolerance of the parity tests: log-probs are differences of scores of size 10, summed in another order and
with another exp (relative error 3e-7), which moves them by some 1e-6; the bound is 2e-5. A wrong row, depth,
gate or scale moves them by more than 0.01.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from jetspec.draft import path_scorer
from jetspec.draft.checkpoint import Head
from jetspec.draft.config import HeadConfig
from jetspec.draft.native_scorer import MarkovTables
from jetspec.draft.path_scorer import MarkovScorer
from jetspec.draft.shared_noise import Draws
from jetspec.errors import HeadError
from jetspec.native import bindings, build, native_available
from jetspec.tree import best_first
from jetspec.tree.proposal import MarkovProposal
from tests.draft.tiny import MASK, tiny_target

pytestmark = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")
IDS, ROOTS, HIDDEN, DEPTH = 3100, 50, 64, 4  # roots are ids below ROOTS


@pytest.fixture(params=["this machine", "AVX2"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The library as built for this machine, and as an older processor would get it."""
    if request.param == "AVX2":
        if shutil.which("cc") is None or "avx2" not in Path("/proc/cpuinfo").read_text():
            pytest.skip("no AVX2 here")
        flags = tuple("-march=x86-64-v3" if f == "-march=native" else f for f in build.FLAGS)
        monkeypatch.setattr(build, "FLAGS", flags)
        older = build.load_library.__wrapped__("native")
        assert older is not None
        monkeypatch.setattr(bindings, "load_library", lambda name: older)
        declared = bindings.library.__wrapped__()
        monkeypatch.setattr("jetspec.draft.native_scorer.library", lambda: declared)
    yield request.param


class Case(NamedTuple):
    """A scorer with inputs for it."""

    scorer: MarkovScorer
    hidden: Tensor
    logits: Tensor
    roots: list[int]
    draws: Draws | None

    def tables(self, native: bool) -> MarkovTables:
        """What one of the two forms makes of the inputs."""
        base = self.logits if self.draws is None else self.draws.score(self.logits)
        scorer, scale = self.scorer, None if self.draws is None else self.draws.scale
        counts = path_scorer.CANDIDATES, path_scorer._PARENTS
        with torch.inference_mode():
            if not native:
                return scorer._tables(self.hidden, base, self.roots, self.draws)
            assert scorer.native is not None
            return scorer.native.tables(self.hidden, base, self.roots, scale, *counts)


def case(
    kind: str,
    width: int,
    batch: int,
    rank: int = 16,
    noise: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Case:
    """A random head whose draft vocabulary has `width` ids, none of them a root, and random states and
    logits.
    """
    config = HeadConfig.for_target(
        tiny_target(vocab_size=IDS).config,
        mask_token_id=MASK,
        layers=1,
        block_size=DEPTH + 1,
        taps=(0,),
        rank=rank,
        scorer=kind,
    )
    dice = torch.Generator().manual_seed(width + rank)
    weights = {
        name: torch.randn(shape, generator=dice) * (0.1 if "gate" in name else 1.0) / math.sqrt(rank / 8)
        for name, shape in config.shapes().items()
        if name.startswith("markov_head.")
    }
    vocab = (ROOTS + torch.randperm(IDS - ROOTS, generator=dice)[:width]).sort().values
    scorer = MarkovScorer(Head(config, weights, vocab), vocab, dtype, torch.device("cpu"))
    hidden = torch.randn(batch, DEPTH, HIDDEN, generator=dice)
    logits = 3 * torch.randn(batch, DEPTH, width, generator=dice)
    draws = None
    if noise:
        scale = 0.5 + torch.rand(batch, DEPTH, 1, generator=dice)
        draws = Draws(scale, torch.randn(batch, DEPTH, width, generator=dice))
    return Case(scorer, hidden, logits, [7 * n + 3 for n in range(batch)], draws)


def assert_close(one: MarkovTables, other: MarkovTables) -> None:
    """Same candidates in the same order, same log-probs."""
    assert np.array_equal(one.tokens, other.tokens)
    for a, b in zip(one[1:], other[1:], strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype == np.float32
        assert np.abs(a - b).max(initial=0.0) < 2e-5


def same_bits(one: MarkovTables, other: MarkovTables) -> bool:
    """Whether nothing differs; NaN equals NaN."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("noise", [False, True], ids=["silent", "noisy"])
@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_equals_the_portable_path(kernels: str, kind: str, noise: bool) -> None:
    """Guards rows of another parent, depth or sequence, the tails of every vector loop (odd vocabularies and
    ranks), fewer ids than candidates or parents, the gate, and the weight of the scorer under noise.
    """
    for width, batch, rank in [(1, 1, 16), (2, 3, 5), (40, 1, 8), (64, 2, 17), (777, 1, 64), (2999, 3, 32)]:
        own = case(kind, width, batch, rank, noise)
        assert_close(own.tables(native=True), own.tables(native=False))


def test_other_numbers_of_candidates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards panels and vectors that the candidates do not fill, and more candidates than the default."""
    for candidates, parents in [(1, 1), (6, 3), (33, 17), (100, 40)]:
        monkeypatch.setattr(path_scorer, "CANDIDATES", candidates)
        monkeypatch.setattr(path_scorer, "_PARENTS", parents)
        own = case("gated", 500, 2)
        found = own.tables(native=True)
        assert found.tokens.shape == (2, DEPTH, candidates)
        assert_close(found, own.tables(native=False))


def test_the_scorer_uses_it_where_it_can() -> None:
    """Guards a fast path that nobody takes, or that is taken in a dtype that the kernel cannot read."""
    own = case("gated", 200, 1)
    assert own.scorer.native is not None
    (proposal,) = own.scorer.proposals(own.hidden, own.logits, own.roots)
    assert isinstance(proposal, MarkovProposal)
    found = own.tables(native=True)
    assert np.array_equal(proposal.tokens, found.tokens[0])
    (children,) = proposal.expand([proposal.root_state])
    assert list(children.logps) == found.first[0].tolist()
    double = case("gated", 200, 1, dtype=torch.float64)
    assert double.scorer.native is None
    double.scorer.proposals(double.hidden.double(), double.logits, double.roots)


def test_equal_scores_are_in_the_order_of_the_vocabulary() -> None:
    """Guards determinism: all children equal, so that the selection meets nothing but ties."""
    own = case("vanilla", 2500, 1)
    scorer = own.scorer
    flat = Case(scorer, own.hidden, torch.zeros_like(own.logits), own.roots, None)
    scorer.parent_rows.zero_()
    found = flat.tables(native=True)
    assert np.array_equal(found.tokens[0], scorer.vocab[:64].numpy()[None].repeat(DEPTH, 0))
    assert np.allclose(found.first, -math.log(2500), atol=1e-5)
    assert np.allclose(found.table, -math.log(2500), atol=1e-5)


@pytest.mark.parametrize("pattern", ["rising", "falling", "steps", "few values", "minus infinity"])
def test_selection_meets_any_order(pattern: str) -> None:
    """Guards the bound by which candidates are collected: orders that fill one group, and ties across it.
    The choice is checked against a stable sort.
    """
    width, own = 2999, case("vanilla", 2999, 1)
    n = torch.arange(width).float()
    logits = {
        "rising": n / 100,
        "falling": -n / 100,
        "steps": (n / 50).floor(),
        "few values": (7 * n) % 3,
        "minus infinity": torch.where(n % 40 == 0, n / 100, torch.tensor(-math.inf)),
    }[pattern]
    own.scorer.parent_rows.zero_()
    found = Case(own.scorer, own.hidden, logits.expand(1, DEPTH, -1), own.roots, None).tables(native=True)
    wanted = logits.sort(descending=True, stable=True).indices[:64]
    assert np.array_equal(found.tokens[0, 2], own.scorer.vocab[wanted].numpy())
    assert np.allclose(found.first[0], logits.log_softmax(-1)[wanted].numpy(), atol=1e-5)


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("where", ["one logit", "all logits", "a state", "a row"])
def test_damaged_numbers_are_a_head_error(kernels: str, where: str, bad: float) -> None:
    """Guards NaN and infinity, of either sign: no crash, no endless loop, and the error that the portable
    path ends in, not a tree of made-up log-probs.
    """
    own = case("gated", 900, 2)
    for depth in (0, DEPTH - 1):
        hidden, logits = own.hidden.clone(), own.logits.clone()
        before = own.scorer.parent_rows.clone()
        if where == "one logit":
            logits[1, depth, 333] = bad
        elif where == "all logits":
            logits[1, depth] = bad
        elif where == "a state":
            hidden[1, depth] = math.copysign(math.nan, bad)
        else:
            own.scorer.parent_rows[own.roots[1]] = bad
        proposals = own.scorer.proposals(hidden, logits, own.roots)
        own.scorer.parent_rows.copy_(before)
        best_first(5, proposals[0], 200)
        with pytest.raises(HeadError, match="NaN log-probs"):
            best_first(5, proposals[1], 10**4)


def test_no_logit_left_is_a_head_error() -> None:
    """Guards a depth whose logits are all minus infinity, which has no law."""
    own = case("vanilla", 100, 1)
    (proposal,) = own.scorer.proposals(own.hidden, torch.full_like(own.logits, -math.inf), own.roots)
    with pytest.raises(HeadError, match="NaN log-probs"):
        best_first(5, proposal, 10)


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_bits_do_not_depend_on_company_or_threads(kernels: str, kind: str) -> None:
    """Guards reproducible trees: a sequence's tables are the same alone, in a batch, and on two threads."""
    own = case(kind, 1500, 5, noise=True)
    assert own.draws is not None
    together = own.tables(native=True)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2 if before == 1 else 1)
        assert same_bits(together, own.tables(native=True))
    finally:
        torch.set_num_threads(before)
    for n in range(5):
        part = slice(n, n + 1)
        alone = Case(own.scorer, own.hidden[part], own.logits[part], own.roots[part], own.draws.of(n))
        assert same_bits(MarkovTables(*(x[part] for x in together)), alone.tables(native=True))


def test_inputs_of_other_strides() -> None:
    """Guards states and logits that are views: the kernel reads addresses, not strides."""
    own = case("gated", 300, 2)
    hidden, logits = own.hidden.transpose(0, 1).contiguous(), own.logits.transpose(1, 2).contiguous()
    view = Case(own.scorer, hidden.transpose(0, 1), logits.transpose(1, 2), own.roots, None)
    assert same_bits(view.tables(native=True), own.tables(native=True))
