"""Answers from an endpoint: everything that is answered is kept, whatever the network does."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from jetspec.errors import DataError, EndpointError, OptionError, StorageError
from jetspec.train.answer_folder import Progress
from jetspec.train.answers import Answer, read_answers
from jetspec.train.endpoint import Endpoint, ask_endpoint
from jetspec.train.prompts import Prompt
from jetspec.train.responses import AnswerOptions
from tests.draft.tiny import tiny_prompts

PROMPTS = tiny_prompts(24)
OPTIONS = AnswerOptions(max_tokens=9, tokens=10**6, temperatures=((0.0, 0.5), (1.0, 0.5)), seed=7)
Handler = Callable[[httpx.Request], httpx.Response]


def endpoint(**changes: Any) -> Endpoint:
    """An endpoint that is tried three times without much of a pause."""
    options = {"concurrency": 4, "tries": 3, "pause": 0.001, **changes}
    return Endpoint("http://host:1", "the-model", **options)


def completion(text: str | None, finish: str = "stop", **more: Any) -> httpx.Response:
    """What a server answers."""
    choice = {"message": {"role": "assistant", "content": text, **more}, "finish_reason": finish}
    content = json.dumps({"choices": [choice], "usage": {"completion_tokens": 5}})  # in ASCII
    return httpx.Response(200, content=content)


def echo(request: httpx.Request) -> httpx.Response:
    """A server that answers with the last turn."""
    return completion("re: " + json.loads(request.content)["messages"][-1]["content"])


def ask(
    folder: Path,
    handler: Handler,
    prompts: list[Prompt] = PROMPTS,
    options: AnswerOptions = OPTIONS,
    **changes: Any,
) -> Progress:
    """Ask a server that is a function."""
    transport = httpx.MockTransport(handler)
    return ask_endpoint(endpoint(**changes), prompts, folder, options, transport=transport)


def answers(folder: Path) -> dict[int, Answer]:
    """Answers by number; each may be there once."""
    found = read_answers(folder / "answers.jsonl")[0]
    assert len({answer.number for answer in found}) == len(found)
    return {answer.number: answer for answer in found}


def test_what_is_asked_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the request (address, key, seed, temperature of the mix, length) and the line of a reply."""
    monkeypatch.setenv("KEY", "secret")
    seen: list[dict[str, Any]] = []

    def server(request: httpx.Request) -> httpx.Response:
        assert str(request.url) == "http://host:1/v1/chat/completions"
        assert request.headers["Authorization"] == "Bearer secret"
        seen.append(json.loads(request.content))
        return echo(request)

    progress = ask(tmp_path, server, api_key_env="KEY")
    assert (progress.answered, progress.tokens, progress.exhausted) == (24, 120, True)
    assert {body["temperature"] for body in seen} == {0.0, 1.0} and len(seen) == 24
    bodies = {body["messages"][0]["content"]: body for body in seen}
    for number, answer in answers(tmp_path).items():
        body = bodies[PROMPTS[number].messages[0]["content"]]
        assert (body["model"], body["max_tokens"], body["seed"]) == ("the-model", 9, 7 + number)
        assert body["temperature"] == answer.temperature == OPTIONS.temperature_of(number)
        assert answer.text == "re: " + body["messages"][0]["content"]
        assert (answer.finish, answer.count, answer.seed) == ("stop", 5, 7 + number)
    assert "secret" not in (tmp_path / "answers.jsonl").read_text() + (tmp_path / "answers.json").read_text()


def test_thinking_is_asked_for(tmp_path: Path) -> None:
    """Guards the prompt: an endpoint that thinks by default would be given another one than the features."""

    def server(request: httpx.Request) -> httpx.Response:
        assert json.loads(request.content)["chat_template_kwargs"] == {"enable_thinking": False}
        return echo(request)

    ask(tmp_path, server, options=AnswerOptions(**{**OPTIONS.__dict__, "thinking": False}))
    assert all(answer.thinking is False for answer in answers(tmp_path).values())


def test_later_turns_follow_the_answers(tmp_path: Path) -> None:
    """Guards conversations: the second request holds the first answer, and none follows a cut one."""
    prompts = [Prompt(p.id, p.messages, ("more",)) for p in PROMPTS[:6]]

    def server(request: httpx.Request) -> httpx.Response:
        messages = json.loads(request.content)["messages"]
        if len(messages) == 3:
            assert messages[1] == {"role": "assistant", "content": "re: " + messages[0]["content"]}
        cut = messages[0] == prompts[2].messages[0]
        return completion("re: " + messages[-1]["content"], "length" if cut else "stop")

    progress = ask(tmp_path, server, prompts)
    assert progress.answered == 11 and progress.cut == 1
    assert answers(tmp_path).keys() == set(range(12)) - {5}
    assert answers(tmp_path)[1].id == prompts[0].id + "/2"


def test_raw_prompts_use_the_other_address(tmp_path: Path) -> None:
    """Guards base models, which have no chat."""

    def server(request: httpx.Request) -> httpx.Response:
        assert request.url.path == "/v1/completions"
        text = json.loads(request.content)["prompt"] + "!"
        return httpx.Response(200, json={"choices": [{"text": text, "finish_reason": "length"}]})

    ask(tmp_path, server, options=AnswerOptions(**{**OPTIONS.__dict__, "raw": True}))
    assert all(a.raw and a.text == a.messages[0]["content"] + "!" for a in answers(tmp_path).values())


@pytest.mark.parametrize("fault", [429, 503, "timeout", "reset", "html"])
def test_what_is_temporary_is_tried_again(tmp_path: Path, fault: Any) -> None:
    """Guards hours of work against one bad second: each first try fails, each answer is there once."""
    tries: Counter[bytes] = Counter()

    def server(request: httpx.Request) -> httpx.Response:
        tries[request.content] += 1
        if tries[request.content] == 1:
            if fault == "timeout":
                raise httpx.ReadTimeout("slow")
            if fault == "reset":
                raise httpx.ReadError("reset")
            if fault == "html":
                return httpx.Response(200, text="<html>")
            return httpx.Response(fault, text="busy", headers={"Retry-After": "0"})
        return echo(request)

    assert ask(tmp_path, server).answered == 24 == len(answers(tmp_path))
    assert set(tries.values()) == {2}


def test_a_vanished_endpoint_keeps_the_answers(tmp_path: Path) -> None:
    """Guards the bar: the endpoint goes away in the middle; one line, everything kept, the next run asks only
    for the rest."""
    asked: list[str] = []

    def server(request: httpx.Request) -> httpx.Response:
        asked.append(json.loads(request.content)["messages"][0]["content"])
        if len(asked) > 10:
            raise httpx.ConnectError("Connection refused")
        return echo(request)

    with pytest.raises(EndpointError) as caught:
        ask(tmp_path, server)
    message = str(caught.value)
    assert "\n" not in message and "is gone, 3 tries failed: Connection refused" in message
    assert "10 answers" in message and "run again" in message
    kept = answers(tmp_path)
    assert len(kept) == 10
    asked.clear()
    (tmp_path / "answers.jsonl").open("a").write('{"number": 5, "mes')  # and a line was cut off

    def back(request: httpx.Request) -> httpx.Response:
        asked.append("")
        return echo(request)

    assert ask(tmp_path, back).answered == 24
    assert len(asked) == 14 and answers(tmp_path).items() > kept.items()


@pytest.mark.parametrize("concurrency", [1, 4])
@pytest.mark.parametrize("fault", [httpx.RemoteProtocolError, httpx.ReadError, httpx.ReadTimeout])
def test_a_prompt_that_breaks_the_connection_is_counted(
    tmp_path: Path, fault: type[httpx.TransportError], concurrency: int
) -> None:
    """Guards the other prompts: one at which the server hangs up ended the run as if nobody were there any
    more, and each further run, in which it was asked first again."""

    def server(request: httpx.Request) -> httpx.Response:
        if json.loads(request.content)["messages"][0] == PROMPTS[2].messages[0]:
            raise fault("Server disconnected without sending a response.")
        return echo(request)

    progress = ask(tmp_path, server, concurrency=concurrency)
    assert (progress.answered, progress.failed) == (23, 1)


def test_lost_connections_alone_end_the_run(tmp_path: Path) -> None:
    """Guards against asking every prompt of a server that takes connections and answers none."""
    calls: list[int] = []

    def server(request: httpx.Request) -> httpx.Response:
        calls.append(1)
        raise httpx.RemoteProtocolError("hung up")

    with pytest.raises(EndpointError, match="failed 10 times in a row: hung up"):
        ask(tmp_path, server)
    assert len(calls) <= 3 * 14


def test_an_endpoint_that_is_not_there(tmp_path: Path) -> None:
    """Guards a wrong port, over the real network stack."""
    nowhere = Endpoint("http://127.0.0.1:9", "m", tries=2, pause=0.001)
    with pytest.raises(EndpointError, match="is gone"):
        ask_endpoint(nowhere, PROMPTS, tmp_path, OPTIONS)


@pytest.mark.parametrize(
    ("status", "reply", "message"),
    [
        (401, {"error": {"message": "bad\nkey"}}, "refuses with HTTP 401: bad key"),
        (404, {"message": "no model m"}, "refuses with HTTP 404: no model m"),
        (400, {"error": "nonsense"}, "refuses every prompt: HTTP 400: nonsense"),
        (500, {}, "failed 10 times in a row: HTTP 500"),
    ],
)
def test_refusals_of_everything_end_the_run(tmp_path: Path, status: int, reply: Any, message: str) -> None:
    """Guards against asking a million times for what will never come."""
    calls: list[int] = []

    def server(request: httpx.Request) -> httpx.Response:
        calls.append(1)
        return httpx.Response(status, json=reply)

    with pytest.raises(EndpointError, match=message):
        ask(tmp_path, server)
    assert len(calls) <= 3 * 14


def test_single_refusals_are_counted(tmp_path: Path) -> None:
    """Guards against silence, and against one long prompt ending the run."""

    def server(request: httpx.Request) -> httpx.Response:
        content = json.loads(request.content)["messages"][0]["content"]
        number = next(n for n, p in enumerate(PROMPTS) if p.messages[0]["content"] == content)
        if number == 3:
            return httpx.Response(400, json={"error": {"message": "too long"}})
        if number == 4:
            return httpx.Response(500)
        if number == 5:
            return completion("x", "content_filter")
        return completion("" if number == 6 else "fine")

    progress = ask(tmp_path, server)
    assert (progress.answered, progress.refused, progress.failed, progress.empty) == (21, 2, 1, 1)
    assert answers(tmp_path).keys() == set(range(24)) - {3, 4, 5}


def test_reasoning_that_is_split_off_is_refused(tmp_path: Path) -> None:
    """Guards the features: an answer without its reasoning is not what the target wrote."""
    with pytest.raises(EndpointError, match="reasoning parser"):
        ask(tmp_path, lambda request: completion("4", reasoning_content="2 + 2"))


def test_enough_tokens_end_the_run(tmp_path: Path) -> None:
    """Guards --tokens, and that a second run with enough asks for nothing."""
    options = AnswerOptions(**{**OPTIONS.__dict__, "tokens": 30})
    first = ask(tmp_path, echo, options=options)
    assert 30 <= first.tokens <= 30 + 3 * 5 and not first.exhausted

    def never(request: httpx.Request) -> httpx.Response:
        raise AssertionError

    assert ask(tmp_path, never, options=options) == first


def test_requests_overlap_but_not_too_many(tmp_path: Path) -> None:
    """Guards --concurrency: one at a time leaves a server idle, all at once overruns it."""
    now, most = 0, 0

    async def server(request: httpx.Request) -> httpx.Response:
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0.005)
        now -= 1
        return echo(request)

    ask(tmp_path, server)  # type: ignore[arg-type]
    assert most == 4


def test_other_settings_are_refused(tmp_path: Path) -> None:
    """Guards a folder against a mixture of prompts, models, or answers made here."""
    ask(tmp_path, echo)
    with pytest.raises(DataError, match="prompts"):
        ask(tmp_path, echo, PROMPTS[1:])
    with pytest.raises(DataError, match="max_tokens"):
        ask(tmp_path, echo, options=AnswerOptions(**{**OPTIONS.__dict__, "max_tokens": 8}))


def test_a_full_disk_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a traceback out of the event loop."""

    def full(*_: object) -> None:
        raise StorageError("full")

    monkeypatch.setattr("jetspec.train.answer_folder.append_answers", full)
    with pytest.raises(StorageError, match="full"):
        ask(tmp_path, echo)


def garbage() -> httpx.Response:
    """A body that is not compressed as its header says."""
    headers = {"Content-Encoding": "gzip"}
    return httpx.Response(200, headers=headers, stream=httpx.ByteStream(b"no gzip"))


DEEP = b"[" * 200_000


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (garbage, "failed 10 times in a row"),
        (lambda: httpx.Response(200, content=DEEP), "an answer that is no completion"),
        (lambda: httpx.Response(400, content=DEEP), "refuses every prompt: HTTP 400"),
        (lambda: completion("\ud800"), "refuses every prompt: the text holds half of a surrogate pair"),
        (lambda: completion("x", finish=["stop"]), "it finished with <class 'list'>"),  # type: ignore[arg-type]
    ],
    ids=["gzip", "deep-200", "deep-400", "surrogate", "finish"],
)
def test_nonsense_is_no_traceback(tmp_path: Path, reply: Callable[[], httpx.Response], message: str) -> None:
    """Guards against replies that ended in DecodingError, RecursionError or UnicodeEncodeError."""
    with pytest.raises(EndpointError, match=message):
        ask(tmp_path, lambda request: reply())


def test_a_timeout_bounds_the_whole_answer(tmp_path: Path) -> None:
    """Guards against a server that sends a byte now and then, each within the limit, and never ends."""
    whole = completion("late").content

    async def drip() -> Any:
        for n in range(len(whole)):
            await asyncio.sleep(0.01)
            yield whole[n : n + 1]

    with pytest.raises(EndpointError, match=r"no answer within 0\.05 s"):
        ask(tmp_path, lambda request: httpx.Response(200, content=drip()), timeout=0.05, tries=1)


@pytest.mark.parametrize("status", [400, 500])
def test_nothing_answered_is_an_error(tmp_path: Path, status: int) -> None:
    """Guards the exit code: three prompts that all failed were "all prompts are answered: 0 tokens"."""
    with pytest.raises(EndpointError, match=f"answered none of 3 prompts: HTTP {status}"):
        ask(tmp_path, lambda request: httpx.Response(status), PROMPTS[:3])


def test_some_failed_is_said(tmp_path: Path) -> None:
    """Guards the summary: prompts that failed were asked, and not answered."""

    def server(request: httpx.Request) -> httpx.Response:
        first = json.loads(request.content)["messages"][0] == PROMPTS[0].messages[0]
        return completion("fine") if first else httpx.Response(500)

    lines = ask(tmp_path, server, PROMPTS[:3]).report(10**6)
    assert any("all prompts are asked: 5 of" in line for line in lines)


@pytest.mark.parametrize("count", [-1, 10, 10**9, True, "5", None])
def test_counts_that_cannot_be_true_are_not_believed(tmp_path: Path, count: Any) -> None:
    """Guards --tokens: one answer of 10**9 tokens ended the run, and one of -10**9 made it endless."""
    reply = {"choices": [{"message": {"content": "abcd"}, "finish_reason": "stop"}]}
    reply["usage"] = {"completion_tokens": count}  # type: ignore[assignment]
    assert ask(tmp_path, lambda request: httpx.Response(200, json=reply), PROMPTS[:1]).tokens == 2


def test_the_key_is_sent_bare_and_never_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the key: with a line feed it was printed in an error, outside ASCII it was a traceback, and some
    servers repeat it when they refuse it."""
    monkeypatch.setenv("KEY", " sk-secret\n")
    assert endpoint(api_key_env="KEY").headers == {"Authorization": "Bearer sk-secret"}
    for status in (401, 400, 500):
        said = {"error": {"message": "x" * 190 + " no such key sk-secret"}}
        with pytest.raises(EndpointError) as caught:
            ask(tmp_path / str(status), lambda request: httpx.Response(status, json=said), api_key_env="KEY")  # noqa: B023
        assert "sk-s" not in str(caught.value) and "sk-s" not in repr(caught.value.__context__)
    for wrong in ("sk-sécret", "sk-\nsecret", "sk secret", "sk-\x7f"):
        monkeypatch.setenv("KEY", wrong)
        with pytest.raises(OptionError, match="which holds no key") as refused:
            endpoint(api_key_env="KEY")
        assert wrong not in str(refused.value)
    monkeypatch.setenv("KEY", " \n")
    with pytest.raises(OptionError, match="is not set"):
        endpoint(api_key_env="KEY")


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://h:8000", "http://h:8000/v1/chat/completions"),
        ("http://h:8000/", "http://h:8000/v1/chat/completions"),
        ("https://h/v1", "https://h/v1/chat/completions"),
        ("https://h/api/v3/", "https://h/api/v3/chat/completions"),
        ("https://h/v1/chat/completions", "https://h/v1/chat/completions"),
    ],
)
def test_addresses(url: str, address: str) -> None:
    """Guards every usual way to write the URL."""
    assert Endpoint(url, "m").address(raw=False) == address
    assert Endpoint(url, "m").address(raw=True) == address.replace("/chat", "")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"url": "localhost:8000"}, "give a URL such as"),
        ({"api_key_env": "NO_SUCH_VARIABLE"}, "NO_SUCH_VARIABLE, which is not set"),
        ({"concurrency": 0}, "concurrency must be"),
        ({"timeout": float("nan")}, "timeout must be"),
    ],
)
def test_bad_options(changes: dict[str, Any], message: str) -> None:
    """Guards the message for each option."""
    with pytest.raises(OptionError, match=message):
        Endpoint(**{"url": "http://h", "model": "m", **changes})
