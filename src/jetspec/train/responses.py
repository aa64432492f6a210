"""The target answers the training prompts, batched through the engine, and its features are recorded on the
way.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from jetspec.config import check_least, check_train_seed
from jetspec.decode.engine import Engine
from jetspec.errors import OptionError, PromptError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.train.answer_folder import AnswerFolder, Progress
from jetspec.train.answers import Answer, spelled
from jetspec.train.conversation import Turn, follow, next_turns, prompts_hash, turn_numbers
from jetspec.train.features import Recorder, Sample
from jetspec.train.pace import Pace
from jetspec.train.prompts import Prompt
from jetspec.train.turns import check_template, prompt_ids

__all__ = ["AnswerOptions", "Progress", "answer_prompts"]

DEFAULT_MIX = ((0.0, 0.6), (0.7, 0.15), (1.0, 0.25))


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    tokens        stop after this many answer tokens
    max_tokens    longest answer; max_prompt: longest prompt, earlier turns of its conversation included
    temperatures  (temperature, share) pairs; shares sum to 1
    part          (i, n): answer only every n-th prompt from the i-th on, so that n processes with one
                  thread each can share a file; each needs a folder of its own
    thinking      the chat template's `enable_thinking`; None leaves its default
    raw           continue the user's text as it is, without chat template (base models)
    features      record features; without them only the text is written
    """

    max_tokens: int = 192
    tokens: int = 650_000
    temperatures: tuple[tuple[float, float], ...] = DEFAULT_MIX
    batch: int = 96
    max_prompt: int = 512
    seed: int = 0
    part: tuple[int, int] = (0, 1)
    raw: bool = False
    features: bool = True
    thinking: bool | None = None

    def __post_init__(self) -> None:
        check_least(1, tokens=self.tokens, max_tokens=self.max_tokens, batch=self.batch)
        check_least(1, max_prompt=self.max_prompt)
        check_train_seed(self.seed)
        for temperature, share in self.temperatures:
            Sampling(temperature=temperature)
            check_least(0, share=share)
        if abs(sum(share for _, share in self.temperatures) - 1) > 1e-6:
            raise OptionError(f"the shares of temperatures must sum to 1, got {self.temperatures}")

    def temperature_of(self, prompt: int) -> float:
        """The temperature for a prompt: a hash of its number and the seed decides, so shares hold in every
        part of the prompts, and a resumed run deals the same.
        """
        digest = hashlib.blake2b(f"{self.seed}/{prompt}".encode(), digest_size=8).digest()
        point = int.from_bytes(digest) / 2**64
        for temperature, share in self.temperatures:
            if point < share:
                return temperature
            point -= share
        return self.temperatures[-1][0]

    def settings(self) -> dict[str, Any]:
        """What must not change between the runs that fill one folder."""
        record = asdict(self)
        for changeable in ("tokens", "batch", "features"):
            record.pop(changeable)
        return record


def expected_tokens(target: Target, prompts: Many[Prompt], options: AnswerOptions) -> float:
    """About how many tokens of prompts and answers a run will hold, judged by the first prompts and by
    answers that use two thirds of their room.
    """
    check_template(target, options.raw)
    sample = [_length(target, prompt, options) for prompt in prompts[:50]]
    answer = options.max_tokens * 2 / 3
    turns = sum(1 + len(prompt.later) for prompt in prompts[options.part[0] :: options.part[1]])
    answers = min(turns, options.tokens / answer)
    return answers * (sum(sample) / max(1, len(sample)) + answer)


def _length(target: Target, prompt: Prompt, options: AnswerOptions) -> int:
    try:
        ids = prompt_ids(target, prompt.messages, options.raw, options.thinking)
    except PromptError:  # counted when it is its turn
        return 0
    return min(len(ids), options.max_prompt)


def answer_prompts(
    target: Target,
    prompts: Many[Prompt],
    folder: Path,
    taps: tuple[int, ...],
    options: AnswerOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer prompts into `folder` until `options.tokens` answer tokens exist or the prompts run out.

    `on_progress` is called when an answer is kept, and a few times a second while answers are under way.

    Raises:
        DataError: the folder holds answers made with other taps, prompts or options.
        PromptError: the target has no chat template, and `options.raw` is off.
        StorageError: the disk is full, what was written before is kept; or another process writes there.
    """
    check_template(target, options.raw)
    settings = {"target": target.name, "prompts": prompts_hash(prompts), **options.settings()}
    with AnswerFolder(folder, taps if options.features else None, settings) as store:
        run = _Run(target, prompts, taps, options)
        run.resume(store)
        on_progress(run.progress)
        if run.progress.tokens >= options.tokens:
            return run.progress
        for answer, sample in run.answers(on_progress):
            store.add(answer, sample)
            on_progress(run.progress)
            if run.progress.tokens >= options.tokens:
                break
        else:
            run.progress.exhausted = True
        run.under_way(())  # what is not whole is dropped
    return run.progress


class _Run:
    """The engine, kept full of turns."""

    def __init__(
        self, target: Target, prompts: Many[Prompt], taps: tuple[int, ...], options: AnswerOptions
    ) -> None:
        self.target, self.prompts, self.options = target, prompts, options
        self.progress = Progress()
        self.recorder = Recorder(taps) if options.features else None
        self.engine = Engine(target, self.recorder, budget=0, max_batch=options.batch)
        self.done: dict[int, Answer] = {}

    def resume(self, store: AnswerFolder) -> None:
        """Take in what earlier runs left, and write the lines that they did not get to."""
        if self.recorder is None:
            for answer in store.answers:
                self._count(answer, len(answer.ids(self.target.tokenizer)))
            return
        lines = {answer.number: answer for answer in store.answers}
        samples = {sample.prompt: sample for sample in store.samples()}
        firsts = turn_numbers(self.prompts)
        prompt_of = {first + i: n for n, first in enumerate(firsts) for i in range(self._turns(n))}
        for number in sorted(samples):  # later turns need the answers before them
            if number not in prompt_of:
                continue
            sample, n = samples[number], prompt_of[number]
            if number not in lines:
                turn = self._turn(n, number - firsts[n], firsts[n])
                emitted = sample.tokens[sample.prompt_len :].tolist()
                lines[number] = self._answer(turn, emitted, sample.temperature)
                store.mend(lines[number])
            self._count(lines[number], sample.answer_len)

    def answers(
        self, on_progress: Callable[[Progress], None] = lambda progress: None
    ) -> Iterator[tuple[Answer, Sample | None]]:
        """Every turn that is left, as it is answered; `on_progress` sees the answers under way grow."""
        options, pace = self.options, Pace()
        queue = deque(next_turns(self.prompts, options.part, options.raw, self.done, self.progress))
        active: dict[int, tuple[Turn, Sequence]] = {}  # by sequence id
        while queue or self.engine.busy:
            while queue and len(active) < options.batch:
                turn = queue.popleft()
                sequence = self._submit(turn)
                if sequence is not None:
                    active[sequence.id] = turn, sequence
            for outcome in self.engine.step():
                sequence = outcome.sequence
                if sequence.finished is None:
                    continue
                turn, _ = active.pop(sequence.id)
                answer = self._answer(turn, sequence.emitted, sequence.sampling.temperature)
                self._count(answer, len(sequence.emitted))
                later = follow(self.prompts[turn.prompt], turn, answer, options.raw, self.progress)
                if later is not None:
                    queue.appendleft(later)
                self.under_way(s for _, s in active.values())
                yield answer, self._sample(sequence, answer)
            if pace.due():
                self.under_way(s for _, s in active.values())
                on_progress(self.progress)

    def under_way(self, sequences: Iterable[Sequence]) -> None:
        """Count what is begun and not done."""
        lengths = [len(s.tokens) - s.prompt_len for s in sequences]
        self.progress.begun, self.progress.written = len(lengths), sum(lengths)

    def _submit(self, turn: Turn) -> Sequence | None:
        """Hand a turn to the engine; None if it cannot be answered, which is counted."""
        options = self.options
        sampling = Sampling(temperature=options.temperature_of(turn.prompt), seed=options.seed + turn.number)
        try:
            ids = prompt_ids(self.target, turn.messages, options.raw, options.thinking)
        except PromptError:
            self.progress.refused += 1
            return None
        try:
            if len(ids) > options.max_prompt:
                raise PromptError("longer than the limit")
            return self.engine.add(ids, sampling, Limits(max_tokens=options.max_tokens))
        except PromptError:
            if turn.index:
                self.progress.cut += 1
            else:
                self.progress.too_long += 1
            return None

    def _answer(self, turn: Turn, emitted: list[int], temperature: float) -> Answer:
        tokenizer = self.target.tokenizer
        ends = tokenizer.eos_ids | frozenset(self.target.config.eos_ids)
        stopped = bool(emitted) and emitted[-1] in ends
        text = tokenizer.decode(emitted[:-1] if stopped else emitted)
        finish = "stop" if stopped else "length"
        return Answer(
            number=turn.number,
            id=self.prompts[turn.prompt].id + (f"/{turn.index + 1}" if turn.index else ""),
            messages=turn.messages,
            text=text,
            finish=finish,
            temperature=temperature,
            seed=self.options.seed + turn.number,
            tokens=None if spelled(tokenizer, text, finish) == emitted else tuple(emitted),
            raw=self.options.raw,
            thinking=self.options.thinking,
        )

    def _sample(self, sequence: Sequence, answer: Answer) -> Sample | None:
        if self.recorder is None:
            return None
        rows, hidden = self.recorder.take(sequence.id, len(sequence.tokens))
        tokens = torch.tensor(sequence.tokens)
        return Sample(answer.number, sequence.prompt_len, answer.temperature, tokens, rows, hidden)

    def _count(self, answer: Answer, tokens: int) -> None:
        self.done[answer.number] = answer
        self.progress.answered += 1
        self.progress.tokens += tokens
        self.progress.empty += not answer.text.strip()

    def _turns(self, prompt: int) -> int:
        return 1 + len(self.prompts[prompt].later)

    def _turn(self, prompt: int, index: int, first: int) -> Turn:
        """A turn of a conversation whose earlier turns are done."""
        turn = Turn(prompt, 0, first, self.prompts[prompt].messages)
        for later in self.prompts[prompt].later[:index]:
            turn = turn.then(self.done[turn.number].text, later)
        return turn
