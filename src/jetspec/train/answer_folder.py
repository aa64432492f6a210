"""A folder of answers: `answers.json` says how they were made, `answers.jsonl` holds their text, and shards
hold the target's states at every token.

Shards appear whole, and the lines of their answers after them, so an interrupted run loses no finished
shard and goes on where it stopped.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from jetspec.errors import DataError
from jetspec.target.config import ModelConfig
from jetspec.train.answers import ANSWERS_FILE, Answer, append_answers, resume_answers
from jetspec.train.features import (
    Sample,
    next_shard,
    read_shard,
    shard_paths,
    shard_taps,
    write_shard,
)
from jetspec.train.folder_lock import locked
from jetspec.train.log import write_whole
from jetspec.train.shard_check import check_shard

SHARD_SAMPLES = 64
_ORIGINS = ("taps", "endpoint", "from", "prompts")


@dataclass
class Progress:
    """Counts of a run, those of the runs that it goes on with included.

    answered, tokens  turns answered, and their tokens
    empty             of the answered ones, those without text
    too_long          prompts that do not fit into the context or the limit on prompts
    refused           prompts that the chat template or the endpoint refuses
    failed            prompts that an endpoint did not answer
    cut               conversations that ended early: a later turn would follow an answer that was cut off
                      or empty, or had grown too long
    exhausted         whether all prompts are answered, or asked in vain, with fewer tokens than wanted
    begun, written    just now: turns whose answers are under way, and their tokens so far. They are done, and
                      counted above, when they are whole
    """

    answered: int = 0
    tokens: int = 0
    empty: int = 0
    too_long: int = 0
    refused: int = 0
    failed: int = 0
    cut: int = 0
    exhausted: bool = False
    begun: int = field(default=0, compare=False)
    written: int = field(default=0, compare=False)

    @property
    def skipped(self) -> int:
        """Prompts without an answer."""
        return self.too_long + self.refused + self.failed

    def report(self, wanted: int | None = None) -> list[str]:
        """What happened, in lines of at most 80 columns."""
        lines = [f"{self.answered} turns answered, {self.tokens} tokens"]
        skips = {"too long": self.too_long, "refused": self.refused, "failed": self.failed}
        skipped = ", ".join(f"{count} {reason}" for reason, count in skips.items() if count)
        if skipped:
            lines.append(f"  skipped: {skipped}")
        if self.empty:
            lines.append(f"  {self.empty} empty answers, which training leaves out")
        if self.cut:
            lines.append(f"  {self.cut} conversations end early: an answer cut, empty, or grown too long")
        if self.exhausted and wanted is not None:
            done = "asked" if self.failed else "answered"
            lines.append(f"  all prompts are {done}: {self.tokens} of the {wanted} tokens asked for")
            lines.append("  for more tokens give more prompts, or allow longer answers (--max-tokens)")
        return lines


class AnswerFolder:
    """Writes answers and resumes them. Use it with `with`: from its creation to the end of the block no other
    process can write there, and at the end of the block, be it a fault or Ctrl-C, what waits for its shard to
    fill is written. Reading the files of a folder takes no lock.

    Args:
        taps: target layers of the shards; None writes the text only.
        settings: what must be the same in every run that writes here.
    Raises:
        DataError: the folder was made with other settings or taps.
        StorageError: it cannot be written, or another process writes there.
    """

    def __init__(self, folder: Path, taps: tuple[int, ...] | None, settings: dict[str, Any]) -> None:
        self.folder, self.taps = folder, taps
        self._text = folder / ANSWERS_FILE
        self._waiting: list[tuple[Answer, Sample]] = []
        with ExitStack() as lock:
            lock.enter_context(locked(folder))  # already the check writes, and resuming cuts half a line off
            self._check({**({} if taps is None else {"taps": list(taps)}), **settings})
            self._number = next_shard(folder)
            self._lines = {answer.number: answer for answer in resume_answers(self._text)}
            self._lock = lock.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *fault: object) -> None:
        with self._lock:
            self._flush()

    @property
    def answers(self) -> list[Answer]:
        """The answers whose text earlier runs wrote."""
        return list(self._lines.values())

    def samples(self) -> Iterator[Sample]:
        """The samples in the shards of earlier runs. Raises DataError if one is broken."""
        for path in shard_paths(self.folder):
            check_shard(path)
            yield from read_shard(path)

    def mend(self, answer: Answer) -> None:
        """Write the line of an answer that has a shard but no line: a kill came between, or an older version
        wrote no lines.
        """
        if answer.number not in self._lines:
            self._lines[answer.number] = answer
            append_answers(self._text, [answer])

    def add(self, answer: Answer, sample: Sample | None = None) -> None:
        """Keep an answer: without features at once, with features in the next shard."""
        if sample is None:
            append_answers(self._text, [answer])
            return
        self._waiting.append((answer, sample))
        if len(self._waiting) >= SHARD_SAMPLES:
            self._flush()

    def _flush(self) -> None:
        if self._waiting and self.taps is not None:
            waiting = self._waiting
            # Emptied once the shard is there: what Ctrl-C interrupts is written again, under the same number.
            write_shard(self.folder, self._number, [sample for _, sample in waiting], self.taps)
            self._waiting, self._number = [], self._number + 1
            append_answers(self._text, [answer for answer, _ in waiting])

    def _check(self, record: dict[str, Any]) -> None:
        record = json.loads(json.dumps(record))
        path = self.folder / "answers.json"
        if not path.exists():
            shards = shard_paths(self.folder)
            if any(shard_taps(shard) != self.taps for shard in shards):
                raise DataError(
                    f"{self.folder} holds shards with other taps; use another folder or delete this one"
                )
            if not shards and (self.folder / ANSWERS_FILE).exists():
                raise DataError(f"{self.folder} holds answers of another origin; use another folder")
            started = time.strftime("%Y-%m-%d")
            write_whole(path, json.dumps({**record, "started": started}, indent=2))
            return
        try:
            found = dict(json.loads(path.read_text("utf-8")))
        except (OSError, ValueError, TypeError) as error:
            raise DataError(
                f"{path} cannot be read ({error}); use another folder or delete this one"
            ) from None
        different = [key for key in record if found.get(key, record[key]) != record[key]]
        # What only some origins have; other keys may be missing in the folder of an older version.
        different += [key for key in _ORIGINS if (key in found) != (key in record)]
        if different:
            raise DataError(
                f"{self.folder} holds answers made with other settings ({', '.join(different)}); "
                "use another folder or delete this one"
            )


def feature_bytes(config: ModelConfig, taps: Many[int]) -> int:
    """Bytes of features per token of prompt and answer: taps and the last state in float16, and the id."""
    return 2 * config.hidden_size * (len(taps) + 1) + 4


def folder_bytes(folder: Path) -> int:
    """Bytes of the shards that a folder holds already."""
    return sum(path.stat().st_size for path in shard_paths(folder))


def free_bytes(folder: Path) -> int:
    """Bytes that are free where a folder is, or will be once it is made."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free
