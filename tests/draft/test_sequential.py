"""Heads that draft depth by depth: the cached, tree-masked forward computes what a forward from scratch does,
and the text stays the target's own."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from jetspec.decode.engine import Engine
from jetspec.draft import sequential as sequential_module
from jetspec.draft.sequential import SequentialDrafter
from jetspec.errors import HeadError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.tree import beam, best_first, chain
from jetspec.tree.dynamic import dynamic
from tests.draft.sequential_tiny import drafter_of, random_eagle3, random_mtp, slow_logits
from tests.draft.tiny import tiny_target

VOCAB = 24  # small, so that a random head is right often enough to be accepted at several depths
PROMPTS = ([5], [7, 3, 11, 20, 2], [9, 9, 2, 3, 14, 8, 1, 20, 20, 5, 6])
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=1.0, seed=4)}
LENGTH = 14
PART = torch.tensor([0, 2, 3, 5, 6, 7, 8, 9, 11, 14, 15, 17, 20, 21, 22, 23])
# Norms are computed in float32, as the models do it; a wrong row or mask moves log-probs by 0.01 and more.
CLOSE = 1e-5

MOE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "moe": MOE,
    "window": {"model_type": "mistral", "sliding_window": 2},
}
HEADS: dict[str, tuple[str, Any]] = {
    "eagle3": ("llama", lambda t: random_eagle3(t)),
    "eagle3-part": ("llama", lambda t: random_eagle3(t, vocab=PART, own_embedding=True, taps=(0, 1, 2, 3))),
    "mtp": ("llama", lambda t: random_mtp(t)),
    "mtp-part": ("qwen2", lambda t: random_mtp(t, vocab=PART, order="hidden_first")),
    "mtp-moe": ("moe", lambda t: random_mtp(t)),
    "mtp-window": ("window", lambda t: random_mtp(t)),
    "mtp-three": ("llama", lambda t: random_mtp(t, modules=3)),
}


@cache
def target_of(name: str) -> Target:
    """One frozen float64 target of each kind, whose texts never end by themselves."""
    target = tiny_target(torch.float64, vocab_size=VOCAB, **TARGETS[name])
    target.tokenizer.eos_ids = frozenset()
    return target


def make(name: str) -> tuple[Target, SequentialDrafter, Any]:
    """A target, a drafter with a random head, and the head."""
    kind, build = HEADS[name]
    target = target_of(kind)
    head = build(target)
    return target, drafter_of(head, target), head


@cache
def plain(kind: str, name: str) -> list[list[int]]:
    """What plain decoding emits for the prompts, one after the other."""
    engine = Engine(target_of(kind), max_batch=1)
    sequences = engine.generate(PROMPTS, SAMPLINGS[name], Limits(max_tokens=LENGTH, ignore_eos=True))
    return [sequence.emitted for sequence in sequences]


def sequence_of(key: int, tokens: list[int]) -> Sequence:
    """A sequence whose last token is the root."""
    return Sequence(key, tokens, Sampling(), Limits(max_tokens=50), lambda ids: "")


def rows_of(target: Target, drafter: SequentialDrafter, tokens: list[int]) -> Any:
    """What the target gives at all tokens but the root."""
    cache = target.new_cache()
    cache.add(0)
    output = target.forward(chunk([(0, tokens[:-1])], cache), cache, drafter.taps, drafter.needs_hidden)
    return output.hidden if drafter.needs_hidden else output.taps


def observe(drafter: SequentialDrafter, key: int, rows: Any) -> None:
    """Hand rows over under whichever name the drafter wants them."""
    drafter.observe(key, None if drafter.needs_hidden else rows, rows if drafter.needs_hidden else None)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("head", ["eagle3-part", "mtp", "mtp-three"])
def test_same_text_as_plain_decoding(head: str, name: str) -> None:
    """Guards losslessness end to end, for every builder, budget and batch; some accepted path must have had a
    gap, or wrong masks and rows could pass by luck. After each round the draft cache holds the committed rows
    and no drafted one, and at the end nothing."""
    target, drafter, _ = make(head)
    gaps = 0
    for grow, budget, batch in (("best-first", 6, 3), ("beam", 12, 3), ("chain", 5, 1), ("best-first", 1, 1)):
        engine = Engine(target, drafter, budget=budget, grow=grow, max_batch=batch)
        limits = Limits(max_tokens=LENGTH, ignore_eos=True)
        sequences = [engine.add(prompt, SAMPLINGS[name], limits) for prompt in PROMPTS]
        while engine.busy:
            for outcome in engine.step():
                gaps += outcome.path != list(range(len(outcome.path)))
            for s in sequences:
                if s.id in drafter.cache and s.emitted:
                    waiting = sum(len(part) for part in drafter._raw.get(s.id, []))
                    assert drafter.cache.length(s.id) + waiting == s.position
                    assert drafter.cache.drafted(s.id) == 0
        assert [s.emitted for s in sequences] == plain(HEADS[head][0], name), (grow, budget)
        assert drafter.cache.bytes == 0 and not drafter._last and not drafter._round
        assert not drafter._raw and not drafter._ready
    assert gaps > 0


@pytest.mark.parametrize("head", HEADS)
def test_every_node_sees_its_own_path_only(head: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards masks, positions, rows and features of the incremental forward: log-probs of every node of three
    trees drawn from ONE proposal equal a forward from scratch over the node's path. Committed rows arrive in
    pieces, in forwards of a few rows, with rounds between that were rejected altogether."""
    monkeypatch.setattr(sequential_module, "FLUSH_ROWS", 3)
    monkeypatch.setattr(sequential_module, "CHUNK_ROWS", 4)
    target, drafter, config = make(head)
    tokens = [7, 3, 11, 20, 2, 9, 14]
    rows = rows_of(target, drafter, tokens)
    observe(drafter, 1, rows[:2])
    best_first(11, drafter.propose([sequence_of(1, tokens[:3])])[0], 9)
    observe(drafter, 1, rows[2:])
    other = [4, 4, 8]
    observe(drafter, 2, rows_of(target, drafter, other))
    proposal, second = drafter.propose([sequence_of(1, tokens), sequence_of(2, other)])
    dynamic(8, second, 8)
    vocab = drafter.network.vocab.tolist()
    checked = 0
    for tree in (beam(14, proposal, 12, 3), best_first(14, proposal, 10), chain(14, proposal, 5)):
        paths = [tree.tokens_of(tree.path_to(node)) for node in range(tree.size)]
        for node in range(1, tree.size):
            logits = slow_logits(config, target, rows, tokens, paths[tree.parents[node]])
            logps = logits.log_softmax(-1)
            own = tree.logps[node] - tree.logps[tree.parents[node]]
            assert abs(float(logps[vocab.index(tree.tokens[node])]) - own) < CLOSE, paths[node]
            checked += tree.depths[node] > 2
    assert checked > 3


def test_a_proposal_ends_with_its_round() -> None:
    """Guards against rows of one round that are read in the next: an old proposal refuses to grow."""
    _, drafter, _ = make("mtp")
    tokens = [7, 3, 11]
    rows = torch.randn(2, 64, dtype=torch.float64)
    observe(drafter, 1, rows)
    (old,) = drafter.propose([sequence_of(1, tokens)])
    beam(11, old, 8)
    assert drafter.cache.drafted(1) > 0
    observe(drafter, 1, rows[:1])
    assert drafter.cache.drafted(1) == 0
    with pytest.raises(AssertionError, match="gone on"):
        chain(11, old, 8)


def test_a_level_is_one_forward_of_the_whole_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the cost of a round: one forward for the new rows of all sequences, then one per level, whatever
    the number of sequences; nodes that are asked for one by one are drafted up to eight at a time."""
    target, drafter, _ = make("eagle3")
    calls: list[int] = []
    real = drafter.network.run

    def counting(module: int, features: Any, ids: Any, context: Any) -> Any:
        calls.append(len(ids))
        return real(module, features, ids, context)

    monkeypatch.setattr(drafter.network, "run", counting)
    sequences = [sequence_of(key, prompt) for key, prompt in enumerate(PROMPTS)]
    for key, prompt in enumerate(PROMPTS[1:], start=1):
        observe(drafter, key, rows_of(target, drafter, prompt))
    proposals = drafter.propose(sequences)
    assert calls == [4 + 10]
    assert chain(5, proposals[0], 4).size == 1  # a prompt of one token
    for grow, most in (
        (lambda p: chain(2, p, 8), 4),  # depths 2..5; the root's children are there from the start
        (lambda p: dynamic(2, p, 30, 6), 8),  # the second tree may ask for a few others
        (lambda p: best_first(2, p, 24), 12),
    ):
        proposals = drafter.propose(sequences)
        calls.clear()
        trees = [grow(proposal) for proposal in proposals[1:]]
        together, rows = len(calls), sum(calls)
        assert 4 <= together <= most and rows >= 8
        alone = []
        for n, s in enumerate(sequences[1:]):
            calls.clear()
            alone.append(grow(drafter.propose([s])[0]))
            assert len(calls) <= together, n
        for one, other in zip(trees, alone, strict=True):
            assert (one.tokens, one.parents) == (other.tokens, other.parents)


def test_nan_weights_are_reported() -> None:
    """Guards against a damaged head that drafts nonsense without a word."""
    target = target_of("llama")
    head = random_mtp(target)
    head.weights["layers.0.eh_proj.weight"][0, 0] = float("nan")
    drafter = drafter_of(head, target)
    observe(drafter, 1, torch.ones(1, 64, dtype=torch.float64))
    with pytest.raises(HeadError, match="NaN"):
        drafter.propose([sequence_of(1, [3, 4])])


def test_heads_of_other_targets_are_refused() -> None:
    """Guards the border: width, vocabulary, tokenizer, family and taps must be the target's."""
    target = target_of("llama")
    wider = tiny_target(torch.float64, vocab_size=VOCAB, hidden_size=32)
    other = tiny_target(torch.float64, vocab_size=VOCAB + 1)
    for head in (random_eagle3(target), random_mtp(target)):
        for wrong, what in ((wider, "hidden size"), (other, "vocabulary")):
            with pytest.raises(HeadError, match=what):
                drafter_of(head, wrong)
        head.manifest["target"] = {"tokenizer_hash": "another"}
        with pytest.raises(HeadError, match="tokenizer"):
            drafter_of(head, target)
    with pytest.raises(HeadError, match="qwen2 layers"):
        drafter_of(random_mtp(target_of("qwen2")), target)
    with pytest.raises(HeadError, match="last layer of the target is not allowed"):
        drafter_of(random_eagle3(target, taps=(1, 2, 4)), target)
