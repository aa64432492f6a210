from __future__ import annotations

import math
import random

import pytest

from jetspec.bench.summary import summarise
from jetspec.bench.theory import (
    best_length,
    chain_curve,
    draw,
    expected_tokens,
    fitted_alpha,
    formula_grids,
    mark_grid,
    marks,
    predicted_speedup,
    verify_curve,
)
from jetspec.errors import DataError, OptionError
from tests.bench.tiny import item, method


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 0.999999999999, 1.0])
def test_expected_tokens_is_the_sum_of_survivals(alpha: float) -> None:
    """Guards the closed form, its limit at alpha = 1 and its border cases, against the plain sum."""
    for length in (0, 1, 7, 64):
        direct = sum(alpha**k for k in range(length + 1))
        assert expected_tokens(alpha, length) == pytest.approx(direct)


def test_formula_is_what_a_simulation_gives() -> None:
    """Guards the model itself: chains of 5 with alpha .7 and c .05, coin by coin. 20,000 rounds put the mean
    within 0.013 (one sigma 0.013); the tolerance is 4 sigma, the seed fixed."""
    dice = random.Random(1)
    emitted = 0
    for _ in range(20_000):
        accepted = 0
        while accepted < 5 and dice.random() < 0.7:
            accepted += 1
        emitted += accepted + 1
    assert emitted / 20_000 == pytest.approx(expected_tokens(0.7, 5), abs=0.052)
    assert predicted_speedup(0.7, 0.05, 5) == pytest.approx(expected_tokens(0.7, 5) / 1.25)


def test_limits() -> None:
    """Guards N = 0 (plain decoding), free drafts, worthless drafts, and refusals by name."""
    assert predicted_speedup(0.8, 0.05, 0) == 1.0
    assert predicted_speedup(1.0, 0.0, 9) == pytest.approx(10.0)
    assert predicted_speedup(0.0, 0.1, 10) == pytest.approx(0.5)
    assert best_length(0.0, 0.1) == 0 and best_length(0.9, 0.05) == 13
    wrong = [
        ((1.1, 0.1, 4), "alpha"),
        ((0.5, -1.0, 4), "c is the cost"),
        ((0.5, math.nan, 4), "c is the cost"),
        ((0.5, 0.1, -1), "a chain has"),
    ]
    for arguments, message in wrong:
        with pytest.raises(OptionError, match=message):
            predicted_speedup(*arguments)


@pytest.mark.parametrize("alpha", [0.05, 0.5, 0.83, 0.99])
def test_alpha_is_found_again(alpha: float) -> None:
    """Guards the fit: the alpha that explains a tau made with it, and the ends of the scale."""
    assert fitted_alpha(expected_tokens(alpha, 7), 7) == pytest.approx(alpha, abs=1e-9)
    assert fitted_alpha(1.0, 7) == pytest.approx(0.0, abs=1e-9) and fitted_alpha(8.0, 7) == 1.0


def records() -> list[dict[str, object]]:
    """A plain step of 20 ms; a tree of 8 and a chain of 4 with hand-made phases."""
    plain = {"draft": 0.0, "build": 0.5, "verify": 19.0, "commit": 0.5}
    tree = {"draft": 4.0, "build": 1.0, "verify": 24.0, "commit": 1.0}
    chain = {"draft": 4.0, "build": 0.5, "verify": 21.0, "commit": 0.5}

    def made(
        name: str, budget: int, ms: dict[str, float], tokens: int, rounds: int, **more: object
    ) -> object:
        seconds = rounds * sum(ms.values()) / 1e3
        split = {phase: value * rounds / 1e3 for phase, value in ms.items()}
        return method(name, budget, seconds, [tokens], [rounds], split=split, split_ms=ms, **more)

    survival = [[40, 20], [40, 10], [40, 6], [40, 4]]
    return [
        item(0, [
            made("plain", 0, plain, 80, 80),
            made("jetspec-tree", 8, tree, 120, 40),
            made("jetspec-chain", 4, chain, 80, 40, by_depth=survival),
        ])
    ]  # fmt: skip


def test_marks_are_the_model_by_phases() -> None:
    """Guards both models on measured numbers, worked out by hand: tau 3 in 30 ms rounds against 20 ms steps
    is 2.0; the chain's tau 2 in 26 ms is 1.54, while the formula, to which verifying is free, says more."""
    tree, chain = marks(summarise(records()))
    assert tree.by_phases == pytest.approx(2.0) and tree.alpha is None and tree.formula is None
    assert tree.measured == pytest.approx(2.0) and tree.cost == pytest.approx(0.25 / 8)
    assert tree.terms == pytest.approx({"draft": 0.2, "build": 0.05, "verify": 1.2, "commit": 0.05})
    assert chain.by_phases == pytest.approx(2.0 / 1.3)
    assert chain.alpha is not None and expected_tokens(chain.alpha, 4) == pytest.approx(2.0)
    assert chain.formula == pytest.approx(2.0 / (1.0 + 0.225)) and chain.formula > chain.by_phases
    with pytest.raises(DataError, match="no drafting method beside plain decoding at T = 1, batch 1"):
        marks(summarise(records()), 1.0)


def test_curves() -> None:
    """Guards the measured curves: verification at 0, 4 and 8 nodes, and the chain cut to each length, which
    at its full length is the measured mark."""
    rows = summarise(records())
    assert verify_curve(rows) == [
        (0.0, pytest.approx(0.95)),
        (4.0, pytest.approx(1.05)),
        (8.0, pytest.approx(1.2)),
    ]
    curve = chain_curve(rows[2], rows)
    assert [length for length, _ in curve] == [1, 2, 3, 4]
    assert curve[3][1] == pytest.approx(marks(rows)[1].by_phases)
    assert curve[0][1] == pytest.approx(1.5 / (0.25 + 0.975))


def test_tables_and_picture() -> None:
    """Guards what is shown: the article's two costs side by side, marks in the nearer panel, and the
    model in a panel of its own."""
    rows = summarise(records())
    found = marks(rows)
    grids = formula_grids((0.8,), (0.05, 0.0005))
    assert [grid.rows[0][4] for grid in grids] == ["3.09", "4.31"]
    assert mark_grid(found).rows[1][0] == "jetspec-chain 4" and mark_grid(found).rows[0][3] == "–"
    figure = draw((0.6, 0.8), (0.05, 0.0005), found, rows)
    cheap, cheapest, phases = figure.axes
    assert [t.get_text() for t in cheap.get_legend().get_texts()][2].startswith("jetspec-chain 4: α ")
    assert len(cheapest.get_legend().get_texts()) == 2 and "hollow: measured" in phases.get_title()
    assert len(draw((0.6,), (0.05,)).axes) == 1


def test_auto_budgets_stand_at_their_mean() -> None:
    """Guards rows of the budget auto against dropping out of table and picture: they stand at the mean number
    of nodes that was chosen, apart from the line of fixed budgets; without any draft there is no alpha."""
    one = records()
    own: list[dict[str, object]] = one[0]["methods"]  # type: ignore[assignment]
    tree, chain = own[1], own[2]
    own.append({**tree, "budget": "auto", "nodes": 200})
    own.append({**chain, "budget": "auto", "nodes": 0})
    found = marks(summarise(one))
    assert [mark.name for mark in found] == [
        "jetspec-tree 8",
        "jetspec-tree auto",
        "jetspec-chain 4",
        "jetspec-chain auto",
    ]
    auto, never = found[1], found[3]
    assert auto.length == pytest.approx(5.0) and auto.by_phases == pytest.approx(found[0].by_phases)
    assert never.length == 0 and never.alpha is None and never.cost == 0
    assert [row[:2] for row in mark_grid(found).rows][1] == ("jetspec-tree auto", "5.0")
    names = [text.get_text() for text in draw((0.6,), (0.05,), found).axes[-1].get_legend().get_texts()]
    assert names == [
        "jetspec-tree",
        "jetspec-tree auto (mean nodes)",
        "jetspec-chain",
        "jetspec-chain auto (mean nodes)",
    ]
