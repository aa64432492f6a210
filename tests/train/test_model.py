"""The head in training is the head in decoding, and no slot sees what it has to predict.

Comparisons are in float32. Sums of 64 to 320 products of order one, over two layers, differ by about 1e-5
between two orders of addition; a wrong row, mask or position moves a normed state by about 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.draft import backbone as backbone_module
from jetspec.draft.backbone import Backbone
from jetspec.draft.checkpoint import Head
from jetspec.target.linear import in_half
from jetspec.target.target import Target
from jetspec.train.data import Batch, Entry, make_batch
from jetspec.train.model import HeadModule, ScorerTables, initialise
from tests.draft.tiny import PLAIN_PARTS, TAPS, VOCAB, MemoryCorpus, module_of, random_head, tiny_target

CLOSE = 2e-4
LENGTHS = (9, 17, 1 + 5)
ANCHORS = torch.tensor([[0, 3, 7], [4, 15, 11], [0, 1, 4]])
PARTS: dict[str, dict[str, Any]] = {
    "all": {},
    "plain": PLAIN_PARTS,
    "direct": {**PLAIN_PARTS, "direct": True},
    "slots": {**PLAIN_PARTS, "slot_embedding": True},
    "vanilla": {"scorer": "vanilla"},
    "shifted": {"alignment": "shifted", "block_size": 4, "scorer": "rnn", "confidence": True},
}


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    return tiny_target()


def corpus() -> MemoryCorpus:
    """Three answers of different lengths."""
    return MemoryCorpus(LENGTHS, len(TAPS), 64)


def batch_of(source: MemoryCorpus, anchors: Tensor = ANCHORS, depth: int = 4) -> Batch:
    """All answers of a corpus with the given anchors."""
    entries = [Entry(None, n, len(ids), 1, 0.0) for n, ids in enumerate(source.ids)]  # type: ignore[arg-type]
    return make_batch(source, entries, anchors, torch.ones(depth))  # type: ignore[arg-type]


def drafted(
    head: Head, target: Target, source: MemoryCorpus, pieces: int, flush: int, reject: bool
) -> Tensor:
    """The same slots from decoding: [n, A, D, H], all sequences in one forward per column of anchors."""
    vocab = torch.arange(VOCAB)
    columns = []
    for column in ANCHORS.T.tolist():
        network = Backbone(head, target.transformer, vocab)
        for key, anchor in enumerate(column):
            for start in range(0, anchor, pieces):
                network.observe(key, source.features[key][start : min(start + pieces, anchor)])
                if reject and start % 2 == 0:
                    network.forward([key], [5])  # a round whose draft was rejected altogether
        roots = [int(source.ids[key][anchor]) for key, anchor in enumerate(column)]
        hidden, logits = network.forward([0, 1, 2], roots)
        matrix = in_half(target.transformer.output_matrix)  # what drafting reads, and training does not
        assert torch.allclose(logits, hidden @ matrix.T, atol=1e-3)
        columns.append(hidden)
    return torch.stack(columns, dim=1)


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
@pytest.mark.parametrize("parts", PARTS)
def test_training_and_decoding_compute_the_same_states(
    target: Target, parts: str, causal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the whole point of training: masks, positions, norms and optional parts agree with decoding.

    Anchor 0 is a prompt of one token. Context arrives in pieces of any size, flushed early or late, and with
    rejected rounds between."""
    head = random_head(target, causal=causal, **PARTS[parts])
    source = corpus()
    expected = module_of(head, target)(batch_of(source)).detach()
    assert expected.std() > 0.5
    for pieces, flush, reject in ((100, 128, False), (1, 128, False), (3, 4, True), (2, 1, True)):
        monkeypatch.setattr(backbone_module, "_FLUSH_ROWS", flush)
        found = drafted(head, target, source, pieces, flush, reject)
        assert (found - expected).abs().max() < CLOSE, (pieces, flush, reject)


def slow_terms(head: Head, hidden: Tensor, rows: Tensor) -> Tensor:
    """The scorers' formulas (arXiv 2607.05147), one slot at a time: hidden [D, H], rows [D, r]."""
    w, kind, terms = head.weights, head.config.scorer, []
    state = torch.zeros(rows.shape[1])
    for h, e in zip(hidden, rows, strict=True):
        if kind == "gated":
            gate = w["markov_head.gate_proj.weight"] @ torch.cat([h, e]) + w["markov_head.gate_proj.bias"]
            terms.append(e * torch.sigmoid(gate))
        elif kind == "rnn":
            u = w["markov_head.joint_proj.weight"] @ torch.cat([state, e, h])
            g, c, o = (u + w["markov_head.joint_proj.bias"]).chunk(3)
            state = torch.sigmoid(g) * state + (1 - torch.sigmoid(g)) * torch.tanh(c)
            terms.append(torch.tanh(o))
        else:
            terms.append(e)
    return torch.stack(terms)


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_scorers_follow_their_formulas(target: Target, kind: str) -> None:
    """Guards the order of state, parent row and slot in the scorer's products, the carried state, and the
    tables that one step works on. `tests/draft` compares decoding with the same formulas."""
    head = random_head(target, scorer=kind)
    module = module_of(head, target)
    batch = batch_of(corpus())
    hidden = module(batch)
    tables = ScorerTables(module, [batch], torch.arange(VOCAB))
    found = tables.terms(hidden, batch.parents)
    assert found is not None and tables.child_rows is not None
    rows = head.weights["markov_head.markov_w1.weight"][batch.parents]
    for n in range(3):
        for column in range(3):
            expected = slow_terms(head, hidden[n, column], rows[n, column])
            assert torch.allclose(found[n, column], expected, atol=1e-4)
    assert torch.equal(tables.child_rows, head.weights["markov_head.markov_w2.weight"])


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_a_scorer_knows_the_path_and_nothing_behind_it(target: Target, kind: str) -> None:
    """Guards teacher forcing against a leak: a written token moves the scores of the depths behind it (of the
    next one only, without a recurrence) and those of no other depth, its own least of all; nor those of other
    blocks of the answer."""
    module = module_of(random_head(target, scorer=kind, confidence=True), target)

    def scores(source: MemoryCorpus) -> tuple[Tensor, Tensor]:
        batch = batch_of(source, torch.tensor([[3, 9]] * 3))
        rows = module.weight("markov_head.markov_w1.weight")[batch.parents]
        hidden = module(batch)
        return module.terms(hidden, rows).detach(), module.confidence(hidden, rows).detach()

    before = scores(corpus())
    for place in range(1, 5):
        changed = corpus()
        changed.ids[1][3 + place] = (int(changed.ids[1][3 + place]) + 1) % VOCAB
        for old, new in zip(before, scores(changed), strict=True):
            gap = (new - old).abs()
            moved = gap[1, 0].reshape(4, -1).amax(-1) > 1e-4
            reach = range(1, 5) if kind == "rnn" and old.ndim == 4 else range(1, 2)
            assert moved.tolist() == [k - place in reach for k in range(1, 5)], place
            assert float(gap[0].max()) == float(gap[2].max()) == float(gap[1, 1].max()) == 0.0


def test_scorer_tables_carry_gradients_to_the_big_tables(target: Target) -> None:
    """Guards against a scorer that is never trained, or whose rows get the gradients of other tokens."""
    module = module_of(random_head(target), target)
    batch = batch_of(corpus())
    vocab = torch.arange(0, VOCAB, 3)
    w1, w2 = (module.weight(f"markov_head.markov_w{n}.weight") for n in (1, 2))
    hidden = module(batch).detach()
    direct = (module.terms(hidden, w1[batch.parents]) @ w2[vocab].T).sin().sum()
    wanted = torch.autograd.grad(direct, [w1, w2])
    tables = ScorerTables(module, [batch], vocab)
    for part in (slice(0, 1), slice(1, 3)):
        terms = tables.terms(hidden[part], batch.parents[part])
        assert terms is not None and tables.child_rows is not None
        (terms @ tables.child_rows.T).sin().sum().backward()
    tables.backward()
    for table, gradient in zip((w1, w2), wanted, strict=True):
        assert table.grad is not None and torch.allclose(table.grad, gradient, atol=1e-4)


def test_draft_cache_equals_a_fresh_one_in_every_layer(target: Target) -> None:
    """Guards a cache that is right in layer 0 only, or that keeps rows of a rejected block."""
    head, source = random_head(target, layers=3), corpus()
    taps = source.features[1]
    grown = Backbone(head, target.transformer, torch.arange(VOCAB))
    for row in range(12):
        grown.observe(7, taps[row : row + 1])
        if row % 3 == 0:
            grown.forward([7], [row])
    fresh = Backbone(head, target.transformer, torch.arange(VOCAB))
    fresh.observe(7, taps[:12])
    outputs = [network.forward([7], [9]) for network in (grown, fresh)]
    assert (outputs[0][1] - outputs[1][1]).abs().max() < 1e-3
    for layer in range(3):
        rows = [network.cache.rows(7, layer) for network in (grown, fresh)]
        assert rows[0].shape[2] == rows[1].shape[2] == 12
        assert (rows[0] - rows[1]).abs().max() < 1e-4, layer


SHAPES: dict[str, dict[str, Any]] = {
    "jetspec": {},
    "dflash": {"causal": False},
    "dspark": {"causal": False, "alignment": "shifted", "block_size": 4},
    "causal-shifted": {"alignment": "shifted", "block_size": 4},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_no_slot_sees_its_answer(target: Target, shape: str) -> None:
    """Guards against a leak: taps at or behind the anchor and tokens behind it are not there when drafting.

    What is there (the row before the anchor, the root) must matter."""
    module = module_of(random_head(target, **SHAPES[shape]), target)
    source = corpus()
    batch = batch_of(source)
    before = module(batch).detach()
    for n, column in ((0, 1), (1, 2), (2, 1)):
        anchor = int(ANCHORS[n, column])
        changed = corpus()
        changed.features[n][anchor:] += 5.0
        changed.ids[n][anchor + 1 :] = 3
        changed.states[n][:] = 0.0
        assert torch.equal(module(batch_of(changed)).detach()[n, column], before[n, column])
        for edit in ("taps", "root"):
            changed = corpus()
            if edit == "taps":
                changed.features[n][anchor - 1] *= -1.0
            else:
                changed.ids[n][anchor] = (int(changed.ids[n][anchor]) + 1) % VOCAB
            difference = (module(batch_of(changed)).detach() - before)[n, column].abs().amax(-1)  # [D]
            assert bool((difference > 0.01).all()), edit


@pytest.mark.parametrize("shape", SHAPES)
def test_who_sees_whom_inside_a_block(target: Target, shape: str) -> None:
    """Guards the causal flag and the alignment: a slot may not depend on later slots in a causal head, and
    must in another; depth k is slot k in place, and slot k - 1 when shifted."""
    head = random_head(target, **SHAPES[shape])
    causal, first = head.config.causal, head.config.first_slot
    assert head.config.depth == 4
    batch = batch_of(corpus())
    before = module_of(head, target)(batch).detach()
    for slot in range(head.config.block_size):
        weights = {name: tensor.clone() for name, tensor in head.weights.items()}
        weights["slot_embed.weight"][slot] += 3.0
        after = module_of(replace(head, weights=weights), target)(batch).detach()
        moved = (after - before).abs().amax(dim=(0, 1, 3)) > 0.01  # [D], of slots 1..D
        expected = [k >= slot or not causal for k in range(first, first + 4)]
        assert moved.tolist() == expected, slot


def test_another_block_has_no_effect(target: Target) -> None:
    """Guards the border between blocks of one answer: moving one anchor, and so its whole block, leaves the
    states of the others as they are, but for rounding: how long a context is looked at depends on all."""
    for shape in SHAPES.values():
        module = module_of(random_head(target, **shape), target)
        before = module(batch_of(corpus())).detach()
        for column in range(3):
            anchors = ANCHORS.clone()
            anchors[:, column] = torch.tensor([6, 1, 3])
            after = module(batch_of(corpus(), anchors)).detach()
            others = [n for n in range(3) if n != column]
            assert (after[:, others] - before[:, others]).abs().max() < CLOSE
            assert (after[:, column] - before[:, column]).abs().amax(-1).min() > 0.01


def test_blocks_and_answers_do_not_see_each_other(target: Target) -> None:
    """Guards against attention across blocks of one answer, across answers, and to padding."""
    module: HeadModule = module_of(random_head(target, causal=False), target)
    together = module(batch_of(corpus())).detach()
    for n in range(3):
        for column in range(3):
            source = corpus()
            alone = MemoryCorpus([1], 1, 1)
            alone.ids, alone.features, alone.states = (
                [x[n]] for x in (source.ids, source.features, source.states)
            )
            single = module(batch_of(alone, ANCHORS[n : n + 1, column : column + 1])).detach()
            assert (single[0, 0] - together[n, column]).abs().max() < CLOSE


def test_a_start_does_not_hang_on_the_solver(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the same start on every device: solvers choose the signs of eigenvectors differently, and with
    them the parents' rows and all gradients behind differed."""
    solve = torch.linalg.eigh

    def other(matrix: Tensor) -> tuple[Tensor, Tensor]:
        values, vectors = solve(matrix)
        signs = torch.ones(vectors.shape[1])
        signs[::2] = -1
        return values, vectors * signs

    starts = []
    for solver in (solve, other):
        monkeypatch.setattr("torch.linalg.eigh", solver)
        module = HeadModule(random_head(target).config, target.transformer.embedding)
        initialise(module)
        starts.append(module.weight("markov_head.markov_w1.weight").clone())
    assert starts[0].abs().sum() > 0
    torch.testing.assert_close(*starts)
