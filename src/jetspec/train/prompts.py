"""Training prompts: user turns from any source, read strictly, without duplicates and evaluation prompts, and
shuffled reproducibly.
"""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from pathlib import Path

from jetspec.errors import DataError
from jetspec.train.exclusion import Exclusion
from jetspec.train.prompt_layouts import conversation_of
from jetspec.train.prompt_sources import HUB, HUB_LIMIT, read_items, source_name


@dataclass(frozen=True)
class Prompt:
    """One conversation up to the turn that the target is to answer, and the user turns that follow."""

    id: str
    messages: tuple[dict[str, str], ...]
    later: tuple[str, ...] = ()

    @property
    def user_turns(self) -> tuple[str, ...]:
        """Every text that the user says."""
        return (*(m["content"] for m in self.messages if m["role"] == "user"), *self.later)


@dataclass
class PromptSet:
    """Prompts with what was left out on the way.

    broken, excluded  where: "file line 7", and for excluded ones also the evaluation prompt
    """

    prompts: list[Prompt] = field(default_factory=list)
    read: int = 0
    duplicates: int = 0
    broken: list[str] = field(default_factory=list)
    excluded: list[str] = field(default_factory=list)
    limited: list[str] = field(default_factory=list)

    def report(self) -> list[str]:
        """What was read and left out, as lines of at most 80 columns (long names aside)."""
        lines = [f"{len(self.prompts)} prompts of {self.read} records"]
        if self.duplicates:
            lines.append(f"  left out: {self.duplicates} duplicates")
        if self.broken:
            lines.append(f"  left out: {len(self.broken)} broken lines, first {self.broken[0]}")
        if self.excluded:
            lines.append(f"  left out: {len(self.excluded)} eval prompts, first {self.excluded[0]}")
        lines += [f"  {source}: only the first {HUB_LIMIT} records (see --limit)" for source in self.limited]
        return lines


def read_prompts(path: Path, *, seed: int | None = 0, skip_broken: bool = False) -> list[Prompt]:
    """The prompts of one source; see `load_prompts`."""
    return load_prompts([str(path)], seed=seed, skip_broken=skip_broken).prompts


def load_prompts(
    sources: Many[str],
    *,
    seed: int | None = 0,
    skip_broken: bool = False,
    exclude: Many[Path] = (),
    strict: bool = False,
    limit: int | None = None,
) -> PromptSet:
    """Read prompts from files and data sets (`prompt_sources`, `prompt_layouts`), one source after the other.

    Args:
        seed: shuffles all prompts together; None keeps the order.
        skip_broken: leave out lines that cannot be read, and count them.
        exclude: evaluation files in the same layouts. Prompts that give one of theirs away are left out and
            counted; with `strict` they are refused.
        limit: most records to read from each source.
    Raises:
        DataError: naming the line that is broken, the prompt that is refused, or the source that is missing
            or holds no prompts.
    """
    exclusion = load_exclusion(exclude)
    found, seen = PromptSet(), set[tuple[str, ...]]()
    for source in sources:
        before = found.read
        _read(source, found, seen, exclusion, skip_broken, limit)
        if source.startswith(HUB) and limit is None and found.read - before == HUB_LIMIT:
            found.limited.append(source)
    if strict and found.excluded:
        raise DataError(
            f"{len(found.excluded)} prompts are eval prompts (first: {found.excluded[0]});"
            " take them out, or leave --strict away to skip them"
        )
    if not found.prompts:
        left_out = len(found.broken) + len(found.excluded)
        reason = f" ({left_out} were left out)" if left_out else ""
        raise DataError(f"{' and '.join(sources)} holds no prompts{reason}; give another file")
    if seed is not None:
        random.Random(seed).shuffle(found.prompts)
    return found


def load_exclusion(files: Many[Path]) -> Exclusion:
    """The user turns of evaluation files. Raises DataError as `load_prompts` does."""
    texts: list[tuple[str, str]] = []
    for file in files:
        for prompt in load_prompts([str(file)], seed=None).prompts:
            texts += [(prompt.id, turn) for turn in prompt.user_turns]
    return Exclusion(texts)


def normalised(text: str) -> str:
    """A text without the differences of case, spacing and composed letters that hide a duplicate."""
    return " ".join(unicodedata.normalize("NFC", text).casefold().split())


def _read(
    source: str,
    found: PromptSet,
    seen: set[tuple[str, ...]],
    exclusion: Exclusion,
    skip_broken: bool,
    limit: int | None,
) -> None:
    for item in read_items(source, limit):
        found.read += 1
        where = f"{source} line {item.line}"
        try:
            if item.error is not None:
                raise ValueError(item.error)
            messages, later = conversation_of(item.record)
        except ValueError as error:
            if not skip_broken:
                raise DataError(
                    f"{where}: {error}; fix it, or give --skip-broken to leave such lines out"
                ) from None
            found.broken.append(where)
            continue
        given = item.record.get("id")
        prompt = Prompt(
            str(given if given is not None else f"{source_name(source)}-{item.line}"), messages, later
        )
        key = tuple(normalised(m["content"]) for m in messages) + tuple(map(normalised, later))
        if key in seen:
            found.duplicates += 1
            continue
        seen.update(key[:end] for end in range(len(messages), len(key) + 1))  # shorter ones repeat it
        known = next(filter(None, map(exclusion.find, prompt.user_turns)), None) if len(exclusion) else None
        if known is None:
            found.prompts.append(prompt)
        else:
            found.excluded.append(f"{where} = {known}")
