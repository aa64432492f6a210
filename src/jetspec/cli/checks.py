"""What `jetspec doctor` checks on a user's own target: losslessness, the logits, and the draft head."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch

from jetspec.budget.choose import AUTO, BudgetOption
from jetspec.decode.compare import Divergence, find_divergence, tie_below
from jetspec.decode.engine import Engine
from jetspec.draft.base import Drafter
from jetspec.errors import ModelError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.linear import Linear
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.tree import GROW

PROMPTS = (
    "Give three reasons to keep a diary.",
    "def mean(values):\n    # the arithmetic mean\n",
    "Count from one to ten in words, then backwards.",
)
BUDGETS = (2, 16)
SAMPLINGS = {"greedy": Sampling(), "sampled": Sampling(temperature=0.8, top_p=0.95, seed=7)}
# Logits agree with another implementation's up to this share of the largest one: sums of a few thousand
# products in another order, over some ten layers. Half precision rounds every intermediate result, in places
# that the two choose differently.
LOGIT_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 2e-1}


Case: TypeAlias = tuple[Drafter, str, BudgetOption, str]  # drafter, builder, budget, sampling


@dataclass(frozen=True)
class Run:
    """All prompts decoded with one drafter, builder, budget and sampling, compared with plain decoding."""

    drafter: str
    grow: str
    budget: BudgetOption
    sampling: str
    tokens: int
    tau: float
    gaps: int  # accepted paths that skip rows: what a wrong mask or a wrong compaction would break
    divergences: tuple[tuple[int, Divergence], ...]  # (number of the prompt, first difference)

    @property
    def ties(self) -> int:
        """Differences that rounding explains."""
        return sum(first.tie for _, first in self.divergences)

    @property
    def lossless(self) -> bool:
        """Whether nothing differs but ties."""
        return self.ties == len(self.divergences)


def prompt_ids(target: Target) -> list[list[int]]:
    """The built-in prompts, through the chat template if there is one; cut to fit a very short context."""
    tokenizer = target.tokenizer
    most = max(1, target.config.max_positions // 2)
    if tokenizer.has_template:
        return [tokenizer.chat([{"role": "user", "content": text}])[-most:] for text in PROMPTS]
    return [tokenizer.encode(text)[:most] for text in PROMPTS]


def plain_outputs(target: Target, prompts: list[list[int]], limits: Limits) -> dict[str, list[list[int]]]:
    """What plain decoding emits per sampling and prompt; one prompt at a time, so batches are checked too."""
    outputs: dict[str, list[list[int]]] = {}
    for name, sampling in SAMPLINGS.items():
        engine = Engine(target, None, budget=0)
        outputs[name] = [engine.generate([ids], sampling, limits)[0].emitted for ids in prompts]
    return outputs


def cases(drafters: list[Drafter]) -> list[Case]:
    """Every drafter × builder × budget greedily, and once with sampling; the last one with the budget auto,
    too.
    """
    greedy: list[Case] = [
        (d, grow, budget, "greedy") for d in drafters for grow in GROW for budget in BUDGETS
    ]
    sampled: list[Case] = [(drafter, "best-first", BUDGETS[-1], "sampled") for drafter in drafters]
    return [*greedy, *sampled, *((drafters[-1], "best-first", AUTO, name) for name in SAMPLINGS)]


def run_case(
    target: Target,
    case: Case,
    prompts: list[list[int]],
    plain: dict[str, list[list[int]]],
    limits: Limits,
) -> Run:
    """Decode the prompts as one batch and compare with plain decoding."""
    drafter, grow, budget, name = case
    sampling = SAMPLINGS[name]
    engine = Engine(target, drafter, budget=budget, grow=grow)
    sequences = [engine.add(ids, sampling, limits) for ids in prompts]
    gaps = sum(outcome.path[-1] != len(outcome.path) - 1 for outcome in engine.run(sequences))
    divergences: list[tuple[int, Divergence]] = []
    for number, (ids, expected, sequence) in enumerate(zip(prompts, plain[name], sequences, strict=True)):
        first = find_divergence(target, ids, expected, sequence.emitted, sampling)
        if first is not None:
            divergences.append((number, first))
    stats = engine.stats
    return Run(drafter.name, grow, budget, name, stats.tokens, stats.tau, gaps, tuple(divergences))


def reference_logits(target: Target, folder: Path, ids: list[int]) -> dict[str, Any]:
    """Logits of all rows of `ids` [T], ours and those of the transformers library, on the CPU.

    Raises ModelError if the library cannot load the folder.
    """
    with _quiet():
        from transformers import AutoModelForCausalLM

        try:
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=target.dtype, local_files_only=True)
        except Exception as error:  # it has its own exception for everything that can be wrong with a folder
            reason = " ".join(str(error).split())
            raise ModelError(
                f"transformers cannot load {folder} ({reason}); leave it out with --no-reference"
            ) from error
    with torch.inference_mode():
        theirs = model.eval()(torch.tensor([ids])).logits[0].float()  # [T, V]
    del model
    cache = target.new_cache()
    cache.add(0, capacity=len(ids))
    ours = target.forward(chunk([(0, ids)], cache, logits=True), cache).logits  # [T, V]
    assert ours is not None
    ours = ours.float().cpu()
    difference = float((ours - theirs).abs().max())
    bound = LOGIT_TOLERANCE[target.dtype] * max(1.0, float(theirs.abs().max()))
    same = ours.argmax(-1) == theirs.argmax(-1)
    return {
        "rows": len(ids),
        "max_difference": difference,
        "bound": bound,
        "same_best": int(same.sum()),
        "agree": difference <= bound,
    }


def head_facts(target: Target, drafter: Drafter, prompts: list[list[int]], limits: Limits) -> dict[str, Any]:
    """What a head reads, and how often it is right on the built-in prompts, greedily.

    first_slot: share of rounds whose most probable first token is the target's; tau: with best-first trees of
    16 nodes; accepted_by_depth: share of all its rounds that accepted each depth.
    """
    chain = Engine(target, drafter, budget=1, grow="chain")
    chain.generate(prompts, None, limits)
    tree = Engine(target, drafter, budget=BUDGETS[-1])
    tree.generate(prompts, None, limits)
    drafted, right = chain.stats.by_depth[0] if chain.stats.by_depth else (0, 0)
    return {
        "name": drafter.name,
        "taps": list(drafter.taps),
        "taps_exist": all(0 <= layer < target.config.num_layers for layer in drafter.taps),
        "tap_width": len(drafter.taps) * target.config.hidden_size,
        "first_slot": right / drafted if drafted else 0.0,
        "tau": tree.stats.tau,
        "accepted_by_depth": [kept / tree.stats.rounds for _, kept in tree.stats.by_depth],
    }


def model_facts(target: Target) -> dict[str, Any]:
    """The target's shape and what decodes it."""
    config, tokenizer = target.config, target.tokenizer
    return {
        "family": config.family,
        "layers": config.num_layers,
        "hidden_size": config.hidden_size,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "vocabulary": config.vocab_size,
        "context": config.max_positions,
        "chat_template": tokenizer.has_template,
        "end_ids": sorted(tokenizer.eos_ids | frozenset(config.eos_ids)),
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
        "threads": torch.get_num_threads(),
        "cpus": os.cpu_count(),
        "kernel": _kernel(target),
    }


def _kernel(target: Target) -> str:
    """Which path multiplies and attends, and whether speculation gives the same bits as plain decoding."""
    product: Linear = target.transformer.output
    if target.transformer.native is not None:
        kept = str(product.native.data.dtype).removeprefix("torch.") if product.native is not None else ""
        return f"compiled decoder, {kept} weights, row-invariant (a row's bits do not depend on its company)"
    if product.native is not None:
        if tie_below(target) == 0.0:
            return "compiled products and attention, row-invariant"
        return "compiled products, attention in torch (the head size is no multiple of 16), not row-invariant"
    if product.packed:
        return "oneDNN packed weights, not row-invariant (no C compiler was found)"
    return "torch linear, not row-invariant"


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep transformers' progress bars and advice out of the report."""
    from transformers.utils import logging

    before: int = logging.get_verbosity()
    restore: Callable[[], None] = logging.enable_progress_bar
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        restore()
