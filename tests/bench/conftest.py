"""Fixtures of these tests."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from jetspec.bench import summary


@pytest.fixture(autouse=True)
def _few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    """Intervals from 200 draws instead of 10,000, which take most of the time; values do not depend on it."""
    monkeypatch.setattr(summary, "RESAMPLES", 200)


@pytest.fixture(autouse=True, scope="module")
def _short_collections() -> Iterator[None]:
    """Leave what the test session has imported out of the garbage collections before each measurement."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
