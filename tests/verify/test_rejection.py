from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from jetspec.verify.rejection import (
    COIN_STREAM,
    DRAFT_STREAM,
    REST_STREAM,
    draw,
    residual,
    uniform,
    verify_chain,
)

V, K = 3, 2


def laws(seed: int) -> dict[tuple[int, ...], Tensor]:
    """A random law over three tokens for each path of at most K tokens, some of it zero."""
    dice = torch.Generator().manual_seed(seed)
    found = {}
    for length in range(K + 1):
        for path in itertools.product(range(V), repeat=length):
            weights = torch.rand(V, generator=dice, dtype=torch.float64) ** 3
            if torch.rand((), generator=dice) < 0.3:
                weights[int(torch.randint(V, (), generator=dice))] = 0.0
            found[path] = weights / weights.sum()
    return found


def output_law(p: dict[tuple[int, ...], Tensor], q: dict[tuple[int, ...], Tensor]) -> Tensor:
    """The law of the first K + 1 emitted tokens [V, V, V] by exact enumeration: every draft with its
    probability, every way its coins can fall, and what follows a rejection drawn from p."""
    law = torch.zeros((V,) * (K + 1), dtype=torch.float64)
    for draft in itertools.product(range(V), repeat=K):
        weight = 1.0
        for depth, token in enumerate(draft):
            weight *= float(q[draft[:depth]][token])
        if weight == 0.0:
            continue
        target = torch.stack([p[draft[:depth]] for depth in range(K + 1)])
        drafted = [q[draft[:depth]] for depth in range(K)]
        chances = [min(1.0, float(target[k, x] / drafted[k][x])) for k, x in enumerate(draft)]
        for fallen in itertools.product((True, False), repeat=K):
            # A coin just below the chance accepts, one just above it rejects.
            coins = [c * (1 - 1e-9 if yes else 1 + 1e-9) for c, yes in zip(chances, fallen, strict=True)]
            odds = 1.0
            for chance, yes in zip(chances, fallen, strict=True):
                odds *= chance if yes else 1.0 - chance
            if odds == 0.0:
                continue
            accepted, rest = verify_chain(draft, drafted, target, coins.__getitem__)
            expected = next((k for k, yes in enumerate(fallen) if not yes), K)
            assert accepted == expected
            _add(law, p, draft[:accepted], rest, weight * odds)
    return law


def _add(
    law: Tensor, p: dict[tuple[int, ...], Tensor], path: tuple[int, ...], rest: Tensor, weight: float
) -> None:
    for token in range(V):
        own, longer = weight * float(rest[token]), (*path, token)
        if len(longer) == K + 1:
            law[longer] += own
        elif own:
            _add(law, p, longer, p[longer], own)


@pytest.mark.parametrize("seed", range(6))
def test_output_has_the_targets_law(seed: int) -> None:
    """Guards exactness: summed over all drafts and coins, the first three tokens have the target's joint law,
    zeros in p or q included. Only float64 rounding is left."""
    p, q = laws(seed), laws(seed + 100)
    expected = torch.zeros((V,) * (K + 1), dtype=torch.float64)
    for path in itertools.product(range(V), repeat=K + 1):
        expected[path] = p[()][path[0]] * p[path[:1]][path[1]] * p[path[:2]][path[2]]
    assert (output_law(p, q) - expected).abs().max() < 1e-11


def test_acceptance_is_one_minus_the_distance() -> None:
    """Guards the efficiency, which an exact but timid rule would lose: P(accept) = sum_v min(p, q)."""
    p, q = laws(1)[()], laws(101)[()]
    accepted = sum(float(q[x]) * min(1.0, float(p[x] / q[x])) for x in range(V) if q[x] > 0)
    assert accepted == pytest.approx(float(torch.minimum(p, q).sum()))
    counted = sum(
        float(q[x]) * verify_chain([x], [q], torch.stack([p, p]), lambda n, c=coin / 1000: c)[0] / 1000
        for x in range(V)
        if q[x] > 0
        for coin in range(1000)
    )
    assert counted == pytest.approx(accepted, abs=2e-3)  # 1000 coins on a grid


def test_equal_laws_reject_nothing() -> None:
    """Guards the border: p = q accepts everything, whatever the coin, and leaves no division by zero."""
    p = torch.tensor([0.2, 0.5, 0.3], dtype=torch.float64)
    for token in range(3):
        assert verify_chain([token], [p], torch.stack([p, p]), lambda n: 1.0 - 1e-9)[0] == 1
    assert torch.equal(residual(p, p), p)
    assert residual(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0])).tolist() == [0.0, 1.0]


def test_picked_drafts_would_be_wrong() -> None:
    """Guards the warning in the docstring: a token that was picked, with q = (.6, .4) stated for it,
    comes out with .5 / .6; with the law that it really has, one-hot, the output is p."""
    p, stated = torch.tensor([0.5, 0.5]), torch.tensor([0.6, 0.4])
    one_hot = torch.tensor([1.0, 0.0])
    found = {}
    for name, law in (("stated", stated), ("true", one_hot)):
        accepted = min(1.0, float(p[0] / law[0]))
        found[name] = accepted + (1.0 - accepted) * float(residual(p, law)[0])
    assert found["stated"] == pytest.approx(0.8333, abs=1e-4) and found["true"] == pytest.approx(0.5)


def test_noise_is_reproducible_and_independent() -> None:
    """Guards the streams: the same seed and position give the same coin and token, coins are uniform,
    and drafts, coins and the token after a rejection are uncorrelated. 1,600 numbers: a mean is within 4
    sigma = 0.029 of 1/2, a correlation within 4 / sqrt(1600) = 0.1; the seed is fixed."""
    law = torch.full((50,), 0.02)
    coins = torch.tensor([uniform(7, position) for position in range(1600)])
    assert (
        float(coins[3]) == pytest.approx(uniform(7, 3))
        and float(coins.min()) > 0.0
        and float(coins.max()) < 1.0
    )
    assert float(coins.mean()) == pytest.approx(0.5, abs=0.029)
    drafts, rests = (
        torch.tensor([float(draw(law, 7, position, stream)) for position in range(1600)])
        for stream in (DRAFT_STREAM, REST_STREAM)
    )
    for one, other in itertools.combinations((coins, drafts, rests), 2):
        assert abs(float(torch.corrcoef(torch.stack([one, other]))[0, 1])) < 0.1
    assert draw(torch.tensor([0.0, 1.0, 0.0]), 7, 1, COIN_STREAM) == 1
