from __future__ import annotations

import pytest
import torch

from jetspec.budget.fixed import FixedBudget
from jetspec.decode.engine import Engine
from jetspec.draft.sampled import SampledDrafter
from jetspec.draft.stubs import Decoy, Off, Random
from jetspec.sampling import History, Sampling, process_logits
from jetspec.sequence import Limits
from jetspec.target.plan import chunk
from tests.decode.tiny import PROMPTS, VOCAB, plain, shared_target, tiny_target


def engine(drafter: SampledDrafter, budget: int = 4, max_batch: int = 64) -> Engine:
    """An engine that verifies by rejection sampling."""
    made = Engine(drafter_target, drafter, budget=budget, grow="chain", max_batch=max_batch)
    made.walker = drafter.walk
    return made


drafter_target = shared_target()


def test_greedy_requests_get_plain_decodings_text() -> None:
    """Guards temperature 0, where the walk is used: the text is that of plain decoding, token by token."""
    drafter = SampledDrafter(Decoy(drafter_target, depth=4, width=3), 4)
    for sequence, prompt in zip(
        engine(drafter).generate(PROMPTS, Sampling(), Limits(max_tokens=14)), PROMPTS, strict=True
    ):
        assert tuple(sequence.emitted) == plain(tuple(prompt), "greedy")


def test_text_depends_on_the_seed_alone() -> None:
    """Guards reproducibility: the same seed gives the same text in a batch, alone, and again; another seed
    another text."""

    def texts(prompts: list[list[int]], seed: int) -> list[list[int]]:
        drafter = SampledDrafter(Random(seed=1, vocab=VOCAB), 3)
        sampling = Sampling(temperature=1.0, seed=seed)
        return [s.emitted for s in engine(drafter).generate(prompts, sampling, Limits(max_tokens=10))]

    prompts = [list(prompt) for prompt in PROMPTS]
    together = texts(prompts, 5)
    assert together == texts(prompts, 5) == [texts([prompt], 5)[0] for prompt in prompts]
    assert together != texts(prompts, 6)


def test_accepts_what_the_target_would_say() -> None:
    """Guards against a rule that always rejects: a drafter whose children are the target's favourites is
    accepted often, random ones seldom, and limits hold in both cases."""
    taus = []
    for inner in (Decoy(drafter_target, depth=4, width=12, place=0), Random(seed=1, vocab=VOCAB, depth=4)):
        made = engine(SampledDrafter(inner, 4))
        for seed in range(6):
            for s in made.generate(PROMPTS, Sampling(temperature=0.6, seed=seed), Limits(max_tokens=12)):
                assert len(s.emitted) == 12
        taus.append(made.stats.tau)
    assert taus[0] > taus[1] + 0.3 and taus[1] >= 1.0


@pytest.mark.parametrize("options", [{}, {"top_k": 7, "temperature": 0.8}], ids=["T1", "top-k"])
def test_first_tokens_have_the_targets_law(options: dict[str, float]) -> None:
    """Guards the law in the engine, noise streams included: over 500 seeds the first and the second token
    have the target's law, which a chi-square test compares after pooling rare tokens. The statistic exceeds
    mean + 4.5 sigma by chance about once in 10^4 (it is skewed); the seeds are fixed.
    """
    settings = {"temperature": 1.0, **options}
    prompt, count = [7, 3, 41], 500
    drafter = SampledDrafter(Decoy(drafter_target, depth=2, width=5, place=0), 2)
    made = engine(drafter, 2, 250)
    sequences = [
        made.add(prompt, Sampling(seed=seed, **settings), Limits(max_tokens=3))  # type: ignore[arg-type]
        for seed in range(count)
    ]
    for _ in made.run(sequences):
        pass
    assert made.stats.accepted > count / 10
    first = law_after([prompt], settings)[0]
    second = first @ law_after([[*prompt, token] for token in range(VOCAB)], settings)
    for place, law in enumerate((first, second)):
        counts = torch.bincount(torch.tensor([s.emitted[place] for s in sequences]), minlength=VOCAB)
        assert_fits(counts.double(), law * count)


class Floored(FixedBudget):
    """Has no use for any but the most probable paths, as a measured budget after its first rounds."""

    floor = -0.1


def test_a_budgets_floor_does_not_shorten_what_was_drawn() -> None:
    """Guards the law: a chain ended at a token that was drawn although it is improbable, so that the token
    could only come from the bonus. A greedy request, whose tokens nobody draws, may be shortened."""
    made = engine(SampledDrafter(Random(seed=1, vocab=VOCAB, depth=4), 4))
    made.budget = Floored(4)
    limits = Limits(max_tokens=12)
    drawn, greedy = (made.add(PROMPTS[0], Sampling(temperature=t, seed=1), limits) for t in (1.0, 0.0))
    depths: dict[int, list[int]] = {drawn.id: [], greedy.id: []}
    for outcome in made.run([drawn, greedy]):
        depths[outcome.sequence.id].append(outcome.tree.depth)
    assert depths[drawn.id][:3] == [4, 4, 4]
    assert max(depths[greedy.id]) < 4


def law_after(prefixes: list[list[int]], settings: dict[str, float]) -> torch.Tensor:
    """The target's law after each prefix, from plain forwards: [n, V]."""
    target, rows = tiny_target(), []
    for prefix in prefixes:
        cache = target.new_cache()
        cache.add(0)
        logits = target.forward(chunk([(0, prefix)], cache, logits=True), cache).logits
        assert logits is not None
        sampling = Sampling(**settings)  # type: ignore[arg-type]
        rows.append(process_logits(logits[-1:], sampling, [History(prefix, 3)])[0].double().softmax(-1))
    return torch.stack(rows)


def assert_fits(counts: torch.Tensor, expected: torch.Tensor) -> None:
    """Chi-square with cells of at least 5 expected counts, the others pooled."""
    assert float(counts[expected < 1e-9].sum()) == 0.0
    large = expected >= 5
    cells = torch.cat([counts[large], counts[~large].sum()[None]])
    wanted = torch.cat([expected[large], expected[~large].sum()[None]])
    kept = wanted > 1e-9
    chi = float(((cells[kept] - wanted[kept]) ** 2 / wanted[kept]).sum())
    freedom = int(kept.sum()) - 1
    assert chi < freedom + 4.5 * (2 * freedom) ** 0.5, (chi, freedom)


def test_nothing_drafted_is_plain_decoding_in_law() -> None:
    """Guards empty proposals and the last token: no draft, one token from the target's law each round."""
    made = engine(SampledDrafter(Off(), 4))
    (s,) = made.generate([PROMPTS[0]], Sampling(temperature=1.0, seed=3), Limits(max_tokens=5))
    assert len(s.emitted) == 5 and made.stats.tau == 1.0 and not made.drafter._laws  # type: ignore[attr-defined]
