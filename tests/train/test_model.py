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
from jetspec.target.target import Target
from jetspec.train.data import Batch, Entry, make_batch
from jetspec.train.model import HeadModule, ScorerTables
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
        assert torch.allclose(logits, hidden @ target.transformer.output_matrix.T, atol=1e-3)
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


def test_scorer_terms_are_those_of_decoding(target: Target) -> None:
    """Guards the order of state and parent row in the gate, and the tables that one step works on."""
    head = random_head(target)
    module = module_of(head, target)
    batch = batch_of(corpus())
    hidden = module(batch)
    tables = ScorerTables(module, [batch], torch.arange(VOCAB))
    found = tables.terms(hidden, batch.parents)
    assert found is not None and tables.child_rows is not None
    w = head.weights
    rows = w["markov_head.markov_w1.weight"][batch.parents]
    joined = torch.cat([hidden, rows], dim=-1)
    gate = joined @ w["markov_head.gate_proj.weight"].T + w["markov_head.gate_proj.bias"]
    assert torch.allclose(found, rows * torch.sigmoid(gate), atol=1e-5)
    assert torch.equal(tables.child_rows, w["markov_head.markov_w2.weight"])


def test_scorer_tables_carry_gradients_to_the_big_tables(target: Target) -> None:
    """Guards against a scorer that is never trained, or whose rows get the gradients of other tokens."""
    module = module_of(random_head(target), target)
    batch = batch_of(corpus())
    vocab = torch.arange(0, VOCAB, 3)
    w1, w2 = (module.weight(f"markov_head.markov_w{n}.weight") for n in (1, 2))
    hidden = module(batch).detach()
    direct = (module.gated(hidden, w1[batch.parents]) @ w2[vocab].T).sin().sum()
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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_no_slot_sees_its_answer(target: Target, causal: bool) -> None:
    """Guards against a leak: taps at or behind the anchor and tokens behind it are not there when drafting.

    What is there (the row before the anchor, the root) must matter."""
    module = module_of(random_head(target, causal=causal), target)
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


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_who_sees_whom_inside_a_block(target: Target, causal: bool) -> None:
    """Guards the causal flag: slot k may not depend on later slots in a causal head, and must in another."""
    head = random_head(target, causal=causal)
    batch = batch_of(corpus())
    before = module_of(head, target)(batch).detach()
    for slot in range(1, 5):
        weights = {name: tensor.clone() for name, tensor in head.weights.items()}
        weights["slot_embed.weight"][slot] += 3.0
        after = module_of(replace(head, weights=weights), target)(batch).detach()
        moved = (after - before).abs().amax(dim=(0, 1, 3)) > 0.01  # [D], of slots 1..D
        expected = [k >= slot or not causal for k in range(1, 5)]
        assert moved.tolist() == expected, slot


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
