"""What goes wrong in a round is the affair of the requests that it is about; the others never notice."""

from __future__ import annotations

import asyncio
import logging
import math
from pathlib import Path
from typing import Any

import httpx
import pytest

import jetspec
from jetspec.draft.stubs import Decoy
from jetspec.errors import NAN_LOGPS, HeadError
from jetspec.serve.app import create_app
from tests.helpers import tiny_folder
from tests.serve.tiny import TEXT, desk_of, engine_of, events, gated, load, run, serving, until

__all__ = ["tiny_folder"]  # a fixture

LENGTH = 24
PROMPTS = ["the quick", "lazy dogs", "brown fox"]


def asked(prompt: str, **more: Any) -> dict[str, Any]:
    """A greedy request of fixed length."""
    return {"prompt": prompt, "temperature": 0, "ignore_eos": True, "max_tokens": LENGTH, **more}


def alone(folder: Path, prompt: str, **more: Any) -> str:
    """The text of such a request by itself, without drafts."""
    plain = load(folder, "off", 0)
    return plain.generate(prompt, raw=True, ignore_eos=True, max_tokens=LENGTH, **more).text


def text_of(response: httpx.Response) -> str:
    """The text of a completion."""
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["text"]


def assert_idle(app: Any) -> None:
    """Nothing is left of any request."""
    engine = engine_of(app)
    assert not engine.busy and engine.cache.keys() == [] and desk_of(app).live == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_sick_request_fails_alone(
    tiny_folder: Path, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards the batch against one request whose logits are not finite: it gets an error, its sibling of the
    same request too, and the others their texts."""
    model = load(tiny_folder)
    sick = model.target.tokenizer.encode("☕")[-1]
    model.target.transformer.embedding[sick] = math.nan
    ban = {str(sick): -100}
    plain = jetspec.LanguageModel(model.target, None, budget=0)
    options: Any = {"raw": True, "ignore_eos": True, "max_tokens": LENGTH, "logit_bias": {sick: -100.0}}
    expected = [plain.generate(prompt, **options).text for prompt in PROMPTS]
    app = create_app(model)

    async def ask() -> list[httpx.Response]:
        async with serving(app) as client:
            bad = {"prompt": [[sick, 40], [41, 42]], "stream": stream}
            healthy = [client.post(TEXT, json=asked(prompt, logit_bias=ban)) for prompt in PROMPTS]
            found = await asyncio.gather(client.post(TEXT, json=bad), *healthy)
            await until(lambda: desk_of(app).live == 0)
            return found

    bad, *healthy = run(ask())
    assert [text_of(response) for response in healthy] == expected
    error = events(bad)[-1]["error"] if stream else bad.json()["error"]
    assert "logits are not finite" in error["message"] and error["type"] == "server_error"
    assert stream or bad.status_code == 500
    assert_idle(app)


def test_a_broken_head_costs_drafts_and_no_text(tiny_folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards requests against NaN from the draft head: they go on plainly, which is said once."""

    class Broken(Decoy):
        calls = 0

        def propose(self, sequences: Any) -> Any:
            self.calls += 1
            if self.calls > 2:
                raise HeadError(NAN_LOGPS)
            return super().propose(sequences)

    target = load(tiny_folder).target
    drafter = Broken(target)
    app = create_app(jetspec.LanguageModel(target, drafter, budget=6))

    async def ask() -> tuple[list[Any], str]:
        async with serving(app) as client:
            found = await asyncio.gather(*(client.post(TEXT, json=asked(prompt)) for prompt in PROMPTS))
            found.append(await client.post(TEXT, json=asked("later")))
            return found, (await client.get("/metrics")).text

    with caplog.at_level(logging.ERROR, "jetspec.serve"):
        found, metrics = run(ask())
    assert [text_of(response) for response in found] == [alone(tiny_folder, p) for p in (*PROMPTS, "later")]
    assert found[0].json()["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert "jetspec_drafting 0.0" in metrics
    assert drafter.calls == 3 and drafter.cache.bytes == 0
    assert [record.message for record in caplog.records if "without drafts" in record.message] != []
    assert len(caplog.records) == 1


def test_a_request_without_memory_gets_503(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the worker against a request too large for the memory: it is told so, and nothing else ends."""
    app = create_app(load(tiny_folder))
    cache = engine_of(app).cache
    add = cache.add

    def narrow(key: int, capacity: int = 64) -> None:
        if capacity > 200:
            raise MemoryError
        add(key, capacity)

    monkeypatch.setattr(cache, "add", narrow)

    async def ask() -> list[httpx.Response]:
        async with serving(app) as client:
            large = await client.post(TEXT, json=asked("the quick", max_tokens=200))
            return [large, await client.post(TEXT, json=asked("the quick"))]

    large, small = run(ask())
    assert large.status_code == 503 and large.headers["retry-after"]
    assert large.json()["error"]["code"] == "out_of_memory"
    assert text_of(small) == alone(tiny_folder, "the quick")
    assert_idle(app)


@pytest.mark.parametrize("where", ["forward", "observe"])
def test_memory_that_runs_out_in_a_round(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Guards the others when a round finds no memory: before anything was kept, the newest request goes; in
    the middle of the commits, those that were committed but never told (their texts would lack tokens)."""
    model = load(tiny_folder)
    app = create_app(model)
    engine = engine_of(app)
    armed = [False]

    def failing(inner: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            if armed[0] and (where == "forward" or args[0] == max(engine.cache.keys())):
                armed[0] = False
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory")
            return inner(*args, **options)

        return call

    owner: Any = model.target if where == "forward" else engine.drafter
    monkeypatch.setattr(owner, where, failing(getattr(owner, where)))

    async def ask() -> list[httpx.Response]:
        async with gated(app) as (client, gate):
            asking = []
            for turn, prompt in enumerate(PROMPTS, 1):
                asking.append(asyncio.ensure_future(client.post(TEXT, json=asked(prompt))))
                await until(lambda turn=turn: desk_of(app).live == turn)
            gate.let(2)
            await until(lambda: all(s.emitted for s in engine._running) and len(engine._running) == 3)
            armed[0] = True
            gate.open()
            return await asyncio.gather(*asking)

    found = run(ask())
    gone = [response.status_code == 503 for response in found]
    assert gone == ([False, False, True] if where == "forward" else [True, True, True])
    for prompt, response in zip(PROMPTS, found, strict=True):
        if response.status_code == 200:
            assert text_of(response) == alone(tiny_folder, prompt)
    assert_idle(app)


def test_a_fault_of_ours_ends_the_service_and_nobody_waits(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards clients of a worker that died: those who wait are told, those who come too, and health says so.
    The fault itself goes to the log and not to strangers."""
    app = create_app(load(tiny_folder))
    engine = engine_of(app)

    def broken() -> Any:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(engine, "step", broken)

    async def ask() -> list[httpx.Response]:
        async with serving(app) as client:
            assert (await client.get("/health")).status_code == 200
            found = await asyncio.gather(*(client.post(TEXT, json=asked(prompt)) for prompt in PROMPTS))
            found.append(await client.post(TEXT, json=asked("later")))
            found.append(await client.get("/health"))
            return found

    with caplog.at_level(logging.CRITICAL, "jetspec.serve"):
        *first, later, health = run(ask())
    codes = {response.status_code for response in first}
    assert 500 in codes and codes <= {500, 503}, "whoever came a moment later meets a closed door"
    assert later.status_code == health.status_code == 503
    assert all("secret" not in response.text for response in (*first, later, health))
    assert "secret detail" in caplog.text


def test_a_full_queue_refuses_and_recovers(tiny_folder: Path) -> None:
    """Guards memory and waiting times under load: what neither runs nor may wait is refused with 429 and
    Retry-After, and taken again afterwards. A request for more than fits at all is told so."""
    app = create_app(load(tiny_folder), max_batch=2, max_queue=1)

    async def ask() -> list[Any]:
        async with gated(app) as (client, gate):
            asking = []
            for turn, prompt in enumerate(PROMPTS, 1):
                asking.append(asyncio.ensure_future(client.post(TEXT, json=asked(prompt))))
                await until(lambda turn=turn: desk_of(app).live == turn)
            gate.let(2)  # the first one may have begun alone
            await until(lambda: engine_of(app).waiting == 1 and engine_of(app).running == 2)
            full = await client.post(TEXT, json=asked("more"))
            never = client.post(TEXT, json=asked("more", n=4))
            gate.open()
            done = await asyncio.gather(*asking)
            return [full, await never, await client.post(TEXT, json=asked("more")), *done]

    full, never, later, *done = run(ask())
    assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
    assert full.json()["error"]["code"] == "queue_full"
    assert never.status_code == 400 and "takes 3 at most" in never.json()["error"]["message"]
    found = [text_of(response) for response in (later, *done)]
    assert found == [alone(tiny_folder, prompt) for prompt in ("more", *PROMPTS)]
    assert_idle(app)
