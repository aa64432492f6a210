"""Drafting with the target's own noise: it may change what is drafted, never what is emitted.

Texts are compared in float64, so that two ways of adding up cannot swap two tokens (odds below 1e-9)."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from jetspec.decode.engine import Engine
from jetspec.draft import path_scorer
from jetspec.draft.base import Drafter
from jetspec.draft.checkpoint import Head, save_head
from jetspec.draft.jetspec import BlockDrafter, make_scorer
from jetspec.draft.loading import load_drafter
from jetspec.draft.path_scorer import Marginals
from jetspec.draft.sampled import SampledDrafter
from jetspec.draft.shared_noise import NoiseWeights, SharedNoise, request_terms
from jetspec.errors import HeadError
from jetspec.noise import gumbel_noise
from jetspec.sampling import History, Sampling, pick_tokens, process_logits
from jetspec.sequence import Limits, Sequence
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.tree.proposal import Proposal
from tests.draft.sequential_tiny import drafter_of, random_eagle3, random_mtp
from tests.draft.tiny import random_head, tiny_target

VOCAB = 24  # small, so that a random head is right often enough to be accepted at several depths
PROMPTS = ([5], [7, 3, 11, 20, 2], [9, 9, 2, 3, 14, 8, 1, 20, 20, 5, 6])
LENGTH = 9
PENALTIES: dict[str, Any] = {
    "repetition_penalty": 1.3,
    "presence_penalty": 0.4,
    "frequency_penalty": 0.3,
    "logit_bias": {4: 2.0, 20: -1e9},
}
SAMPLINGS = {
    "greedy": Sampling(),
    "T1": Sampling(temperature=1.0, seed=2**63 + 9),
    "T0.6-filters": Sampling(temperature=0.6, top_k=8, top_p=0.9, min_p=0.02, seed=3),
    "T1.5-penalties": Sampling(temperature=1.5, seed=8, **PENALTIES),
}
PART = torch.tensor([0, 2, 3, 5, 6, 7, 8, 9, 11, 14, 15, 17, 20, 21, 22, 23])
HEADS: dict[str, dict[str, Any]] = {
    "gated": {},
    "gated-part": {"vocab": PART},
    "marginals": {"scorer": "none", "rank": 0},
    "recurrent": {"scorer": "rnn"},
    "dspark": {"scorer": "vanilla", "alignment": "shifted", "block_size": 4, "confidence": True},
}


@cache
def shared_target() -> Target:
    """One frozen float64 target whose texts never end by themselves."""
    target = tiny_target(torch.float64, vocab_size=VOCAB)
    target.tokenizer.eos_ids = frozenset()
    return target


@cache
def made(name: str) -> Drafter:
    """A drafter of a random head."""
    target = shared_target()
    if name == "eagle3":
        return drafter_of(random_eagle3(target, vocab=PART), target)
    if name == "mtp":
        return drafter_of(random_mtp(target), target)
    return BlockDrafter(random_head(target, **HEADS[name]), target)


@cache
def plain(prompt: tuple[int, ...], name: str) -> list[int]:
    """What budget 0 without a drafter emits, alone in its engine."""
    engine = Engine(shared_target(), budget=0)
    (sequence,) = engine.generate([prompt], SAMPLINGS[name], Limits(max_tokens=LENGTH, ignore_eos=True))
    return sequence.emitted


def request(
    tokens: list[int], sampling: Sampling, emitted: int = 0, key: int = 0, room: int = 64
) -> Sequence:
    """A sequence of which the last `emitted` tokens were emitted."""
    cut = len(tokens) - emitted
    s = Sequence(key, tokens[:cut], sampling, Limits(max_tokens=room), lambda ids: "")
    s.tokens.extend(tokens[cut:])
    return s


def children(proposal: Proposal, state: Any) -> dict[int, float]:
    """Token -> log-prob below a state, after a check of what builders rely on."""
    (found,) = proposal.expand([state])
    assert list(found.logps) == sorted(found.logps, reverse=True), "siblings are not sorted"
    assert all(logp <= 0.0 for logp in found.logps)
    assert sum(map(math.exp, found.logps)) <= 1.0 + 1e-5
    return dict(zip(found.tokens, found.logps, strict=True))


# --- the text


@pytest.mark.parametrize("grow", ["best-first", "chain"])
@pytest.mark.parametrize("name", [*HEADS, "eagle3", "mtp"])
def test_same_text_with_and_without(name: str, grow: str) -> None:
    """Guards the promise: for a seed the text is plain decoding's whatever the drafter saw, for every kind
    of head, budget and batch, for a tree and a chain, and for requests of different kinds side by side.

    With the noise in view some tree must differ from the one without, or the comparison is empty."""
    drafter: Any = made(name)
    cases = [(p, n) for n in SAMPLINGS for p in PROMPTS]
    wanted = [plain(tuple(prompt), n) for prompt, n in cases]
    rounds: dict[bool, list[int]] = {}
    for shared in (True, False):
        drafter.shared_noise = shared
        rounds[shared] = []
        for budget, batch in ((1, 12), (8, 1) if grow == "chain" else (8, 5)):
            engine = Engine(shared_target(), drafter, budget=budget, grow=grow, max_batch=batch)
            limits = Limits(max_tokens=LENGTH, ignore_eos=True)
            sequences = [engine.add(prompt, SAMPLINGS[n], limits) for prompt, n in cases]
            for _ in engine.run(sequences):
                pass
            assert [s.emitted for s in sequences] == wanted, (shared, budget, batch)
            rounds[shared].append(engine.stats.rounds)
    drafter.shared_noise = True
    assert rounds[True] != rounds[False], "the noise changed no tree"


def test_the_first_two_tokens_follow_the_law() -> None:
    """Guards the law itself, which equality with plain decoding does not: a toy target, 600 seeds, drafted
    with the noise in view, against the exact joint law of two tokens, cells of at least five expected pairs.

    Odds of a false alarm 1e-4 per case for new seeds; the seeds are fixed."""
    target, drafter = shared_target(), made("gated")
    for name, case in {
        "T1": {"temperature": 1.0},
        "filters": {"temperature": 0.8, "top_k": 9, "top_p": 0.9},
        "rest": {"temperature": 1.2, "min_p": 0.03, **PENALTIES},
    }.items():
        prompt, count = [7, 3, 11], 600
        engine = Engine(target, drafter, budget=6, max_batch=150)
        limits = Limits(max_tokens=3, ignore_eos=True)
        sequences = [engine.add(prompt, Sampling(**case, seed=7919 * n), limits) for n in range(count)]
        for _ in engine.run(sequences):
            pass
        seen = Counter((s.emitted[0], s.emitted[1]) for s in sequences)
        first = law(target, prompt, prompt, Sampling(**case))
        joint = {
            (a, b): float(first[a] * p)
            for a in range(VOCAB)
            if first[a] > 0
            for b, p in enumerate(law(target, [*prompt, a], prompt, Sampling(**case)).tolist())
        }
        assert all(joint.get(pair, 0.0) > 0.0 for pair in seen), f"{name}: a removed token was emitted"
        cells = [(p * count, seen[pair]) for pair, p in joint.items() if p * count >= 5]
        cells.append((count - sum(e for e, _ in cells), count - sum(n for _, n in cells)))
        assert cells[-1][0] >= 5 and len(cells) > 8
        statistic = sum((n - e) ** 2 / e for e, n in cells)
        half = torch.tensor([(len(cells) - 1) / 2, statistic / 2], dtype=torch.float64)
        odds = float(torch.special.gammaincc(half[0], half[1]))
        assert odds > 1e-4, (name, odds, len(cells))
        assert engine.stats.accepted > count / 4, "next to nothing was drafted right: this proves little"


def law(target: Target, tokens: list[int], prompt: list[int], sampling: Sampling) -> Tensor:
    """The law [V] of the next token."""
    cache_ = target.new_cache()
    cache_.add(0)
    logits = target.forward(chunk([(0, tokens)], cache_, logits=True), cache_).logits
    assert logits is not None
    scores = process_logits(logits[-1:], sampling, [History(tokens, len(prompt))])
    return scores[0].double().softmax(-1)


# --- the scores


@pytest.mark.parametrize("part", [False, True], ids=["all-ids", "draft-vocabulary"])
@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.3, seed=5),
        Sampling(temperature=1.0, seed=2**64 - 1),
        Sampling(temperature=2.0, seed=1, presence_penalty=1.1, frequency_penalty=0.7),
        Sampling(temperature=1.0, seed=4, logit_bias={3: 1.5, 5: -1e9, 10: 2.5}),
        Sampling(temperature=0.8, seed=4, repetition_penalty=1.7),
    ],
    ids=["T0.3", "T1", "T2-penalties", "bias", "repetition"],
)
def test_a_perfect_draft_knows_the_pick(sampling: Sampling, part: bool) -> None:
    """Guards noise of the wrong position, id, seed or scale, and wrong signs of what the request adds: with
    the target's own logits the first child of every depth is the token that the target will pick."""
    vocab, depth = (PART if part else torch.arange(VOCAB)), 5
    tokens = [3, 9, 9, 4, 17, 3, 21]
    s = request(tokens, sampling, emitted=4)
    for trial in range(20):
        logits = 3 * torch.randn(2, depth, VOCAB, generator=torch.Generator().manual_seed(trial))
        other = request([1, 2, 3], Sampling(temperature=1.0, seed=77), key=1)
        draws = SharedNoise(vocab, depth, VOCAB, NoiseWeights((30.0,), (30.0,))).draws([other, s])
        proposal = Marginals(vocab).proposals(torch.empty(2, depth, 1), logits[:, :, vocab], [0, 0], draws)[1]
        hidden = torch.full((depth, VOCAB), -math.inf)
        hidden[:, vocab] = logits[1, :, vocab]
        histories = [History(tokens, 3)] * depth
        picks = pick_tokens(hidden, [s.position + d for d in range(1, depth + 1)], sampling, histories)
        assert [next(iter(children(proposal, d))) for d in range(depth)] == picks


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_conditional_scores_equal_a_slow_reference(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards path scorers: below any parent the weighted logits and the noise of the child's own depth are
    added before the softmax. Differences of log-probs between siblings are compared, one by one, with those
    of the same proposal without noise."""
    monkeypatch.setattr(path_scorer, "CANDIDATES", VOCAB)
    depth, vocab = 4, torch.arange(VOCAB)
    head = random_head(shared_target(), scorer=kind)
    dice = torch.Generator().manual_seed(8)
    hidden, logits = torch.randn(2, depth, 64, generator=dice), torch.randn(2, depth, VOCAB, generator=dice)
    scorer = make_scorer(head, vocab, torch.float32, torch.device("cpu"))
    weights = NoiseWeights((1.2, 0.9), (0.8, 0.5, 0.4))
    s = request([3, 9, 17], Sampling(temperature=1.3, seed=11))
    greedy = request([3, 9, 5], Sampling(), key=1)
    draws = SharedNoise(vocab, depth, VOCAB, weights).draws([s, greedy])
    noisy, silent = scorer.proposals(hidden, logits, [17, 5], draws)
    bare, also_silent = scorer.proposals(hidden, logits, [17, 5])
    for _ in range(2):  # paths of first and of last children
        states = [(p, p.root_state) for p in (noisy, bare)]
        path: list[int] = []
        for level in range(depth):
            a, b = weights.at(level + 1)
            noise = gumbel_noise(11, torch.tensor([s.position + level + 1]), VOCAB)[0]
            with_noise, without = (children(p, state) for p, state in states)
            wanted = torch.tensor([a * without[v] + b * 1.3 * float(noise[v]) for v in range(VOCAB)])
            wanted = wanted.log_softmax(-1)
            assert with_noise == pytest.approx(dict(enumerate(wanted.tolist())), abs=1e-4)
            token = list(with_noise)[0 if _ == 0 else -1]
            path.append(token)
            states = [(p, _state_of(p, state, token)) for p, state in states]
    state_a, state_b = silent.root_state, also_silent.root_state
    for _ in range(depth):
        (one,), (two,) = silent.expand([state_a]), also_silent.expand([state_b])
        assert one.tokens == two.tokens and one.logps == two.logps, "a greedy request was changed"
        state_a, state_b = one.states[3], two.states[3]


def _state_of(proposal: Proposal, state: Any, token: int) -> Any:
    (found,) = proposal.expand([state])
    return found.states[list(found.tokens).index(token)]


@pytest.mark.parametrize("name", ["eagle3", "mtp"])
def test_heads_that_draft_depth_by_depth(name: str) -> None:
    """Guards the depth whose noise a node's children get, and greedy requests in the same batch: log-probs
    differ from those without noise by the weighted noise of the children's position."""
    target, drafter = shared_target(), made(name)
    sampling = Sampling(temperature=1.0, seed=6)
    found: list[list[list[dict[int, float]]]] = []
    for shared in (True, False):
        drafter.shared_noise = shared  # type: ignore[attr-defined]
        sequences = [request([7, 3, 11, 20], way, key=n) for n, way in enumerate((sampling, Sampling()))]
        cache_ = target.new_cache()
        for s in sequences:
            cache_.add(s.id)
            plan = chunk([(s.id, s.tokens[:-1])], cache_)
            out = target.forward(plan, cache_, drafter.taps, drafter.needs_hidden)
            drafter.observe(s.id, out.taps, out.hidden)
        proposals = drafter.propose(sequences)
        found.append([])
        for proposal in proposals:
            state, levels = proposal.root_state, []
            for token in (8, 20, 3):
                levels.append(children(proposal, state))
                state = _state_of(proposal, state, token)
            found[-1].append(levels)
        for s in sequences:
            drafter.free(s.id)
    drafter.shared_noise = True  # type: ignore[attr-defined]
    (noisy, silent), (bare, also_silent) = found
    assert silent == also_silent
    for level, (one, two) in enumerate(zip(noisy, bare, strict=True)):
        ids = torch.tensor(sorted(two))
        noise = gumbel_noise(6, torch.tensor([3 + level + 1]), ids)[0]
        wanted = (torch.tensor([two[v] for v in ids.tolist()]) + 0.75 * noise).log_softmax(-1)
        assert one == pytest.approx(dict(zip(ids.tolist(), wanted.tolist(), strict=True)), abs=1e-4)


def test_stated_chances_are_the_chances() -> None:
    """Guards the form of the scores: targets are made from a draft as the module's docstring says (positive
    stable variables of index 0.6), and the first child is right as often as it says, far more often than
    without the noise.

    The weights are those of maximum likelihood for this model. 6,000 draws, so the rate deviates by 0.0065
    at most; the approximation itself is off by 0.02."""
    count, size, c = 6000, 60, 0.6
    dice = torch.Generator().manual_seed(1)
    draft = 2 * torch.randn(count, size, generator=dice)
    u = math.pi * torch.rand(count, size, generator=dice, dtype=torch.float64)
    e = -torch.rand(count, size, generator=dice, dtype=torch.float64).log()
    log_s = (c * u).sin().log() - u.sin().log() / c + (1 - c) / c * (((1 - c) * u).sin() / e).log()
    target = draft / c + log_s  # log_s: Kanter's formula
    noise = gumbel_noise(3, torch.arange(count), size)
    drawn = (target + noise).argmax(-1)
    stated = (1.11 * draft + 0.68 * noise).softmax(-1).max(-1)
    hits = float((stated.indices == drawn).float().mean())
    assert hits == pytest.approx(float(stated.values.mean()), abs=0.03)
    blind = draft.softmax(-1).max(-1)
    blind_hits = float((blind.indices == drawn).float().mean())
    assert blind_hits == pytest.approx(float(blind.values.mean()), abs=0.03), "the model is not calibrated"
    assert hits > blind_hits + 0.1


def test_terms_are_those_of_the_sampler() -> None:
    """Guards a second opinion on bias and penalties: they equal what `process_logits` adds."""
    sampling = Sampling(presence_penalty=0.7, frequency_penalty=-0.3, logit_bias={9: 1.5, 4: -2.0})
    s = request([9, 4, 4, 9, 9, 17], sampling, emitted=4)
    zero = torch.zeros(1, VOCAB)
    scores = process_logits(zero, sampling, [History(s.tokens, s.prompt_len)])[0]
    terms = request_terms(s)
    assert [terms.get(v, 0.0) for v in range(VOCAB)] == pytest.approx(scores.tolist(), abs=1e-6)


# --- switches


def test_weights_come_from_the_manifest() -> None:
    """Guards the place where a fit overrides the defaults, per depth, the last value for deeper ones."""
    head = random_head(shared_target())
    manifest = {"shared_noise": {"logits": [1.1], "noise": [0.9, 0.5]}}
    drafter = BlockDrafter(Head(head.config, head.weights, None, manifest), shared_target())
    draws = drafter.noise.draws([request([3, 4], Sampling(temperature=2.0, seed=1))])
    assert draws is not None
    noise = gumbel_noise(1, torch.arange(2, 6), VOCAB)
    b = torch.tensor([[0.9], [0.5], [0.5], [0.5]])
    torch.testing.assert_close(draws.added[0], b * 2 * noise)
    assert draws.scale is not None and draws.scale.flatten().tolist() == pytest.approx([1.1] * 4)
    assert drafter.noise.draws([request([3, 4], Sampling())]) is None


@pytest.mark.parametrize(
    "stored",
    [
        3,
        {"logits": [1.0]},
        {"logits": [], "noise": [1.0]},
        {"logits": [0.0], "noise": [1.0]},
        {"logits": [1.0], "noise": [-1.0]},
        {"logits": [1.0], "noise": ["1"]},
        {"logits": [1.0], "noise": [math.nan]},
        {"logits": 1.0, "noise": [1.0]},
    ],
)
def test_malformed_weights_are_refused(stored: Any) -> None:
    """Guards damaged manifests: one line that names the entry."""
    with pytest.raises(HeadError, match=r"shared_noise.* valid: "):
        NoiseWeights.of({"shared_noise": stored})


def test_it_can_be_switched_off(tmp_path: Path) -> None:
    """Guards the option's way from a loader to the drafter: without it, no draws are looked at."""
    save_head(tmp_path / "head", random_head(shared_target()), None)
    for shared in (True, False):
        drafter: Any = load_drafter(str(tmp_path / "head"), shared_target(), shared_noise=shared)
        assert drafter.shared_noise is shared
        proposals = [
            drafter.propose([request([5], Sampling(temperature=1.0, seed=seed))])[0] for seed in (1, 2)
        ]
        laws = [children(p, p.root_state) for p in proposals]
        assert (laws[0] == laws[1]) is not shared


@pytest.mark.parametrize("name", ["gated", "mtp"])
def test_rejection_sampling_keeps_the_heads_own_law(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the published rule, whose coins know nothing of this noise: what its chains are sampled from is
    the head's own law. The drafter's setting is the user's, for the other threads that draft with it: the
    rule switched it off for the time of its call, for all of them, and two at once for ever."""
    target = shared_target()
    drafter: Any = made(name)
    s = request([5, 3], Sampling(temperature=1.0, seed=2))
    cache_ = target.new_cache()
    cache_.add(s.id)
    out = target.forward(chunk([(s.id, s.tokens[:-1])], cache_), cache_, drafter.taps, drafter.needs_hidden)
    drafter.observe(s.id, out.taps, out.hidden)
    settings, propose = list[bool](), drafter.propose

    def watched(*given: Any, **named: Any) -> list[Proposal]:
        settings.append(drafter.shared_noise)
        return propose(*given, **named)  # type: ignore[no-any-return]

    monkeypatch.setattr(drafter, "propose", watched)
    sampled = SampledDrafter(drafter, 2)
    sampled.propose([s])
    assert settings == [True]
    ids, chances = sampled._laws[s.id][0]
    monkeypatch.setattr(drafter, "shared_noise", False)
    (own,) = drafter.propose([s])
    bare = children(own, own.root_state)
    wanted = torch.tensor([bare[v] for v in ids], dtype=torch.float64).softmax(-1)
    torch.testing.assert_close(chances, wanted)
    drafter.free(s.id)
