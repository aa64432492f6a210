"""What engines in threads of their own share."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any

import pytest

from jetspec.budget import knowledge, outlook
from jetspec.budget.adaptive import AdaptiveBudget
from jetspec.budget.calibrate import Sample
from jetspec.budget.cost import CostModel
from jetspec.budget.knowledge import Knowledge
from jetspec.budget.maps import Calibration
from jetspec.budget.outlook import Outlook, look_ahead
from jetspec.budget.profile import Measurement
from tests.budget.world import Head, Machine, run


def test_a_fit_is_not_disturbed_by_another_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """A head without a calibration has maps fitted to the trees so far. A tree that another thread added
    meanwhile ended the request: "deque mutated during iteration"."""
    known = Knowledge(Measurement(Machine().model(), 1.0, noisy=False))
    other = threading.Thread(target=run, args=(AdaptiveBudget(known), Head(), Machine(), 20))
    seen = []

    def fit(samples: Iterable[Sample]) -> Calibration:
        for sample in samples:
            if not seen:
                other.start()
                other.join(0.2)  # ends at once where nothing holds it back
            seen.append(sample)
        return Calibration()

    monkeypatch.setattr(knowledge, "fit_early", fit)
    policy = AdaptiveBudget(known)
    while not seen:
        run(policy, Head(), Machine(), 1)
    other.join(10.0)
    assert not other.is_alive()


def test_policies_think_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what they share: mean gains, maps and curves that two threads wrote at once got ranks that do
    not belong together (IndexError, or the map of another depth for as long as the process ran)."""
    known = Knowledge(Measurement(Machine().model(), 1.0, noisy=False))
    inside: list[int] = []
    most = 0

    def slowly(cost: CostModel, *rest: Any) -> Outlook:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        time.sleep(0.001)
        inside.pop()
        return look_ahead(cost, *rest)

    monkeypatch.setattr(outlook, "look_ahead", slowly)
    threads = [
        threading.Thread(target=run, args=(AdaptiveBudget(known), Head(seed=n), Machine(), 30))
        for n in range(3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30.0)
    assert most == 1 and not any(thread.is_alive() for thread in threads)
