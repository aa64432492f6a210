"""From options to a loaded model and a prompt, shared by the verbs."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from jetspec.cli.screen import Screen
from jetspec.errors import OptionError, PromptError

if TYPE_CHECKING:
    from jetspec.api import LanguageModel
    from jetspec.budget.choose import BudgetOption

_MAX_THREADS = 1024  # where the system refuses a thread, OpenMP ends the process without a word


def open_model(
    screen: Screen,
    model: str,
    head: str,
    *,
    budget: BudgetOption,
    grow: str | None,
    dtype: str,
    device: str,
    threads: int | None,
    shared_noise: bool = True,
    confidence_threshold: float = 0.0,
) -> LanguageModel:
    """Load target and head as `jetspec.load` does, saying so, and saying if there is no head."""
    import jetspec
    from jetspec.draft.loading import PACKAGED

    use_threads(threads)
    screen.progress(f"loading {model}")
    loaded = jetspec.load(
        model,
        head,
        budget=budget,
        grow=grow,
        dtype=dtype,
        device=device,
        shared_noise=shared_noise,
        confidence_threshold=confidence_threshold,
    )
    if head in PACKAGED and loaded.drafter.name == "off":
        screen.note_later(f"jetspec: no draft head is packaged for {model}: decoding plainly (see --head)")
    return loaded


def budget_of(text: str) -> BudgetOption:
    """The value of --budget. Raises OptionError."""
    from jetspec.budget.choose import check_budget_option

    # Python reads no integer of some thousand digits; one of ten is refused like it.
    number = _is_number(text) and len(text) <= 10
    budget: BudgetOption = int(text) if number else text  # type: ignore[assignment]
    check_budget_option(budget)
    return budget


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isascii() and text.removeprefix("-").isdigit()


def use_threads(threads: int | None) -> None:
    """Set torch's number of threads; None leaves it. Raises OptionError."""
    import torch

    if threads is None:
        return
    if not 1 <= threads <= _MAX_THREADS:
        raise OptionError(f"threads must be an integer of at least 1, at most {_MAX_THREADS}, got {threads}")
    torch.set_num_threads(threads)


def read_prompt(prompt: str | None, raw: bool) -> str:
    """The prompt as given, or from standard input, whose last line break is not part of it.

    Raises PromptError if it is missing, empty, or not UTF-8.
    """
    from jetspec.config import check_text

    argued = prompt not in (None, "-")
    if sys.stdin is None:  # closed by the shell
        prompt = None if prompt == "-" else prompt
    elif prompt == "-" or (prompt is None and not sys.stdin.isatty()):
        try:
            prompt = sys.stdin.buffer.read().decode("utf-8")
        except UnicodeDecodeError as error:
            raise PromptError(
                f"the prompt on standard input is not UTF-8 text (byte {error.start}); convert it first"
            ) from error
        prompt = prompt.removesuffix("\n").removesuffix("\r")
    elif prompt is not None and not prompt.isascii():
        prompt = from_argument(prompt)
    if prompt is None:
        raise PromptError("there is no prompt: write it in quotes, or pipe it in")
    try:
        check_text(prompt, raw)
    except PromptError as error:
        raise PromptError(f"{error} ('-' reads it from standard input)" if argued else str(error)) from None
    return prompt


def from_argument(text: str, what: str = "the prompt") -> str:
    """A text as the terminal sent it: in a locale without UTF-8 its bytes arrive as lone surrogates."""
    try:
        return text.encode("utf-8", "surrogateescape").decode("utf-8")
    except UnicodeError as error:
        raise PromptError(f"{what} is not UTF-8 text; convert it first") from error
