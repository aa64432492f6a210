"""The target answers the training prompts, batched through the engine, and its features are recorded on the
way.

A folder of answers is a list of shards. Shards appear whole, so an interrupted run goes on where it
stopped: finished prompts are read back from the shards, the others are answered.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from jetspec.config import check_least, check_train_seed
from jetspec.decode.engine import Engine
from jetspec.errors import DataError, PromptError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.train.features import (
    Recorder,
    Sample,
    next_shard,
    read_shard,
    shard_paths,
    shard_prompts,
    shard_taps,
    write_shard,
)
from jetspec.train.log import write_whole
from jetspec.train.prompts import Prompt

SHARD_SAMPLES = 64
_MIX_CYCLE = 20  # prompts are dealt out to the temperatures in a cycle of this length


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    temperatures  (temperature, share) pairs; shares sum to 1 and are dealt out in twentieths
    tokens        stop after this many answer tokens
    part          (i, n): answer only every n-th prompt from the i-th on, so that n processes with one
                  thread each can share a file; each needs a folder of its own
    """

    max_tokens: int = 192
    tokens: int = 650_000
    temperatures: tuple[tuple[float, float], ...] = ((0.0, 0.6), (0.7, 0.15), (1.0, 0.25))
    batch: int = 96
    max_prompt: int = 512
    seed: int = 0
    part: tuple[int, int] = (0, 1)

    def __post_init__(self) -> None:
        check_least(1, tokens=self.tokens, max_tokens=self.max_tokens, batch=self.batch)
        check_train_seed(self.seed)

    def temperature_of(self, prompt: int) -> float:
        """The temperature for a prompt: a fixed function of its number, so that a resumed run deals the
        same.
        """
        point = (prompt * 7 % _MIX_CYCLE + 0.5) / _MIX_CYCLE
        for temperature, share in self.temperatures:
            if point < share:
                return temperature
            point -= share
        return self.temperatures[-1][0]


@dataclass
class Progress:
    """Counts of a run: prompts answered, answer tokens written, prompts skipped because they are too long."""

    answered: int = 0
    tokens: int = 0
    skipped: int = 0


def answer_prompts(
    target: Target,
    prompts: Many[Prompt],
    folder: Path,
    taps: tuple[int, ...],
    options: AnswerOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
) -> Progress:
    """Answer prompts into shards of `folder` until `options.tokens` answer tokens exist or the prompts run
    out.

    Raises:
        DataError: the folder holds shards made with other taps or options.
    """
    folder.mkdir(parents=True, exist_ok=True)
    _check_folder(folder, taps, options, target, prompts)
    progress, done = _resume(folder)
    on_progress(progress)
    if progress.tokens >= options.tokens:
        return progress
    number = next_shard(folder)
    waiting: list[Sample] = []
    try:
        for sample in _answers(target, prompts, done, taps, options, progress):
            waiting.append(sample)
            on_progress(progress)
            if len(waiting) == SHARD_SAMPLES:
                write_shard(folder, number, waiting, taps)
                number, waiting = number + 1, []
            if progress.tokens >= options.tokens:
                break
    finally:  # Ctrl-C keeps what is finished
        if waiting:
            write_shard(folder, number, waiting, taps)
    return progress


def _answers(
    target: Target,
    prompts: Many[Prompt],
    done: set[int],
    taps: tuple[int, ...],
    options: AnswerOptions,
    progress: Progress,
) -> Iterator[Sample]:
    """Keep the engine full and yield finished answers."""
    recorder = Recorder(taps)
    engine = Engine(target, recorder, budget=0, max_batch=options.batch)
    queue = deque(
        number for number in range(options.part[0], len(prompts), options.part[1]) if number not in done
    )
    active: dict[int, tuple[int, float]] = {}  # sequence id -> prompt number, temperature
    while queue or engine.busy:
        while queue and len(active) < options.batch:
            number = queue.popleft()
            sequence = _submit(engine, target, prompts[number], number, options)
            if sequence is None:
                progress.skipped += 1
            else:
                active[sequence.id] = (number, sequence.sampling.temperature)
        for outcome in engine.step():
            sequence = outcome.sequence
            if sequence.finished is None:
                continue
            number, temperature = active.pop(sequence.id)
            rows, hidden = recorder.take(sequence.id, len(sequence.tokens))
            progress.answered += 1
            progress.tokens += len(sequence.emitted)
            yield Sample(
                number, sequence.prompt_len, temperature, torch.tensor(sequence.tokens), rows, hidden
            )


def _submit(
    engine: Engine, target: Target, prompt: Prompt, number: int, options: AnswerOptions
) -> Sequence | None:
    ids = target.tokenizer.chat(list(prompt.messages))
    if len(ids) > options.max_prompt:
        return None
    temperature = options.temperature_of(number)
    sampling = Sampling(temperature=temperature, seed=options.seed + number)
    try:
        return engine.add(ids, sampling, Limits(max_tokens=options.max_tokens))
    except PromptError:
        return None


def _resume(folder: Path) -> tuple[Progress, set[int]]:
    """What the shards of an earlier run already hold."""
    progress, done = Progress(), set[int]()
    for path in shard_paths(folder):
        done.update(shard_prompts(path))
        for sample in read_shard(path):
            progress.answered += 1
            progress.tokens += sample.answer_len
    return progress, done


def _check_folder(
    folder: Path, taps: tuple[int, ...], options: AnswerOptions, target: Target, prompts: Many[Prompt]
) -> None:
    """Refuse to mix answers of different settings or prompts in one folder: shards know prompts by number."""
    settings = asdict(options)
    for changeable in ("tokens", "batch"):
        settings.pop(changeable)
    text = json.dumps([prompt.messages for prompt in prompts])
    record = {
        "target": target.name,
        "taps": list(taps),
        "prompts": hashlib.sha256(text.encode()).hexdigest(),
        **json.loads(json.dumps(settings)),
    }
    path = folder / "answers.json"
    if path.exists():
        try:
            found = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); use another folder or delete this one"
            ) from None
        different = [key for key in record if found.get(key, record[key]) != record[key]]
        if different:
            raise DataError(
                f"{folder} holds answers made with other settings ({', '.join(different)}); "
                "use another folder or delete this one"
            )
        return
    if any(shard_taps(shard) != taps for shard in shard_paths(folder)):
        raise DataError(f"{folder} holds shards with other taps; use another folder or delete this one")
    write_whole(path, json.dumps({**record, "started": time.strftime("%Y-%m-%d")}, indent=2))
