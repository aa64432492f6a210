"""Answers as text: JSON lines, one answer each, small enough to keep and to share.

What a head is trained on (the target's states at every token) is thousands of times larger and can be
computed from these lines again (`replay`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec.errors import DataError, StorageError
from jetspec.target.tokenizer import Tokenizer
from jetspec.train.text import check_whole
from jetspec.train.text_file import read_text
from jetspec.train.turns import answer_end

ANSWERS_FILE = "answers.jsonl"


@dataclass(frozen=True)
class Answer:
    """One turn that the target wrote.

    number       of the turn among all turns of the prompt set; tells answers of one folder apart
    messages     the conversation before it, earlier answers of the target included
    finish       "stop" (the target ended its turn) or "length" (it was cut)
    temperature, seed   that it was sampled with
    tokens       its ids, the ending one included, if they differ from those of its text; None otherwise
    raw          the prompt was continued as it is, without a chat template
    thinking     the template's `enable_thinking` of the prompt; None was its default
    count        tokens of the answer as an endpoint counted them; None for those of our engine
    """

    number: int
    id: str
    messages: tuple[dict[str, str], ...]
    text: str
    finish: str
    temperature: float
    seed: int
    tokens: tuple[int, ...] | None = None
    raw: bool = False
    count: int | None = None
    thinking: bool | None = None

    @property
    def user_turns(self) -> list[str]:
        """Every text that the user says."""
        return [message["content"] for message in self.messages if message["role"] == "user"]

    def to_json(self) -> str:
        """The line of this answer."""
        record: dict[str, Any] = {
            "number": self.number,
            "id": self.id,
            "messages": list(self.messages),
            "answer": self.text,
            "finish": self.finish,
            "temperature": self.temperature,
            "seed": self.seed,
        }
        if self.raw:
            record["raw"] = True
        if self.count is not None:
            record["count"] = self.count
        if self.thinking is not None:
            record["thinking"] = self.thinking
        if self.tokens is not None:
            record["tokens"] = list(self.tokens)
        return json.dumps(record, ensure_ascii=False)

    def ids(self, tokenizer: Tokenizer) -> list[int]:
        """Token ids of the answer; what ended it is part of them unless it was cut."""
        return list(self.tokens) if self.tokens is not None else spelled(tokenizer, self.text, self.finish)


def spelled(tokenizer: Tokenizer, text: str, finish: str) -> list[int]:
    """The ids of an answer of which only the text is known."""
    ids, end = tokenizer.encode(text, special=False), answer_end(tokenizer)
    return [*ids, end] if finish == "stop" and end is not None else ids


def parse_answer(record: Any, line: int) -> Answer:
    """An answer from a JSON line: ours, or any conversation whose last message is an assistant's.

    Raises ValueError.
    """
    if not isinstance(record, Mapping) or not isinstance(record.get("messages"), list):
        raise ValueError("expected an object with `messages` and `answer`")
    messages = tuple(_message(message) for message in record["messages"])
    text = record.get("answer")
    if text is None and messages and messages[-1]["role"] == "assistant":
        text, messages = messages[-1]["content"], messages[:-1]
    if not isinstance(text, str):
        raise ValueError("the text `answer` is missing")
    if not messages or messages[-1]["role"] != "user":
        raise ValueError("`messages` must end with the user's turn")
    try:
        tokens = None if record.get("tokens") is None else tuple(int(n) for n in record["tokens"])
        numbers = int(record.get("number", line - 1)), int(record.get("seed", 0))
        temperature = float(record.get("temperature", 0.0))
        count = None if record.get("count") is None else int(record["count"])
        if not math.isfinite(temperature):
            raise ValueError
    except (TypeError, ValueError, OverflowError):
        raise ValueError("`number`, `seed`, `temperature`, `count` and `tokens` must be numbers") from None
    finish, raw = str(record.get("finish", "stop")), bool(record.get("raw", False))
    thinking = record.get("thinking")
    if thinking is not None and not isinstance(thinking, bool):
        raise ValueError("`thinking` must be true or false")
    given = str(record.get("id", f"answer-{line}"))
    answer = Answer(
        number=numbers[0],
        id=given,
        messages=messages,
        text=text,
        finish=finish,
        temperature=temperature,
        seed=numbers[1],
        tokens=tokens,
        raw=raw,
        count=count,
        thinking=thinking,
    )
    check_whole(answer.to_json())  # every text in it: they are written again
    return answer


def _message(message: Any) -> dict[str, str]:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, Mapping) else (None, None)
    )
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message must hold the texts `role` and `content`")
    return {"role": role, "content": content}


def read_answers(path: Path, *, skip_broken: bool = False) -> tuple[list[Answer], int]:
    """All answers of a file, and how many broken lines were left out.

    Raises DataError naming the line, unless `skip_broken`; or that the file is missing or holds none.
    """
    answers: list[Answer] = []
    broken = 0
    for line, content in enumerate(_lines(path), start=1):
        if not content.strip():
            continue
        try:
            answers.append(parse_answer(json.loads(content), line))
        except (ValueError, RecursionError) as error:
            if not skip_broken:
                raise DataError(
                    f"{path} line {line}: {error}; fix it, or give --skip-broken to leave such lines out"
                ) from None
            broken += 1
    if not answers:
        raise DataError(f"{path} holds no answers; make some with `jetspec answers`")
    return answers, broken


def resume_answers(path: Path) -> list[Answer]:
    """The answers that an earlier run wrote; a last line that a kill or a full disk cut off is removed.

    Raises DataError if another line is broken; StorageError if the file cannot be mended.
    """
    if not path.exists():
        return []
    try:
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            with path.open("r+b") as file:
                file.truncate(whole)
    except OSError as error:
        raise StorageError(f"{path} cannot be mended ({error.strerror or error})") from None
    return read_answers(path)[0] if content[:whole].strip() else []


def append_answers(path: Path, answers: Iterable[Answer]) -> None:
    """Add lines, on disk when this returns. Raises StorageError."""
    try:
        with path.open("a", encoding="utf-8", newline="\n") as file:
            file.write("".join(answer.to_json() + "\n" for answer in answers))
    except OSError as error:
        raise StorageError(
            f"answers cannot be written to {path} ({error.strerror or error}); free space, then run again"
        ) from None


def _lines(path: Path) -> list[str]:
    return read_text(path, "the answer file").split("\n")
