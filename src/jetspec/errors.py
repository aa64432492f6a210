"""Every exception a user can meet.

    JetSpecError            anything jetspec raises on purpose
    └── UserError           the input is at fault; the command line prints one line and exits with code 2
        ├── OptionError     an option or argument is out of range or unknown
        ├── PromptError     an empty prompt, or one that does not fit into the context
        ├── ModelError      the target cannot be found, read or decoded
        ├── HeadError       the draft head cannot be read or belongs to another target
        ├── DataError       a prompt file, answer file or checkpoint is broken
        ├── DownloadError   a fetch failed or was interrupted; trying again is safe
        ├── EndpointError   an endpoint that answers prompts is gone or refuses; running again goes on
        ├── ProcessError    another process of a run with many is gone; running again goes on
        └── StorageError    no space or no permission where files have to be written

A message is one line that says what happened, why, and what to do, with the valid choices where there are
any. Violations of our own invariants are `assert`s, not exceptions.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class JetSpecError(Exception):
    """Base of all exceptions that jetspec raises on purpose."""


class UserError(JetSpecError):
    """The input is at fault. The command line prints the message on one line and exits with code 2."""


class OptionError(UserError):
    """An option or argument is out of range or unknown."""


class PromptError(UserError):
    """A prompt is empty or does not fit into the target's context."""


class ModelError(UserError):
    """The target model cannot be found, read or decoded.

    `sequences` are the requests of an engine that it could not decode; () where it is about no request.
    """

    def __init__(self, message: str, sequences: Sequence[Any] = ()) -> None:
        super().__init__(message)
        self.sequences = tuple(sequences)


class HeadError(UserError):
    """The draft head cannot be read, or it belongs to another target."""


NAN_LOGPS = (
    "the draft head returned NaN log-probs: its weights, or those of its target, are damaged or overflow in "
    "this dtype; fetch them again or run in float32"
)


class DataError(UserError):
    """A prompt file, an answer file or a training checkpoint is broken."""


class DownloadError(UserError):
    """Fetching a file failed or was interrupted. Trying again is safe."""


class EndpointError(UserError):
    """An endpoint that is to answer prompts is gone or refuses everything. Running again goes on."""


class ProcessError(UserError):
    """Another process of a run with many ended or cannot be reached. Running again goes on."""


class StorageError(UserError):
    """A file cannot be written: no space left or no permission."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out: Python's or torch's, which has no exception of its own on every device."""
    if isinstance(error, MemoryError):
        return True
    text = str(error) if isinstance(error, RuntimeError) else ""
    return "can't allocate memory" in text or "out of memory" in text


LONGEST_NAME = 300  # characters of a path or a name that a message shows


def brief(value: object, longest: int = 80) -> str:
    """A value as a message shows it: its repr, cut to about `longest` characters."""
    try:
        text = repr(value)
    except ValueError:  # Python writes no integer of more than some thousand digits
        return f"a value of type {type(value).__name__} that is too long to show"
    return text if len(text) <= longest else f"{text[:longest]}… ({len(text)} characters)"
