"""Render a chat template: Jinja text that ships with a model, run in a sandbox with the usual helpers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jetspec.errors import ModelError, PromptError


def render_chat(template: str, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
    """The text that the template makes of the messages.

    variables: everything else the template sees (special tokens, add_generation_prompt, …).
    Raises ModelError if the template itself is broken and PromptError if a message has no text or the
    template refuses these messages.
    """
    compiled = _compile(template)
    cleaned = [_clean(message, number) for number, message in enumerate(messages, 1)]
    try:
        return compiled.render(messages=cleaned, **variables)
    except Exception as error:  # a template is a program: it can divide by zero, or call itself without end
        reason = " ".join(str(error).split())
        raise PromptError(f"the target's chat template refuses these messages: {reason}") from error


def _clean(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """A message as templates expect it: role and content are texts, parts of a content joined."""
    # Clients send "name": null and the like; templates test whether a key is there, or would print "None".
    cleaned = {key: value for key, value in message.items() if value is not None}
    content = cleaned.get("content")
    if isinstance(content, list):
        parts = [part for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        texts = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        if len(texts) == len(content):
            cleaned["content"] = "".join(texts)
    for key in ("role", "content"):
        if key == "content" and key not in cleaned and "tool_calls" in cleaned:
            continue  # an assistant's message may hold calls alone
        if not isinstance(cleaned.get(key), str):
            raise PromptError(
                f"message {number} has no {key} that is a text; a message is "
                '{"role": ..., "content": ...}, its content a text or a list of {"type": "text", "text": ...}'
            )
    return cleaned


@lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    try:
        return environment.from_string(template)
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"the target's chat template has a syntax error in line {error.lineno}: {error}"
        ) from error


class _Generation(Extension):
    """`{% generation %}…{% endgeneration %}` marks an answer's text for training; its body is rendered."""

    tags = {"generation"}  # noqa: RUF012 (Jinja declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the HTML escapes of Jinja's own filter, which would change the prompt."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(pattern: str) -> str:
    return datetime.now().strftime(pattern)
