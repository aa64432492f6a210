"""Training prompts: files of user turns, read strictly and shuffled reproducibly."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jetspec.errors import DataError


@dataclass(frozen=True)
class Prompt:
    """One conversation up to the turn that the target is to answer."""

    id: str
    messages: tuple[dict[str, str], ...]


def read_prompts(path: Path, *, seed: int | None = 0, skip_broken: bool = False) -> list[Prompt]:
    """Read JSON lines with `turns` (user turns; the first is used) or `messages` (role and content), or
    plain text, one per line.

    Duplicates are dropped. `seed` shuffles; None keeps the order. `skip_broken` drops lines that cannot be
    read.

    Raises DataError naming the line, or that the file is missing or empty.
    """
    try:
        lines = path.read_text("utf-8-sig").split("\n")  # not splitlines: JSON may hold U+2028
    except OSError as error:
        raise DataError(f"the prompt file {path} cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"the prompt file {path} is not UTF-8 ({error}); convert it first") from None
    prompts: list[Prompt] = []
    seen: set[tuple[str, ...]] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            prompt = _parse(line, f"{path.stem}-{number}", path.suffix in (".jsonl", ".json"))
        except (ValueError, RecursionError) as error:
            if skip_broken:
                continue
            raise DataError(
                f"{path} line {number}: {error}; fix it, or give --skip-broken to leave such lines out"
            ) from None
        key = tuple(message["content"] for message in prompt.messages)
        if key not in seen:
            seen.add(key)
            prompts.append(prompt)
    if not prompts:
        raise DataError(f"the prompt file {path} holds no prompts")
    if seed is not None:
        random.Random(seed).shuffle(prompts)
    return prompts


def _parse(line: str, default_id: str, is_json: bool) -> Prompt:
    if not is_json:
        return Prompt(default_id, ({"role": "user", "content": line.strip()},))
    record: Any = json.loads(line)
    if not isinstance(record, dict):
        raise ValueError("expected an object with `turns` or `messages`")
    if "messages" in record:
        messages = [_message(message) for message in _list(record, "messages")]
        while messages and messages[-1]["role"] == "assistant":
            messages.pop()  # the target writes its own answer
    elif "turns" in record:
        messages = [_message({"role": "user", "content": turn}) for turn in _list(record, "turns")[:1]]
    else:
        raise ValueError("neither `turns` nor `messages` is there")
    if not messages or not messages[-1]["content"].strip():
        raise ValueError("the prompt is empty")
    return Prompt(str(record.get("id", default_id)), tuple(messages))


def _list(record: dict[str, Any], key: str) -> list[Any]:
    if not isinstance(record[key], list):
        raise ValueError(f"`{key}` must be a list")
    return list(record[key])


def _message(message: Any) -> dict[str, str]:
    role, content = (
        (message.get("role"), message.get("content")) if isinstance(message, dict) else (None, None)
    )
    if not isinstance(role, str) or not isinstance(content, str):
        raise ValueError("a message must hold the texts `role` and `content`, and a turn must be a text")
    if any("\ud800" <= letter <= "\udfff" for letter in content):
        raise ValueError("the text holds half of a surrogate pair")
    return {"role": role, "content": content}
