"""Clients that leave, stop reading, or are sent away: their memory is free at once, the others go on."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from jetspec.serve.app import create_app
from tests.helpers import tiny_folder
from tests.serve.tiny import (
    TEXT,
    Visitor,
    desk_of,
    engine_of,
    events_in,
    gated,
    joined,
    load,
    run,
    serving,
    until,
)

__all__ = ["tiny_folder"]  # a fixture

LONG = {"prompt": "the quick", "temperature": 0, "ignore_eos": True, "max_tokens": 200}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("rounds", [0, 3])
def test_a_client_that_leaves_frees_its_rows(tiny_folder: Path, stream: bool, rounds: int) -> None:
    """Guards memory and speed: an answer that nobody waits for was decoded to its end. All choices of the
    request end before the next round, waiting ones included; another client's text is its own."""
    app = create_app(load(tiny_folder), max_batch=3)
    engine = engine_of(app)
    expected = (
        load(tiny_folder, "off", 0).generate("lazy dogs", raw=True, max_tokens=60, ignore_eos=True).text
    )

    async def ask() -> Any:
        async with gated(app) as (client, gate):
            other = asyncio.ensure_future(
                client.post(TEXT, json={**LONG, "prompt": "lazy dogs", "max_tokens": 60})
            )
            await until(lambda: desk_of(app).live == 1)
            visitor = Visitor(app, TEXT, {**LONG, "n": 4, "stream": stream})
            await until(lambda: desk_of(app).live == 5)
            if rounds:
                gate.let(rounds)
                await until(lambda: len(engine.cache.keys()) == 3 and engine.stats.forwards == rounds)
                held = engine.cache.bytes
            visitor.left.set()
            await visitor.task
            gate.let(1)  # the worker may stand at the gate already: this round is the last one
            await until(lambda: desk_of(app).live == 1)
            assert len(engine.cache.keys()) <= 1 and engine.waiting == 0
            assert not rounds or engine.cache.bytes < held
            gate.open()
            answer = await other
            metrics = (await client.get("/metrics")).text
            return answer, metrics

    answer, metrics = run(ask())
    assert answer.json()["choices"][0]["text"] == expected
    assert engine.cache.keys() == [] and engine.cache.bytes == 0 and not engine.busy
    assert 'jetspec_requests_total{outcome="cancelled"} 1.0' in metrics


def test_coming_and_going_changes_nobodys_text(tiny_folder: Path) -> None:
    """Guards everything at once: clients that come and leave at any moment of others' prompts and rounds,
    more than batch and queue hold. Whenever that is, those who stay get their texts, and nothing is left."""
    app = create_app(load(tiny_folder), max_batch=4, max_queue=8)
    plain = load(tiny_folder, "off", 0)
    options: dict[str, Any] = {"temperature": 0.9, "ignore_eos": True}
    dice = random.Random(7)

    async def stay(client: Any, seed: int) -> tuple[int, str]:
        body = {"prompt": "the quick " * (1 + seed % 9), "seed": seed, "max_tokens": 5 + seed, **options}
        while (answer := await client.post(TEXT, json=body)).status_code == 429:
            await asyncio.sleep(0.01)
        return seed, answer.json()["choices"][0]["text"]

    async def leave(seed: int) -> None:
        body = {"prompt": "lazy dogs", "seed": seed, "n": 1 + seed % 3, "max_tokens": 200, **options}
        visitor = Visitor(app, TEXT, {**body, "stream": bool(seed % 2)})
        await asyncio.sleep(dice.random() / 20)
        visitor.left.set()
        await visitor.task

    async def ask() -> list[tuple[int, str]]:
        async with serving(app) as client:
            tasks = []
            for seed in range(24):
                tasks += [asyncio.ensure_future(stay(client, seed)), asyncio.ensure_future(leave(seed))]
                await asyncio.sleep(dice.random() / 50)
            found = await asyncio.gather(*tasks)
            await until(lambda: desk_of(app).live == 0)
            return [entry for entry in found if entry is not None]

    for seed, text in run(ask()):
        prompt = "the quick " * (1 + seed % 9)
        assert text == plain.generate(prompt, raw=True, seed=seed, max_tokens=5 + seed, **options).text
    engine = engine_of(app)
    assert engine.cache.keys() == [] and engine.cache.bytes == 0 and not engine.busy


def test_a_client_that_takes_nothing_does_not_hold_up_the_others(tiny_folder: Path) -> None:
    """Guards against slow readers: decoding goes on without them, and one that is stuck is given up."""
    app = create_app(load(tiny_folder), stall_seconds=0.3)
    engine = engine_of(app)

    async def ask() -> Any:
        async with gated(app) as (client, gate):
            visitor = Visitor(app, TEXT, {**LONG, "stream": True})
            gate.let(2)
            await until(lambda: '"text"' in visitor.text)
            visitor.taking.clear()
            other = asyncio.ensure_future(client.post(TEXT, json={**LONG, "max_tokens": 20}))
            await until(lambda: desk_of(app).live == 2)
            gate.let(2)
            await visitor.task  # given up, though its request could not go on
            gate.open()
            return (await other).status_code

    assert run(ask()) == 200
    assert engine.cache.keys() == [] and not engine.busy


def test_a_late_reader_gets_everything_in_one_chunk(tiny_folder: Path) -> None:
    """Guards the memory of slow streams, and their text: what gathers is sent at once, nothing is lost."""
    app = create_app(load(tiny_folder))
    expected = load(tiny_folder, "off", 0).generate("the quick", raw=True, max_tokens=200, ignore_eos=True)

    async def ask() -> str:
        async with serving(app):
            visitor = Visitor(app, TEXT, {**LONG, "stream": True, "jetspec_details": True})
            visitor.taking.clear()
            await until(lambda: desk_of(app).live == 1)
            await until(lambda: desk_of(app).live == 0)
            visitor.taking.set()
            await visitor.task
            return visitor.text

    (chunk,) = events_in(run(ask()))
    assert joined([chunk]) == expected.text
    assert len(chunk["jetspec"]["kinds"]) == len(expected.tokens) == 200


def test_the_end_of_the_server_is_told(tiny_folder: Path) -> None:
    """Guards clients of a server that stops: a cut text must not look like a whole one. Nothing new is taken,
    what runs may go on, and is then ended with an error."""
    app = create_app(load(tiny_folder))
    engine = engine_of(app)

    async def ask() -> Any:
        async with gated(app) as (client, gate):
            visitor = Visitor(app, TEXT, {**LONG, "stream": True})
            whole = asyncio.ensure_future(client.post(TEXT, json=LONG))
            await until(lambda: desk_of(app).live == 2)
            gate.let(2)
            await until(lambda: '"text"' in visitor.text)
            desk_of(app).stop_intake()
            refused = [await client.post(TEXT, json=LONG), await client.get("/health")]
            before = len(visitor.text)
            gate.let(2)
            await until(lambda: len(visitor.text) > before)
            desk_of(app).end_all()
            gate.open()
            await visitor.task
            return visitor.text, [*refused, await whole]

    text, responses = run(ask())
    *chunks, last = events_in(text)
    assert joined(chunks) and all(chunk["choices"][0]["finish_reason"] is None for chunk in chunks)
    assert last["error"]["code"] == "shutting_down"
    for response in responses:
        assert response.status_code == 503 and response.headers["retry-after"]
        assert response.json()["error"]["code"] == "shutting_down"
    assert engine.cache.keys() == [] and not engine.busy
