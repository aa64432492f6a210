"""The target writes its own prompts: shown an empty user turn, a chat model continues it with what users ask
(arXiv 2406.08464 found this for aligned models). So a head can be trained without any data set.

Half of the turns begin with words given to the target, because alone a small model keeps to a few phrases.
"""

from __future__ import annotations

import hashlib
import json
import textwrap
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass, field
from pathlib import Path

from jetspec.config import check_least, check_train_seed
from jetspec.decode.engine import Engine
from jetspec.errors import DataError, OptionError, PromptError, StorageError
from jetspec.sampling import Sampling
from jetspec.sequence import Limits, Sequence
from jetspec.target.target import Target
from jetspec.train.exclusion import Exclusion, words_of
from jetspec.train.folder_lock import locked_file
from jetspec.train.pace import Pace
from jetspec.train.turns import user_frame

# fmt: off
OPENINGS = (
    "What is", "What are", "How do I", "How can I", "How many", "How does", "Why do", "Why is",
    "When should", "Where can I", "Which", "Who was", "Can you explain", "Can you write",
    "Could you help me", "Please", "Explain", "Describe", "Compare", "List", "Give me", "Name three",
    "Write a", "Write a Python function", "Write a short story", "Write an email", "Write a program",
    "Create a", "Design a", "Implement", "Fix the following", "Debug", "Convert", "Translate", "Summarize",
    "Rewrite", "Calculate", "Solve", "Find the", "Prove that", "If a", "A train", "A store", "There are",
    "Suppose", "Imagine", "I am", "I'm trying to", "I need", "I have", "My", "Tell me about", "Is it",
)
# fmt: on
TOPIC = "The user asks for help with this topic: {topic}"
_MIN_WORDS = 3
_MAX_TRIES = 8  # per wanted prompt, over the whole run, where at least _FEW are wanted
_FEW = 8


@dataclass(frozen=True)
class SelfOptions:
    """How prompts are written.

    count         prompts wanted
    max_tokens    a turn that has not ended by then is dropped
    temperature, top_p, seed   of the sampling
    topics        subjects that a system message names, in turn; none leaves the template's own message
    batch         turns written at once, without effect on what they are
    """

    count: int = 1000
    max_tokens: int = 128
    temperature: float = 1.0
    top_p: float = 0.9
    seed: int = 0
    topics: tuple[str, ...] = ()
    batch: int = 64

    def __post_init__(self) -> None:
        check_least(1, count=self.count, max_tokens=self.max_tokens, batch=self.batch)
        check_train_seed(self.seed)
        if Sampling(temperature=self.temperature, top_p=self.top_p).greedy:
            raise OptionError(
                f"temperature must be above 0 to write different prompts, got {self.temperature}"
            )


@dataclass
class SelfCounts:
    """Prompts kept by this run and before it, and turns dropped by this run.

    tokens: of all turns that this run wrote, those that are dropped or still under way included. It moves
        from the first rounds on, while the first prompt waits for its end.
    """

    kept: int = 0
    unfinished: int = 0
    short: int = 0
    garbled: int = 0
    duplicates: int = 0
    excluded: int = 0
    tokens: int = field(default=0, compare=False)

    @property
    def dropped(self) -> int:
        """Turns that were written in vain."""
        return self.unfinished + self.short + self.garbled + self.duplicates + self.excluded

    def report(self) -> list[str]:
        """Lines of at most 80 columns."""
        reasons = {
            "not ended": self.unfinished,
            "too short": self.short,
            "garbled": self.garbled,
            "duplicates": self.duplicates,
            "eval prompts": self.excluded,
        }
        dropped = ", ".join(f"{count} {reason}" for reason, count in reasons.items() if count)
        return [
            f"{self.kept} prompts written",
            *(
                textwrap.wrap(f"dropped: {dropped}", 80, initial_indent="  ", subsequent_indent="  ")
                if dropped
                else []
            ),
        ]


def write_prompts(
    target: Target,
    path: Path,
    options: SelfOptions,
    exclusion: Exclusion | None = None,
    on_progress: Callable[[SelfCounts], None] = lambda counts: None,
) -> SelfCounts:
    """Write prompts as JSON lines with `turns`, or go on with a file that was begun with the same options.
    What is written depends on target, options (but for `batch`) and exclusion alone. `on_progress` is called
    when a turn is judged, and a few times a second in between.

    Raises:
        PromptError: the target has no chat template.
        OptionError: topics were given, and the template knows no system message.
        DataError: the file holds other prompts, or too few turns of the target are usable.
        StorageError: the file cannot be written, prompts written before are kept; or another process writes
            there.
    """
    if not target.tokenizer.has_template:
        raise PromptError(
            f"{target.name} has no chat template, so it cannot write what its users ask;"
            " give prompts of your own instead: --prompts FILE --raw (base models)"
        )
    with locked_file(path):
        return _write(target, path, options, exclusion, on_progress)


def _write(
    target: Target,
    path: Path,
    options: SelfOptions,
    exclusion: Exclusion | None,
    on_progress: Callable[[SelfCounts], None],
) -> SelfCounts:
    mark = _fingerprint(target, options)
    texts, attempt = _resume(path, mark)
    seen = {words_of(text) for text in texts}
    counts = SelfCounts(kept=len(seen))  # a file of an older version may hold some twice
    on_progress(counts)
    if counts.kept >= options.count:
        return counts
    ended = 0  # tokens of the turns that are judged

    def show(under_way: int) -> None:
        counts.tokens = ended + under_way
        on_progress(counts)

    for sequence, opening in _turns(target, options, attempt, show):
        ended += len(sequence.emitted)
        text = (opening + sequence.text).strip()
        if _usable(target, sequence, text, seen, exclusion, counts):
            seen.add(words_of(text))
            record = {"id": f"{mark}-{attempt}", "source": "self-instruct", "turns": [text]}
            _append(path, json.dumps(record, ensure_ascii=False) + "\n")
            counts.kept += 1
        attempt += 1
        on_progress(counts)
        if counts.kept >= options.count:
            break
        if attempt >= _MAX_TRIES * max(options.count, _FEW):
            reasons = " ".join(map(str.strip, counts.report()[1:]))
            raise DataError(
                f"only {counts.kept} of {options.count} prompts after {attempt} tries ({reasons});"
                f" raise --max-tokens, or use {path} as it is"
            )
    return counts


def _turns(
    target: Target, options: SelfOptions, first: int, show: Callable[[int], None]
) -> Iterator[tuple[Sequence, str]]:
    """The target's user turns from number `first` on, in order, each with the words that it began with.
    `show` is told the tokens of those that are not yielded yet.
    """
    tokenizer = target.tokenizer
    frames = _frames(target, options.topics)
    after = frames[0][1]
    marks = [n for n in tokenizer.encode(after, special=False)[:2] if n in tokenizer.special_ids]
    limits = Limits(
        max_tokens=options.max_tokens,
        stop_ids=frozenset(marks[:1]),
        stop_strings=() if marks or not after.strip() else (after.strip().split("\n")[0],),
    )
    engine = Engine(target, None, budget=0, max_batch=options.batch)
    running: list[tuple[Sequence, str]] = []
    submitted, pace = first, Pace()
    try:
        while True:
            while (
                len(running) < 2 * options.batch
                and sum(s.finished is None for s, _ in running) < options.batch
            ):
                opening = _opening(options.seed, submitted)
                ids = tokenizer.encode(frames[submitted % len(frames)][0] + opening, special=False)
                seed = int.from_bytes(_digest(options.seed, submitted, "seed"))
                sampling = Sampling(temperature=options.temperature, top_p=options.top_p, seed=seed)
                running.append((engine.add(ids, sampling, limits), opening))
                submitted += 1
            engine.step()
            while running and running[0][0].finished is not None:
                yield running.pop(0)
            if pace.due():
                show(sum(len(s.tokens) - s.prompt_len for s, _ in running))
    finally:
        for sequence, _ in running:
            engine.abort(sequence)


def _frames(target: Target, topics: Many[str]) -> list[tuple[str, str]]:
    if not topics:
        return [user_frame(target.tokenizer)]
    try:
        frames = [user_frame(target.tokenizer, TOPIC.format(topic=topic)) for topic in topics]
    except PromptError as error:
        raise OptionError(f"topics need a chat template with a system message ({error})") from None
    if topics[0] not in frames[0][0]:
        raise OptionError("the target's chat template drops system messages; leave --seed-topics away")
    return frames


def _opening(seed: int, attempt: int) -> str:
    digest = _digest(seed, attempt, "opening")
    return OPENINGS[digest[1] % len(OPENINGS)] if digest[0] % 2 else ""


def _digest(seed: int, attempt: int, what: str) -> bytes:
    return hashlib.blake2b(f"{seed}/{attempt}/{what}".encode(), digest_size=8).digest()


def _usable(
    target: Target,
    sequence: Sequence,
    text: str,
    seen: set[tuple[str, ...]],
    exclusion: Exclusion | None,
    counts: SelfCounts,
) -> bool:
    """Whether a turn is worth asking; if not, the reason is counted."""
    words = words_of(text)
    if sequence.finished != "stop":
        counts.unfinished += 1
    elif len(words) < _MIN_WORDS:
        counts.short += 1
    elif "\ufffd" in text or target.tokenizer.special_ids.intersection(sequence.emitted[:-1]):
        counts.garbled += 1
    elif words in seen:
        counts.duplicates += 1
    elif exclusion is not None and exclusion.find(text) is not None:
        counts.excluded += 1
    else:
        return True
    return False


def _fingerprint(target: Target, options: SelfOptions) -> str:
    """The beginning of the ids: tells files of other options apart."""
    settings = {key: value for key, value in asdict(options).items() if key not in ("count", "batch")}
    text = json.dumps([target.name, target.tokenizer.hash, target.tokenizer.template_hash, settings])
    return f"self-{hashlib.sha256(text.encode()).hexdigest()[:8]}"


def _resume(path: Path, mark: str) -> tuple[list[str], int]:
    """The prompts that are there, and the number of the first turn after them. A last line that a kill or a
    full disk cut off is removed, if it is one of these prompts.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise StorageError(f"{path} cannot be read ({error.strerror or error})") from None
    whole = content.rfind(b"\n") + 1
    cut, begin = content[whole:], f'{{"id": "{mark}-'.encode()
    try:
        records = [json.loads(line) for line in content[:whole].decode("utf-8").split("\n")[:-1]]
        ids = [record["id"].rpartition("-") for record in records]
        texts = [str(record["turns"][0]) for record in records]
        attempts = [int(number) for _, _, number in ids]
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        ids, texts, attempts = [("", "", "")], [], []
    if any(found != mark for found, _, _ in ids) or cut[: len(begin)] != begin[: len(cut)]:
        raise DataError(
            f"{path} holds other prompts than these options write; give another file or delete it"
        )
    if cut:
        _truncate(path, whole)
    return texts, max(attempts, default=-1) + 1


def _truncate(path: Path, size: int) -> None:
    try:
        with path.open("r+b") as file:
            file.truncate(size)
    except OSError as error:
        raise StorageError(f"{path} cannot be mended ({error.strerror or error})") from None


def _append(path: Path, line: str) -> None:
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write(line)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be written ({error.strerror or error}); free space, then run again"
        ) from None
