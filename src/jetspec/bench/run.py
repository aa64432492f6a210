"""The run: every method on every group of prompts, in turns, each group recorded as soon as it is done."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Any

from jetspec.bench.baselines import Library, LibraryRunner
from jetspec.bench.clock import EngineRunner, Measured, Runner, take_turns, warm_up
from jetspec.bench.methods import PLAIN, Heads, Method, make_engine, variants
from jetspec.bench.prompts import Question, digest, encode, warm_up_ids
from jetspec.bench.record import Journal, load_average, peak_memory, provenance, run_key
from jetspec.bench.runs import place_of, runs_of
from jetspec.budget.choose import check_budget_option
from jetspec.decode.compare import TIE_BELOW, find_divergence, tie_below
from jetspec.errors import OptionError, PromptError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.target.target import Target

WARM_UP_TOKENS = 12
CLOCK = "the first round to the last token, prefill apart"


@dataclass(frozen=True)
class Settings:
    """What is measured. Raises OptionError naming the value that is out of range.

    budgets, temperatures, batches, seeds   all combinations are measured; seeds matter above T = 0 only.
                    A budget is a number of drafted nodes, or "auto", which follows the measured cost
    tokens          most tokens of an answer
    ignore_eos      go on after the end of the text, so that all answers have `tokens` tokens
    outside_prompts prompts of a set that outside methods decode as well; they are several times slower
    """

    budgets: tuple[int | str, ...] = (8,)
    temperatures: tuple[float, ...] = (0.0,)
    batches: tuple[int, ...] = (1,)
    seeds: tuple[int, ...] = (0,)
    tokens: int = 64
    ignore_eos: bool = False
    outside_prompts: int = 3

    def __post_init__(self) -> None:
        for name in ("budgets", "temperatures", "batches", "seeds"):
            if not getattr(self, name):
                raise OptionError(f"--{name} is empty; give at least one value")
        for budget in self.budgets:
            check_budget_option(budget)
            if budget == 0:
                raise OptionError("budget 0 is plain decoding, which is measured anyway; leave it out")
        for batch in self.batches:
            if not 1 <= batch <= 1024:
                raise OptionError(f"a batch must be from 1 to 1024 prompts, got {batch}")
        for temperature in self.temperatures:
            for seed in self.seeds:
                Sampling(temperature=temperature, seed=seed)
        if self.outside_prompts < 0:
            raise OptionError(f"--outside-prompts must be 0 or more, got {self.outside_prompts}")
        self.limits()

    def limits(self) -> Limits:
        """When an answer ends."""
        return Limits(max_tokens=self.tokens, ignore_eos=self.ignore_eos)

    def reaches(self, method: Method) -> bool:
        """Whether any case is one that a method decodes; see `takes`."""
        return any(
            takes(method, batch, Sampling(temperature=temperature))
            for batch in self.batches
            for temperature in self.temperatures
        )

    def prompts_for(self, wanted: int) -> int:
        """`wanted` prompts per set, rounded up to whole groups of the largest batch."""
        largest = max(self.batches)
        return -(-wanted // largest) * largest


def takes(method: Method, batch: int, sampling: Sampling) -> bool:
    """Outside methods decode one prompt at a time, greedily; rejection sampling is for T > 0."""
    if method.outside:
        return batch == 1 and sampling.greedy
    return not (method.in_law and sampling.greedy)


@dataclass(frozen=True)
class Item:
    """One group of prompts of one set, decoded as one batch by every method."""

    set: str
    number: int  # of the group within its set, batch and temperature
    turn: int  # which method begins: one more from group to group, from set to set and from case to case
    questions: tuple[Question, ...]
    prompts: tuple[tuple[int, ...], ...]
    temperature: float
    seed: int
    digest: str

    @property
    def sampling(self) -> Sampling:
        """How tokens are picked."""
        return Sampling(temperature=self.temperature, seed=self.seed)

    @property
    def place(self) -> tuple[str, float, int, int, str]:
        """What tells it apart within a run; in records too, see `runs.place_of`."""
        return self.set, self.temperature, self.seed, len(self.prompts), self.digest


def plan(
    questions: Many[Question], target: Target, settings: Settings, complain: Callable[[str], None]
) -> list[Item]:
    """All groups, in the order in which they are measured: one of each set, then the next of each, so that a
    run that is stopped early has seen all sets.

    A last group that is not full is filled up from the start of its set. A prompt that leaves no room for
    `tokens` in the context is left out, and so is one with the text of another of its set, which would count
    as a prompt more without being one; `complain` is told. Raises PromptError if one is empty, or if none is
    left.
    """
    by_set: dict[str, list[tuple[Question, tuple[int, ...]]]] = {}
    known: dict[tuple[str, tuple[int, ...]], str] = {}
    for question in questions:
        ids = tuple(encode(target, question))
        if not ids:
            raise PromptError(
                f"{question.id} of {question.set} is an empty prompt; write one, or leave it out"
            )
        if (question.set, ids) in known:
            first = known[question.set, ids]
            complain(f"{question.id} of {question.set} is left out: it has the text of {first}")
            continue
        known[question.set, ids] = question.id
        if len(ids) + settings.tokens > target.config.max_positions:
            complain(
                f"{question.id} is left out: its {len(ids)} tokens leave no room for {settings.tokens} in "
                f"the context of {target.config.max_positions}"
            )
            continue
        by_set.setdefault(question.set, []).append((question, ids))
    if not by_set:
        raise PromptError("no prompt fits into the context with --tokens; give shorter ones or fewer tokens")
    items: list[Item] = []
    case = 0  # of temperature, seed and batch
    for temperature in dict.fromkeys(settings.temperatures):
        greedy = Sampling(temperature=temperature).greedy
        for seed in dict.fromkeys(settings.seeds[:1] if greedy else settings.seeds):
            for batch in dict.fromkeys(settings.batches):
                groups = [
                    Item(
                        set=name,
                        number=number,
                        turn=number + place + case,
                        questions=tuple(question for question, _ in group),
                        prompts=tuple(ids for _, ids in group),
                        temperature=temperature,
                        seed=seed,
                        digest=digest([ids for _, ids in group]),
                    )
                    for place, (name, entries) in enumerate(by_set.items())
                    for number, group in enumerate(_groups(entries, batch))
                ]
                items += sorted(groups, key=lambda item: item.number)
                case += 1
    return items


def _groups(entries: list[Any], batch: int) -> Iterator[list[Any]]:
    for start in range(0, len(entries), batch):
        yield [entries[index % len(entries)] for index in range(start, start + batch)]


class Bench:
    """Measures groups of prompts with all methods on one target.

    Args:
        methods: plain decoding first; those whose heads can be used.
        library: for outside methods; None if there is none among `methods`.
        journal: where records go, and where those of an earlier start are found.
        model, sets: for the record.
    """

    def __init__(
        self,
        target: Target,
        methods: Many[Method],
        heads: Heads,
        settings: Settings,
        journal: Journal,
        library: Library | None = None,
        skipped: dict[str, str] | None = None,
    ) -> None:
        assert methods[0].name == PLAIN, methods
        self.target, self.settings, self.journal = target, settings, journal
        self._heads, self._library = heads, library
        self.variants = variants(methods, settings.budgets, heads)
        self.facts = provenance(self._arguments(skipped or {}), str(target.device))
        self.key = run_key(self.facts)
        self._runners: dict[tuple[str, int | str, int], Runner] = {}

    def _arguments(self, skipped: dict[str, str]) -> dict[str, Any]:
        tokenizer = self.target.tokenizer
        drafting = dict.fromkeys(method for method, _ in self.variants if method.family is not None)
        return {
            "model": self.target.name,
            "tokenizer": tokenizer.hash[:16],
            "template": (tokenizer.template_hash or "none")[:16],
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "device": self.target.device.type,
            "methods": [[method.name, budget] for method, budget in self.variants],
            "confidence": self._heads.confidence,
            "heads": {method.name: self._heads.identity(method) for method in drafting},
            "skipped": skipped,
            "tokens": self.settings.tokens,
            "ignore_eos": self.settings.ignore_eos,
            "outside_prompts": self.settings.outside_prompts,
            "clock": CLOCK,
        }

    def done(self) -> set[tuple[str, float, int, int, str]]:
        """Places of the groups that an earlier start with the same arguments has recorded."""
        runs = [run for run in runs_of(self.journal.read()) if run.key == self.key]
        return {place_of(item) for run in runs for item in run.items}

    def run(self, items: Many[Item], done: int = 0, fresh: bool = False) -> Iterator[Item]:
        """Measure and record `items`, yielding each when it is done. Stopping in between loses that one.

        done: groups that were asked for as well and are recorded already.
        fresh: what is recorded of `items` counts no longer, also should this start be interrupted.
        """
        if items:
            counts: dict[str, Any] = {"planned": done + len(items), "done": done}
            if fresh:
                counts["fresh"] = [item.place for item in items]
            self.journal.append({"kind": "run", "key": self.key, **counts, "run": self.facts})
        gc.collect()
        gc.freeze()  # models and libraries are not looked at again before every group
        try:
            for item in items:
                self.journal.append({"kind": "item", "key": self.key, **self.measure(item)})
                yield item
        finally:
            gc.unfreeze()

    def measure(self, item: Item) -> dict[str, Any]:
        """One group with every method that can decode it: its record."""
        chosen = [variant for variant in self.variants if self._takes(variant[0], item)]
        batch = len(item.prompts)
        runners = [self._runner(method, budget, batch) for method, budget in chosen]
        turn = item.turn % len(chosen)  # another method begins each time
        order = [*range(turn, len(chosen)), *range(turn)]
        load = load_average()
        outcomes = take_turns(
            [runners[place] for place in order], item.prompts, item.sampling, self.settings.limits()
        )
        by_place = dict(zip(order, outcomes, strict=True))
        plain = by_place[0][1]
        return {
            "set": item.set,
            "temperature": item.temperature,
            "seed": item.seed,
            "batch": batch,
            "ids": [question.id for question in item.questions],
            "digest": item.digest,
            "digests": [digest([ids]) for ids in item.prompts],
            "prompt_tokens": [len(ids) for ids in item.prompts],
            "load": load,
            "methods": [
                {
                    "method": method.name,
                    "budget": budget,
                    **by_place[place][0].values(),
                    "divergence": self._differences(item, method, plain, by_place[place][1]),
                }
                for place, (method, budget) in enumerate(chosen)
            ],
            "peak_memory": peak_memory(),
        }

    def _takes(self, method: Method, item: Item) -> bool:
        """As the function of that name; and outside methods decode only some prompts of each set."""
        some = not method.outside or item.number < self.settings.outside_prompts
        return some and takes(method, len(item.prompts), item.sampling)

    def _runner(self, method: Method, budget: int | str, batch: int) -> Runner:
        """The runner of a variant, made and warmed up at every temperature when it is first needed."""
        place = (method.name, budget, batch)
        if place not in self._runners:
            runner: Runner
            if method.outside:
                assert self._library is not None
                runner = LibraryRunner(self._library, method.name)
            else:
                runner = EngineRunner(make_engine(self.target, method, budget, self._heads, batch))
            limits = Limits(max_tokens=WARM_UP_TOKENS, ignore_eos=True)
            for temperature in dict.fromkeys(self.settings.temperatures):
                sampling = Sampling(temperature=temperature, seed=self.settings.seeds[0])
                if takes(method, batch, sampling):
                    warm_up(runner, [warm_up_ids(self.target)] * batch, sampling, limits)
            self._runners[place] = runner
        return self._runners[place]

    def _differences(
        self, item: Item, method: Method, plain: Many[Many[int]], other: Many[Many[int]]
    ) -> list[dict[str, Any] | None]:
        """Per prompt the first place where the answer leaves plain decoding's, None where it does not."""
        found: list[dict[str, Any] | None] = []
        # Another library adds in another order, so its answers may part at a tie wherever it runs.
        bound = TIE_BELOW[self.target.dtype] if method.outside else tie_below(self.target)
        for ids, expected, answer in zip(item.prompts, plain, other, strict=True):
            first = find_divergence(self.target, ids, expected, answer, item.sampling, bound)
            found.append(None if first is None else first.as_dict())
        return found


__all__ = ["Bench", "Item", "Measured", "Settings", "place_of", "plan"]
