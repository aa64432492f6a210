"""Parameters that other servers know and this one does not: which are refused, and which make no difference.

What would change the answer is never passed over in silence; what changes nothing is not worth an error.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from jetspec.errors import brief
from jetspec.serve.errors import invalid

# They change no answer: accounts, caching, routing, and hints about what the answer may be.
HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "parallel_tool_calls",
        "prediction",
        "request_id",
        "priority",
    }
)
_HARMLESS_IN_MESSAGES = frozenset({"annotations", "reasoning_content", "reasoning"})

# Name -> the values that ask for nothing, and what to do instead.
_NOTHING: tuple[Any, ...] = (None, False, [], {})
_UNSUPPORTED: dict[str, tuple[tuple[Any, ...], str]] = {
    "logprobs": (_NOTHING, "log-probabilities are not returned; leave it out"),
    "top_logprobs": ((*_NOTHING, 0), "log-probabilities are not returned; leave it out"),
    "prompt_logprobs": (_NOTHING, "log-probabilities are not returned; leave it out"),
    "tools": (_NOTHING, "tools are not called here; describe them in a message instead"),
    "tool_choice": ((None, "none", "auto"), "tools are not called here; leave it out"),
    "functions": (_NOTHING, "functions are not called here; describe them in a message instead"),
    "function_call": ((None, "none", "auto"), "functions are not called here; leave it out"),
    "response_format": (
        (None, {"type": "text"}),
        'answers are free text: leave it out or send {"type": "text"}',
    ),
    "modalities": ((None, ["text"]), "answers are text; leave it out"),
    "audio": ((None,), "answers are text; leave it out"),
    "web_search_options": ((None,), "nothing is searched here; leave it out"),
    "reasoning_effort": ((None,), "the model has no such switch; try chat_template_kwargs.enable_thinking"),
    "verbosity": ((None, "medium"), "the model has no such switch; ask for it in a message"),
    "suffix": ((None, ""), "text is only continued, not filled in; leave it out"),
    "best_of": ((None, 1), "choices are not ranked; ask for n of them and choose yourself"),
    "use_beam_search": (_NOTHING, "tokens are picked greedily or sampled; leave it out"),
    "length_penalty": ((None, 1, 1.0), "there is no beam search; leave it out"),
    "min_tokens": ((None, 0), "set ignore_eos and max_tokens for an exact length"),
    "skip_special_tokens": ((None, True), "special tokens are never shown; leave it out"),
    "spaces_between_special_tokens": ((None, True), "special tokens are never shown; leave it out"),
    "include_stop_str_in_output": ((None, False), "the stop string is never part of the text; leave it out"),
    "add_generation_prompt": ((None, True), "the answer is always a new message; leave it out"),
    "continue_final_message": (
        (None, False),
        "the answer is a new message; use /v1/completions to continue one",
    ),
    "chat_template": ((None,), "the model's own template is used; leave it out"),
    "documents": (_NOTHING, "put them into a message"),
    "guided_json": ((None,), "answers are free text; leave it out"),
    "guided_regex": ((None,), "answers are free text; leave it out"),
    "guided_choice": ((None,), "answers are free text; leave it out"),
    "guided_grammar": ((None,), "answers are free text; leave it out"),
    "structured_outputs": ((None,), "answers are free text; leave it out"),
}
_UNSUPPORTED_IN_MESSAGES: dict[str, tuple[tuple[Any, ...], str]] = {
    "tool_calls": (_NOTHING, "tools are not called here; write the call into the content"),
    "function_call": ((None,), "functions are not called here; write the call into the content"),
    "tool_call_id": ((None,), "tools are not called here; write the result into a user message"),
    "refusal": ((None, ""), "write the refusal into the content"),
    "audio": ((None,), "messages are text; leave it out"),
}


def drop_neutral(fields: dict[str, Any], known: Collection[str]) -> dict[str, Any]:
    """A request's fields without those that change nothing, its messages' too.

    Raises ApiError for those that are not known, or known to be missing here.
    """
    kept = _drop(fields, known, HARMLESS, _UNSUPPORTED, "")
    messages = kept.get("messages")
    if "messages" in known and isinstance(messages, list):
        names = ("role", "content", "name")
        kept["messages"] = [
            _drop(m, names, _HARMLESS_IN_MESSAGES, _UNSUPPORTED_IN_MESSAGES, f"messages.{at}.")
            if isinstance(m, dict)
            else m
            for at, m in enumerate(messages)
        ]
    return kept


def _drop(
    fields: dict[str, Any],
    known: Collection[str],
    harmless: Collection[str],
    unsupported: dict[str, tuple[tuple[Any, ...], str]],
    place: str,
) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    for name, value in fields.items():
        if name in known:
            kept[name] = value
        elif name in unsupported:
            neutral, advice = unsupported[name]
            if not any(type(value) is type(other) and value == other for other in neutral):
                raise invalid(
                    f"{place}{name} is not supported: {advice}", place + name, "unsupported_parameter"
                )
        elif name not in harmless:
            raise invalid(
                f"unknown parameter {brief(place + name)}; valid: {', '.join(known)}",
                place + name if name.isprintable() and len(name) < 80 else None,
                "unknown_parameter",
            )
    return kept
