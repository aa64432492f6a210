"""Heads that draft depth by depth, in training: what is unrolled is what will be drafted, nothing sees what
it has to predict, and the loss counts supervised tokens only.

Comparisons are in float32 unless said: sums in another order move a log-prob of order one by about 1e-5, a
wrong row, mask or position by 0.1 and more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.draft.eagle3_format import Eagle3Head, load_eagle3
from jetspec.draft.mtp_format import MTPHead, load_mtp
from jetspec.errors import OptionError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.train.data import Batch, Corpus, Entry, batches_at, make_batch
from jetspec.train.eagle3 import Eagle3Method, Eagle3Module, initialise_eagle3
from jetspec.train.eagle3_family import Eagle3Options
from jetspec.train.families import find_family
from jetspec.train.loop import LoopOptions, Report, train
from jetspec.train.loss import reference_loss
from jetspec.train.mtp import MTPMethod, MTPModule, initialise_mtp
from jetspec.train.mtp_family import MTPOptions
from jetspec.train.sequential import SequentialMethod
from jetspec.train.weighting import LossOptions
from jetspec.tree import chain
from tests.draft.sequential_tiny import drafter_of, random_eagle3, random_mtp
from tests.draft.tiny import TAPS, VOCAB, MemoryCorpus, tiny_answers, tiny_target

CLOSE = 2e-4
LENGTHS = (9, 17, 6)
ANCHORS = torch.tensor([[1, 3, 7], [4, 15, 11], [0, 1, 4]])
DEPTH = 4
PART = torch.arange(0, VOCAB, 2)
TARGETS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"model_type": "qwen2"},
    "qwen3": {"model_type": "qwen3"},
    "window": {"model_type": "mistral", "sliding_window": 2},
    "moe": {
        "model_type": "qwen3_moe",
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "norm_topk_prob": True,
    },
}
HEADS: dict[str, tuple[str, Callable[[Target], Eagle3Head | MTPHead]]] = {
    "eagle3": ("llama", lambda t: random_eagle3(t, vocab=PART)),
    "mtp": ("qwen3", lambda t: random_mtp(t)),
    "mtp-hidden-first": ("qwen2", lambda t: random_mtp(t, order="hidden_first")),
    "mtp-window": ("window", lambda t: random_mtp(t)),
    "mtp-moe": ("moe", lambda t: random_mtp(t)),
    "mtp-three": ("llama", lambda t: random_mtp(t, modules=3, vocab=PART)),
}


def target_of(name: str) -> Target:
    """A tiny target of a kind."""
    return tiny_target(**TARGETS[name])


def method_of(
    head: Eagle3Head | MTPHead, target: Target, loss: LossOptions | None = None, steps: int = DEPTH
) -> SequentialMethod:
    """The training form of a head."""
    embedding, loss = target.transformer.embedding.float(), loss or LossOptions()
    method: SequentialMethod
    if isinstance(head, Eagle3Head):
        method = Eagle3Method(Eagle3Module(head.config, embedding), target, head.vocab, loss, steps)
    else:
        vocab = head.vocab if head.vocab is not None else torch.arange(VOCAB)
        method = MTPMethod(MTPModule(head.config, embedding), target, vocab, loss, steps)
    with torch.no_grad():
        for name in method.module.names:
            method.module.weight(name).copy_(head.weights[name])
    return method


def corpus(lengths: tuple[int, ...] = LENGTHS) -> MemoryCorpus:
    """Three answers of different lengths."""
    return MemoryCorpus(lengths, len(TAPS), 64)


def batch_of(
    source: MemoryCorpus, anchors: Tensor = ANCHORS, weights: Tensor | None = None, temperature: float = 0.0
) -> Batch:
    """All answers of a corpus with the given anchors."""
    entries = [Entry(Path("memory"), n, len(ids), 1, temperature) for n, ids in enumerate(source.ids)]
    weights = torch.ones(DEPTH) if weights is None else weights
    return make_batch(source, entries, anchors, weights)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", HEADS)
def test_training_and_decoding_compute_the_same(name: str) -> None:
    """Guards the point of the training-time test: every step of the unrolled head is the draft step along
    that path, with its features, positions, masks and module."""
    target = target_of(HEADS[name][0])
    head = HEADS[name][1](target)
    method, source = method_of(head, target), corpus()
    batch = batch_of(source)
    states = method.module(batch)
    logps = (states @ method.own_output.T).log_softmax(-1).detach()  # [n, A, D, Vd]
    drafter = drafter_of(head, target)
    drafter.candidates = VOCAB
    rows = source.states if drafter.needs_hidden else source.features
    checked = 0
    for n, ids in enumerate(source.ids):
        for column, anchor in enumerate(ANCHORS[n].tolist()):
            if anchor == 0:
                continue
            tokens = ids.tolist()
            part = rows[n][:anchor]
            drafter.observe(checked, *((None, part) if drafter.needs_hidden else (part, None)))
            sequence = Sequence(checked, tokens[: anchor + 1], Sampling(), Limits(), lambda ids: "")
            (proposal,) = drafter.propose([sequence])
            state = proposal.root_state
            for depth in range(min(DEPTH, len(tokens) - 1 - anchor)):
                children = proposal.expand([state])[0]
                found = dict(zip(children.tokens, children.logps, strict=True))
                own = logps[n, column, depth]
                assert len(found) == len(own)
                wanted = torch.tensor([found[token] for token in drafter.network.vocab.tolist()])
                # Drafting reads an MTP head's output matrix in half precision, see `in_half`.
                assert (own - wanted).abs().max() < (10 if name.startswith("mtp") else 1) * CLOSE, (n, anchor)
                checked += 1
                following = tokens[anchor + 1 + depth]
                if following not in found:  # outside the draft vocabulary: no such child
                    break
                state = children.states[children.tokens.index(following)]
            drafter.free(sequence.id)
    assert checked > 10


@pytest.mark.parametrize("name", ["eagle3", "mtp", "mtp-three"])
def test_no_step_sees_what_it_predicts(name: str) -> None:
    """Guards against a leak: features from the root's on and tokens from the predicted one on do not reach a
    step; what may be seen (the newest feature, the parent token) does."""
    target = target_of(HEADS[name][0])
    method = method_of(HEADS[name][1](target), target)
    before = method.module(batch_of(corpus())).detach()
    for n, column in ((0, 1), (1, 2), (2, 2)):
        anchor = int(ANCHORS[n, column])
        for depth in range(DEPTH):
            changed = corpus()
            changed.features[n][anchor:] += 5.0
            changed.states[n][anchor:] += 5.0
            changed.ids[n][anchor + 1 + depth :] = 3
            after = method.module(batch_of(changed)).detach()[n, column]
            assert torch.equal(after[: depth + 1], before[n, column, : depth + 1]), (n, depth)
        changed = corpus()
        changed.features[n][anchor - 1] *= -1.0
        changed.states[n][anchor - 1] *= -1.0
        after = method.module(batch_of(changed)).detach()[n, column]
        assert bool(((after - before[n, column]).abs().amax(-1) > 0.01).all())
        changed = corpus()
        changed.ids[n][anchor + 1] = (changed.ids[n][anchor + 1] + 1) % VOCAB
        after = method.module(batch_of(changed)).detach()[n, column]
        moved = ((after - before[n, column]).abs().amax(-1) > 0.01).tolist()
        assert moved[:2] == [False, True]


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_the_loss_is_the_mean_over_supervised_tokens(name: str) -> None:
    """Guards scale and mask: whatever the padding, the number of parts and the number of tokens outside the
    vocabulary, the loss is a mean over supervised tokens, and its gradients are finite and reach every
    tensor."""
    target = target_of(HEADS[name][0])
    head = random_eagle3(target, vocab=PART) if name == "eagle3" else random_mtp(target, vocab=PART)
    method = method_of(head, target)
    weights = method.weights
    source = corpus()
    whole = batch_of(source, weights=weights)
    parts = []
    for n in range(3):  # each answer alone, without the others' padding
        alone = MemoryCorpus([1], 1, 1)
        alone.ids, alone.features, alone.states = (
            [x[n]] for x in (source.ids, source.features, source.states)
        )
        entry = Entry(Path("memory"), 0, len(source.ids[n]), 1, 0.0)
        parts.append(make_batch(alone, [entry], ANCHORS[n : n + 1], weights))  # type: ignore[arg-type]
        parts[-1] = replace(parts[-1], entries=(replace(entry, start=n),))
    results = []
    for batches in ([whole], parts):
        method.module.zero_grad()
        total = float(sum(batch.weight.sum() for batch in batches))
        sums = method.accumulate(batches, total)
        grads = {n: method.module.weight(n).grad.clone() for n in method.module.names}  # type: ignore[union-attr]
        results.append((sums, grads))
    (together, grads), (apart, others) = results
    assert abs(together.loss - apart.loss) < 1e-4 * abs(together.loss)
    assert torch.allclose(together.per_depth, apart.per_depth, rtol=1e-3)
    for tensor, grad in grads.items():
        assert bool(grad.isfinite().all()) and float(grad.abs().max()) > 0, tensor
        assert torch.allclose(grad, others[tensor], rtol=1e-2, atol=1e-5), tensor
    inside = (whole.labels % 2 == 0) & (whole.anchors > 0).unsqueeze(-1)  # greedy: the choice is the label
    weight = whole.weight * inside
    assert 0 < int((weight > 0).sum()) < int((whole.weight > 0).sum())
    states = method.module(whole).flatten(0, 2)
    expected = reference_loss(
        [(states, method.own_output)],
        whole.teacher,
        method.output,
        whole.teacher_row.flatten(),
        weight.flatten(),
        method.loss,
    )
    assert abs(float(expected.loss.detach()) - together.loss) < 1e-4 * abs(together.loss)
    assert together.per_depth[2].sum() == int((weight > 0).sum())


def test_the_choice_of_a_sampled_answer_is_the_target_s() -> None:
    """Guards the mask of answers sampled at a temperature: what counts is the target's most probable token at
    that place, not the one that was written."""
    target = target_of("llama")
    method = method_of(random_eagle3(target, vocab=PART), target)
    batch = batch_of(corpus(), temperature=0.7)
    chosen = (batch.teacher @ target.transformer.output_matrix.T).argmax(-1)[batch.teacher_row]
    present = batch.weight > 0
    expected = (chosen % 2 == 0) & (batch.anchors > 0).unsqueeze(-1)
    assert torch.equal(method.supervised(batch) & present, expected & present)
    assert not torch.equal(expected & present, (batch.labels % 2 == 0) & present)


def test_cross_entropy_and_expected_length_train_too() -> None:
    """Guards the other losses of a recipe: labels are places in the draft vocabulary, and weights that follow
    the head leave masked tokens masked."""
    target = target_of("llama")
    head = random_eagle3(target, vocab=PART)
    batch = batch_of(corpus())
    for loss in (LossOptions(kl=0.0, ce=1.0), LossOptions(weighting="expected-length")):
        method = method_of(head, target, loss)
        sums = method.accumulate([batch], float(batch.weight.sum()))
        masked = int((batch.weight * method.supervised(batch) > 0).sum())
        assert sums.loss > 0 and int(sums.per_depth[2].sum()) == masked


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Corpus]:
    """A target with twelve short greedy answers."""
    torch.set_num_threads(1)
    target = tiny_target()
    return target, tiny_answers(target, tmp_path_factory.mktemp("answers"))


OPTIONS = LoopOptions(steps=6, answers=4, anchors=4, part=3, checkpoint_minutes=0.0, validate_minutes=1e6)
SHAPES = {
    "eagle3": Eagle3Options(taps=(0, 2), vocab=60, steps=3, depth=4, warm=False),
    "mtp": MTPOptions(vocab=60, steps=3, depth=4, warm=False),
}


def new_method(name: str, target: Target, answers: Corpus, seed: int = 0) -> tuple[Any, Corpus]:
    """An untrained head by way of its family."""
    family = find_family(name)
    taps = family.taps(target, SHAPES[name])
    assert taps is not None
    chosen = answers.with_taps(taps)
    return family.build(target, chosen, SHAPES[name], family.loss, seed), chosen


@pytest.mark.parametrize("name", SHAPES)
def test_training_resumes_exactly_learns_and_saves(
    name: str, answered: tuple[Target, Corpus], tmp_path: Path
) -> None:
    """Guards the whole way: a killed run ends with the weights of one that was not, the loss goes down, and
    the folder that is left drafts as the head in training does."""
    target, answers = answered
    losses: list[float] = []

    def watch(report: Report) -> None:
        if report.by_depth:
            losses.append(report.loss)

    def kill(report: Report) -> None:
        if report.step == 4 and report.by_depth:
            raise KeyboardInterrupt

    method, chosen = new_method(name, target, answers)
    train(method, chosen, tmp_path / "whole", OPTIONS, {}, watch)
    again, _ = new_method(name, target, answers)
    with pytest.raises(KeyboardInterrupt):
        train(again, chosen, tmp_path / "killed", OPTIONS, {}, kill)
    resumed, _ = new_method(name, target, answers, seed=9)
    folder = train(resumed, chosen, tmp_path / "killed", OPTIONS, {})
    for tensor in method.module.names:
        assert torch.equal(method.module.weight(tensor), resumed.module.weight(tensor)), tensor
    head = load_eagle3(folder) if name == "eagle3" else load_mtp(folder)
    assert head.manifest["steps"] == 6
    validation = method.validation(chosen, chosen.held_out, [("chain", chain, 4)])
    assert validation.tau["chain-4"] >= 1.0
    assert len(drafter_of(head, target).network.vocab) == 60
    batch = next(batches_at(chosen, 0, seed=5, answers=4, anchors=8, weights=method.weights, part=4))
    optimiser = torch.optim.Adam(method.module.parameters(), lr=3e-3)
    curve = []
    for _ in range(25):
        optimiser.zero_grad()
        curve.append(method.accumulate([batch], float(batch.weight.sum())).loss)
        optimiser.step()
    assert curve[-1] < 0.5 * curve[0]
    assert len(losses) == 6 and all(torch.isfinite(torch.tensor(losses)))


def test_warm_starts(answered: tuple[Target, Corpus]) -> None:
    """Guards the names and halves of a warm start: EAGLE-3's layer works like the target's last one on the
    side of the projections that reads the feature; an MTP module passes the state on, on whichever side it is
    read."""
    target, _ = answered
    dice = torch.Generator().manual_seed(1)
    config = random_eagle3(target).config
    shapes = random_mtp(target).config.shapes()
    mlp = [f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")]
    names = ["input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.o_proj.weight", *mlp]
    projections = [f"self_attn.{part}_proj.weight" for part in "qkv"]
    weights = {
        f"model.layers.4.{name}": torch.randn(shapes[f"layers.0.{name}"], generator=dice)
        for name in (*names, *projections)
    }
    weights["model.norm.weight"] = torch.rand(64, generator=dice) + 0.5
    embedding, rows = target.transformer.embedding, target.transformer.output_matrix
    eagle = Eagle3Module(config, embedding)
    initialise_eagle3(eagle, rows, weights, target_layers=5)
    for name in names:
        own = "hidden_norm.weight" if name == "input_layernorm.weight" else name
        assert torch.equal(eagle.weight(f"midlayer.{own}"), weights[f"model.layers.4.{name}"]), name
    for name in projections:
        weight = eagle.weight(f"midlayer.{name}").detach()
        assert torch.equal(weight[:, 64:], weights[f"model.layers.4.{name}"])
        assert 0.015 < float(weight[:, :64].std()) < 0.025
    assert torch.equal(eagle.weight("lm_head.weight"), rows)
    for order, state in (("embedding_first", slice(64, 128)), ("hidden_first", slice(0, 64))):
        module = MTPModule(random_mtp(target, order=order).config, embedding)
        initialise_mtp(module)
        halves = module.weight("layers.0.eh_proj.weight").detach()
        assert float((halves[:, state] - torch.eye(64)).abs().max()) < 0.12
        assert float(halves.square().sum()) < 64 + 2 * 64 * 64 * 0.02**2 * 2


def test_options_that_make_no_sense_are_refused() -> None:
    """Guards the hours of a run: modules that no step would train, taps that the target does not have."""
    with pytest.raises(OptionError, match="modules must be at most 2"):
        MTPOptions(modules=3, steps=2)
    with pytest.raises(OptionError, match="order 'both' is unknown"):
        MTPOptions(order="both")
    with pytest.raises(OptionError, match="steps must be"):
        Eagle3Options(steps=0)
    target = target_of("llama")
    with pytest.raises(OptionError, match="strictly increasing layers from 0 to 3"):
        find_family("eagle3").check(target, Eagle3Options(taps=(1, 4)))
