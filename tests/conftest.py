"""Fixtures for every test.

Transformers is not imported here, so that tests of the light stages stay fast to start.
"""

from __future__ import annotations

import os
import random
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

PROJECT_ROOT = Path(__file__).resolve().parents[1]

# A busy machine must not fail a property test, and a failure in CI must come back when the run is repeated.
settings.register_profile("jetspec", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("jetspec")


@pytest.fixture(autouse=True)
def _same_start(request: pytest.FixtureRequest) -> None:
    """Give each test one thread (tiny tensors gain nothing from more) and its own fixed seed, so that its
    outcome depends on no other test.
    """
    seed = zlib.crc32(request.node.nodeid.encode())
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    random.seed(seed)


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """The folder shared/data beside the project's root: prompts/ and eval/ as JSON lines; skips if absent."""
    folder = PROJECT_ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("no folder shared/data beside the project")
    return folder
