"""From logits to one token: options, processors, and the picker that everybody calls.

This file knows nothing about trees, caches or drafts. `pick_tokens` is the only place in the project that
picks a token of the target: plain decoding, every node on a path, and the bonus token all go through it.

A token at absolute position t is  argmax_v( processed_logits(v) + Gumbel(seed, t, v) ). That is an exact draw
from the softmax (Gumbel-max), and since the noise depends on (seed, t, v) alone, the emitted text depends on
the prompt, the seed and the weights, but not on the draft, the tree or the batch (arXiv 2408.07978 has the
idea).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import index
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from jetspec.cuts import keep_likely
from jetspec.errors import ModelError, OptionError, brief
from jetspec.noise import NOISE_AT_ONCE, add_noise, pick_with_noise

GREEDY_BELOW = 1e-5  # the one threshold: a smaller temperature means argmax, everywhere
MAX_TEMPERATURE = 1e3
MAX_BIAS = 1e9  # large enough to ban or force a token, small enough to stay finite in float32
_RANGES = {  # lowest, highest, and whether the lowest itself is excluded
    "temperature": (0.0, MAX_TEMPERATURE, False),
    "top_p": (0.0, 1.0, True),
    "min_p": (0.0, 1.0, False),
    "repetition_penalty": (1e-3, 1e3, False),
    "presence_penalty": (-2.0, 2.0, False),
    "frequency_penalty": (-2.0, 2.0, False),
}


class History(NamedTuple):
    """What stands before the token to pick: prompt, emitted tokens, and for a tree node its own path."""

    tokens: Sequence[int]
    prompt_len: int


@dataclass(frozen=True)
class Sampling:
    """How the target picks a token. Construction checks every field; OptionError names it and what is valid.

    temperature         0 (anything below 1e-5) is greedy; at most 1000
    top_k               keep the k largest logits; 0 is off
    top_p               keep the smallest set of tokens whose mass reaches top_p; 1.0 is off
    min_p               keep tokens at least min_p times as probable as the top one; 0.0 is off
    repetition_penalty  divides positive and multiplies negative logits of tokens seen in prompt or output;
                        1.0 is off; 0.001..1000 (CTRL, arXiv 1909.05858)
    presence_penalty    subtracted once from tokens generated before (the prompt does not count); -2..2
    frequency_penalty   subtracted once per earlier generated occurrence; -2..2
    logit_bias          token id -> number added to its logit, within -1e9..1e9 (-1e9 bans the token)
    seed                0..2**64-1; selects the noise stream, without effect when greedy
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int = 0

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            name: checked_number(name, getattr(self, name), *valid) for name, valid in _RANGES.items()
        }
        checked["top_k"] = _checked_integer("top_k", self.top_k, 2**31 - 1, "0 turns it off")
        checked["seed"] = _checked_integer("seed", self.seed, 2**64 - 1, "the default is 0")
        if not isinstance(self.logit_bias, Mapping):
            raise OptionError(f"logit_bias must map token ids to numbers, got {brief(self.logit_bias)}")
        biases: dict[int, float] = {}  # a copy: the caller's may change later
        for token, bias in self.logit_bias.items():
            id = _checked_integer("a token id in logit_bias", token, 2**31 - 1, "ids count from 0")
            biases[id] = checked_number(f"logit_bias[{id}]", bias, -MAX_BIAS, MAX_BIAS)
        for name, value in {**checked, "logit_bias": biases}.items():
            object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """True where the token is the argmax, without noise."""
        return self.temperature < GREEDY_BELOW

    @property
    def cuts(self) -> bool:
        """True if tokens are removed by top-k, top-p or min-p."""
        return bool(self.top_k) or self.top_p < 1.0 or self.min_p > 0.0

    @property
    def tempered(self) -> bool:
        """True if a temperature is all that changes the law."""
        return not (self.greedy or self.cuts or self.logit_bias or self.needs_history)

    @property
    def needs_history(self) -> bool:
        """True if a penalty is on, so that the picker must be given the tokens before each row."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


def checked_number(name: str, value: object, low: float, high: float, above_low: bool = False) -> float:
    """The value as an int or a float, one of NumPy too. Raises OptionError unless it is from `low`, itself
    excluded with `above_low`, up to `high`.
    """
    number = _as_number(value)
    if number is None or not low <= number <= high or (above_low and number == low):  # NaN fails comparisons
        valid = f"{'above' if above_low else 'from'} {low:g} up to {high:g}"
        raise OptionError(f"{name} must be a number {valid}, got {brief(value)}")
    return number


def _as_number(value: object) -> float | None:
    """The value as an int or a float, one of NumPy too; None if it is neither, as True and False are none."""
    if isinstance(value, (float, np.floating)):
        return float(value)
    return as_integer(value)


def as_integer(value: object) -> int | None:
    """The value as an int, one of NumPy too; None if it is no integer, as True and False are none."""
    if isinstance(value, bool):
        return None
    try:
        return index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def _checked_integer(name: str, value: int, high: int, hint: str) -> int:
    number = as_integer(value)
    if number is None or not 0 <= number <= high:
        raise OptionError(f"{name} must be an integer from 0 to {high} ({hint}), got {brief(value)}")
    return number


# --- processors


def process_logits(logits: Tensor, sampling: Sampling, histories: Sequence[History] | None = None) -> Tensor:
    """Scores whose softmax is the law of the target's token: float32 [n, V], a copy of `logits` [n, V].

    Order: repetition penalty, presence and frequency penalty, bias -> temperature -> top-k -> top-p -> min-p.
    Each option means what it means in Hugging Face transformers (and vLLM, which applies min-p before top-p;
    that differs only when both are on). Greedy decoding applies penalties and bias, and stops there. Ties:
    top-k and min-p keep all tokens equal to the last one kept, top-p keeps the lowest ids among them. The top
    token always survives, so a row never becomes empty.

    `histories` holds one History per row and is needed when `sampling.needs_history`. Removed tokens have
    score -inf. Raises OptionError if logit_bias names a token outside the vocabulary.
    """
    scores = logits.to(torch.float32, copy=True, memory_format=torch.contiguous_format)
    if sampling.needs_history:
        assert histories is not None and len(histories) == len(scores), "penalties need one history per row"
        for row, history in zip(scores, histories, strict=True):
            _penalize(row, sampling, history)
    if sampling.logit_bias:
        _add_bias(scores, sampling.logit_bias)
    if sampling.greedy:
        return scores
    scores /= sampling.temperature
    if sampling.cuts:
        keep_likely(scores, sampling.top_k, sampling.top_p, sampling.min_p)
    return scores


def _penalize(row: Tensor, sampling: Sampling, history: History) -> None:
    """Apply the three penalties to one row [V], in place."""
    if sampling.repetition_penalty != 1.0 and history.tokens:
        seen = torch.tensor(sorted(set(history.tokens)), device=row.device)
        old = row[seen]
        penalty = sampling.repetition_penalty
        row[seen] = torch.where(old < 0, old * penalty, old / penalty)
    counts = Counter(history.tokens[history.prompt_len :])
    if counts and (sampling.presence_penalty or sampling.frequency_penalty):
        ids = torch.tensor(list(counts), device=row.device)
        times = torch.tensor(list(counts.values()), dtype=torch.float32, device=row.device)
        row[ids] -= sampling.frequency_penalty * times + sampling.presence_penalty


def check_bias(bias: Mapping[int, float], vocab: int) -> None:
    """Raise OptionError if the bias names a token outside a vocabulary of `vocab` ids."""
    if bias and max(bias) >= vocab:
        raise OptionError(
            f"logit_bias names token {max(bias)}, but ids of this target go from 0 to {vocab - 1}"
        )


def _add_bias(scores: Tensor, bias: Mapping[int, float]) -> None:
    """Add the bias to every row of scores [n, V], in place."""
    check_bias(bias, scores.shape[-1])
    ids = torch.tensor(list(bias), device=scores.device)
    scores[:, ids] += torch.tensor(list(bias.values()), dtype=torch.float32, device=scores.device)


# --- the picker


def pick_tokens(
    logits: Tensor,
    positions: Tensor | Sequence[int],
    sampling: Sampling,
    histories: Sequence[History] | None = None,
) -> list[int]:
    """The target's own token for each row of logits [n, V].

    `positions` [n] are absolute positions of the tokens being picked, counted from 0 with the prompt
    included. Rows are independent: a row gives the same token alone and in any batch. Equal scores go to the
    lowest id.
    """
    assert len(logits) == len(positions), "one position per row"
    if len(logits) == 0:
        return []
    where = positions.tolist() if isinstance(positions, Tensor) else positions
    return _checked(_best(logits, where, sampling, [sampling.seed] * len(where), histories))


def _best(
    logits: Tensor,
    positions: Sequence[int],
    sampling: Sampling,
    seeds: Sequence[int],
    histories: Sequence[History] | None = None,
) -> Tensor:
    """The picks [n] of rows of logits [n, V] with a position and a seed each; -1 for a row without one."""
    temperature = sampling.temperature
    if not sampling.tempered and (sampling.needs_history or sampling.logit_bias or not sampling.greedy):
        logits, temperature = process_logits(logits, sampling, histories), 1.0
    if sampling.greedy:
        return best_ids(logits)
    picks = pick_with_noise(logits, temperature, seeds, positions)
    if picks is None:
        logits = process_logits(logits, sampling) if sampling.tempered else logits
        add_noise(logits, seeds, positions)
        picks = best_ids(logits)
    return picks


def best_ids(scores: Tensor) -> Tensor:
    """The id of the largest score of each row, the lowest of equal ones: [n, V] to int64 [n]; -1 where the
    largest score is no finite number, as every row's is that holds a NaN.

    On a processor NumPy finds it ten times faster than torch, whose argmax of one tree's logits costs as much
    as a draft layer.
    """
    if scores.device.type == "cpu" and scores.dtype in (torch.float32, torch.float64):
        rows = scores.detach().numpy()
        found = rows.argmax(axis=-1)
        found[~np.isfinite(rows[np.arange(len(rows)), found])] = -1
        return torch.from_numpy(found)
    best = scores.argmax(dim=-1)
    largest = scores.gather(-1, best.unsqueeze(-1)).squeeze(-1)
    return torch.where(largest.isfinite(), best, -1)


def _checked(best: Tensor) -> list[int]:
    """The ids [n]. Raises ModelError for a row without a best one."""
    picks: list[int] = best.tolist()
    if -1 in picks:
        raise ModelError(
            "the target's logits are not finite: its weights are damaged, or overflow in this dtype; fetch "
            "the model again, or run it in float32"
        )
    return picks


def pick_each(logits: Tensor, positions: Sequence[int], samplings: Sequence[Sampling]) -> list[int]:
    """The tokens that `pick_tokens` picks for requests of their own, one row of logits [n, V] each.

    Requests that differ in nothing but the seed go through the sampler together, and results leave the device
    once: one by one they would cost it more time than a forward. Not for requests that need a history.
    """
    kinds: dict[Any, list[int]] = {}
    for row, s in enumerate(samplings):
        assert not s.needs_history
        kind_of = s.temperature, s.top_k, s.top_p, s.min_p, tuple(s.logit_bias.items())
        kinds.setdefault(kind_of, []).append(row)
    picks = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    for members in kinds.values():
        kind = samplings[members[0]]
        for rows in _pieces(members, max(1, NOISE_AT_ONCE // logits.shape[-1])):
            place = slice(None) if len(rows) == len(logits) else torch.tensor(rows, device=logits.device)
            seeds = [samplings[row].seed for row in rows]
            picks[place] = _best(logits[place], [positions[row] for row in rows], kind, seeds)
    return _checked(picks)


def _pieces(rows: list[int], size: int) -> list[list[int]]:
    return [rows[first : first + size] for first in range(0, len(rows), size)]
