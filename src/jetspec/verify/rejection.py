"""Rejection sampling on a chain, the published rule of DSpark (Leviathan et al., arXiv 2211.17192; Chen et
al., arXiv 2302.01318). It is for drafts that were SAMPLED from their law q.

The project's own rule is `walk`: it never reads q, emits plain decoding's text for the same seed, and works
for any tree. This one follows the target's law as well, but not its text: what is emitted depends on the
draft. For drafts that were picked, not sampled, it is wrong: with p = (.5, .5), q = (.6, .4) and the first
token always drafted it would emit that one with probability .833.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from jetspec.noise import gumbel_noise

# Streams of noise apart from that of `pick_tokens`: what was drafted, the coins, and the token after a
# rejection must not depend on each other.
DRAFT_STREAM, COIN_STREAM, REST_STREAM = 0x6A09E667F3BCC908, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B


def verify_chain(
    tokens: Sequence[int], drafted: Sequence[Tensor], target: Tensor, coin: Callable[[int], float]
) -> tuple[int, Tensor]:
    """How many tokens of a chain are accepted, and the law of the token after them.

    tokens   [K] the drafted tokens, x_k sampled from drafted[k]
    drafted  K laws [V], each as it was sampled from: same temperature, same candidates, given x_1 … x_(k-1)
    target   [K + 1, V] the target's laws after the root and after each token
    coin     number of a token -> its coin, uniform in [0, 1), independent of the drafts; asked in order
    return   accepted (0..K), and the law [V]: after a rejection what the target has left, norm((p - q)+),
             else the target's own after the whole chain

    x_k is accepted with probability min(1, p(x_k) / q(x_k)), in all sum_v min(p, q) = 1 - TV(p, q).
    """
    for number, (token, law) in enumerate(zip(tokens, drafted, strict=True)):
        p, q = float(target[number, token]), float(law[token])
        assert q > 0.0, "a token that its law cannot draw was drafted"
        if coin(number) * q >= p:
            return number, residual(target[number], law)
    return len(tokens), target[len(tokens)]


def residual(p: Tensor, q: Tensor) -> Tensor:
    """norm((p - q)+), what a rejected draft leaves of the target's law: [V]. Where rounding leaves nothing
    (p equals q, and then nothing is rejected) it is p."""
    rest = (p - q).clamp(min=0.0)
    total = rest.sum()
    return rest / total if float(total) > 0.0 else p


def draw(law: Tensor, seed: int, position: int, stream: int) -> int:
    """A token drawn from a law [V] with noise that depends on seed, position and stream only."""
    noise = gumbel_noise(seed ^ stream, torch.tensor([position], device=law.device), law.shape[-1])[0]
    return int((law.double().log() + noise).argmax())


def uniform(seed: int, position: int, stream: int = COIN_STREAM) -> float:
    """A uniform number in (0, 1), a function of seed, position and stream: the inverse of Gumbel noise."""
    noise = gumbel_noise(seed ^ stream, torch.tensor([position]), 1).double()
    return float(torch.exp(-torch.exp(-noise)))
