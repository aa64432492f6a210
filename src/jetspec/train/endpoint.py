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
from jetspec.train.completions import (
    Refused,
    Unusable,
    parse_reply,
    request_body,
    stated_reason,
    wanted_pause,
)
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
    timeout      seconds for one whole answer
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
        if self.api_key_env is None:
            return
        if not self._key:
            raise OptionError(f"--api-key-env names {self.api_key_env}, which is not set; export it first")
        if not all("!" <= letter <= "~" for letter in self._key):  # the key itself is never shown
            raise OptionError(
                f"--api-key-env names {self.api_key_env}, which holds no key: blanks, control characters and "
                "letters outside ASCII cannot be sent; export it again"
            )

    def address(self, raw: bool) -> str:
        """The full URL of the requests."""
        base = self.url.rstrip("/").removesuffix("/chat/completions").removesuffix("/completions")
        if base.count("/") == 2:  # only a host
            base += "/v1"
        return base + ("/completions" if raw else "/chat/completions")

    @property
    def headers(self) -> dict[str, str]:
        """With the key, if there is one."""
        return {"Authorization": f"Bearer {self._key}"} if self._key else {}

    @property
    def _key(self) -> str:
        """The key without blanks around it, such as the line feed of a file; "" if there is none."""
        return os.environ.get(self.api_key_env, "").strip() if self.api_key_env else ""

    def hide_key(self, text: str) -> str:
        """The text without the key, which some servers repeat when they refuse it."""
        return text.replace(self._key, "***") if self._key else text


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
        EndpointError: the endpoint cannot be reached, or answers nothing; answers so far are kept.
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
        self._problem = ""  # why the last turn that has no answer has none
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
            timeout=httpx.Timeout(self.endpoint.timeout, connect=min(10.0, self.endpoint.timeout / 2)),
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
        if self._problem and not self.progress.answered:
            raise self._end(f"answered none of {self.progress.skipped} prompts: {self._problem}")
        self.progress.exhausted = self.progress.tokens < self.options.tokens

    async def _work(self, client: httpx.AsyncClient) -> None:
        while self._queue and self.progress.tokens < self.options.tokens:
            turn: Turn | None = self._queue.popleft()
            while turn is not None and self.progress.tokens < self.options.tokens:
                self.progress.begun += 1
                self.on_progress(self.progress)
                try:
                    turn = await self._turn(client, turn)
                finally:
                    self.progress.begun -= 1
                self.on_progress(self.progress)

    async def _turn(self, client: httpx.AsyncClient, turn: Turn) -> Turn | None:
        """Answer one turn; returns the one that follows it."""
        try:
            answer = await self._ask(client, turn)
        except Refused as refusal:
            self._problem = str(refusal)
            self.progress.refused += 1
            if not self.progress.answered and self.progress.refused >= _HOPELESS:
                raise self._end(f"refuses every prompt: {refusal}") from None
            return None
        except _Failed as failure:
            self._problem = str(failure)
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
        body = request_body(self.endpoint.model, turn, options, temperature, seed)
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

        Raises Refused, _Failed, or EndpointError if there is nobody to ask any more.
        """
        httpx, endpoint = _httpx(), self.endpoint
        problem, gone, asked = "", False, 0.0
        for attempt in range(endpoint.tries):
            if attempt:
                pause = endpoint.pause * 2 ** (attempt - 1) * jitter.uniform(0.5, 1.5)
                await asyncio.sleep(min(max(pause, asked), _MAX_PAUSE))
            asked = 0.0
            try:
                # Bounds the whole answer; the client's own limit is between two pieces of it.
                asked_for = client.post(endpoint.address(self.options.raw), json=body)
                response = await asyncio.wait_for(asked_for, endpoint.timeout)
            except httpx.InvalidURL as error:
                raise OptionError(f"--endpoint is {endpoint.url!r}: {error}") from None
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                problem, gone = str(error) or type(error).__name__, True
                continue
            except (httpx.TimeoutException, TimeoutError):
                problem, gone = f"no answer within {endpoint.timeout:g} s", False
                continue
            except httpx.RequestError as error:  # a lost connection, or a body not compressed as it says
                problem, gone = str(error) or type(error).__name__, False
                continue
            if response.status_code in _TEMPORARY:
                problem, gone = f"HTTP {response.status_code}{self._reason(response)}", False
                asked = wanted_pause(response)
                continue
            if response.status_code in _FATAL:
                raise self._end(f"refuses with HTTP {response.status_code}{self._reason(response)}")
            if response.status_code != 200:
                raise Refused(f"HTTP {response.status_code}{self._reason(response)}")
            try:
                return parse_reply(response, self.options)
            except Unusable as reason:
                raise self._end(str(reason)) from None
            except ValueError as error:
                problem, gone = f"an answer that is no completion ({error})", False
        if gone:
            raise self._end(f"is gone, {endpoint.tries} tries failed: {problem}")
        raise _Failed(problem)

    def _reason(self, response: httpx.Response) -> str:
        """What the endpoint says about an error, not too long."""
        text = self.endpoint.hide_key(stated_reason(response))  # before it is cut: half a key is too much
        return f": {text[:200]}" if text else ""

    def _end(self, reason: str) -> EndpointError:
        """The error that ends the run."""
        return EndpointError(
            f"the endpoint {self.endpoint.url} {self.endpoint.hide_key(reason)}; the"
            f" {self.progress.answered} answers so far are kept in {self.store.folder}, run again to go on"
        )

    def _count(self, answer: Answer) -> None:
        self.progress.answered += 1
        self.progress.tokens += answer.count or 0
        self.progress.empty += not answer.text.strip()


def _httpx() -> Any:
    try:
        return importlib.import_module("httpx")
    except ImportError:
        raise OptionError("--endpoint needs the package `httpx`: pip install httpx") from None
