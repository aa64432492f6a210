from __future__ import annotations

import math
import random

import pytest

from jetspec.tree import GROW, MarkovProposal, Tree


def proposal(seed: int) -> MarkovProposal:
    """Random transitions over four depths of five candidates."""
    dice = random.Random(seed)

    def row() -> list[float]:
        weights = [dice.expovariate(1.0) for _ in range(5)]
        return [math.log(weight / sum(weights)) for weight in weights]

    tokens = [[10 * depth + n for n in range(5)] for depth in range(4)]
    return MarkovProposal(tokens, row(), [[row() for _ in range(5)] for _ in range(3)])


@pytest.mark.parametrize("grow", GROW)
@pytest.mark.parametrize("floor", [-0.5, -2.0, -3.5, -math.inf])
def test_nothing_below_the_floor_is_grown(grow: str, floor: float) -> None:
    """Guards the limit that saves time: trees are valid and hold no node below it; best-first and chain lose
    nothing above it, and without a floor everything is as it was."""
    for seed in range(5):
        whole = GROW[grow](0, proposal(seed), 40)
        tree = GROW[grow](0, proposal(seed), 40, floor=floor)
        tree.check()
        assert min(tree.logps) >= floor
        if floor == -math.inf:
            assert tree == whole
        if grow in ("best-first", "chain"):
            wanted = sum(logp >= floor for logp in whole.logps)
            assert tree == Tree(
                *(part[:wanted] for part in (whole.tokens, whole.parents, whole.depths, whole.logps))
            )
