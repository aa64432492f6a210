"""The JSON that clients read, checked by hand against OpenAI's format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from jetspec.serve.app import create_app
from tests.helpers import tiny_folder
from tests.serve.tiny import CHAT, TEXT, events, joined, load, run, served, serving

__all__ = ["tiny_folder"]  # a fixture

USER = [{"role": "user", "content": "the quick"}]
GREEDY = {"temperature": 0, "max_tokens": 10, "ignore_eos": True}


def ask(folder: Path, path: str, fields: dict[str, Any], head: str = "decoy", budget: int = 6) -> Any:
    """The response to one request to a new server."""

    async def one() -> Any:
        async with served(load(folder, head, budget), served_name="tiny") as client:
            return await client.post(path, json=fields)

    return run(one())


def test_a_chat_completion_has_openais_form(tiny_folder: Path) -> None:
    """Guards clients that read by name: every key of the object, and no other ones but `jetspec`."""
    answer = ask(tiny_folder, CHAT, {"model": "tiny", "messages": USER, **GREEDY}).json()
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "jetspec"]
    assert answer["id"].startswith("chatcmpl-") and type(answer["created"]) is int
    assert (answer["object"], answer["model"]) == ("chat.completion", "tiny")
    (choice,) = answer["choices"]
    assert list(choice) == ["index", "message", "logprobs", "finish_reason"]
    assert list(choice["message"]) == ["role", "content", "refusal"]
    assert (choice["index"], choice["finish_reason"], choice["message"]["role"]) == (0, "length", "assistant")
    usage, own = answer["usage"], answer["jetspec"]
    assert usage["completion_tokens"] == 10
    assert usage["total_tokens"] == usage["prompt_tokens"] + 10
    details = usage["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] == 10 - own["rounds"] > 0
    assert details["rejected_prediction_tokens"] > 0
    assert own["tau"] == pytest.approx(10 / own["rounds"], abs=1e-4)


def test_a_chat_stream_has_openais_form(tiny_folder: Path) -> None:
    """Guards clients that add chunks up: the role comes first and once, the end has its own chunk, the usage
    comes last and only if it was asked for."""
    asked = {"messages": USER, **GREEDY}
    whole = ask(tiny_folder, CHAT, asked).json()
    chunks = events(ask(tiny_folder, CHAT, {**asked, "stream": True}))
    assert len({chunk["id"] for chunk in chunks}) == 1 and chunks[0]["id"].startswith("chatcmpl-")
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert all("usage" not in chunk for chunk in chunks)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert [delta.get("role") for delta in deltas] == ["assistant", *[None] * (len(deltas) - 1)]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert finishes == [*[None] * (len(finishes) - 1), "length"]
    assert joined(chunks) == whole["choices"][0]["message"]["content"]
    assert chunks[-1]["jetspec"] == whole["jetspec"]
    counted = events(
        ask(tiny_folder, CHAT, {**asked, "stream": True, "stream_options": {"include_usage": True}})
    )
    assert all(chunk["usage"] is None and chunk["choices"] for chunk in counted[:-1])
    assert (counted[-1]["choices"], counted[-1]["usage"]) == ([], whole["usage"])


def test_a_text_completion_has_openais_form(tiny_folder: Path) -> None:
    """Guards the older interface: `text` instead of a message, 16 tokens by default, temperature 1."""
    answer = ask(tiny_folder, TEXT, {"prompt": "the quick", "ignore_eos": True}).json()
    assert list(answer) == ["id", "object", "created", "model", "choices", "usage", "jetspec"]
    assert answer["id"].startswith("cmpl-") and answer["object"] == "text_completion"
    (choice,) = answer["choices"]
    assert list(choice) == ["index", "text", "logprobs", "finish_reason"]
    assert answer["usage"]["completion_tokens"] == 16
    assert type(answer["jetspec"]["seed"]) is int, "temperature 1 by default, so a seed was drawn"
    stream = events(ask(tiny_folder, TEXT, {"prompt": "the", "stream": True, **GREEDY}))
    assert {chunk["object"] for chunk in stream} == {"text_completion"}
    assert all(
        list(chunk["choices"][0]) == ["index", "text", "logprobs", "finish_reason"] for chunk in stream
    )


def test_prompts_in_all_four_forms(tiny_folder: Path) -> None:
    """Guards the forms of `prompt`: a text, texts, ids and lists of ids are the same request."""
    model = load(tiny_folder)
    ids = model.target.tokenizer.encode("the quick")

    async def texts() -> list[list[str]]:
        async with served(model) as client:
            answers = [
                await client.post(TEXT, json={"prompt": prompt, **GREEDY})
                for prompt in ("the quick", ["the quick"], ids, [ids, ids], ["the quick", ids])
            ]
            return [[choice["text"] for choice in answer.json()["choices"]] for answer in answers]

    found = run(texts())
    assert [len(choices) for choices in found] == [1, 1, 1, 2, 2]
    assert len({text for choices in found for text in choices}) == 1


def test_echo_puts_the_prompt_first(tiny_folder: Path) -> None:
    """Guards `echo`, also for ids and in a stream, where it comes once for each choice."""
    ids = load(tiny_folder).target.tokenizer.encode("the quick")
    bare = ask(tiny_folder, TEXT, {"prompt": "the quick", **GREEDY}).json()["choices"][0]["text"]
    for prompt in ("the quick", ids):
        asked = {"prompt": prompt, "echo": True, "n": 2, **GREEDY}
        whole = ask(tiny_folder, TEXT, asked).json()
        assert [choice["text"] for choice in whole["choices"]] == ["the quick" + bare] * 2
        chunks = events(ask(tiny_folder, TEXT, {**asked, "stream": True}))
        assert [joined(chunks, index) for index in (0, 1)] == ["the quick" + bare] * 2


def test_parts_and_roles_of_messages(tiny_folder: Path) -> None:
    """Guards conversations as clients send them: text parts are joined, `developer` is the system's newer
    name, and what a client kept of an earlier answer does no harm."""

    async def texts() -> list[str]:
        async with served(load(tiny_folder)) as client:
            found = []
            for messages in (
                [{"role": "system", "content": "lazy"}, {"role": "user", "content": "the quick"}],
                [
                    {"role": "developer", "content": [{"type": "text", "text": "lazy"}], "name": "me"},
                    {
                        "role": "user",
                        "content": [{"type": "text", "text": "the "}, {"type": "text", "text": "quick"}],
                    },
                ],
                [{"role": "user", "content": "the quick"}],
                [
                    *USER,
                    {
                        "role": "assistant",
                        "content": "fox",
                        "refusal": None,
                        "tool_calls": None,
                        "annotations": [],
                    },
                    {"role": "user", "content": "jumps"},
                ],
            ):
                answer = await client.post(CHAT, json={"messages": messages, **GREEDY})
                assert answer.status_code == 200, answer.text
                found.append((answer.json()["choices"][0]["message"]["content"], answer.json()["usage"]))
            return found

    with_system, same, without, longer = run(texts())
    assert with_system == same
    assert with_system[1]["prompt_tokens"] > without[1]["prompt_tokens"]
    assert longer[1]["prompt_tokens"] > without[1]["prompt_tokens"]


def test_details_tell_where_tokens_came_from(tiny_folder: Path) -> None:
    """Guards the page's colours: kinds and texts of all tokens, in order, only if they are asked for."""
    model = load(tiny_folder)
    asked = {"prompt": "the quick", "stream": True, **GREEDY}
    chunks = events(ask(tiny_folder, TEXT, {**asked, "jetspec_details": True}))
    expected = model.generate("the quick", raw=True, max_tokens=10, ignore_eos=True)
    kinds = [kind for chunk in chunks for kind in chunk["jetspec"]["kinds"]]
    texts = [text for chunk in chunks for text in chunk["jetspec"]["texts"]]
    assert kinds == expected.kinds and "accepted" in kinds
    assert "".join(texts) == expected.text == joined(chunks)
    plain = events(ask(tiny_folder, TEXT, asked))
    assert all("jetspec" not in chunk for chunk in plain[:-1]) and "kinds" not in plain[-1]["jetspec"]


def test_a_chat_may_fill_the_context(tiny_folder: Path) -> None:
    """Guards chats without max_tokens: they go on to the end of the context, and no further."""
    answer = ask(
        tiny_folder, CHAT, {"messages": USER, "temperature": 0, "ignore_eos": True}, "echo", 4
    ).json()
    assert answer["usage"]["total_tokens"] == 256 and answer["choices"][0]["finish_reason"] == "length"
    limited = ask(
        tiny_folder, CHAT, {"messages": USER, "max_completion_tokens": 3, "ignore_eos": True}
    ).json()
    assert limited["usage"]["completion_tokens"] == 3


def test_harmless_and_neutral_parameters_are_taken(tiny_folder: Path) -> None:
    """Guards clients that send everything they know: what changes nothing is no error, nor is null."""
    fields: dict[str, Any] = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "parallel_tool_calls": True,
        "logprobs": False,
        "top_logprobs": None,
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "stop": None,
        "logit_bias": None,
        "seed": None,
        "top_k": -1,
        "stream_options": None,
        "chat_template_kwargs": {"enable_thinking": False},
    }
    response = ask(tiny_folder, CHAT, {"messages": USER, **GREEDY, **fields})
    assert response.status_code == 200, response.text


def test_models_and_health(tiny_folder: Path) -> None:
    """Guards discovery: clients list models first, and a balancer asks for health."""

    async def look() -> list[Any]:
        async with served(load(tiny_folder)) as client:
            paths = ("/v1/models", f"/v1/models/{tiny_folder.name}", "/v1/models/other", "/health")
            return [await client.get(path) for path in paths]

    models, one, other, health = run(look())
    (listed,) = models.json()["data"]
    assert models.json()["object"] == "list"
    assert listed == one.json() and listed["id"] == tiny_folder.name and listed["object"] == "model"
    assert other.status_code == 404 and tiny_folder.name in other.json()["error"]["message"]
    assert (health.status_code, health.json()) == (200, {"status": "ok"})


def test_metrics_count_what_happened(tiny_folder: Path) -> None:
    """Guards dashboards: the counters are those of the answers."""

    async def look() -> tuple[Any, str]:
        app = create_app(load(tiny_folder))
        async with serving(app) as client:
            answer = await client.post(TEXT, json={"prompt": ["the", "lazy"], **GREEDY})
            refused = await client.post(TEXT, json={"prompt": 1})
            assert refused.status_code == 400
            return answer.json(), (await client.get("/metrics")).text

    answer, text = run(look())
    lines = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    value = {name: float(number) for name, number in lines.items()}
    tokens = {
        kind: value[f'jetspec_generated_tokens_total{{kind="{kind}"}}']
        for kind in ("accepted", "bonus", "plain")
    }
    usage, rounds = answer["usage"], answer["jetspec"]["rounds"]
    assert sum(tokens.values()) == usage["completion_tokens"] == 20
    assert tokens["accepted"] == usage["completion_tokens_details"]["accepted_prediction_tokens"] > 0
    assert value["jetspec_prompt_tokens_total"] == usage["prompt_tokens"]
    assert value["jetspec_rounds_total"] == rounds == value["jetspec_batch_size_sum"]
    assert value["jetspec_tau"] == pytest.approx(20 / rounds)
    assert value['jetspec_answers_total{finish="length"}'] == 2
    assert value['jetspec_requests_total{outcome="done"}'] == 1
    assert value['jetspec_requests_total{outcome="refused"}'] == 1
    assert (
        value["jetspec_time_to_first_token_seconds_count"]
        == value["jetspec_time_per_token_seconds_count"]
        == 2
    )
    assert value["jetspec_nodes_per_round_sum"] == value["jetspec_drafted_nodes_total"] > 0
    assert value["jetspec_running"] == value["jetspec_waiting"] == value["jetspec_cache_bytes"] == 0
    assert value["jetspec_drafting"] == 1
