"""The text of each of many concurrent requests is the one that it has alone, whatever is drafted."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_folder
from tests.serve.tiny import CHAT, TEXT, events, joined, load, run, served

__all__ = ["tiny_folder"]  # a fixture

SETTINGS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": 0.2},
    {"temperature": 0.7, "seed": 3},
    {"temperature": 1.0, "top_k": 40, "top_p": 0.9, "min_p": 0.02, "seed": 2**40 + 5},
    {"temperature": 1.0, "frequency_penalty": 0.5, "seed": 8},
    {"temperature": 0.8, "logit_bias": {"40": 2.0, "50": -100}, "seed": 1},
    {"temperature": 1.3, "stop": ["e", "zz"], "seed": 9},
    {"temperature": 0.9, "seed": 2**64 - 1},
]
PROMPTS = ["the quick", "lazy dogs, isn't it?", "日本語 \U0001f600", "def f(x):"]
TOKENS = 40


@pytest.mark.parametrize(("head", "budget"), [("decoy", 6), ("echo", 5), ("random", 12), ("off", 0)])
def test_texts_are_those_of_requests_alone(tiny_folder: Path, head: str, budget: int) -> None:
    """Guards losslessness through HTTP: concurrent requests with settings and seeds of their own, streamed
    and not, raw and as chats, in a batch that is smaller than their number."""
    alone = load(tiny_folder, "off", 0)
    asked = [
        (path, PROMPTS[number % len(PROMPTS)], setting, bool((number + turn) % 2))
        for turn, path in enumerate((CHAT, TEXT))
        for number, setting in enumerate(SETTINGS)
    ]

    async def all_at_once() -> list[tuple[str, str, int]]:
        async with served(load(tiny_folder, head, budget), max_batch=5) as client:

            async def one(
                path: str, prompt: str, setting: dict[str, Any], stream: bool
            ) -> tuple[str, str, int]:
                said = (
                    {"messages": [{"role": "user", "content": prompt}]}
                    if path == CHAT
                    else {"prompt": prompt}
                )
                options = {"include_usage": True} if stream else None
                body = {**said, **setting, "max_tokens": TOKENS, "stream": stream, "stream_options": options}
                response = await client.post(path, json=body)
                if stream:
                    chunks = events(response)
                    (finish,) = (c["choices"][0]["finish_reason"] for c in chunks[-2:-1])
                    return joined(chunks), finish, chunks[-1]["usage"]["completion_tokens"]
                assert response.status_code == 200, response.text
                choice = response.json()["choices"][0]
                text = choice["message"]["content"] if path == CHAT else choice["text"]
                return text, choice["finish_reason"], response.json()["usage"]["completion_tokens"]

            return list(await asyncio.gather(*(one(*request) for request in asked)))

    found = run(all_at_once())
    for (path, prompt, setting, _), (text, finish, tokens) in zip(asked, found, strict=True):
        biases = {int(id): bias for id, bias in setting.get("logit_bias", {}).items()}
        options = {**setting, "logit_bias": biases, "max_tokens": TOKENS, "raw": path == TEXT}
        expected = alone.generate(prompt, **options)
        assert (text, finish, tokens) == (expected.text, expected.finish, len(expected.tokens))
    assert len({text for text, _, _ in found}) > len(found) // 2, "the requests are to differ"


def test_choices_are_the_samples_of_the_next_seeds(tiny_folder: Path) -> None:
    """Guards `n`: choices with one seed would all be equal, and a prompt among others has its own text."""
    alone = load(tiny_folder, "off", 0)

    async def ask() -> Any:
        async with served(load(tiny_folder)) as client:
            body = {"prompt": PROMPTS[:2], "n": 3, "seed": 5, "max_tokens": 12}
            return await client.post(TEXT, json=body), await client.post(TEXT, json={**body, "stream": True})

    whole, stream = run(ask())
    found = [choice["text"] for choice in whole.json()["choices"]]
    expected = [
        alone.generate(prompt, raw=True, temperature=1.0, seed=5 + k, max_tokens=12)
        for prompt in PROMPTS[:2]
        for k in range(3)
    ]
    assert found == [result.text for result in expected] and len(set(found)) == 6
    assert [joined(events(stream), index) for index in range(6)] == found
    assert [choice["index"] for choice in whole.json()["choices"]] == list(range(6))
    usage = whole.json()["usage"]
    assert usage["completion_tokens"] == sum(len(result.tokens) for result in expected)
    assert usage["prompt_tokens"] == expected[0].prompt_tokens + expected[3].prompt_tokens


def test_a_seed_that_was_drawn_is_told_and_gives_the_text_again(tiny_folder: Path) -> None:
    """Guards requests without a seed: they differ, and each can be repeated with the seed in its answer."""

    async def ask() -> list[Any]:
        async with served(load(tiny_folder)) as client:
            body = {"prompt": "the quick", "max_tokens": 20}
            first, second = [(await client.post(TEXT, json=body)).json() for _ in range(2)]
            again = await client.post(TEXT, json={**body, "seed": first["jetspec"]["seed"]})
            streamed = events(await client.post(TEXT, json={**body, "n": 2, "stream": True}))
            ends = [c for c in streamed if c["choices"][0]["finish_reason"]]
            seeds = {c["choices"][0]["index"]: c["jetspec"]["seed"] for c in ends}
            greedy = (await client.post(TEXT, json={**body, "temperature": 0})).json()
            return [first, second, again.json(), seeds, greedy]

    first, second, again, seeds, greedy = run(ask())
    assert first["jetspec"]["seed"] != second["jetspec"]["seed"]
    assert again["choices"] == first["choices"] != second["choices"]
    assert seeds[1] == seeds[0] + 1 < 2**53
    assert greedy["jetspec"]["seed"] is None
