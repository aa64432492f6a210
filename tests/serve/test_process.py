"""`jetspec serve` as a process: a port, real connections, signals."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from jetspec.cli import serve as verb
from tests.helpers import changed_model, jetspec, tiny_folder
from tests.serve.tiny import PATIENCE, TEXT, events_in, joined, load

__all__ = ["tiny_folder"]  # a fixture

# Some thousands of rounds: it is still running whenever a test does something to it.
ENDLESS = {"prompt": "the quick", "temperature": 0, "ignore_eos": True, "max_tokens": 30_000, "stream": True}


@pytest.fixture(scope="module")
def endless_folder(tiny_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with a context that takes long to fill."""
    return changed_model(
        tiny_folder, tmp_path_factory.mktemp("serve") / "tiny", max_position_embeddings=32_768
    )


class Server:
    """A running `jetspec serve`."""

    def __init__(self, *arguments: object) -> None:
        command = [sys.executable, "-m", "jetspec", "serve", "--port", "0", "--head", "off", "--threads", "1"]
        self.process = subprocess.Popen(
            [*command, *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "JETSPEC_API_KEY": "k"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert " is served on http://127.0.0.1:" in line, (line, self.process.communicate(timeout=PATIENCE))
        self.url = line.split()[-1].removesuffix("/v1")
        self.client = httpx.Client(
            base_url=self.url, timeout=PATIENCE, headers={"Authorization": "Bearer k"}, trust_env=False
        )

    def value(self, metric: str) -> float:
        """A metric's value."""
        lines = self.client.get("/metrics").text.splitlines()
        return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"{metric} "))

    def said(self, words: str) -> None:
        """Wait for a line on standard error."""
        assert self.process.stderr is not None
        line = self.process.stderr.readline()
        assert words in line, line

    def end(self) -> int:
        """Its exit code, once it has ended by itself."""
        return self.process.wait(timeout=PATIENCE)


@contextlib.contextmanager
def server(*arguments: object) -> Iterator[Server]:
    """A process that is gone afterwards."""
    running = Server(*arguments)
    try:
        yield running
    finally:
        running.client.close()
        running.process.kill()
        running.process.communicate()


def first_chunk(response: httpx.Response) -> tuple[str, Iterator[str]]:
    """The beginning of a stream, and the rest."""
    rest = response.iter_text()
    return next(rest), rest


def test_running_answers_end_before_the_server_does(endless_folder: Path) -> None:
    """Guards SIGTERM, with which every restart begins: nobody is let in any more, whoever is in gets the
    whole text, and the process ends well and by itself."""
    asked = {**ENDLESS, "max_tokens": 400}
    with server("--model", endless_folder, "--grace", 60) as running:
        with running.client.stream("POST", TEXT, json=asked) as response:
            text, rest = first_chunk(response)
            running.process.send_signal(signal.SIGTERM)
            text += "".join(rest)
        chunks = events_in(text)
        expected = load(endless_folder, "off", 0).generate(
            "the quick", raw=True, max_tokens=400, ignore_eos=True
        )
        assert joined(chunks) == expected.text and chunks[-1]["choices"][0]["finish_reason"] == "length"
        assert running.end() == 0
        with pytest.raises(httpx.ConnectError):
            running.client.get("/health")


def test_the_grace_time_ends_and_so_does_the_server(endless_folder: Path) -> None:
    """Guards Ctrl-C while an answer runs that would take minutes: it is ended, its client is told, and the
    process is gone with a code that says all went well."""
    with server("--model", endless_folder, "--grace", 0.2) as running:
        with running.client.stream("POST", TEXT, json=ENDLESS) as response:
            text, rest = first_chunk(response)
            running.process.send_signal(signal.SIGINT)
            running.said("stopping: 1 answer is given 0.2 s to end")
            text += "".join(rest)
        *chunks, last = events_in(text)
        assert last["error"]["code"] == "shutting_down" and joined(chunks)
        running.said("stopped")
        assert running.end() == 0


def test_a_second_signal_ends_at_once(endless_folder: Path) -> None:
    """Guards an impatient Ctrl-C: the process hung until the grace time was over."""
    with (
        server("--model", endless_folder, "--grace", 600) as running,
        running.client.stream("POST", TEXT, json=ENDLESS) as response,
    ):
        kept = first_chunk(response)  # without the iterator httpx would close the connection
        running.process.send_signal(signal.SIGINT)
        running.said("stopping: 1 answer")
        running.process.send_signal(signal.SIGINT)
        assert running.end() == 130
        del kept


def test_a_connection_that_breaks_frees_its_rows(endless_folder: Path) -> None:
    """Guards the way from a closed socket to the engine, through a real server, streamed or not."""
    with server("--model", endless_folder) as running:
        for number, stream in enumerate((True, False), 1):
            body = json.dumps({**ENDLESS, "stream": stream}).encode()
            head = f"POST {TEXT} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer k\r\n"
            head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            host, port = running.url.removeprefix("http://").split(":")
            with socket.create_connection((host, int(port))) as connection:
                connection.sendall(head.encode() + body)
                while running.value("jetspec_running") == 0:
                    pass
                assert running.value("jetspec_cache_bytes") > 0
            while running.value("jetspec_running") > 0:
                pass
            assert running.value("jetspec_cache_bytes") == 0
            while running.value('jetspec_requests_total{outcome="cancelled"}') < number:
                pass
        assert running.client.get("/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_port_in_use_is_told_at_once(tiny_folder: Path) -> None:
    """Guards the start: one line, before a model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = jetspec("serve", "--model", "/no/such/model", "--port", port)
    assert done.error.startswith(f"cannot listen on 127.0.0.1 port {port} (") and "--port" in done.error
    assert "cannot listen on no.such.host.invalid" in jetspec("serve", "--host", "no.such.host.invalid").error
    assert "port must be from 0" in jetspec("serve", "--port", 99999).error


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--grace", -1], "grace must be"),
        (["--grace", "inf"], "grace must be"),
        (["--budget", "x"], "budget must be"),
        (["--api-key", ""], "API key"),
        (["--max-batch", 0], "max_batch must be"),
        (["--max-queue", -1], "max_queue must be"),
        (["--served-name", ""], "served name must be"),
    ],
)
def test_bad_options_are_one_line(tiny_folder: Path, arguments: list[Any], words: str) -> None:
    """Guards the command line's promise: what, why, and what is valid."""
    done = jetspec("serve", "--port", 0, "--model", tiny_folder, "--head", "off", *arguments)
    assert words in done.error


def test_a_missing_extra_is_named(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards users without the extra: they are told which one to install."""
    monkeypatch.setattr(verb.importlib.util, "find_spec", lambda name: None)
    assert 'pip install "jetspec[serve]"' in jetspec("serve", "--model", tiny_folder).error


def test_the_library_needs_no_server() -> None:
    """Guards `import jetspec` and the other verbs where the extra is not installed."""
    code = (
        "import sys\n"
        "for name in ('fastapi', 'starlette', 'uvicorn', 'prometheus_client'): sys.modules[name] = None\n"
        "import jetspec, jetspec.api, jetspec.cli.app; jetspec.load, jetspec.Engine\n"
        "from jetspec.cli.main import main; sys.exit(main(['--help']))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)
