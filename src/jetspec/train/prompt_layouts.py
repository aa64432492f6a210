"""The layouts in which data sets keep user turns, and how a record of each becomes a conversation.

Recorded answers are dropped, whatever the layout: the target answers every turn itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jetspec.train.text import check_whole

LAYOUTS = "`turns`, `messages`, `conversations`, `instruction` (with `input`), `input`, `prompt`, `question`"

# Switches of the model that a data set was made with; to any other target they are noise.
_SWITCHES = frozenset({"", "detailed thinking on", "detailed thinking off", "/think", "/no_think"})
_ROLES = {"human": "user", "gpt": "assistant", "bot": "assistant"}
_TEXT_FIELDS = ("prompt", "question", "problem", "query")

Conversation = tuple[tuple[dict[str, str], ...], tuple[str, ...]]


def conversation_of(record: Any) -> Conversation:
    """The messages up to the first user turn, and the user turns that come after it.

    Layouts: `turns`, a list of user turns; `messages`, role and content (Nemotron Post-Training v1 and v2,
    and most chat data); `conversations`, from and value (ShareGPT); `instruction` with `input` (CodeAlpaca);
    `input` as messages or text with `system_prompt` (Llama-Nemotron Post-Training); a text under `prompt` or
    `question`. Of several keys the first in this order counts. A conversation ends before the first message
    of another role, such as a tool's, since it belongs to an answer that is not the target's.

    Raises ValueError saying what is wrong with the record.
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"expected an object with one of {LAYOUTS}")
    system, turns = _turns_of(record)
    while turns and _is_empty(turns[-1]):
        turns.pop()  # a placeholder behind a real turn
    if not turns or _is_empty(turns[0]):
        raise ValueError("the prompt is empty")
    head = [{"role": "system", "content": system}] if system else []
    return (*head, {"role": "user", "content": turns[0]}), tuple(turns[1:])


def _turns_of(record: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The system message ("" for none) and the user turns of a record."""
    for key in ("messages", "conversations"):
        if record.get(key) is not None:
            system, turns = _chat(record[key], key)
            return system or _system_prompt(record), turns
    if record.get("turns") is not None:
        return _system_prompt(record), [_text(turn, "a turn") for turn in _list(record["turns"], "turns")]
    if record.get("instruction") is not None:
        instruction = _text(record["instruction"], "`instruction`")
        given = record.get("input")
        more = "" if given is None else _text(given, "`input`")
        blank = more.strip().lower() in ("", "<noinput>")
        return _system_prompt(record), [instruction if blank else f"{instruction}\n\n{more}"]
    if isinstance(record.get("input"), list):
        system, turns = _chat(record["input"], "input")
        return system or _system_prompt(record), turns
    for key in ("input", *_TEXT_FIELDS):
        if isinstance(record.get(key), list):  # `prompt` as messages
            return _chat(record[key], key)
        if record.get(key) is not None:
            return _system_prompt(record), [_text(record[key], f"`{key}`")]
    raise ValueError(f"none of {LAYOUTS} is there")


def _chat(messages: Any, key: str) -> tuple[str, list[str]]:
    """System message and user turns of a list of messages; what an assistant said is left out."""
    system, turns = "", list[str]()
    for message in _list(messages, key):
        role, content = _role_and_content(message)
        if role == "assistant":
            continue
        if role == "system" and not turns:
            text = _text(content, "`content`") if content is not None else ""
            system = "" if text.strip().lower() in _SWITCHES else text
        elif role == "user":
            turns.append(_text(content, "`content`"))
        else:
            break
    return system, turns


def _role_and_content(message: Any) -> tuple[str, Any]:
    if isinstance(message, Mapping):
        role, content = message.get("role", message.get("from")), message.get("content", message.get("value"))
        if isinstance(role, str):
            role = role.lower()
            return _ROLES.get(role, role), content
    raise ValueError("a message must hold the texts `role` and `content`")


def _system_prompt(record: Mapping[str, Any]) -> str:
    text = record.get("system_prompt")
    return check_whole(text) if isinstance(text, str) and text.strip().lower() not in _SWITCHES else ""


def _list(value: Any, key: str) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"`{key}` must be a list")
    return value


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} must be a text, got {type(value).__name__}")
    return check_whole(value)


def _is_empty(text: str) -> bool:
    """Whether a turn says nothing: blanks or punctuation (Nemotron's withheld turns are "-")."""
    return not any(letter.isalnum() for letter in text)
