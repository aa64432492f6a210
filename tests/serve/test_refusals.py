"""Requests that cannot be answered: a clean status, one line, the field at fault, and never a 500."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from jetspec.errors import OptionError
from jetspec.serve import service
from jetspec.serve.app import create_app
from jetspec.serve.prepare import TooLong, encode_up_to
from tests.helpers import changed_model, tiny_folder
from tests.serve.tiny import CHAT, TEXT, load, run, served

__all__ = ["tiny_folder"]  # a fixture

USER = [{"role": "user", "content": "hi"}]
HALF = "\ud800"


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    """The error object of a response, whose form is checked."""
    assert response.status_code == status, (response.status_code, response.text)
    (error,) = response.json().values()
    assert list(error) == ["message", "type", "param", "code"]
    assert error["message"] and "\n" not in error["message"] and len(error["message"]) < 700
    return error


@pytest.fixture(scope="module")
def answers(tiny_folder: Path) -> Any:
    """Ask one new server many things; returns the responses."""
    model = load(tiny_folder)

    def ask(requests: list[tuple[str, Any]], **options: Any) -> list[httpx.Response]:
        async def all_of_them() -> list[httpx.Response]:
            async with served(model, served_name="tiny", **options) as client:
                found = [await client.post(path, **_sent(body)) for path, body in requests]
                last = await client.post(TEXT, json={"prompt": "the", "max_tokens": 1})
                assert last.status_code == 200, "the server does not answer any more"
                return found

        return run(all_of_them())

    return ask


def _sent(body: Any) -> dict[str, Any]:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return {"content": content, "headers": {"content-type": "application/json"}}


BAD: list[tuple[str, Any, str | None]] = [  # path, body, the parameter that is named
    (TEXT, b"{", None),
    (TEXT, b"", None),
    (TEXT, b"[" * 100_000, None),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', None),
    (TEXT, b'{"prompt": "\xff"}', None),
    (TEXT, b'{"prompt": "a", "seed": ' + b"9" * 5000 + b"}", None),
    (TEXT, [1], None),
    (TEXT, b'{"prompt": "a", "logit_bias": {"\xed\xa0\x80": "x"}}', None),
    (TEXT, '{"prompt": "a"}'.encode("utf-16"), None),
    (TEXT, {"prompt": HALF}, None),
    (TEXT, {"prompt": "a", "logit_bias": {HALF: "x"}}, None),
    (TEXT, {"prompt": "a", "stop": HALF}, None),
    (TEXT, {"prompt": "a", "model": HALF}, None),
    (TEXT, {"prompt": "a", HALF: 1}, None),
    (CHAT, {"messages": [{"role": "user", "content": HALF}]}, None),
    (TEXT, {}, "prompt"),
    (TEXT, {"prompt": None}, "prompt"),
    (TEXT, {"prompt": ""}, "prompt"),
    (TEXT, {"prompt": []}, "prompt"),
    (TEXT, {"prompt": [[]]}, "prompt"),
    (TEXT, {"prompt": ["a", 1]}, "prompt"),
    (TEXT, {"prompt": [1, 10**30]}, "prompt"),
    (TEXT, {"prompt": [True]}, "prompt"),
    (TEXT, {"prompt": [-1]}, "prompt"),
    (TEXT, {"prompt": {"a": 1}}, "prompt"),
    (TEXT, {"prompt": ["a"] * 1000}, "prompt"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": -1}, "temperature"),
    (TEXT, {"prompt": "a", "temperature": True}, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, "top_p"),
    (TEXT, {"prompt": "a", "top_k": 1.5}, "top_k"),
    (TEXT, {"prompt": "a", "min_p": 2}, "min_p"),
    (TEXT, {"prompt": "a", "seed": -1}, "seed"),
    (TEXT, {"prompt": "a", "seed": 2**64}, "seed"),
    (TEXT, {"prompt": "a", "seed": 2**64 - 1, "n": 2}, "seed"),
    (TEXT, {"prompt": "a", "presence_penalty": 3}, "presence_penalty"),
    (TEXT, {"prompt": "a", "repetition_penalty": 0}, "repetition_penalty"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"²": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"99999": 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"9" * 5000: 1}}, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"1": "x"}}, "logit_bias.1"),
    (TEXT, {"prompt": "a", "logit_bias": {str(id): 1 for id in range(2000)}}, "logit_bias"),
    (TEXT, {"prompt": "a", "max_tokens": 0}, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": 1.5}, "max_tokens"),
    (TEXT, {"prompt": "a", "n": 0}, "n"),
    (TEXT, {"prompt": "a", "n": 129}, "n"),
    (TEXT, {"prompt": ["a"] * 8, "n": 30}, "n"),
    (TEXT, {"prompt": "a", "stop": [""]}, "stop"),
    (TEXT, {"prompt": "a", "stop": ["a"] * 17}, "stop"),
    (TEXT, {"prompt": "a", "stop": "a" * 1000}, "stop"),
    (TEXT, {"prompt": "a", "stop": 1}, "stop"),
    (TEXT, {"prompt": "a", "stop_token_ids": [-1]}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "stop_token_ids": [1], "ignore_eos": True}, "stop_token_ids"),
    (TEXT, {"prompt": "a", "stream": "yes"}, "stream"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, "stream_options"),
    (TEXT, {"prompt": "a", "stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
    (TEXT, {"prompt": "a", "logprobs": 0}, "logprobs"),
    (TEXT, {"prompt": "a", "suffix": "b"}, "suffix"),
    (TEXT, {"prompt": "a", "best_of": 2}, "best_of"),
    (TEXT, {"prompt": "a", "messages": USER}, "messages"),
    (TEXT, {"prompt": "a", "max_completion_tokens": 3}, "max_completion_tokens"),
    (TEXT, {"prompt": "a", "temprature": 1}, "temprature"),
    (CHAT, {"messages": []}, "messages"),
    (CHAT, {"messages": "hi"}, "messages"),
    (CHAT, {"messages": ["hi"]}, "messages.0"),
    (CHAT, {"messages": [{"role": "user"}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "user", "content": None}]}, "messages.0.content"),
    (CHAT, {"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
    (CHAT, {"messages": [{**USER[0], "tool_calls": [{}]}]}, "messages.0.tool_calls"),
    (CHAT, {"messages": [{**USER[0], "x": 1}]}, "messages.0.x"),
    (CHAT, {"messages": USER, "logprobs": True}, "logprobs"),
    (CHAT, {"messages": USER, "tools": [{"type": "function"}]}, "tools"),
    (CHAT, {"messages": USER, "response_format": {"type": "json_object"}}, "response_format"),
    (CHAT, {"messages": USER, "chat_template_kwargs": {"x": 1}}, "chat_template_kwargs.x"),
    (CHAT, {"messages": USER, "echo": True}, "echo"),
]


def test_bad_requests_are_refused_in_one_line(answers: Any) -> None:
    """Guards clients against a 500 or a wrong answer: broken JSON, wrong types and ranges, what is unknown
    and what would change the answer but is missing here."""
    found = answers([(path, body) for path, body, _ in BAD])
    for (_, body, param), response in zip(BAD, found, strict=True):
        error = error_of(response, 400)
        assert error["type"] == "invalid_request_error"
        assert error["param"] == param, (body, error)


def test_refusals_say_what_to_do(answers: Any) -> None:
    """Guards the words: valid names, and the way round what is missing."""
    asked: list[tuple[str, Any, int, str]] = [
        (TEXT, {"prompt": "a", "model": "other"}, 404, "'other' is not served here; valid: 'tiny'"),
        (TEXT, {"prompt": "a", "temprature": 1}, 400, "unknown parameter 'temprature'; valid: model, stream"),
        (TEXT, {"prompt": "a", "best_of": 2}, 400, "ask for n of them and choose yourself"),
        (TEXT, {"prompt": "a", "temperature": -1}, 400, "from 0 up to 1000, got -1"),
        (
            TEXT,
            {"prompt": "a", "max_tokens": "x"},
            400,
            "max_tokens: input should be a valid integer, got 'x'",
        ),
        (
            CHAT,
            {"messages": [{"role": "x", "content": ""}]},
            400,
            "valid: system, developer, user, assistant",
        ),
    ]
    found = answers([(path, body) for path, body, _, _ in asked])
    for (_, _, status, words), response in zip(asked, found, strict=True):
        assert words in error_of(response, status)["message"]


def test_a_prompt_beyond_the_context_is_refused(answers: Any) -> None:
    """Guards long prompts: they are counted, named, and not decoded."""
    long = "the quick " * 300
    found = answers(
        [
            (TEXT, {"prompt": long}),
            (TEXT, {"prompt": [1] * 256}),
            (CHAT, {"messages": [{**USER[0], "content": long}]}),
        ]
    )
    for response in found:
        error = error_of(response, 400)
        assert error["code"] == "context_length_exceeded" and "context of 256" in error["message"]


def test_a_long_text_is_not_encoded_to_its_end(tiny_folder: Path) -> None:
    """Guards rounds and memory: megabytes were encoded in full before anybody counted. What may fit is
    encoded as a whole, as pieces would have other ids."""
    tokenizer = load(tiny_folder, "off").target.tokenizer
    seen: list[int] = []
    encode = tokenizer.encode

    def counting(text: str, special: bool = True) -> list[int]:
        seen.append(len(text))
        return encode(text, special)

    tokenizer.encode = counting  # type: ignore[method-assign]
    with pytest.raises(TooLong):
        encode_up_to(tokenizer, "fox " * 2_000_000, True, 512)
    assert sum(seen) < 100_000
    text = "the quick brown fox " * 5_000
    assert encode_up_to(tokenizer, text, True, 10**6) == encode(text)


def test_large_bodies_are_refused_before_they_are_read(tiny_folder: Path) -> None:
    """Guards memory: by the stated length at once, without one as soon as too much has come."""
    read = 0

    async def endless() -> Any:
        nonlocal read
        for _ in range(10_000):
            read += 10_000
            yield b" " * 10_000

    async def ask() -> list[httpx.Response]:
        async with served(load(tiny_folder)) as client:
            headers = {"content-type": "application/json"}
            stated = await client.post(TEXT, content=b" " * (10 << 20), headers=headers)
            return [stated, await client.post(TEXT, content=endless(), headers=headers)]

    for response in run(ask()):
        assert "larger than 4194304 bytes" in error_of(response, 413)["message"]
        assert response.headers["connection"] == "close"
    assert read < 5 << 20


def test_a_body_that_never_comes_gives_its_place_back(
    tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the queue against clients that open requests and say nothing more."""
    monkeypatch.setattr(service, "BODY_SECONDS", 0.05)

    async def silent() -> Any:
        yield b"{"
        import asyncio

        await asyncio.sleep(3600)

    async def ask() -> list[httpx.Response]:
        async with served(load(tiny_folder), max_batch=1, max_queue=0) as client:
            headers = {"content-type": "application/json"}
            slow = await client.post(TEXT, content=silent(), headers=headers)
            return [slow, await client.post(TEXT, json={"prompt": "a", "max_tokens": 1})]

    slow, next_one = run(ask())
    error_of(slow, 408)
    assert next_one.status_code == 200


def test_other_paths_methods_and_types(tiny_folder: Path) -> None:
    """Guards what is not a completion at all: OpenAI's error object there, too. A form that a foreign web
    page could send without being asked is no request."""

    async def ask() -> list[httpx.Response]:
        async with served(load(tiny_folder)) as client:
            return [
                await client.get("/v1/embeddings"),
                await client.get(TEXT),
                await client.post(TEXT, content=b"{}", headers={"content-type": "text/plain"}),
                await client.post(TEXT, data={"prompt": "a"}),
            ]

    missing, method, *types = run(ask())
    assert "valid: POST /v1/chat/completions" in error_of(missing, 404)["message"]
    error_of(method, 405)
    for response in types:
        assert "send Content-Type: application/json" in error_of(response, 415)["message"]


def test_the_key_is_asked_for(tiny_folder: Path) -> None:
    """Guards a server with a key: nothing without it but health, and the key itself is never told."""

    async def ask() -> list[httpx.Response]:
        async with served(load(tiny_folder), api_key="s3cret") as client:
            found = []
            for sent in (None, "Bearer wrong", "Basic s3cret", "s3cret", "Bearer ", "Bearer s3cr\xe9t"):
                headers = {} if sent is None else {"authorization": sent.encode("latin-1")}
                found.append(await client.post(TEXT, json={"prompt": "a"}, headers=headers))
            found.append(await client.get("/metrics"))
            found.append(await client.get("/v1/models"))
            good = {"authorization": "bearer s3cret"}
            for path in ("/v1/models", "/metrics"):
                assert (await client.get(path, headers=good)).status_code == 200
            body = {"prompt": "a", "max_tokens": 1}
            assert (await client.post(TEXT, json=body, headers=good)).status_code == 200
            assert (await client.get("/health")).status_code == 200
            return found

    for response in run(ask()):
        error = error_of(response, 401)
        assert error["code"] == "invalid_api_key" and "s3cret" not in response.text
        assert response.headers["www-authenticate"] == "Bearer"


def test_a_model_without_a_template_holds_no_chats(tiny_folder: Path, tmp_path: Path) -> None:
    """Guards base models: a chat is refused with the way to go, texts are continued."""
    folder = changed_model(tiny_folder, tmp_path / "base")
    (folder / "chat_template.jinja").unlink()

    async def ask() -> list[httpx.Response]:
        async with served(load(folder)) as client:
            return [
                await client.post(CHAT, json={"messages": USER}),
                await client.post(TEXT, json={"prompt": "a"}),
            ]

    chat, text = run(ask())
    assert "use /v1/completions" in error_of(chat, 400)["message"] and text.status_code == 200


@pytest.mark.parametrize(
    "options",
    [
        {"max_batch": 0},
        {"max_queue": -1},
        {"max_queue": 1.5},
        {"api_key": ""},
        {"api_key": "a b"},
        {"served_name": ""},
    ],
)
def test_bad_settings_are_refused(tiny_folder: Path, options: dict[str, Any]) -> None:
    """Guards the start: a server with such settings would fail at its first request."""
    with pytest.raises(OptionError):
        create_app(load(tiny_folder), **options)
