"""From the bytes of a request to token ids and settings, one for each choice. Runs in a thread of its own:
nothing here may hold up the event loop or a round.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, NoReturn

from jetspec.errors import ModelError, OptionError, PromptError, brief
from jetspec.sampling import Sampling, as_integer, check_bias
from jetspec.sequence import Limits
from jetspec.serve.errors import ApiError, invalid
from jetspec.serve.schema import ChatRequest, CompletionRequest, parse
from jetspec.target.target import Target
from jetspec.target.tokenizer import Tokenizer

_PIECE = 1 << 16  # characters of a long text that are counted at a time
_SEEDS = 2**53  # JavaScript reads larger numbers wrong


class Choice(NamedTuple):
    """One answer to decode."""

    ids: list[int]
    sampling: Sampling
    limits: Limits


@dataclass(frozen=True)
class Job:
    """A checked request.

    choices        all answers: n for the first prompt, n for the second, ...
    echoes         per choice, the text that goes before the answer; "" for none
    prompt_tokens  of all prompts, each counted once
    seed           of the first answer to each prompt, the next ones have the next; None where nothing is
                   drawn and no seed was given
    """

    chat: bool
    choices: list[Choice]
    echoes: list[str]
    prompt_tokens: int
    seed: int | None
    stream: bool
    include_usage: bool
    details: bool


class _Prompt(NamedTuple):
    ids: list[int]
    text: str | None  # as it was given


class Preparer:
    """Makes jobs for one target.

    name: what clients call the model.
    most: choices that one request may ask for.
    """

    def __init__(self, target: Target, name: str, most: int) -> None:
        self.target, self.name, self.most = target, name, most
        self.context = target.config.max_positions

    def job(self, body: bytes, chat: bool) -> Job:
        """Raises ApiError for whatever is wrong with the request."""
        fields = load_json(body)
        request = parse(ChatRequest, fields) if chat else parse(CompletionRequest, fields)
        self.check_model(request.model)
        n = request.n or 1
        if isinstance(request, ChatRequest):
            prompts = [self._conversation(request)]
        else:
            prompts = self._prompts(request.prompt)
        if len(prompts) * n > self.most:
            raise invalid(
                f"the request asks for {len(prompts) * n} answers, but the server takes {self.most} at most",
                "n",
            )
        seed = secrets.randbelow(_SEEDS - n) if request.seed is None else request.seed
        samplings = [request.sampling(seed + k) for k in range(n)]
        limits = request.limits(request.most or self.context)
        for prompt in prompts:
            self._check_length(len(prompt.ids))
        self._check_bias(samplings[0])
        echo = isinstance(request, CompletionRequest) and bool(request.echo)
        return Job(
            chat=chat,
            choices=[Choice(p.ids, sampling, limits) for p in prompts for sampling in samplings],
            echoes=[self._echo(p) if echo else "" for p in prompts for _ in samplings],
            prompt_tokens=sum(len(p.ids) for p in prompts),
            seed=None if request.seed is None and samplings[0].greedy else seed,
            stream=bool(request.stream),
            include_usage=bool(request.stream_options and request.stream_options.include_usage),
            details=bool(request.jetspec_details),
        )

    def check_model(self, name: str | None) -> None:
        """Raises ApiError unless `name` is the model that is served; None is."""
        if name not in (None, self.name):
            raise ApiError(
                404,
                f"model {brief(name)} is not served here; valid: {self.name!r}",
                param="model",
                code="model_not_found",
            )

    def _conversation(self, request: ChatRequest) -> _Prompt:
        tokenizer = self.target.tokenizer
        if not tokenizer.has_template:
            raise invalid(f"{self.name} has no chat template; use /v1/completions", "messages")
        messages: list[Mapping[str, Any]] = [{"role": m.role, "content": m.content} for m in request.messages]
        try:
            text = tokenizer.render(messages, thinking=request.thinking)
        except PromptError as error:
            raise invalid(str(error), "messages") from None
        except ModelError as error:  # the template itself is broken
            raise ApiError(500, str(error)) from None
        return _Prompt(self._encode(text, "messages", special=False), text)

    def _prompts(self, prompt: Any) -> list[_Prompt]:
        """A text, several, token ids or several lists of them."""
        if isinstance(prompt, str):
            return [self._text(prompt)]
        if not prompt:
            raise invalid("the prompt is empty: give a text or token ids", "prompt")
        ids = _ids(prompt)
        if ids is not None:
            return [self._known(ids)]
        if len(prompt) > self.most:
            raise invalid(
                f"the request has {len(prompt)} prompts, but the server takes {self.most} at most", "prompt"
            )
        found: list[_Prompt] = []
        for entry in prompt:
            ids = _ids(entry) if isinstance(entry, list) and entry else None
            if not (isinstance(entry, str) or ids is not None):
                raise invalid(
                    "prompt must be a text, a list of texts, a list of token ids or a list of such lists, "
                    f"none of them empty; it holds {brief(entry)}",
                    "prompt",
                )
            found.append(self._text(entry) if ids is None else self._known(ids))
        return found

    def _text(self, text: str) -> _Prompt:
        ids = self._encode(text, "prompt", special=True)
        if not ids:
            raise invalid("the prompt is empty: give at least one token", "prompt")
        return _Prompt(ids, text)

    def _known(self, ids: list[int]) -> _Prompt:
        vocab = self.target.config.vocab_size
        if min(ids) < 0 or max(ids) >= vocab:
            raise invalid(
                f"the prompt holds token ids outside 0..{vocab - 1}, the model's vocabulary", "prompt"
            )
        return _Prompt(ids, None)

    def _echo(self, prompt: _Prompt) -> str:
        return self.target.tokenizer.decode(prompt.ids) if prompt.text is None else prompt.text

    def _encode(self, text: str, param: str, special: bool) -> list[int]:
        try:
            return encode_up_to(self.target.tokenizer, text, special, 2 * self.context)
        except TooLong as error:
            self._refuse_length(f"more than {error.tokens}", param)
        except PromptError as error:
            raise invalid(str(error), param) from None

    def _check_length(self, tokens: int) -> None:
        if tokens >= self.context:
            self._refuse_length(str(tokens), None)

    def _refuse_length(self, tokens: str, param: str | None) -> NoReturn:
        raise invalid(
            f"the prompt has {tokens} tokens, but {self.name} has a context of {self.context} for prompt and "
            "answer together; shorten it",
            param,
            "context_length_exceeded",
        )

    def _check_bias(self, sampling: Sampling) -> None:
        try:
            check_bias(sampling.logit_bias, self.target.config.vocab_size)
        except OptionError as error:
            raise invalid(str(error), "logit_bias") from None


class TooLong(Exception):
    """A text has more tokens than anybody will decode; `tokens` were counted."""

    def __init__(self, tokens: int) -> None:
        super().__init__(tokens)
        self.tokens = tokens


def encode_up_to(tokenizer: Tokenizer, text: str, special: bool, most: int) -> list[int]:
    """Token ids of a text. Raises TooLong where there are clearly more than `most`, without encoding it all;
    PromptError for what is no text.
    """
    if len(text) > _PIECE:
        # Only the words at the cuts are encoded otherwise than in the whole text.
        counted = 0
        for start in range(0, len(text), _PIECE):
            counted += len(tokenizer.encode(text[start : start + _PIECE], special=False))
            if counted > most:
                raise TooLong(counted)
    return tokenizer.encode(text, special=special)


def load_json(body: bytes) -> Any:
    """The value that a body holds. Raises ApiError if it is no JSON, or holds half of a surrogate pair."""
    try:
        # Python's own decoding of bytes lets half a surrogate pair through, and guesses other encodings.
        value = json.loads(body.decode(), parse_constant=_no_constant)
        if b"\\ud" in body.lower():
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeDecodeError as error:
        raise invalid(f"the body is not UTF-8 text (byte {error.start})") from None
    except UnicodeEncodeError:
        raise invalid("the body is not valid text: it holds half of a surrogate pair") from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not valid JSON: {brief(str(error), 200)[1:-1]}") from None
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON number")


def _ids(values: list[Any]) -> list[int] | None:
    """The values if all of them are integers."""
    ids = [as_integer(value) for value in values]
    return None if None in ids else [id for id in ids if id is not None]
