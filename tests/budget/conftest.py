"""Costs measured by tests go to a folder of their own."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def cost_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of one test; where costs will be kept in it."""
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "cost"
