"""What a request may say: the fields of OpenAI's completions and chat completions, and vLLM's additions to
them. Types are strict: "1" is no number and true is none either.
"""

from __future__ import annotations

from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator
from pydantic_core import PydanticCustomError

from jetspec.errors import OptionError, brief
from jetspec.sampling import Sampling
from jetspec.sequence import Limits
from jetspec.serve.errors import ApiError, invalid
from jetspec.serve.parameters import drop_neutral

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 16, 256  # each piece of text is compared with all beginnings of all of them
MAX_BIASES = 1024  # added to every row of logits
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
)


class _Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class StreamOptions(_Strict):
    """include_usage: a last chunk without choices has the usage of the whole request."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # pads chunks; there is nothing to hide from the network here


class ChatTemplateOptions(_Strict):
    """What vLLM hands on to the chat template; enable_thinking is the one that is known here."""

    enable_thinking: bool | None = None


class Message(_Strict):
    """A turn of a conversation; the content is a text, or a list of text parts that are joined."""

    role: str
    content: str
    name: str | None = None  # templates of the supported families do not look at it

    @field_validator("role")
    @classmethod
    def _known(cls, role: str) -> str:
        if role not in _ROLES:
            raise PydanticCustomError("role", f"unknown role {brief(role)}; valid: {', '.join(_ROLES)}")
        return _ROLES[role]

    @field_validator("content", mode="before")
    @classmethod
    def _joined(cls, content: Any) -> str:
        parts = [content] if isinstance(content, str) else content
        texts = [_part_text(part) for part in parts] if isinstance(parts, list) else [None]
        if None in texts:
            raise PydanticCustomError(
                "content",
                'must be a text or a list of {"type": "text", "text": ...}: other parts are not read',
            )
        return "".join(text for text in texts if text is not None)


def _part_text(part: Any) -> str | None:
    """The text of a part of a content; None if it is something else."""
    if isinstance(part, dict) and part.get("type") == "text":
        part = part.get("text")
    return part if isinstance(part, str) else None


class _Request(_Strict):
    """What both kinds of request may say. None is what leaving it out is."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    max_tokens: int | None = Field(None, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: dict[str, float] | None = Field(None, max_length=MAX_BIASES)
    jetspec_details: bool | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _listed(cls, stop: Any) -> Any:
        stops = [stop] if isinstance(stop, str) else stop
        if stops is None or stops == []:
            return None
        fine = isinstance(stops, list) and len(stops) <= MAX_STOPS
        if not fine or not all(isinstance(s, str) and 1 <= len(s) <= MAX_STOP_LENGTH for s in stops):
            raise PydanticCustomError(
                "stop", f"must be a text or up to {MAX_STOPS} texts of 1 to {MAX_STOP_LENGTH} characters"
            )
        return stops

    def sampling(self, seed: int) -> Sampling:
        """How tokens are picked; temperature 1 if nothing is said, as OpenAI and vLLM have it."""
        given: dict[str, Any] = {
            name: value for name in _SAMPLING if (value := getattr(self, name)) is not None
        }
        given.setdefault("temperature", 1.0)
        if given.get("top_k") == -1:  # off, in vLLM's words
            given["top_k"] = 0
        try:
            return Sampling(**given, logit_bias=self._biases(), seed=seed)
        except OptionError as error:
            words = str(error).split()
            named = next((name for name in (*given, "seed", "logit_bias") if name in words[0]), None)
            raise invalid(str(error), named) from None

    def limits(self, max_tokens: int) -> Limits:
        """When a choice ends."""
        if self.ignore_eos and self.stop_token_ids:
            raise invalid(
                "ignore_eos ignores all stop ids, so it does not go with stop_token_ids; leave one out",
                "stop_token_ids",
            )
        try:
            return Limits(
                max_tokens=max_tokens,
                stop_ids=frozenset(self.stop_token_ids or ()),
                stop_strings=tuple(self.stop or ()),
                ignore_eos=bool(self.ignore_eos),
            )
        except OptionError as error:
            raise invalid(str(error).replace("stop_ids", "stop_token_ids"), "stop_token_ids") from None

    def _biases(self) -> dict[int, float]:
        """JSON has texts as keys only."""
        keys = list(self.logit_bias or {})
        wrong = [key for key in keys if not (key.isascii() and key.isdigit() and len(key) <= 10)]
        if wrong:
            raise invalid(f"logit_bias maps token ids to numbers; {brief(wrong[0])} is no id", "logit_bias")
        return {int(key): bias for key, bias in (self.logit_bias or {}).items()}


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Any  # a text or a list; what is in it is looked at when it is encoded
    echo: bool | None = None

    @field_validator("prompt")
    @classmethod
    def _text_or_list(cls, prompt: Any) -> Any:
        if not isinstance(prompt, (str, list)):
            raise PydanticCustomError("prompt", "must be a text, a list of texts, or token ids")
        return prompt

    @property
    def most(self) -> int:
        """Tokens per choice; OpenAI's default is 16."""
        return 16 if self.max_tokens is None else self.max_tokens


class ChatRequest(_Request):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    chat_template_kwargs: ChatTemplateOptions | None = None

    @property
    def most(self) -> int | None:
        """Tokens per choice; None is all that the context has room for."""
        return self.max_completion_tokens or self.max_tokens

    @property
    def thinking(self) -> bool | None:
        """The template's `enable_thinking`."""
        return self.chat_template_kwargs.enable_thinking if self.chat_template_kwargs else None


AnyRequest = TypeVar("AnyRequest", CompletionRequest, ChatRequest)


def parse(kind: type[AnyRequest], fields: Any) -> AnyRequest:
    """The request in a JSON value. Raises ApiError for the first thing that is wrong with it."""
    if not isinstance(fields, dict):
        raise invalid(f"the body must be a JSON object, got {brief(fields)}")
    kept = drop_neutral(fields, kind.model_fields)
    try:
        request = kind.model_validate(kept)
    except ValidationError as error:
        raise _refusal(error) from None
    if request.stream_options is not None and not request.stream:
        raise invalid("stream_options goes with stream: true only", "stream_options")
    return request


def _refusal(error: ValidationError) -> ApiError:
    """The first finding in one line."""
    found = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in found["loc"])
    if found["type"] == "missing":
        return invalid(f"{place} is missing", place)
    if found["type"] == "extra_forbidden":
        return invalid(f"{place} is unknown; leave it out", place, "unknown_parameter")
    text = str(found["msg"])
    return invalid(f"{place}: {text[:1].lower()}{text[1:]}, got {brief(found.get('input'))}", place)
