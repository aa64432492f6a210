"""Answers from an OpenAI-compatible endpoint that serves the target (vLLM, SGLang, …): text, no features.

Every answer is written as it comes. What may be temporary is tried again with growing pauses; an endpoint
that stays away ends the run with everything kept.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec.config import check_least
from jetspec.errors import EndpointError, OptionError
from jetspec.train.answer_folder import AnswerFolder, Progress
from jetspec.train.answers import Answer
from jetspec.train.conversation import Turn, follow, next_turns, prompts_hash
from jetspec.train.prompts import Prompt
from jetspec.train.responses import AnswerOptions

if TYPE_CHECKING:
    import httpx

_TEMPORARY = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_FATAL = frozenset({401, 403, 404, 405})
_MAX_PAUSE = 30.0  # seconds between two tries
_HOPELESS = 10  # prompts refused or failed at the start, with none answered, that end the run


@dataclass(frozen=True)
class Endpoint:
    """Where answers come from.

    url          http://host:port, or with the path before `/chat/completions`
    model        the model's name there
    api_key_env  the environment variable that holds the key
    concurrency  requests at once
    timeout      seconds to wait for one answer
    tries        per turn
    pause        seconds before the second try; doubled for each further one, up to half a minute
    """

    url: str
    model: str
    api_key_env: str | None = None
    concurrency: int = 16
    timeout: float = 300.0
    tries: int = 6
    pause: float = 0.5

    def __post_init__(self) -> None:
        check_least(1, concurrency=self.concurrency, tries=self.tries)
        check_least(0, timeout=self.timeout, pause=self.pause)
        if not self.url.startswith(("http://", "https://")):
            raise OptionError(f"--endpoint is {self.url!r}; give a URL such as http://localhost:8000/v1")
        if self.api_key_env is not None and not os.environ.get(self.api_key_env):
            raise OptionError(f"--api-key-env names {self.api_key_env}, which is not set; export it first")

    def address(self, raw: bool) -> str:
        """The full URL of the requests."""
        base = self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
        if base.count("/") == 2:  # only a host
            base += "/v1"
        return base + ("/completions" if raw else "/chat/completions")

    @property
    def headers(self) -> dict[str, str]:
        """With the key, if there is one."""
        key = os.environ.get(self.api_key_env) if self.api_key_env else None
        return {"Authorization": f"Bearer {key}"} if key else {}


def ask_endpoint(
    endpoint: Endpoint,
    prompts: Many[Prompt],
    folder: Path,
    options: AnswerOptions,
    on_progress: Callable[[Progress], None] = lambda progress: None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> Progress:
    """Answer prompts into `folder/answers.jsonl` until `options.tokens` tokens (as the endpoint counts them)
    exist or the prompts run out. `replay_answers` computes the features afterwards.

    Args:
        options: `batch`, `max_prompt` and `features` have no effect here.
        transport: stands in for the network in tests.
    Raises:
        EndpointError: the endpoint cannot be reached, or refuses everything; answers so far are kept.
        DataError: the folder holds answers made with other prompts or options.
        StorageError: the disk is full, or another process writes there.
    """
    settings = {
        "endpoint": endpoint.model,
        "prompts": prompts_hash(prompts),
        **{key: value for key, value in options.settings().items() if key != "max_prompt"},
    }
    with AnswerFolder(folder, None, settings) as store:
        run = _Run(endpoint, prompts, store, options, on_progress)
        asyncio.run(run.all(transport))
        return run.progress


class _Refused(Exception):
    """The endpoint will never answer this turn."""


class _Failed(Exception):
    """The endpoint did not answer this turn, though asked several times."""


class _Run:
    def __init__(
        self,
        endpoint: Endpoint,
        prompts: Many[Prompt],
        store: AnswerFolder,
        options: AnswerOptions,
        on_progress: Callable[[Progress], None],
    ) -> None:
        self.endpoint, self.prompts, self.store, self.options = endpoint, prompts, store, options
        self.on_progress = on_progress
        self.progress = Progress()
        self._in_a_row = 0  # turns that failed since the last answer
        done = {answer.number: answer for answer in store.answers}
        for answer in done.values():
            self._count(answer)
        self._queue = deque(next_turns(prompts, options.part, options.raw, done, self.progress))

    async def all(self, transport: httpx.AsyncBaseTransport | None) -> None:
        """Ask until there is enough, with `concurrency` workers on one queue of turns."""
        httpx = _httpx()
        self.on_progress(self.progress)
        limits = httpx.Limits(max_connections=self.endpoint.concurrency)
        async with httpx.AsyncClient(
            headers=self.endpoint.headers,
            timeout=httpx.Timeout(self.endpoint.timeout, connect=min(10.0, self.endpoint.timeout)),
            limits=limits,
            transport=transport,
        ) as client:
            workers = [asyncio.create_task(self._work(client)) for _ in range(self.endpoint.concurrency)]
            try:
                await asyncio.gather(*workers)
            finally:  # the first fault ends all
                for worker in workers:
                    worker.cancel()
                await asyncio.gather(*workers, return_exceptions=True)
        self.progress.exhausted = self.progress.tokens < self.options.tokens

    async def _work(self, client: httpx.AsyncClient) -> None:
        while self._queue and self.progress.tokens < self.options.tokens:
            turn: Turn | None = self._queue.popleft()
            while turn is not None and self.progress.tokens < self.options.tokens:
                turn = await self._turn(client, turn)
                self.on_progress(self.progress)

    async def _turn(self, client: httpx.AsyncClient, turn: Turn) -> Turn | None:
        """Answer one turn; returns the one that follows it."""
        try:
            answer = await self._ask(client, turn)
        except _Refused as refusal:
            self.progress.refused += 1
            if not self.progress.answered and self.progress.refused >= _HOPELESS:
                raise self._end(f"refuses every prompt: {refusal}") from None
            return None
        except _Failed as failure:
            self.progress.failed += 1
            self._in_a_row += 1
            if self._in_a_row >= _HOPELESS:
                raise self._end(f"failed {_HOPELESS} times in a row: {failure}") from None
            return None
        self._in_a_row = 0
        self.store.add(answer)
        self._count(answer)
        return follow(self.prompts[turn.prompt], turn, answer, self.options.raw, self.progress)

    async def _ask(self, client: httpx.AsyncClient, turn: Turn) -> Answer:
        """The answer to a turn. What may be temporary is tried again."""
        options, prompt = self.options, self.prompts[turn.prompt]
        temperature, seed = options.temperature_of(turn.prompt), options.seed + turn.number
        body = _body(self.endpoint.model, turn, options, temperature, seed)
        text, finish, count = await self._post(client, body, random.Random(seed))
        return Answer(
            number=turn.number,
            id=prompt.id + (f"/{turn.index + 1}" if turn.index else ""),
            messages=turn.messages,
            text=text,
            finish=finish,
            temperature=temperature,
            seed=seed,
            raw=options.raw,
            thinking=options.thinking,
            count=count,
        )

    async def _post(
        self, client: httpx.AsyncClient, body: dict[str, Any], jitter: random.Random
    ) -> tuple[str, str, int]:
        """Text, finish and number of tokens of one answer.

        Raises _Refused, _Failed, or EndpointError if there is nobody to ask any more.
        """
        httpx, endpoint = _httpx(), self.endpoint
        problem, gone, asked = "", False, 0.0
        for attempt in range(endpoint.tries):
            if attempt:
                pause = endpoint.pause * 2 ** (attempt - 1) * jitter.uniform(0.5, 1.5)
                await asyncio.sleep(min(max(pause, asked), _MAX_PAUSE))
            asked = 0.0
            try:
                response = await client.post(endpoint.address(self.options.raw), json=body)
            except httpx.InvalidURL as error:
                raise OptionError(f"--endpoint is {endpoint.url!r}: {error}") from None
            except (httpx.ReadTimeout, httpx.WriteTimeout):
                problem, gone = f"no answer within {endpoint.timeout:g} s", False
                continue
            except httpx.TransportError as error:
                problem, gone = str(error) or type(error).__name__, True
                continue
            if response.status_code in _TEMPORARY:
                problem, gone = f"HTTP {response.status_code}{_reason(response)}", False
                asked = _retry_after(response)
                continue
            if response.status_code in _FATAL:
                raise self._end(f"refuses with HTTP {response.status_code}{_reason(response)}")
            if response.status_code != 200:
                raise _Refused(f"HTTP {response.status_code}{_reason(response)}")
            try:
                return self._parse(response.json())
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                problem, gone = f"an answer that is no completion ({error!r})", False
        if gone:
            raise self._end(f"is gone, {endpoint.tries} tries failed: {problem}")
        raise _Failed(problem)

    def _parse(self, reply: dict[str, Any]) -> tuple[str, str, int]:
        choice = reply["choices"][0]
        if self.options.raw:
            text = choice["text"]
        else:
            text = choice["message"].get("content") or ""
            if choice["message"].get("reasoning_content") or choice["message"].get("reasoning"):
                raise self._end(
                    "splits the reasoning off its answers; start it without its reasoning parser,"
                    " the features need the whole answer"
                )
        finish = choice.get("finish_reason")
        if finish not in ("stop", "length"):
            raise _Refused(f"it finished with {finish!r}")
        if not isinstance(text, str):
            raise ValueError("the text is missing")
        usage = reply.get("usage") or {}
        count = usage.get("completion_tokens")
        return text, finish, count if isinstance(count, int) else len(text.encode()) // 4 + 1

    def _end(self, reason: str) -> EndpointError:
        """The error that ends the run."""
        return EndpointError(
            f"the endpoint {self.endpoint.url} {reason}; the {self.progress.answered} answers so far are"
            f" kept in {self.store.folder}, run again to go on"
        )

    def _count(self, answer: Answer) -> None:
        self.progress.answered += 1
        self.progress.tokens += answer.count or 0
        self.progress.empty += not answer.text.strip()


def _body(model: str, turn: Turn, options: AnswerOptions, temperature: float, seed: int) -> dict[str, Any]:
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


def _reason(response: httpx.Response) -> str:
    """What the endpoint says about an error, on one line and not too long."""
    try:
        body = response.json()
        error = body.get("error", body)
        text = str(error.get("message", error) if isinstance(error, dict) else error)
    except (ValueError, AttributeError):
        text = response.text
    text = " ".join(text.split())
    return f": {text[:200]}" if text else ""


def _retry_after(response: httpx.Response) -> float:
    """Seconds that the endpoint asks to wait; 0 if it does not."""
    try:
        return max(0.0, float(response.headers.get("Retry-After", "0")))
    except ValueError:  # a date
        return 0.0


def _httpx() -> Any:
    try:
        return importlib.import_module("httpx")
    except ImportError:
        raise OptionError("--endpoint needs the package `httpx`: pip install httpx") from None
