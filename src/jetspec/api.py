"""The library in three calls: load a model, generate, stream.

    model = jetspec.load("smollm2-135m")
    result = model.generate("Name three rivers.", max_tokens=64)
    for piece in model.stream([{"role": "user", "content": "And three lakes?"}]):
        print(piece.text, end="")

A prompt is a text, a conversation (a list of messages with "role" and "content"), or a list of token ids; a
list of texts, conversations or id lists is a batch, decoded together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any, TypeAlias, Unpack, cast, overload

from jetspec.budget.choose import AUTO, BudgetOption, check_budget_option
from jetspec.config import Options, Request, check_text
from jetspec.decode.compare import Divergence, find_divergence, in_turns
from jetspec.decode.engine import Engine
from jetspec.decode.result import Result, Tally, batch_results
from jetspec.decode.round import Outcome
from jetspec.decode.stream import Stream
from jetspec.draft.base import Drafter
from jetspec.draft.stubs import Off
from jetspec.errors import ModelError, OptionError, PromptError, brief
from jetspec.sampling import as_integer
from jetspec.target.default_model import DEFAULT_MODEL
from jetspec.target.target import Target
from jetspec.tree import GROW

__all__ = [
    "Comparison",
    "LanguageModel",
    "Message",
    "Prompt",
    "Result",
    "Stream",
    "check_growth",
    "load",
    "published_grow",
]

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Many[Message] | Many[int]
_BYTES = (bytes, bytearray, memoryview)  # of a text: sequences of integers, but no token ids


@dataclass(frozen=True)
class Comparison:
    """Plain decoding and speculation on one prompt, by the same engine class, round by round in turns."""

    plain: Result
    speculative: Result
    divergence: Divergence | None  # the first difference, None if there is none

    @property
    def identical(self) -> bool:
        """Whether both emitted the same tokens, and so the same text."""
        return self.divergence is None

    @property
    def lossless(self) -> bool:
        """Whether both are identical up to numeric ties."""
        return self.divergence is None or self.divergence.tie

    @property
    def speedup(self) -> float:
        """Plain decoding's time per token divided by speculation's; prefill is left out."""
        plain, speculative = (
            stats.decode_seconds / max(1, stats.tokens)  # none, where a stop string took all of them back
            for stats in (self.plain.stats, self.speculative.stats)
        )
        return plain / speculative


class LanguageModel:
    """A target with its drafter, ready for any number of requests, several streams at once included.

    Args:
        drafter: None decodes plainly.
        budget: drafted nodes per round, root excluded; "auto", which follows the draft, the load and the
            machine; or a policy.
        grow: "best-first", "beam", "chain", "accum" or "dynamic"; None takes the builder that the drafter's
            family was published with.
    Raises OptionError if budget or grow is out of range.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        budget: BudgetOption = AUTO,
        grow: str | None = None,
    ) -> None:
        check_growth(budget, grow)
        self.target = target
        self.drafter: Drafter = drafter if drafter is not None else Off()
        self.budget, self.grow = budget, published_grow(self.drafter) if grow is None else grow

    def __repr__(self) -> str:
        return f"<LanguageModel {self.target.name!r}, head {self.drafter.name}, budget {self.budget}>"

    @overload
    def generate(
        self, prompts: str | list[dict[str, Any]] | list[int], **options: Unpack[Options]
    ) -> Result: ...

    @overload
    def generate(
        self, prompts: list[str] | list[list[dict[str, Any]]] | list[list[int]], **options: Unpack[Options]
    ) -> list[Result]: ...

    def generate(self, prompts: Prompt | Many[Prompt], **options: Unpack[Options]) -> Result | list[Result]:
        """Decode a prompt, or several as one batch: a Result for one prompt, a list of Results for a list.

        Raises PromptError or OptionError, before anything is decoded; ModelError naming the prompts for which
        the target's logits are not finite.
        """
        request = Request.of(options)
        listed, single = _as_list(prompts)
        samplings = request.samplings(None if single else len(listed))
        encoded = [self.encode(prompt, request) for prompt in listed]
        engine = self._engine()
        tallies = [
            Tally(engine.add(ids, sampling, request.limits))
            for ids, sampling in zip(encoded, samplings, strict=True)
        ]
        by_id = {tally.sequence.id: tally for tally in tallies}
        try:
            for outcome in engine.run([tally.sequence for tally in tallies]):
                by_id[outcome.sequence.id].add(outcome)
        except ModelError as error:
            sick = [str(n) for n, tally in enumerate(tallies) if tally.sequence in error.sequences]
            if single or not sick:
                raise
            raise ModelError(
                f"prompt {', '.join(sick)} of the batch, counted from 0, cannot be decoded ({error}); the "
                "others can be without it",
                error.sequences,
            ) from error
        results = batch_results(tallies, engine.stats)
        return results[0] if single else results

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> Stream:
        """Decode one prompt, handing out emissions as they come.

        Raises PromptError or OptionError at once.
        """
        request = Request.of(options)
        engine = self._engine()
        ids, (sampling,) = self.encode(prompt, request), request.samplings()
        return Stream(engine, engine.add(ids, sampling, request.limits))

    def rounds(self, prompt: Prompt, **options: Unpack[Options]) -> Iterator[Outcome]:
        """Decode one prompt, handing out each round's tree and accepted path."""
        request = Request.of(options)
        engine = self._engine()
        ids, (sampling,) = self.encode(prompt, request), request.samplings()
        return engine.run([engine.add(ids, sampling, request.limits)])

    def compare(
        self, prompt: Prompt, watch: Callable[[Outcome], None] | None = None, **options: Unpack[Options]
    ) -> Comparison:
        """Decode one prompt plainly and with drafts, in turns, after one round of warm-up each.

        `watch` sees the rounds of the speculative side as they happen.
        """
        request = Request.of(options)
        ids, (sampling,) = self.encode(prompt, request), request.samplings()
        plain, speculative = Engine(self.target, None, budget=0), self._engine()
        kept: dict[int, list[Outcome]] = {id(plain): [], id(speculative): []}

        def see(engine: Engine, outcome: Outcome) -> None:
            kept[id(engine)].append(outcome)
            if engine is speculative and watch is not None:
                watch(outcome)

        sequences = in_turns([plain, speculative], ids, sampling, request.limits, see)
        results = []
        for engine, sequence in zip((plain, speculative), sequences, strict=True):
            tally = Tally(sequence)
            for outcome in kept[id(engine)]:
                tally.add(outcome)
            results.append(tally.result(engine.stats))
        first = find_divergence(self.target, ids, results[0].tokens, results[1].tokens, sampling)
        return Comparison(results[0], results[1], first)

    def encode(self, prompt: Prompt, request: Request | None = None) -> list[int]:
        """The token ids of a prompt; the chat template is applied unless the request is raw.

        Raises PromptError.
        """
        request = request if request is not None else Request.of({})
        tokenizer = self.target.tokenizer
        if isinstance(prompt, str):
            check_text(prompt, request.raw)
            if request.raw:
                return tokenizer.encode(prompt)
            system = [] if request.system is None else [{"role": "system", "content": request.system}]
            return tokenizer.chat([*system, {"role": "user", "content": prompt}], thinking=request.thinking)
        parts = list(prompt) if isinstance(prompt, Many) and not isinstance(prompt, _BYTES) else [None]
        if parts and all(isinstance(part, Mapping) for part in parts):
            if request.raw or request.system is not None:
                raise PromptError("raw and system go with a text; a conversation has its own system message")
            return tokenizer.chat(cast("list[Message]", parts), thinking=request.thinking)
        ids = [as_integer(part) for part in parts]
        if None not in ids:
            if request.system is not None or request.thinking is not None:
                raise PromptError(
                    "system and thinking are parts of the chat template, which token ids do not go through; "
                    "leave them out, or give a text"
                )
            return cast("list[int]", ids)
        raise PromptError(
            f"a prompt must be a text, a list of messages or a list of token ids, got {prompt!r:.60}"
        )

    def _engine(self) -> Engine:
        return Engine(self.target, self.drafter, budget=self.budget, grow=self.grow)


def load(
    model: str = DEFAULT_MODEL,
    head: str = "auto",
    *,
    budget: BudgetOption = AUTO,
    grow: str | None = None,
    dtype: str = "float32",
    device: str = "cpu",
    shared_noise: bool = True,
    confidence_threshold: float = 0.0,
) -> LanguageModel:
    """Load a target and its draft head.

    model: "smollm2-135m", a Hugging Face folder, a `.gguf` file or a hub id.
    head: "auto" or "default" (the head packaged for this target, none if there is none), "off", a stub
    ("random", "echo", "decoy") or the folder of a head.
    budget: drafted nodes per round, or "auto", which measures this machine for some seconds at its first use
    and then verifies what pays (docs/budget.md).
    grow: how trees are grown; None is as the head's family was published: "best-first" for JetSpec, "dynamic"
    for EAGLE-3, "chain" for the others.
    shared_noise: above temperature 0, draft with the target's own noise in view (docs/sampling.md).
    confidence_threshold: drafts end where a DSpark head puts the chance of acceptance below it; other heads
    have none.
    Raises OptionError, ModelError, HeadError, DownloadError or StorageError.
    """
    check_growth(budget, grow)
    from jetspec.draft.loading import load_drafter
    from jetspec.target.loading import load_target

    target = load_target(model, dtype=dtype, device=device)
    drafter = load_drafter(head, target, shared_noise=shared_noise, confidence_threshold=confidence_threshold)
    return LanguageModel(target, drafter, budget=budget, grow=grow)


def check_growth(budget: BudgetOption, grow: str | None) -> None:
    """Raise OptionError unless budget and builder are valid; None is the drafter's own builder."""
    check_budget_option(budget)
    if grow is None:
        return
    if not isinstance(grow, str) or grow not in GROW:
        raise OptionError(f"unknown tree builder {brief(grow)}; valid: {', '.join(GROW)}")


def published_grow(drafter: Drafter) -> str:
    """The builder that a drafter's family was published with; best-first for drafters without a family."""
    return str(getattr(drafter, "default_grow", "best-first"))


def _as_list(prompts: Prompt | Many[Prompt]) -> tuple[list[Prompt], bool]:
    """The prompts as a list, and whether it was a single one."""
    if isinstance(prompts, str):
        return [prompts], True
    if not isinstance(prompts, Many) or len(prompts) == 0:
        raise PromptError(f"no prompt: give a text, a list of messages or of prompts, got {prompts!r:.60}")
    first = prompts[0]
    if isinstance(prompts, _BYTES) or isinstance(first, (Mapping, bool)) or as_integer(first) is not None:
        return [cast("Prompt", prompts)], True
    return list(cast("Many[Prompt]", prompts)), False
