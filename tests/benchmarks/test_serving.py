"""The clients of benchmarks/serving.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.helpers import tiny_folder
from tests.serve.tiny import load, run, served
from tests.test_benchmarks import script

__all__ = ["tiny_folder"]  # a fixture


def test_a_client_counts_what_it_got(tiny_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the figures: tokens, not chunks, are counted, those of the first chunk are no part of the time
    per token, and the text is that of the library."""
    serving: Any = script("serving", monkeypatch)
    model = load(tiny_folder)
    expected = model.generate("the quick", max_tokens=30)

    async def ask() -> Any:
        async with served(model) as client:
            return await serving._ask(client, "the quick", 30)

    answer = run(ask())
    assert (answer.text, answer.tokens) == (expected.text, len(expected.tokens))
    first = next(n for n, kind in enumerate(expected.kinds, 1) if kind != "accepted")
    assert answer.tokens - answer.after >= first and answer.first > 0 and answer.rest >= 0


def test_medians(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the unit and the quantiles of the table, and a run without any second chunk."""
    serving: Any = script("serving", monkeypatch)
    spread = serving._spread([n / 1000 for n in range(101)])
    assert spread == pytest.approx({"p50": 50.0, "p95": 95.0})
    assert serving._spread([]) == {}
