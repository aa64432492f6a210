"""The language of OpenAI-compatible endpoints: what a request says, and what its reply means."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jetspec.train.conversation import Turn
from jetspec.train.responses import AnswerOptions
from jetspec.train.text import check_whole

if TYPE_CHECKING:
    import httpx


class Refused(Exception):
    """The endpoint will never answer this turn."""


class Unusable(Exception):
    """The endpoint's answers are of no use, whatever it is asked."""


def request_body(
    model: str, turn: Turn, options: AnswerOptions, temperature: float, seed: int
) -> dict[str, Any]:
    """The JSON object that asks for the answer to a turn."""
    asked: dict[str, Any] = {
        "model": model,
        "max_tokens": options.max_tokens,
        "temperature": temperature,
        "seed": seed,
    }
    if options.raw:
        return {**asked, "prompt": turn.messages[-1]["content"]}
    if options.thinking is not None:  # as vLLM and SGLang spell it
        asked["chat_template_kwargs"] = {"enable_thinking": options.thinking}
    return {**asked, "messages": list(turn.messages)}


def parse_reply(response: httpx.Response, options: AnswerOptions) -> tuple[str, str, int]:
    """Text, finish and number of tokens of an answer. A number that cannot be true is replaced by a guess.

    Raises Refused, Unusable, or ValueError if the reply is no completion.
    """
    try:
        reply = response.json()
        choice = reply["choices"][0]
        if options.raw:
            text = choice["text"]
        else:
            text = choice["message"].get("content") or ""
            if choice["message"].get("reasoning_content") or choice["message"].get("reasoning"):
                raise Unusable(
                    "splits the reasoning off its answers; start it without its reasoning parser,"
                    " the features need the whole answer"
                )
        finish = choice.get("finish_reason")
        count = (reply.get("usage") or {}).get("completion_tokens")
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(repr(error)[:200]) from None
    if finish not in ("stop", "length"):
        raise Refused(f"it finished with {finish[:40] if isinstance(finish, str) else type(finish)!r}")
    if not isinstance(text, str):
        raise ValueError("the text is missing")
    try:
        check_whole(text)
    except ValueError as error:
        raise Refused(str(error)) from None
    if type(count) is not int or not 0 <= count <= options.max_tokens:
        count = min(options.max_tokens, len(text.encode()) // 4 + 1)
    return text, finish, count


def stated_reason(response: httpx.Response) -> str:
    """What the endpoint says about an error, on one line."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError, RecursionError):
        text = response.text
    return " ".join(text.split())


def wanted_pause(response: httpx.Response) -> float:
    """Seconds that the endpoint asks to wait; 0 if it does not."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:  # a date
        return 0.0
