"""What is decoded: questions of evaluation sets, of one's own files, or a few that come with the package."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any, NamedTuple

from jetspec.errors import DataError, OptionError
from jetspec.storage import user_path
from jetspec.target.target import Target
from jetspec.train.prompt_layouts import LAYOUTS, conversation_of
from jetspec.train.text_file import read_text, unpacked_name

# The sets of the papers, in their usual order (JetSpec, arXiv 2606.18394, table 1). None is part of jetspec.
SETS = ("gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt_bench")
# Not in any set, so no measured prompt has been seen before.
WARM_UP = "Describe in a few sentences how a bicycle stays upright while it is moving."
BUILTIN = (
    "A baker sells 12 rolls an hour and opens for 7 hours. 9 rolls are left. How many had been baked?",
    "Write a Python function that returns the second largest of a list of numbers.",
    "What is the sum of the whole numbers from 1 to 60? Show each step.",
    "Explain to a child why the moon changes its shape in the course of a month.",
    "Write a Python function that checks whether a text reads the same backwards.",
    "A train goes 180 km in 2.5 hours. How fast is it on average, and how long does it take for 300 km?",
    "List five things to look at before renting a flat.",
    "Write a short letter to a neighbour whose music is too loud at night.",
    "Solve 3x + 7 = 2x - 5 for x, and check the result.",
    "Compare bicycles and buses for a way to work of six kilometres.",
)


class Question(NamedTuple):
    """One prompt: the conversation up to the turn that the target answers. Of several turns only the first
    is asked."""

    set: str
    id: str
    messages: tuple[dict[str, str], ...]


def read_questions(folder: Path, names: Many[str], count: int) -> list[Question]:
    """`count` questions of each set `names`, read from `folder`/NAME.jsonl; see `read_file`."""
    return [q for name in names for q in read_file(folder / f"{name}.jsonl", count)]


def read_file(path: Path, count: int) -> list[Question]:
    """`count` questions of a file, evenly spaced: number i of n is line floor(i * lines / n), from 0 on; all
    of them if there are fewer. The set is named after the file.

    A `.jsonl` file holds one object a line with `turns` (a list of user turns), `messages` (role and
    content) or another layout of training prompts, and perhaps `id`; any other file is text, one prompt a
    line.

    Raises OptionError if `count` is below 1, DataError if the file is missing, empty, or of the lines that
    are wanted one cannot be read or two have the same id.
    """
    if count < 1:
        raise OptionError(f"--prompts must be at least 1, got {count}")
    advice = "; give the folder of the evaluation sets with --data, or a file of your own with --prompt-file"
    text = read_text(path, "the prompt file", advice).split("\n")  # not splitlines: JSON may hold U+2028
    lines = [(number, line) for number, line in enumerate(text, start=1) if line.strip()]
    if not lines:
        raise DataError(f"{path} holds no prompts; write one a line")
    count = min(count, len(lines))
    chosen = [number * len(lines) // count for number in range(count)]
    found = [_question(path, index, *lines[index]) for index in chosen]
    lines_of: dict[str, int] = {}
    for index, question in zip(chosen, found, strict=True):
        number = lines[index][0]
        first = lines_of.setdefault(question.id, number)
        if first != number:
            raise DataError(
                f"{path} has the id {question.id!r} in line {first} and in line {number}; "
                "give each prompt an id of its own, or none any"
            )
    return found


def builtin(count: int) -> list[Question]:
    """The first `count` questions that come with the package."""
    if count < 1:
        raise OptionError(f"--prompts must be at least 1, got {count}")
    return [
        Question("builtin", f"builtin-{number}", ({"role": "user", "content": text},))
        for number, text in enumerate(BUILTIN[:count])
    ]


def find_data(given: str | None) -> Path | None:
    """The folder of the evaluation sets: the given one, else shared/data/eval beside the project's folder or
    the current one, else None.

    Raises DataError if the given one is no folder.
    """
    if given is not None:
        folder = user_path(given)
        if not folder.is_dir():
            raise DataError(f"--data {given} is no folder; give the one that holds SET.jsonl files")
        return folder
    beside = Path("shared") / "data" / "eval"
    for base in (Path.cwd().parent, Path(__file__).resolve().parents[4]):
        if (base / beside).is_dir():
            return base / beside
    return None


def encode(target: Target, question: Question) -> list[int]:
    """A question in the chat template, thinking mode left at its default; without a template the text."""
    tokenizer = target.tokenizer
    if tokenizer.has_template:
        return tokenizer.chat(question.messages)
    return tokenizer.encode("\n\n".join(message["content"] for message in question.messages))


def warm_up_ids(target: Target) -> list[int]:
    """The prompt of the warm-up, cut for a very short context."""
    question = Question("warm-up", "warm-up", ({"role": "user", "content": WARM_UP},))
    return encode(target, question)[-max(1, target.config.max_positions // 2) :]


def digest(prompts: Many[Many[int]]) -> str:
    """A short hash of token ids, so that a record says which text it was made with."""
    return hashlib.sha256(json.dumps([list(ids) for ids in prompts]).encode()).hexdigest()[:12]


def _question(path: Path, index: int, number: int, line: str) -> Question:
    """The prompt in a line; index: among those that are not blank, for want of an id; number: in the file."""
    name = unpacked_name(path).stem
    if unpacked_name(path).suffix not in (".jsonl", ".json"):
        return Question(name, f"{name}-{index}", ({"role": "user", "content": line.strip()},))
    try:
        record: Any = json.loads(line)
        messages = _messages(record)
        given = record.get("id")
        if not isinstance(given, str | int | None):
            raise ValueError(f"`id` must be a text or a number, got {type(given).__name__}")
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} line {number} is no prompt ({error}); give an object with one of {LAYOUTS}"
        ) from None
    return Question(name, f"{name}-{index}" if given is None else str(given), messages)


def _messages(record: Any) -> tuple[dict[str, str], ...]:
    """The conversation up to the turn that is answered: of `messages` the last one, else the first.

    Raises ValueError saying what is wrong.
    """
    if not isinstance(record, dict) or not isinstance(record.get("messages"), list):
        return conversation_of(record)[0]
    messages = []
    for message in record["messages"]:
        if not isinstance(message, dict):
            raise ValueError("a message must hold the texts `role` and `content`")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise ValueError(f"a message's `{key}` must be a text, got {type(message.get(key)).__name__}")
            message[key].encode()  # half of a surrogate pair is a ValueError too
        messages.append({"role": message["role"], "content": message["content"]})
    while messages and messages[-1]["role"] == "assistant":
        messages.pop()  # the target writes its own answer
    if not any(message["role"] == "user" for message in messages):
        raise ValueError("`messages` holds no turn of the user")
    if not messages[-1]["content"].strip():
        raise ValueError("the prompt is empty")
    return tuple(messages)
