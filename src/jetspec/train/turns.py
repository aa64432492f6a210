"""What a chat template puts around a turn: how a user's turn begins, and which token ends a turn."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many

from jetspec.errors import PromptError
from jetspec.target.target import Target
from jetspec.target.tokenizer import Tokenizer

_MARK = "TURNMARK"  # stands for a turn's text while its surroundings are looked for


def user_frame(tokenizer: Tokenizer, system: str | None = None) -> tuple[str, str]:
    """The text before and after a first user turn, the latter up to where the answer begins.

    Raises PromptError if there is no template, or it does not show the turn (or refuses a system message).
    """
    head = [{"role": "system", "content": system}] if system else []
    before, found, after = tokenizer.render([*head, {"role": "user", "content": _MARK}]).partition(_MARK)
    if not found:
        raise PromptError("the target's chat template does not show the user's turn; give --prompts instead")
    return before, after


def answer_end(tokenizer: Tokenizer) -> int | None:
    """The token that ends an answer in a conversation: of those that end a text, the one that the template
    writes behind an answer; None if nothing ends a text.
    """
    ends = tokenizer.eos_ids
    if len(ends) < 2 or not tokenizer.has_template:
        return min(ends, default=None)
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": _MARK}]
    after = tokenizer.render(turns).partition(_MARK)[2]
    return next((n for n in tokenizer.encode(after, special=False) if n in ends), min(ends))


def prompt_ids(
    target: Target, messages: Many[Mapping[str, str]], raw: bool, thinking: bool | None = None
) -> list[int]:
    """Token ids up to where the answer begins: a conversation, or with `raw` the user's text as it is.

    thinking: the template's `enable_thinking`; None leaves its default.
    """
    if raw:
        return target.tokenizer.encode(messages[-1]["content"])
    if thinking is None:
        return target.tokenizer.chat(list(messages))
    return target.tokenizer.chat(list(messages), thinking=thinking)


def check_template(target: Target, raw: bool) -> None:
    """Raise PromptError, before any work, if a target without chat template is asked for a conversation."""
    if not raw and not target.tokenizer.has_template:
        raise PromptError(
            f"{target.name} has no chat template, so it cannot hold a conversation;"
            " give --raw to let it continue the prompts as they are (base models)"
        )
