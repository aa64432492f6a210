"""Rounds of real decoding that a head's calibration is fitted on, and how well it does on other prompts."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass

from jetspec.budget.base import Spent
from jetspec.budget.calibrate import Reliability, Sample, fit, judge
from jetspec.budget.calibration_file import Kept, prompt_print
from jetspec.budget.fixed import FixedBudget
from jetspec.budget.maps import Calibration
from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.errors import DataError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.tree import Tree

NODES, BATCH, MAX_TOKENS = 32, 4, 96
TEMPERATURE = 1.0  # of the sampled half


@dataclass(frozen=True)
class Outcome:
    """A calibration and what it is worth.

    calibration     fitted on all rounds
    before, after   reliability on the held-out half of the prompts, "path" and "step" (`judge`): of the
                    head's own word, and of maps fitted on the other half alone
    earlier         likewise, of the maps that the head had; None if there are none that it can be said of
    prompts, rounds, nodes, tokens   what it was fitted on
    prints          fingerprints of these prompts
    tau             tokens per round, by kind of sampling
    """

    calibration: Calibration
    before: dict[str, Reliability]
    after: dict[str, Reliability]
    earlier: dict[str, Reliability] | None
    prompts: int
    rounds: int
    nodes: int
    tokens: int
    prints: tuple[str, ...]
    tau: dict[str, float]

    @property
    def better(self) -> bool:
        """Whether the new maps err less on paths than the head's word, and than the maps that it had."""
        others = [self.before, *([] if self.earlier is None else [self.earlier])]
        return all(self.after["path"].error < other["path"].error for other in others)


def calibrate(
    target: Target,
    drafter: Drafter,
    prompts: Many[Many[int]],
    *,
    tokens: int,
    nodes: int = NODES,
    grow: str = "best-first",
    kept: Kept | None = None,
    watch: Callable[[int], None] = lambda tokens: None,
) -> Outcome:
    """Decode prompts (token ids) with trees of `nodes` nodes until `tokens` were emitted, every other prompt
    greedily and the rest at temperature 1, and fit the chance that a drafted node is accepted.

    Of each kind every other prompt is held out while the calibration is judged. `watch` is told the tokens
    emitted so far. Raises DataError if there are fewer than four prompts, or if nothing was drafted.

    kept: the maps that the head has, to be judged by the same prompts.
    """
    if len(prompts) < 4:
        raise DataError(f"a calibration needs at least 4 prompts, got {len(prompts)}; give more")
    budget = _Recorder(nodes)
    engine = Engine(target, drafter, budget=budget, grow=grow)
    emitted = used = 0
    # Two greedy prompts and two sampled ones at a time, so that both halves of both kinds grow alike.
    for first in range(0, len(prompts), BATCH):
        if emitted >= tokens and used:
            break
        sequences = []
        for number, prompt in enumerate(prompts[first : first + BATCH], start=first):
            sampling = Sampling(temperature=TEMPERATURE if number % 2 else 0.0, seed=number)
            sequences.append(engine.add(prompt, sampling, Limits(max_tokens=MAX_TOKENS)))
            budget.numbers[sequences[-1].id] = number
        for outcome in engine.run(sequences):
            emitted += len(outcome.emissions)
            watch(emitted)
        used += len(sequences)
    return _outcome(budget.samples, [prompt_print(ids) for ids in prompts[:used]], emitted, kept)


def _outcome(samples: list[Sample], prints: Many[str], tokens: int, kept: Kept | None) -> Outcome:
    seen = [sample for sample in samples if sample.prompt // 2 % 2 == 0]
    held_out = [sample for sample in samples if sample.prompt // 2 % 2]
    if not seen or not held_out:
        raise DataError("too little was drafted to calibrate on; give more prompts, or raise --tokens")
    tau = {}
    for name, kind in (("greedy", False), ("sampled", True)):
        lengths = [len(sample.path) for sample in samples if sample.sampled == kind]
        if lengths:
            tau[name] = sum(lengths) / len(lengths)
    earlier = None
    if kept is not None and _can_judge({prints[sample.prompt] for sample in held_out}, len(prints), kept):
        earlier = judge(kept.calibration, held_out)
    return Outcome(
        calibration=fit(samples),
        before=judge(Calibration(), held_out),
        after=judge(fit(seen), held_out),
        earlier=earlier,
        prompts=len(prints),
        rounds=len(samples),
        nodes=sum(sample.tree.budget for sample in samples),
        tokens=tokens,
        prints=tuple(prints),
        tau=tau,
    )


def _can_judge(held_out: set[str], prompts: int, kept: Kept) -> bool:
    """Whether held-out prompts can judge maps that the head had.

    Maps that were fitted on some of them look better there than they are, and more prompts of the same source
    could not replace them: they are left out, unless they come from more prompts than there are now.
    """
    return len(kept.prints) > prompts or not held_out.intersection(kept.prints)


class _Recorder(FixedBudget):
    """Keeps every verified tree with its path. `numbers`: number of the prompt by sequence."""

    def __init__(self, nodes: int) -> None:
        super().__init__(nodes)
        self.numbers: dict[int, int] = {}
        self.samples: list[Sample] = []

    def record(
        self, sequences: Many[Sequence], trees: Many[Tree], paths: Many[Many[int]], spent: Spent
    ) -> None:
        """Keep the round. One that ended the text is left out: the path went on behind its end."""
        for s, tree, path in zip(sequences, trees, paths, strict=True):
            if tree.size > 1 and s.finished != "stop":
                self.samples.append(Sample(self.numbers[s.id], not s.sampling.greedy, tree, tuple(path)))
