"""A second pass sees what training with revealed slots shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from jetspec.draft.jetspec import BlockDrafter
from jetspec.errors import OptionError
from jetspec.sampling import Sampling
from jetspec.target.target import Target
from jetspec.train.data import Entry, make_batch
from jetspec.tree import Tree, best_first
from jetspec.tree.proposal import MarginalProposal
from tests.benchmarks.tiny import drafter, script, texts
from tests.draft.tiny import TAPS, MemoryCorpus, module_of, random_head, tiny_target

replay, second_pass = script("replay"), script("second_pass")
ROOT = 7  # position of the root in the longest text


@pytest.fixture(scope="module")
def target() -> Target:
    """One frozen target for all tests."""
    torch.set_num_threads(1)
    return tiny_target()


def trained_states(head: BlockDrafter, target: Target, answer: Any, path: list[int]) -> tuple[Tensor, Tensor]:
    """What training computes behind the root with `path` revealed: states [D, H], and what the scorer's child
    rows are multiplied with [D, r]."""
    depth = head.head.config.depth
    memory = MemoryCorpus([ROOT + 1 + depth], len(TAPS), 64)
    memory.ids[0][: ROOT + 1] = torch.tensor(answer.tokens[: ROOT + 1])
    memory.ids[0][ROOT + 1 : ROOT + 1 + len(path)] = torch.tensor(path)
    memory.features[0][:ROOT] = answer.taps[:ROOT]
    module = module_of(head.head, target)
    batch = make_batch(
        memory,  # type: ignore[arg-type]
        [Entry(None, 0, len(memory.ids[0]), 1, 0.0)],  # type: ignore[arg-type]
        torch.tensor([[ROOT]]),
        torch.ones(depth),
        torch.tensor([[len(path)]]),
    )
    with torch.no_grad():
        hidden = module(batch)
        if head.head.config.scorer == "none":
            return hidden[0, 0], torch.zeros(depth, 1)
        rows = module.weight("markov_head.markov_w1.weight")[batch.parents]
        return hidden[0, 0], module.terms(hidden, rows)[0, 0]


@pytest.mark.parametrize("kind", ["none", "vanilla", "gated", "rnn", "plain"])
def test_second_pass_equals_training_with_revealed_slots(target: Target, kind: str) -> None:
    """Guards the tree-causal mask, positions, slot embeddings and the scorer's input: every node's slot and
    the open slot below it have the states that training gives them along the node's own path, and so have
    the laws of its children. A row, mask or slot that is off moves states by about 1."""
    parts: dict[str, Any] = {"scorer": kind}
    if kind in ("none", "plain"):
        parts = {"scorer": "none", "rank": 0}
    if kind == "plain":
        parts |= {"direct": False, "slot_embedding": False}
    vocab = torch.arange(0, 200, 2)
    head = BlockDrafter(random_head(target, vocab=vocab, **parts), target)
    answer = texts(target)[2]
    assert answer.first == ROOT + 1
    walk = replay.Walk(head, 0, answer._replace(prompt_len=3))
    s = walk.at(ROOT)
    first = head.propose([s])[0]
    again = second_pass.SecondPass(head).again(s, first, 40)
    tree = best_first(s.root, first, 40)
    inner = [n for n in range(1, tree.size) if tree.depths[n] < 4]
    assert {tree.depths[n] for n in inner} >= {1, 2} and len(again._laws) == len(inner) > 20
    with torch.inference_mode():
        states, open_states = second_pass.run_again(head.backbone, 0, tree, inner)
    assert head.backbone.cache.length(0) == ROOT
    for row, node in enumerate(inner):
        path = tree.tokens_of(tree.path_to(node))
        hidden, terms = trained_states(head, target, answer, path)
        depth = tree.depths[node]
        assert (states[row] - hidden[depth - 1]).abs().max() < 2e-4
        assert (open_states[row] - hidden[depth]).abs().max() < 2e-4
        logits = hidden[depth] @ target.transformer.output_matrix[vocab].T
        if parts["scorer"] != "none":
            logits = logits + terms[depth] @ head.head.weights["markov_head.markov_w2.weight"][vocab].T
        law = logits.log_softmax(-1)
        stated = torch.tensor(again._laws[node].logps)
        assert (law.topk(64).values - stated).abs().max() < 2e-3
        assert (law[torch.tensor(again._laws[node].tokens) // 2] - stated).abs().max() < 2e-3


def test_float64_takes_the_portable_path(target: Target) -> None:
    """Guards the layers' own path, which runs where the compiled one cannot: same states."""
    found = []
    for dtype in (torch.float32, torch.float64):
        own = tiny_target(dtype)
        head = drafter(own)
        answer = texts(target)[2]._replace(prompt_len=3)
        answer = answer._replace(taps=answer.taps.to(dtype))
        s = replay.Walk(head, 0, answer).at(ROOT)
        head.propose([s])
        tree = Tree.of([s.root, 5, 6, 5, 9], [-1, 0, 0, 1, 1])
        with torch.inference_mode():
            found.append(second_pass.run_again(head.backbone, 0, tree, [1, 2, 3]))
        assert (head.backbone.native is None) == (dtype == torch.float64)
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).abs().max() < 2e-4


def test_laws_of_the_first_pass_hold_where_the_second_has_not_been() -> None:
    """Guards the mixture: below nodes of the first tree the new law, below others the first pass's, nothing
    below tokens that the first pass does not know; the root keeps its law."""
    first = MarginalProposal([[10, 11], [20, 21], [30, 31]], np.log([[0.9, 0.1], [0.8, 0.2], [0.7, 0.3]]))
    tree = Tree.of([1, 10, 20], [-1, 0, 1])
    law = second_pass.Law([21, 99], [-0.1, -2.0])
    mixed = second_pass.Rescored(first, tree, {1: law})
    (root,) = mixed.expand([mixed.root_state])
    assert list(root.tokens) == [10, 11]
    below_ten, below_eleven = mixed.expand(root.states)
    assert below_ten.tokens == [21, 99] and below_ten.logps == [-0.1, -2.0]
    assert list(below_eleven.tokens) == [20, 21]  # not in the first tree
    known, unknown = mixed.expand(below_ten.states)
    assert list(known.tokens) == [30, 31] and list(unknown.tokens) == []
    grown = best_first(1, mixed, 4)
    assert grown.tokens == (1, 10, 21, 30, 31) and grown.parents == (-1, 0, 1, 2, 2)


def test_heads_that_cannot_run_twice_are_refused(target: Target) -> None:
    """Guards heads whose slots see later ones: their second pass would be something else than in training;
    and sampled requests, whose noise the second pass does not know."""
    for parts in ({"causal": False}, {"alignment": "shifted", "block_size": 4}):
        with pytest.raises(OptionError, match="needs a causal head"):
            second_pass.SecondPass(drafter(target, **parts))
    head = second_pass.SecondPass(drafter(target))
    answer = texts(target, Sampling(temperature=1.0))[0]
    with pytest.raises(OptionError, match="temperature 0 only"):
        head.propose([replay.Walk(head, 0, answer).at(answer.first)])
