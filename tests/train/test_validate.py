"""Validation tau is the tau of decoding, not an estimate of it."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.decode.engine import Engine
from jetspec.draft.jetspec import BlockDrafter
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.train import block as block_module
from jetspec.train.block import BlockMethod
from jetspec.train.data import Corpus, Entry
from jetspec.train.loop import LoopOptions, train
from jetspec.train.model import HeadModule, initialise
from jetspec.train.validate import SETTINGS, unigram_coverage, validate_drafter
from jetspec.train.weighting import LossOptions
from jetspec.tree import Proposal
from tests.draft.tiny import PLAIN_PARTS, random_head, tiny_answers, tiny_target

OPTIONS = LoopOptions(
    steps=60, answers=6, anchors=6, part=3, learning_rate=3e-3, checkpoint_minutes=1e6, validate_minutes=1e6
)


class Rounded:
    """A drafter whose taps are rounded to float16 first, as they are in the shards that validation reads."""

    needs_hidden = False

    def __init__(self, inner: BlockDrafter) -> None:
        self.inner, self.name, self.taps = inner, inner.name, inner.taps

    def observe(self, key: int, taps: Tensor | None, hidden: Tensor | None) -> None:
        """Pass rounded taps on."""
        assert taps is not None
        self.inner.observe(key, taps.half().float(), None)

    def propose(self, sequences: Many[Sequence]) -> list[Proposal]:
        """What the head proposes."""
        return self.inner.propose(sequences)

    def free(self, key: int) -> None:
        """Forget a sequence."""
        self.inner.free(key)


def decoded_tau(
    target: Target, drafter: Any, corpus: Corpus, entries: list[Entry], grow: str, budget: int
) -> float:
    """tau of really decoding the prompts up to the length of the recorded answers.

    The engine may go on behind that length, so that its trees are not cut there; the last round counts the
    tokens that lie inside."""
    engine = Engine(target, drafter, budget=budget, grow=grow)
    wanted: dict[int, list[int]] = {}
    sequences = []
    for entry in entries:
        tokens = corpus.tokens(entry).tolist()
        sequence = engine.add(tokens[: entry.prompt_len], None, Limits(max_tokens=entry.length + 20))
        sequences.append(sequence)
        wanted[sequence.id] = tokens[entry.prompt_len :]
    done = dict.fromkeys(wanted, 0)
    rounds = 0
    while engine.busy and any(done[key] < len(wanted[key]) for key in wanted):
        for outcome in engine.step():
            key = outcome.sequence.id
            if done[key] < len(wanted[key]):
                done[key] += min(len(outcome.path), len(wanted[key]) - done[key])
                rounds += 1
                assert outcome.sequence.emitted[: done[key]] == wanted[key][: done[key]]
    for sequence in sequences:
        engine.abort(sequence)
    return sum(done.values()) / rounds


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"causal": False, "scorer": "rnn"},
        PLAIN_PARTS,
        {"alignment": "shifted", "causal": False, "scorer": "vanilla", "confidence": True},
    ],
    ids=["causal", "bidirectional-recurrent", "plain", "shifted"],
)
def test_validation_tau_is_the_tau_of_decoding(parts: dict[str, Any], tmp_path: Path) -> None:
    """Guards the number that choices are made by: on held-out prompts at temperature 0 it equals the tau of
    the engine with the same head, for every builder and budget, down to the last round."""
    target = tiny_target()
    corpus = tiny_answers(target, tmp_path / "answers", prompts=16, tokens=40)
    module = HeadModule(random_head(target, block_size=6, **parts).config, target.transformer.embedding)
    initialise(module)
    method = BlockMethod(module, target, corpus.frequent_ids(80, 200), LossOptions())
    train(method, corpus, tmp_path / "run", OPTIONS, {})
    entries = corpus.held_out + corpus.training[:2]
    found = method.validation(corpus, entries, SETTINGS)
    plain = validate_drafter(method.drafter(), corpus, entries, SETTINGS, depth=module.config.depth)
    assert plain == found
    drafter = Rounded(method.drafter())
    for name, _, budget in SETTINGS:
        drafted = min(budget, module.config.depth) if name == "chain" else budget  # a chain's real depth
        assert found.tau[f"{name}-{drafted}"] == pytest.approx(
            decoded_tau(target, drafter, corpus, entries, name, budget), rel=1e-12
        )
    taus = [found.tau[f"best-first-{n}"] for n in (4, 8, 16, 32)]
    assert taus[0] > 1.1 and taus[3] > taus[0], "a head that is never right proves little"
    assert 1.0 >= found.survival[0] >= found.survival[-1] >= 0.0
    assert 1 + sum(found.survival) == pytest.approx(taus[3])


@pytest.mark.parametrize("bound", [1, 3 * 5 * 80])
def test_validation_holds_few_logits(bound: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: the logits of all roots of an answer, tens of gigabytes for a large vocabulary, were
    made at once. In slices of roots they give the same numbers."""
    target = tiny_target()
    corpus = tiny_answers(target, tmp_path / "answers", prompts=6, tokens=12)
    module = HeadModule(random_head(target, block_size=6).config, target.transformer.embedding)
    initialise(module)
    method = BlockMethod(module, target, corpus.frequent_ids(80, 200), LossOptions())
    whole = method.validation(corpus, corpus.training[:3], SETTINGS)
    monkeypatch.setattr(block_module, "_VALIDATION_LOGITS", bound)
    sizes: list[int] = []
    module.register_forward_hook(lambda module, given, states: sizes.append(states.shape[:3].numel()))
    assert method.validation(corpus, corpus.training[:3], SETTINGS) == whole
    assert len(sizes) > 3 and max(sizes) * 80 <= max(bound, 5 * 80)


def test_coverage_counts_answers_only(tmp_path: Path) -> None:
    """Guards the share that the manifest states: all ids cover all, and half of the count covers half."""
    corpus = tiny_answers(tiny_target(), tmp_path, tokens=6)
    assert unigram_coverage(corpus, torch.arange(200)) == 1.0
    entry = replace(corpus.training[0])
    corpus.training = [entry]
    answer = corpus.tokens(entry)[entry.prompt_len :]
    some = answer[:2].unique()
    expected = float(torch.isin(answer, some).float().mean())
    assert unigram_coverage(corpus, some) == pytest.approx(expected)
