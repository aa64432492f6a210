"""What engines in threads of their own share."""

from __future__ import annotations

import threading
from collections.abc import Iterable

import pytest

from jetspec.budget import knowledge
from jetspec.budget.calibrate import Sample
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.maps import Calibration
from jetspec.budget.profile import Measurement
from jetspec.tree import Tree
from tests.budget.world import Machine

TREE = Tree.of([0, 1, 2], [-1, 0, 0], [0.0, -0.5, -1.5])


def test_a_fit_is_not_disturbed_by_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without a calibration has maps fitted to the trees so far. A tree that another thread added
    meanwhile ended the request: "deque mutated during iteration"."""
    known = Knowledge(Measurement(Machine().model(), 1.0, noisy=False))
    other = threading.Thread(target=known.observe, args=(TREE, [0, 1], False))
    seen = []

    def fit(samples: Iterable[Sample]) -> Calibration:
        for sample in samples:
            if not seen:
                other.start()
                other.join(0.2)  # ends at once where nothing holds it back
            seen.append(sample)
        return Calibration()

    monkeypatch.setattr(knowledge, "fit_early", fit)
    while not seen:
        known.observe(TREE, [0, 2], False)
    other.join(10.0)
    assert not other.is_alive() and all(sample.path == (0, 2) for sample in seen)
