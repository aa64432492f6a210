"""Layouts of data sets: each becomes the conversation that its users had, without the recorded answers."""

from __future__ import annotations

from typing import Any

import pytest

from jetspec.train.prompt_layouts import conversation_of


def message(role: str, content: Any) -> dict[str, Any]:
    """One message."""
    return {"role": role, "content": content}


NEMOTRON = [
    message("system", "detailed thinking off"),
    message("user", "one"),
    message("assistant", "recorded"),
    message("user", "two"),
    message("assistant", "recorded"),
]


@pytest.mark.parametrize(
    ("record", "system", "turns"),
    [
        ({"turns": ["one", "two"]}, None, ["one", "two"]),
        ({"messages": NEMOTRON}, None, ["one", "two"]),
        ({"messages": [message("system", "be brief"), message("user", "one")]}, "be brief", ["one"]),
        ({"messages": [message("system", None), message("user", "one")]}, None, ["one"]),
        ({"messages": [*NEMOTRON[:3], message("tool", "42"), message("user", "two")]}, None, ["one"]),
        ({"messages": [NEMOTRON[1], message("assistant", None), NEMOTRON[3]]}, None, ["one", "two"]),
        ({"instruction": "Sort this.", "input": "3 1", "output": "1 3"}, None, ["Sort this.\n\n3 1"]),
        ({"instruction": "Sort.", "input": "", "output": "x"}, None, ["Sort."]),
        ({"instruction": "Sort.", "input": "<noinput>"}, None, ["Sort."]),
        (
            {"input": [message("user", "one")], "output": "x", "system_prompt": "detailed thinking on"},
            None,
            ["one"],
        ),
        ({"input": "one", "output": "x", "system_prompt": "You are terse."}, "You are terse.", ["one"]),
        ({"prompt": [message("user", "one")]}, None, ["one"]),
        ({"question": "one", "answer": "x"}, None, ["one"]),
        (
            {"conversations": [{"from": "human", "value": "one"}, {"from": "gpt", "value": "x"}]},
            None,
            ["one"],
        ),
        ({"messages": [message("user", "one"), message("user", "-")]}, None, ["one"]),
        ({"turns": None, "prompt": "one"}, None, ["one"]),
    ],
)
def test_layouts(record: Any, system: str | None, turns: list[str]) -> None:
    """Guards each public layout: system message, every user turn, no recorded answer, no switch of another
    model, nothing behind a tool's message."""
    messages, later = conversation_of(record)
    head = [message("system", system)] if system else []
    assert list(messages) == [*head, message("user", turns[0])]
    assert list(later) == turns[1:]


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ({"text": "a"}, "none of `turns`"),
        ({"messages": [message("user", "-")]}, "empty"),
        ({"messages": [message("tool", "x"), message("user", "y")]}, "empty"),
        ({"instruction": 3}, "`instruction` must be a text, got int"),
        ({"instruction": "a", "input": {}}, "`input` must be a text, got dict"),
        (None, "expected an object"),
    ],
)
def test_unusable_records(record: Any, reason: str) -> None:
    """Guards the message behind the line's number."""
    with pytest.raises(ValueError, match=reason):
        conversation_of(record)
