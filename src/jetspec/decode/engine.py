"""Requests in, tokens out: admission, chunked prefill, rounds over whatever is running, and memory given
back at the end.

A single request is a batch of one. Sequences join and leave between rounds (continuous batching).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from itertools import count
from operator import index

from jetspec.budget.base import Budget
from jetspec.budget.choose import AUTO, BudgetOption, make_budget
from jetspec.budget.fixed import FixedBudget
from jetspec.decode.round import Outcome, Walker, check_roots, decode_round, observed
from jetspec.decode.stats import Stats
from jetspec.draft.base import Drafter
from jetspec.draft.stubs import Off
from jetspec.errors import HeadError, ModelError, OptionError, PromptError, brief
from jetspec.sampling import Sampling, as_integer, check_bias
from jetspec.sequence import Limits, Sequence
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.tree import GROW

PREFILL_ROWS = 256  # packed prompt tokens per prefill forward on a CPU
_TREE_ROWS = 64  # kept free behind the committed rows
_AHEAD_ROWS = 512  # reserved for the answer where memory is only taken when it is written
# Unique in the process: a drafter may serve several engines, and tells their sequences apart by id.
_ids = count()


class Engine:
    """Decodes any number of requests on one target.

    An engine belongs to one thread at a time: all of its requests share one cache, so two threads that step
    it at once spoil each other's rounds. Give each thread an engine of its own, as `LanguageModel` does for
    each call of its methods, or hold a lock around every call.

    Args:
        drafter: None decodes plainly.
        budget: drafted nodes per sequence and round (root excluded); "auto", which verifies what pays by
            measured cost; or a policy.
        grow: how trees are grown: "best-first", "beam", "chain", "accum" or "dynamic".
        max_batch: sequences decoded at once; further ones wait.
        prefill_rows: most packed prompt tokens per prefill forward while others decode, who wait for it; None
            is as many as if nobody waited.
    Raises:
        OptionError: a value is out of range; the message names the valid ones.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | None = None,
        *,
        budget: BudgetOption = AUTO,
        grow: str = "best-first",
        max_batch: int = 64,
        prefill_rows: int | None = None,
    ) -> None:
        if not isinstance(grow, str) or grow not in GROW:
            raise OptionError(f"unknown tree builder {brief(grow)}; valid: {', '.join(GROW)}")
        most = as_integer(max_batch)
        if most is None or most < 1:
            raise OptionError(f"max_batch must be an integer of at least 1, got {brief(max_batch)}")
        self.target = target
        self.drafter: Drafter = drafter if drafter is not None else Off()
        self.grow = GROW[grow]
        self.budget: Budget = make_budget(budget, target, self.drafter, self.grow)
        self.max_batch = most
        self._shared_rows = None if prefill_rows is None else as_integer(prefill_rows) or 0
        if self._shared_rows is not None and self._shared_rows < 1:
            raise OptionError(f"prefill_rows must be an integer of at least 1, got {brief(prefill_rows)}")
        self.walker: Walker | None = None  # see decode_round; for methods with another acceptance rule
        self.cache = target.new_cache()
        self.stats = Stats()
        self._waiting: deque[Sequence] = deque()
        self._prefilling: list[Sequence] = []
        self._running: list[Sequence] = []
        self._full = False  # no memory for the next one until somebody leaves

    def add(
        self, prompt: Many[int], sampling: Sampling | None = None, limits: Limits | None = None
    ) -> Sequence:
        """Queue a request: prompt ids in, the sequence that `step` will advance out.

        Raises:
            PromptError: the prompt is empty, holds something else than ids of the vocabulary, or leaves no
            room in the context.
            OptionError: the bias names an id outside the vocabulary.
        """
        sampling = sampling if sampling is not None else Sampling()
        limits = self._complete(limits if limits is not None else Limits())
        # All that a round could stumble over is refused here: it would stop every request of the round.
        ids = self._check(prompt, limits)
        check_bias(sampling.logit_bias, self.target.config.vocab_size)
        sequence = Sequence(next(_ids), ids, sampling, limits, decode=self.target.tokenizer.decode)
        self._waiting.append(sequence)
        return sequence

    def abort(self, sequence: Sequence) -> None:
        """Stop a request and give its memory back; a finished one or another engine's is left alone."""
        if any(sequence in group for group in (self._waiting, self._prefilling, self._running)):
            sequence.abort()
            self._release(sequence)

    @property
    def busy(self) -> bool:
        """Whether anything is waiting or running."""
        return bool(self._waiting or self._prefilling or self._running)

    @property
    def waiting(self) -> int:
        """Requests that have not been admitted yet."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests in the cache, those whose prompts are still being read included."""
        return len(self._prefilling) + len(self._running)

    def step(self) -> list[Outcome]:
        """Admit, prefill one chunk, and decode one round of all sequences that are ready.

        A request for which no memory is left waits until others have left.

        Raises:
            MemoryError, or torch's RuntimeError: not even a request alone finds memory; it still waits.
            ModelError: the target's logits are not finite for some requests, the error's `sequences`. They
            have been aborted. The others are as they were before: step again, and they go on.
            HeadError: the draft head returned NaN.
        """
        self._admit()
        if self._prefilling:
            self._prefill()
        if not self._running:
            return []
        try:
            outcomes = self._round(self.budget)
        except (HeadError, ModelError) as error:
            self._abort_sick()
            if isinstance(error, HeadError):
                raise
            outcomes = self._round(FixedBudget(0))  # the fault was on a drafted path; the text may avoid it
        for outcome in outcomes:
            if outcome.sequence.finished is not None:
                self._release(outcome.sequence)
        return outcomes

    def run(self, sequences: Iterable[Sequence] = ()) -> Iterator[Outcome]:
        """Step until nothing is left, yielding each sequence's share of every round.

        If the caller stops early (or an exception passes through), all `sequences` are aborted and their
        memory is freed.
        """
        try:
            while self.busy:
                yield from self.step()
        finally:
            for sequence in sequences:
                self.abort(sequence)

    def generate(
        self, prompts: Iterable[Many[int]], sampling: Sampling | None = None, limits: Limits | None = None
    ) -> list[Sequence]:
        """Decode prompts to their end, as one batch as far as `max_batch` allows."""
        sequences: list[Sequence] = []
        try:
            sequences.extend(self.add(prompt, sampling, limits) for prompt in prompts)
        except Exception:
            for sequence in sequences:
                self.abort(sequence)
            raise
        for _ in self.run(sequences):
            pass
        return sequences

    def prefill(self) -> None:
        """Admit as many requests as fit and prefill them to the end, without decoding a round; for
        measurements."""
        self._admit()
        while self._prefilling:
            self._prefill()

    def _round(self, budget: Budget) -> list[Outcome]:
        return decode_round(
            self._running, self.target, self.drafter, self.grow, budget, self.cache, self.stats, self.walker
        )

    def _abort_sick(self) -> None:
        """Abort requests that cannot go on even without a draft. Raises ModelError if there are any."""
        try:
            check_roots(self._running, self.target, self.cache)
        except ModelError as error:
            for sequence in error.sequences:
                self.abort(sequence)
            raise

    def _admit(self) -> None:
        while (
            self._waiting and not self._full and len(self._prefilling) + len(self._running) < self.max_batch
        ):
            sequence = self._waiting[0]
            # Before it leaves the queue: where no memory is left for it, it still waits and can be aborted.
            try:
                self.cache.add(sequence.id, self._capacity(sequence))
            except (MemoryError, RuntimeError):  # torch's own; on a CPU it has no class of its own
                if not self._prefilling and not self._running:
                    raise
                self._full = True
                break
            self._prefilling.append(self._waiting.popleft())

    def _capacity(self, sequence: Sequence) -> int:
        """Cache rows to reserve for a request. Growing means copying the whole context, which for a batch of
        long prompts takes as long as several rounds.
        """
        ahead = min(sequence.room, _AHEAD_ROWS) if self.cache.lazy else 0
        return sequence.prompt_len + ahead + _TREE_ROWS

    def _prefill(self) -> None:
        """Cache the next piece of the waiting prompts, first come first served, a limited number of tokens
        in one forward.

        The last prompt token is left out: it is the first root, so the first round already drafts.
        """
        parts: list[tuple[int, list[int]]] = []
        room = PREFILL_ROWS * (4 if self.target.device.type == "cuda" else 1)  # where rows cost less
        if self._running and self._shared_rows is not None:
            room = min(room, self._shared_rows)
        for sequence in self._prefilling:
            done = self.cache.length(sequence.id)
            piece = sequence.tokens[done : min(sequence.prompt_len - 1, done + room)]
            if piece:
                parts.append((sequence.id, piece))
            room -= len(piece)
            if room <= 0:
                break
        if parts:
            with self.stats.phase("prefill"):
                plan = chunk(parts, self.cache)
                output = self.target.forward(plan, self.cache, self.drafter.taps, self.drafter.needs_hidden)
                for segment in plan.segments:
                    rows = range(segment.start, segment.start + segment.count)
                    self.cache.keep(segment.key, range(segment.count))
                    self.drafter.observe(
                        segment.key, observed(output.taps, rows), observed(output.hidden, rows)
                    )
        ready = [s for s in self._prefilling if self.cache.length(s.id) == s.prompt_len - 1]
        self._prefilling = [s for s in self._prefilling if s not in ready]
        self._running.extend(ready)

    def _release(self, sequence: Sequence) -> None:
        self._full = False
        if sequence in self._waiting:
            self._waiting.remove(sequence)
        for group in (self._prefilling, self._running):
            if sequence in group:
                group.remove(sequence)
        if sequence.id in self.cache:
            self.cache.free(sequence.id)
        self.drafter.free(sequence.id)

    def _complete(self, limits: Limits) -> Limits:
        """Add what the target itself sets: its context and its end-of-text ids."""
        config = self.target.config
        return replace(
            limits,
            max_context=min(limits.max_context, config.max_positions),
            stop_ids=limits.stop_ids | self.target.tokenizer.eos_ids | frozenset(config.eos_ids),
        )

    def _check(self, prompt: Many[int], limits: Limits) -> list[int]:
        """The prompt's ids. Raises PromptError if they are none, no ids, or too many."""
        vocab = self.target.config.vocab_size
        try:
            ids = [index(token) for token in prompt]
        except TypeError:
            raise PromptError(
                f"the prompt must be a list of token ids from 0 to {vocab - 1}; "
                "encode texts with the target's tokenizer"
            ) from None
        if not ids:
            raise PromptError("the prompt is empty: give at least one token")
        if min(ids) < 0 or max(ids) >= vocab:
            raise PromptError(f"the prompt holds token ids outside 0..{vocab - 1}, the target's vocabulary")
        if len(ids) >= limits.max_context:
            raise PromptError(
                f"the prompt has {len(ids)} tokens, but the context ends at {limits.max_context}: "
                "shorten it, at least one token must fit behind it"
            )
        return ids
