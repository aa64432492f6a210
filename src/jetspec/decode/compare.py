"""Two engines on one prompt, in turns; and where two outputs differ, whether rounding can be the reason.

The baseline of every comparison is the same engine with the drafter off, on the same clock, warmed up the
same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any, NamedTuple

import torch
from torch import Tensor

from jetspec.decode.engine import Engine
from jetspec.decode.round import Outcome
from jetspec.decode.stats import Stats
from jetspec.noise import NoiseRows, gumbel_noise, keep_rows_in
from jetspec.sampling import History, Sampling, process_logits
from jetspec.sequence import Limits, Sequence
from jetspec.target.native_attention import native_suits
from jetspec.target.plan import chunk, pack
from jetspec.target.target import Target
from jetspec.tree import Tree

# Two forwards of different shape add the same products in another order. Where the two best scores are closer
# than this, rounding decides which one wins: the size of logits (tens) times some units in the last place.
TIE_BELOW = {torch.float64: 1e-6, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 5e-1}


def tie_below(target: Target) -> float:
    """How close two scores tie for two decoders on this target; 0, so that nothing is excused, where a row
    has the same bits in any company: where the compiled products and the compiled attention run, in one
    call or, with experts, layer by layer.
    """
    model = target.transformer
    compiled = model.output.native is not None and native_suits(
        model.device, model.dtype, model.config.head_dim
    )
    return 0.0 if compiled else TIE_BELOW[target.dtype]


class Divergence(NamedTuple):
    """The first place where two outputs for one prompt differ."""

    place: int  # number of emitted tokens before it
    plain: int | None  # plain decoding's token; None where its output has ended
    other: int | None
    gap: float  # top-two gap of plain decoding's scores there
    lag: float  # how far the worse of the two tokens lies below the best score; infinite where one has ended
    tie: bool  # whether both tokens score so close to the best that rounding decides

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no infinity: None stands for it."""
        return {
            name: None if isinstance(value, float) and math.isinf(value) else value
            for name, value in self._asdict().items()
        }


def in_turns(
    engines: Many[Engine],
    prompt: Many[int],
    sampling: Sampling,
    limits: Limits,
    watch: Callable[[Engine, Outcome], None] = lambda engine, outcome: None,
) -> list[Sequence]:
    """Decode one prompt to its end on every engine, round by round; next is the one with the fewest tokens.

    That way whatever else the machine does hits all alike. Each engine makes its own noise, as it would
    alone. Each decodes one round of the prompt beforehand as a warm-up, which is not counted: `engine.stats`
    covers this run alone. `watch` sees every round as it happens.
    """
    for engine in engines:
        _warm_up(engine, prompt, sampling, limits)
    pairs = [(engine, engine.add(prompt, sampling, limits)) for engine in engines]
    noise = {id(engine): NoiseRows() for engine in engines}
    last: Engine | None = None
    try:
        while unfinished := [pair for pair in pairs if pair[1].finished is None]:
            # Of those that are level, the one that went last goes again (ABBA), so that none is always first.
            engine, _ = min(unfinished, key=lambda pair: (len(pair[1].tokens), pair[0] is not last))
            last = engine
            with keep_rows_in(noise[id(engine)]):
                outcomes = engine.step()
            for outcome in outcomes:
                watch(engine, outcome)
    finally:
        for engine, sequence in pairs:
            engine.abort(sequence)
    return [sequence for _, sequence in pairs]


def _warm_up(engine: Engine, prompt: Many[int], sampling: Sampling, limits: Limits) -> None:
    sequence = engine.add(prompt, sampling, limits)
    try:
        while not engine.step():
            pass
    finally:
        engine.abort(sequence)
    engine.stats = Stats()


def find_divergence(
    target: Target,
    prompt: Many[int],
    plain: Many[int],
    other: Many[int],
    sampling: Sampling,
    bound: float | None = None,
) -> Divergence | None:
    """Where the emitted tokens `other` first differ from those of plain decoding; None if they do not.

    bound: how close the scores tie; by default `tie_below`, which is right for our own engine's outputs.
    """
    pairs = zip(plain, other, strict=False)
    place = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(plain), len(other)))
    if place == len(plain) == len(other):
        return None
    scores = plain_scores(target, [*prompt, *plain[:place]], len(prompt), sampling)
    first = plain[place] if place < len(plain) else None
    second = other[place] if place < len(other) else None
    behind = math.inf  # where one of them has ended, rounding is no reason
    if first is not None and second is not None:
        behind = float(scores.max() - scores[[first, second]].min())
    bound = tie_below(target) if bound is None else bound
    return Divergence(place, first, second, top_two_gap(scores), behind, behind < bound)


def top_two_gap(scores: Tensor) -> float:
    """By how much the best of `scores` [V] beats the second; infinite where one candidate is left."""
    best, second = scores.topk(2).values.tolist()
    return float(best - second)


def plain_scores(target: Target, tokens: Many[int], prompt_len: int, sampling: Sampling) -> Tensor:
    """What the picker compares for the token after `tokens`, logits or logits / T + noise: [V]."""
    cache = target.new_cache()
    cache.add(0, capacity=len(tokens))
    if len(tokens) > 1:
        plan = chunk([(0, tokens[:-1])], cache)
        target.forward(plan, cache)
        cache.keep(0, range(plan.size))
    logits = target.forward(pack([(0, Tree.root_only(tokens[-1]))], cache), cache).logits  # [1, V]
    assert logits is not None
    scores = process_logits(logits, sampling, [History(tokens, prompt_len)])
    if not sampling.greedy:
        position = torch.tensor([len(tokens)], device=scores.device)
        scores += gumbel_noise(sampling.seed, position, scores.shape[-1])
    return scores[0]
