"""Requests that are picked for together get what each gets alone."""

from __future__ import annotations

import pytest
import torch

from jetspec import sampling as sampling_module
from jetspec.decode.engine import Engine
from jetspec.errors import ModelError
from jetspec.noise import gumbel_noise
from jetspec.sampling import Sampling, pick_each, pick_tokens
from jetspec.sequence import Limits
from tests.decode.tiny import PROMPTS, SAMPLINGS, plain, shared_target, tiny_target

KINDS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_k=9, top_p=0.8, min_p=0.01),
    Sampling(logit_bias={3: 4.0, 7: -1e9}),
    Sampling(temperature=1.3, logit_bias={3: 4.0}),
]


@pytest.mark.parametrize("at_once", [2**25, 90])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_row_as_alone(at_once: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards rows, seeds and positions against those of a neighbour, in mixed batches and in pieces. Rows of
    bfloat16 have ties, which go to the lowest id in both."""
    monkeypatch.setattr(sampling_module, "NOISE_AT_ONCE", at_once)
    dice = torch.Generator().manual_seed(2)
    logits = (torch.randn(40, 44, generator=dice) * 2).to(dtype)
    before = logits.clone()
    given = [
        Sampling(**{**vars(KINDS[row % 5]), "seed": (row % 7) * (2**61 + 12345)})
        for row in range(len(logits))
    ]
    positions = [3 + row % 11 for row in range(len(logits))]
    alone = [
        pick_tokens(logits[row : row + 1], [positions[row]], given[row])[0] for row in range(len(logits))
    ]
    assert pick_each(logits, positions, given) == alone
    assert torch.equal(logits, before) and len(set(alone)) > 10
    assert pick_each(logits[:0], [], []) == []


def test_noise_of_several_seeds() -> None:
    """Guards both halves of each row's seed."""
    seeds, positions = [5, 2**63 + 9, 5, 2**32 + 5], torch.tensor([1, 1, 8, 1])
    rows = gumbel_noise(seeds, positions, 30)
    for row, seed, position in zip(rows, seeds, positions, strict=True):
        assert torch.equal(row, gumbel_noise(seed, position[None], 30)[0])


def test_a_batch_without_drafts_is_picked_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the engine's use of it: one call for a batch of different requests, the same text as alone; a
    request with penalties in the batch sends all the slow way."""
    calls: list[int] = []

    def counted(logits: torch.Tensor, *rest: object) -> list[int]:
        calls.append(len(logits))
        return pick_each(logits, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("jetspec.decode.round.pick_each", counted)
    for names in (["greedy", "T1-filters", "T0.7-bias"], ["greedy", "T1-penalties", "T0.7"]):
        calls.clear()
        engine = Engine(shared_target(), budget=0, max_batch=3)
        sequences = [
            engine.add(prompt, SAMPLINGS[name], Limits(max_tokens=14))
            for prompt, name in zip(PROMPTS, names, strict=True)
        ]
        for _ in engine.run(sequences):
            pass
        for sequence, prompt, name in zip(sequences, PROMPTS, names, strict=True):
            assert tuple(sequence.emitted) == plain(tuple(prompt), name), name
        assert (3 in calls) == ("T1-penalties" not in names)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_that_are_not_finite_are_no_text(temperature: float, dtype: torch.dtype, value: float) -> None:
    """The argmax of NaN is the NaN: damaged weights, or an overflow in half precision, would look like an
    answer."""
    logits = torch.randn(3, 50).to(dtype)
    logits[1, 7] = value
    sampling = Sampling(temperature=temperature)
    for pick in (
        lambda: pick_tokens(logits, [4, 5, 6], sampling),
        lambda: pick_each(logits, [4, 5, 6], [sampling] * 3),
    ):
        with pytest.raises(ModelError, match=r"logits are not finite.*damaged.*float32"):
            pick()


def test_a_target_of_damaged_weights_ends_the_request() -> None:
    """The engine must not hold on to the rows of a request that could not be answered."""
    target = tiny_target()
    target.transformer.output_matrix.fill_(torch.nan)
    engine = Engine(target)
    with pytest.raises(ModelError, match="logits are not finite"):
        engine.generate(PROMPTS[:2], limits=Limits(max_tokens=4))
    assert not engine.busy and engine.cache.bytes == 0
