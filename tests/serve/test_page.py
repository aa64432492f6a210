"""The page that shows what the server does."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from jetspec.decode.engine import Engine
from jetspec.sequence import Limits
from jetspec.serve import pulse
from jetspec.serve.app import create_app
from jetspec.serve.pulse import Pulse
from tests.decode.tiny import PROMPTS, shared_target
from tests.helpers import tiny_folder
from tests.serve.tiny import TEXT, desk_of, gated, load, run, served, until

__all__ = ["tiny_folder"]  # a fixture

PAGE = Path(pulse.__file__).parent / "page" / "index.html"


def test_the_page_is_whole(tiny_folder: Path) -> None:
    """Guards a page that works without a network, also with a key set, and that a browser lets nothing else
    run in."""

    async def ask() -> list[Any]:
        async with served(load(tiny_folder), api_key="k") as client:
            return [await client.get("/"), await client.get("/live")]

    page, live = run(ask())
    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert live.status_code == 401, "the figures are for those who have the key"
    assert page.text == PAGE.read_text("utf-8")
    assert not re.search(r"https?:|@import|url\(|\ssrc=", page.text), "a resource from elsewhere"
    assert "innerHTML" not in page.text, "the model's text must not become markup"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy


def test_the_pages_fields_have_labels() -> None:
    """Guards readers by ear: each field has a label, and each name that the script looks up exists."""
    text = PAGE.read_text("utf-8")
    names = set(re.findall(r'\bid="([\w-]+)"', text))
    fields = re.findall(r'<(?:input|textarea)[^>]*\bid="([\w-]+)"', text)
    assert len(fields) == 5 and set(fields) <= set(re.findall(r'<label for="([\w-]+)"', text))
    assert set(re.findall(r'\bat\("([\w-]+)"\)', text)) <= names
    assert {"running", "waiting", "batch", "nodes", "tau"} <= names


def test_live_figures(tiny_folder: Path) -> None:
    """Guards the panel: what runs and waits, and what the last rounds did."""
    app = create_app(load(tiny_folder, "echo", 4), max_batch=2)
    asked = {"prompt": "the", "n": 3, "temperature": 0, "ignore_eos": True, "max_tokens": 100}

    async def ask() -> list[dict[str, Any]]:
        async with gated(app) as (client, gate):
            found = [(await client.get("/live")).json()]
            asking = asyncio.ensure_future(client.post(TEXT, json=asked))
            gate.let(4)
            await until(lambda: desk_of(app).engine.stats.forwards == 4)
            found.append((await client.get("/live")).json())
            gate.open()
            await asking
            return found

    idle, busy = run(ask())
    assert list(idle) == list(busy)
    assert (idle["running"], idle["waiting"], idle["batch"], idle["tau"]) == (0, 0, 0, 0)
    assert (busy["running"], busy["waiting"], busy["max_batch"], busy["drafting"]) == (2, 1, 2, True)


def test_means_of_the_last_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the figures against a count by hand, and against old rounds that never leave them."""
    clock = [100.0]
    monkeypatch.setattr(pulse.time, "perf_counter", lambda: clock[0])
    beats = Pulse()
    engine = Engine(shared_target(), None, budget=0)
    for prompt in PROMPTS[:2]:
        engine.add(prompt, limits=Limits(max_tokens=8))
    while engine.busy:
        beats.beat(engine.step())
        clock[0] += 0.1
    assert beats.view() == {"batch": 2.0, "nodes": 0.0, "tau": 1.0, "tokens_per_second": 20.0}
    clock[0] += pulse.SECONDS - 0.15
    view = beats.view()
    assert view["batch"] == 2.0 and view["tokens_per_second"] == 0.0, "it has been idle for seconds"
    clock[0] += 1.0
    assert beats.view() == {"batch": 0.0, "nodes": 0.0, "tau": 0.0, "tokens_per_second": 0.0}
