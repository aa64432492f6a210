"""The drafter ranks candidates with the very noise that the target will add.

At a temperature T > 0 the target's token at position t is the argmax of l(v) / T + g_t(v), where l are its
logits and g is Gumbel noise, a function of (seed, t, v) alone (`jetspec.sampling`; arXiv 2408.07978). A
drafter knows g as well as the target does, and has its own guess d of l. What it wants to know is the chance
that v wins, given g. As a child's log-prob it states

    log_softmax( a d + b (T g + what the request adds to logits) )                                     (1)

with a weight a for its own knowledge and a weight b for the noise, per depth. Three cases show what they do:

- The draft knows nothing about l beyond that its own law is right on average: the winner does not depend on
  g as far as it can tell, and the best statement is its law itself, a = 1, b = 0.
- The draft equals the target: the winner is known, a = b, both without bound.
- In between. Let l(v) = d(v) / c + log S(v) with independent positive stable variables S of index c < 1.
  Since g + log S is again a Gumbel variable, 1 / c times as wide, the target's law is softmax(d) on average
  for every c, as it is for a head trained with forward KL. With log S replaced by a Gumbel variable of its
  variance, the chance of winning given g is (1) with a = 1 / sqrt(1 - c^2) and b = c a. log S has a longer
  tail than that, for which smaller weights make up: at c = 0.6 the best are a = 1.11 and b = 0.68, not 1.25
  and 0.75.

Fitted to what a real target drew, a is close to 1 and b to 0.75 at all depths (`docs/sampling.md`): these are
the defaults. With a = 1 the scores go over into those of greedy requests as T goes to 0.

The text cannot depend on any of this: whatever was drafted, the emitted token is the target's own pick.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetspec.errors import HeadError
from jetspec.noise import noise_of
from jetspec.sequence import Sequence

MANIFEST_KEY = "shared_noise"  # in a head's manifest: {"logits": [...], "noise": [...]}, fitted to that head


@dataclass(frozen=True)
class NoiseWeights:
    """The weights a (`logits`) and b (`noise`) of each depth; the last value holds for all deeper ones.

    Raises HeadError unless both are lists of at least one finite number, a above 0 and b not below 0.
    """

    logits: tuple[float, ...] = (1.0,)
    noise: tuple[float, ...] = (0.75,)

    def __post_init__(self) -> None:
        for name, values, valid in (
            ("logits", self.logits, "above 0 and at most 100"),
            ("noise", self.noise, "from 0 to 100"),
        ):
            numbers = [v for v in values if isinstance(v, int | float) and 0 <= v <= 100]
            if not values or len(numbers) < len(values) or (name == "logits" and min(numbers) == 0):
                raise HeadError(f"{MANIFEST_KEY}.{name} is {list(values)!r}; valid: numbers {valid}")

    @staticmethod
    def of(manifest: Mapping[str, Any]) -> NoiseWeights:
        """Those that were fitted to a head, or the defaults. Raises HeadError if they are malformed."""
        stored = manifest.get(MANIFEST_KEY)
        if stored is None:
            return NoiseWeights()
        known = isinstance(stored, Mapping) and set(stored) == {"logits", "noise"}
        if not known or not all(isinstance(values, list) for values in stored.values()):
            raise HeadError(f"{MANIFEST_KEY} is {stored!r}; valid: lists of numbers 'logits' and 'noise'")
        return NoiseWeights(tuple(stored["logits"]), tuple(stored["noise"]))

    def at(self, depth: int) -> tuple[float, float]:
        """(a, b) of a depth, counted from 1."""
        return self.logits[min(depth, len(self.logits)) - 1], self.noise[min(depth, len(self.noise)) - 1]


class Draws(NamedTuple):
    """What is known of the target's draws at the depths of a block; a greedy request has scale 1, added 0.

    scale     [B, D, 1]   weight a of the draft's logits; None if all are 1
    added     [B, D, Vd]  b (T g + what the request adds to logits)
    repeated  the repetition penalties: number of a sequence, rows [k] of the tokens that it has seen, penalty
    """

    scale: Tensor | None
    added: Tensor
    repeated: Many[tuple[int, Tensor, float]] = ()

    def score(self, logits: Tensor) -> Tensor:
        """Logits [B, D, Vd] to scores, whose softmax is the chance of being drawn."""
        if self.repeated:
            logits = logits.clone()
        for n, rows, penalty in self.repeated:
            old = logits[n, :, rows]
            logits[n, :, rows] = torch.where(old < 0, old * penalty, old / penalty)
        return (logits if self.scale is None else logits * self.scale) + self.added

    def of(self, n: int) -> Draws:
        """Those of one sequence."""
        own = [(0, rows, penalty) for number, rows, penalty in self.repeated if number == n]
        return Draws(None if self.scale is None else self.scale[n : n + 1], self.added[n : n + 1], own)

    def below(self, depths: list[int]) -> Draws:
        """Those for children of nodes at these depths [n], the root's being 0."""
        scale = None if self.scale is None else self.scale[:, depths]
        return Draws(scale, self.added[:, depths], self.repeated)


def scaled(terms: Tensor, draws: Draws | None, first: int = 0) -> Tensor:
    """What a path scorer adds to logits, weighted as they are: terms [B, D - first, ...], the depths from
    `first` on. Without draws, and for greedy requests, nothing changes.
    """
    if draws is None or draws.scale is None:
        return terms
    return terms * draws.scale[:, first:].view(*terms.shape[:2], *(1,) * (terms.ndim - 2)).to(terms.dtype)


class SharedNoise:
    """Looks ahead at the noise of a draft vocabulary's ids.

    Args:
        vocab: ids [Vd] that are drafted.
        depth: of the blocks.
        size: V, of the target's vocabulary.
        weights: None takes the defaults.
    """

    def __init__(self, vocab: Tensor, depth: int, size: int, weights: NoiseWeights | None = None) -> None:
        self.vocab, self.depth, self.size = vocab, depth, size
        self._place = torch.full((size,), -1, dtype=torch.int64, device=vocab.device)  # id -> row of `vocab`
        self._place[vocab] = torch.arange(len(vocab), device=vocab.device)
        self.weigh(weights if weights is not None else NoiseWeights())

    def weigh(self, weights: NoiseWeights) -> None:
        """Use these weights from now on."""
        pairs = [weights.at(d) for d in range(1, self.depth + 1)]
        self._plain = all(a == 1.0 for a, _ in pairs)
        self._weights = torch.tensor(pairs, device=self.vocab.device).unsqueeze(-1)  # [D, 2, 1]

    def draws(self, sequences: Many[Sequence], depth: int | None = None) -> Draws | None:
        """What is known behind the sequences' roots, down to the depth of their blocks; None if all are
        greedy, so that nothing need be done.
        """
        depth = self.depth if depth is None else min(depth, self.depth)
        sampled = [n for n, s in enumerate(sequences) if not s.sampling.greedy]
        if not sampled:
            return None
        known = self._known([sequences[n] for n in sampled], depth)  # [n, D, Vd]
        repeated = [
            (n, self._rows(sorted(set(sequences[n].tokens)))[0], sequences[n].sampling.repetition_penalty)
            for n in sampled
            if sequences[n].sampling.repetition_penalty != 1.0
        ]
        scale: Tensor | None = None
        if not self._plain:
            scale = self._weights.new_ones(len(sequences), depth, 1)
            scale[sampled] = self._weights[:depth, 0]
        if len(sampled) == len(sequences):
            return Draws(scale, known, repeated)
        added = known.new_zeros(len(sequences), *known.shape[1:])
        added[sampled] = known
        return Draws(scale, added, repeated)

    def _known(self, sequences: Many[Sequence], depth: int) -> Tensor:
        """`Draws.added` of requests that sample. A node of depth d stands at position root + d."""
        device, depths = self.vocab.device, range(1, depth + 1)
        seeds = [s.sampling.seed for s in sequences for _ in depths]
        positions = [s.position + d for s in sequences for d in depths]
        known = noise_of(seeds, positions, self.vocab, self.size).view(len(sequences), depth, -1)
        for own, s in zip(known, sequences, strict=True):
            own *= s.sampling.temperature
            amounts = request_terms(s)
            if amounts:
                rows, kept = self._rows(list(amounts))
                own[:, rows] += torch.tensor(list(amounts.values()), device=device)[kept]
        return known.mul_(self._weights[:depth, 1])

    def _rows(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Rows [k] of the draft vocabulary for the ids [n] that it has, and which ones it has, bool [n]."""
        rows = self._place[torch.tensor(ids, device=self.vocab.device)]
        found = rows >= 0
        return rows[found], found


def request_terms(s: Sequence) -> dict[int, float]:
    """Token -> what the request's bias and its presence and frequency penalties add to the logit, after the
    committed tokens; those of a node's own path are left out.
    """
    sampling = s.sampling
    amounts = {token: float(bias) for token, bias in sampling.logit_bias.items()}
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token, times in Counter(s.emitted).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * times
            amounts[token] = amounts.get(token, 0.0) - penalty
    return amounts
