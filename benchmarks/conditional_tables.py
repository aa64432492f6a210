"""What `conditional.py` has recorded, as tables."""

from __future__ import annotations

import statistics
from collections.abc import Sequence as Many
from typing import Any

import numpy as np
from arms import complete, files_of
from conditional_counts import KS
from replay import ratio_interval, tau

from jetspec.bench.table import Grid

SHOWN = (1, 2, 3)  # depths of their own in the table of next tokens
SCOPES = {"tree": "in the tree", "candidates": "among candidates"}
STAGES = {"backbone": "backbone", "scorer": "scorer", "again": "second pass", "build": "build"}
QUIET = "Timings (medians over an answer's rounds, then over answers) need a quiet machine"


def grids(facts: dict[str, Any], records: Many[dict[str, Any]]) -> list[Grid]:
    """All tables of a run."""
    arms, budgets = complete(facts, records), facts["arguments"]["budgets"]
    return [
        _tau(arms, budgets),
        _tau_by_file(arms, budgets),
        _recall(arms),
        _recall_by_depth(arms),
        _next(arms),
        _cost(arms, facts["arguments"]["look"]),
    ]


def notes(facts: dict[str, Any], records: Many[dict[str, Any]]) -> list[str]:
    """Lines below the tables."""
    given, files = facts["arguments"], files_of(complete(facts, records))
    load = "unknown" if facts["load"] is None else f"{facts['load']:.1f}"
    return [
        f"Greedy texts of up to {given['tokens']} tokens by {given['model']}; files and prompts: {files}. "
        f"Next tokens and costs are those of budget {given['look']}.",
        f"{QUIET}; the load was {load} when this run began.",
    ]


def _rounds(records: Many[dict[str, Any]], budget: int) -> list[list[int]]:
    return [row for r in records for row in r["rounds"][str(budget)]]


def _tau(arms: dict[str, list[dict[str, Any]]], budgets: Many[int]) -> Grid:
    base = next(iter(arms))
    rows = []
    for arm, records in arms.items():
        cells = []
        for budget in budgets:
            first, own = _rounds(arms[base], budget), _rounds(records, budget)
            text = f"{tau(own):.3f}"
            if arm != base:
                low, high = ratio_interval(first, own)
                text += f" ({tau(own) / tau(first):.3f}: {low:.3f}-{high:.3f})"
            cells.append(text)
        rows.append((arm, *cells))
    return Grid(f"τ, all files (ratio to {base}: 95 %)", ("head", *(f"budget {n}" for n in budgets)), rows)


def _tau_by_file(arms: dict[str, list[dict[str, Any]]], budgets: Many[int]) -> Grid:
    rows = [
        (r["set"], arm, *(f"{tau(_rounds([r], budget)):.3f}" for budget in budgets))
        for n in range(len(next(iter(arms.values()))))
        for arm, records in arms.items()
        for r in [records[n]]
    ]
    return Grid("τ by file", ("file", "head", *(f"budget {n}" for n in budgets)), rows, names=2)


def _recalls(records: Many[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Sums over files: [D] and [D, K]."""
    return {name: np.sum([r["recall"][name] for r in records], axis=0) for name in records[0]["recall"]}


RANKINGS = (  # title, hits, places
    ("candidates", "candidates", "places"),
    ("candidates, path drafted", "candidates_reached", "reached"),
    ("children, path drafted", "conditional", "reached"),
)


def _recall(arms: dict[str, list[dict[str, Any]]]) -> Grid:
    rows = []
    for arm, records in arms.items():
        sums = _recalls(records)
        for title, hits, places in RANKINGS:
            count = int(sums[places].sum())
            cells = [_share(int(n), count) for n in sums[hits].sum(0)]
            rows.append((arm, title, *cells, f"{count}"))
    columns = ("head", "ranking", *(f"K = {k}" for k in KS), "places")
    return Grid("Written token among the first K, all depths", columns, rows, names=2)


def _recall_by_depth(arms: dict[str, list[dict[str, Any]]]) -> Grid:
    rows, deepest = [], max(len(r["recall"]["places"]) for records in arms.values() for r in records)
    for arm, records in arms.items():
        sums = _recalls(records)
        for title, hits, places in RANKINGS:
            for k in (1, 8, 64):
                cells = [
                    _share(int(row[KS.index(k)]), int(n))
                    for row, n in zip(sums[hits], sums[places], strict=True)
                ]
                rows.append((arm, title, f"{k}", *cells, *[""] * (deepest - len(cells))))
    columns = ("head", "ranking", "K", *(f"depth {n}" for n in range(1, deepest + 1)))
    return Grid("Written token among the first K, by depth", columns, rows, names=3)


def _next(arms: dict[str, list[dict[str, Any]]]) -> Grid:
    rows = []
    for scope, where in SCOPES.items():
        for arm, records in arms.items():
            cells = []
            for kind in ("sibling", "top"):
                pairs = np.sum([r["next"][scope][kind] for r in records], axis=0).reshape(-1, 2)  # [D - 1, 2]
                for depth in SHOWN:
                    own = pairs[depth - 1 : depth].sum(0)
                    cells.append(_share(int(own[1]), int(own[0]), counted=True))
                cells.append(_share(int(pairs[:, 1].sum()), int(pairs[:, 0].sum()), counted=True))
            rows.append((arm, where, *cells))
    depths = (*SHOWN, "all")
    columns = (*(f"sibling, {n}" for n in depths), *(f"top path, {n}" for n in depths))
    title = (
        "Top child of an accepted node is the next token, by what the node is and its depth (share of nodes)"
    )
    return Grid(title, ("head", "accepted", *columns), rows, names=2)


def _cost(arms: dict[str, list[dict[str, Any]]], look: int) -> Grid:
    rows = []
    for arm, records in arms.items():
        stages = [[value for r in records for value in r["ms"][name]] for name in STAGES]
        medians = [statistics.median(values) if values else 0.0 for values in stages]
        rows.append((arm, *(f"{ms:.2f}" for ms in medians), f"{sum(medians):.2f}"))
    return Grid(f"ms per draft, one sequence, budget {look}", ("head", *STAGES.values(), "sum"), rows)


def _share(hits: int, count: int, counted: bool = False) -> str:
    if not count:
        return "–"
    text = f"{100 * hits / count:.1f} %"
    return f"{text} of {count}" if counted else text
