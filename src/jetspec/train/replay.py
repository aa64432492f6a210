"""Features of answers that exist as text: teacher forcing, one prefill forward per answer, several answers
packed into each.

The rows are those that `Recorder` keeps while the target decodes, up to the rounding of another order of
sums. So answers may be made elsewhere (any OpenAI-compatible endpoint), or kept as text alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from jetspec.errors import PromptError
from jetspec.target.plan import chunk
from jetspec.target.target import Target
from jetspec.train.answer_folder import AnswerFolder, Progress
from jetspec.train.answers import Answer
from jetspec.train.features import Recorder, Sample
from jetspec.train.turns import check_template, prompt_ids

ROWS = 1024  # packed tokens per forward
_BATCH = 64  # answers per forward


def expected_rows(target: Target, answers: Many[Answer]) -> float:
    """About how many tokens prompts and answers have together, judged by every n-th of them."""
    check_template(target, raw=all(answer.raw for answer in answers))
    sample = answers[:: max(1, len(answers) // 50)]
    lengths = [len(job.ids) for job in _encoded(target, sample, set(), Progress())]
    return len(answers) * sum(lengths) / len(sample)


def replay_answers(
    target: Target,
    answers: Many[Answer],
    folder: Path,
    taps: tuple[int, ...],
    on_progress: Callable[[Progress], None] = lambda progress: None,
    *,
    rows: int = ROWS,
) -> Progress:
    """Compute the features of answers into `folder`, which may hold those of an interrupted run.

    The answers are numbered by their place. Empty ones and those that do not fit into the context are left
    out and counted.

    Raises:
        DataError: the folder was made from other answers, with other taps or another target.
        PromptError: the target has no chat template.
        StorageError: the disk is full, what was written before is kept; or another process writes there.
    """
    check_template(target, raw=all(answer.raw for answer in answers))
    numbered = [replace(answer, number=number) for number, answer in enumerate(answers)]
    lines = "\n".join(answer.to_json() for answer in numbered)
    settings = {"target": target.name, "from": hashlib.sha256(lines.encode()).hexdigest()}
    progress, done = Progress(), set[int]()
    with AnswerFolder(folder, taps, settings) as store:
        for sample in store.samples():
            done.add(sample.prompt)
            store.mend(numbered[sample.prompt])
            progress.answered += 1
            progress.tokens += sample.answer_len
        on_progress(progress)
        recorder = Recorder(taps)
        for batch in _batches(_encoded(target, numbered, done, progress), rows):
            for sample in _forward(target, recorder, batch, rows):
                store.add(numbered[sample.prompt], sample)
                progress.answered += 1
                progress.tokens += sample.answer_len
            on_progress(progress)
    return progress


class _Job(NamedTuple):
    """An answer behind its prompt, as token ids."""

    number: int
    prompt_len: int
    temperature: float
    ids: list[int]


def _encoded(target: Target, answers: Many[Answer], done: set[int], progress: Progress) -> Iterator[_Job]:
    """The answers that are left to do; those that cannot be used are counted."""
    config = target.config
    for answer in answers:
        if answer.number in done:
            continue
        if not answer.text.strip() and not answer.tokens:
            progress.empty += 1
            continue
        try:
            prompt = prompt_ids(target, answer.messages, answer.raw, answer.thinking)
            ids = [*prompt, *answer.ids(target.tokenizer)]
        except PromptError:
            progress.refused += 1
            continue
        if not prompt or max(ids) >= config.vocab_size or min(ids) < 0:
            progress.refused += 1  # made by a target of another vocabulary
        elif len(ids) > config.max_positions:
            progress.too_long += 1
        else:
            yield _Job(answer.number, len(prompt), answer.temperature, ids)


def _batches(jobs: Iterable[_Job], rows: int) -> Iterator[list[_Job]]:
    """Jobs that fit into one forward together; a longer one is alone."""
    batch: list[_Job] = []
    for job in jobs:
        if batch and (len(batch) == _BATCH or sum(len(j.ids) for j in batch) + len(job.ids) > rows):
            yield batch
            batch = []
        batch.append(job)
    if batch:
        yield batch


def _forward(target: Target, recorder: Recorder, batch: list[_Job], rows: int) -> Iterator[Sample]:
    """One forward for a batch, or several for a single answer of more than `rows` tokens. The last token is
    left out: decoding never computes its row either.
    """
    cache = target.new_cache()
    longest = max(len(job.ids) for job in batch)
    for job in batch:
        cache.add(job.number, capacity=len(job.ids))
    for start in range(0, longest - 1, rows):
        parts = [(job.number, job.ids[start : start + rows][: len(job.ids) - 1 - start]) for job in batch]
        plan = chunk([(number, piece) for number, piece in parts if piece], cache)
        output = target.forward(plan, cache, recorder.taps, recorder.needs_hidden)
        assert output.taps is not None and output.hidden is not None
        for segment in plan.segments:
            own = slice(segment.start, segment.start + segment.count)
            cache.keep(segment.key, range(segment.count))
            recorder.observe(segment.key, output.taps[own], output.hidden[own])
    for job in batch:
        recorder.free(job.number)
        taps, hidden = recorder.take(job.number, len(job.ids))
        yield Sample(job.number, job.prompt_len, job.temperature, torch.tensor(job.ids), taps, hidden)
