"""How often a run says where it stands."""

from __future__ import annotations

import pytest

from jetspec.train import pace
from jetspec.train.pace import Pace


def test_it_is_due_at_once_and_then_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the engine's speed: rounds of a small model come a thousand times a second, and each would be
    shown."""
    now = 1000.0
    monkeypatch.setattr(pace.time, "monotonic", lambda: now)
    watch, due = Pace(), 0
    for _ in range(2000):
        due += watch.due()
        now += 0.001
    assert 4 <= due <= 8
