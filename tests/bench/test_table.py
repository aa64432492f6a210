from __future__ import annotations

import io

import pytest
from rich.console import Console

from jetspec.bench.summary import summarise
from jetspec.bench.table import LEGEND, Grid, findings, grids, legend, main_grid
from tests.bench.tiny import item, items, method

SKIPPED = {"mtp": "no head: none is packaged", "hf-assisted": "no assistant: give one"}


def test_main_table_has_the_papers_layout() -> None:
    """Guards the layout: a row per method and budget, a column per set and one for all, plain decoding's
    tokens per second, and a row for each method that was not measured."""
    rows = summarise([*items(3, 2.0, "gsm8k"), *items(2, 0.5, "mbpp")])
    grid = main_grid(rows, SKIPPED, "T = 0")
    assert grid.columns == ("method", "gsm8k (3)", "mbpp (2)", "all (5)")
    named = {row[0]: row[1:] for row in grid.rows}
    assert named["plain"][0] == "10.0 tok/s"
    assert named["jetspec-tree 8"][0] == "2.00×/2.55" and named["jetspec-tree 8"][1] == "0.50×/2.52 ✗"
    assert named["mtp"] == ("no head",) * 3 and named["hf-assisted"] == ("left out",) * 3


def test_misses_and_differences_are_said() -> None:
    """Guards honesty: slower and undecided cells are marked and listed with their intervals, a text that
    differs is the first thing said, and a faster baseline from outside is a miss as well."""
    wrong = {"place": 0, "gap": 1.0, "tie": False}
    records = [*items(3, 0.5, "gsm8k", divergence=[wrong]), *items(2, 1.0, "mbpp"), *items(2, 3.0, "aime25")]
    for record in records:
        record["methods"].append(method("hf-generate", 0, 0.01, [9], [9]))
    lines = findings(summarise(records), SKIPPED)
    assert lines[0].startswith("NOT LOSSLESS: jetspec-tree 8 on gsm8k: 3 of 3 answers differ")
    slower = "Miss: jetspec-tree 8, T = 0, batch 1: slower than plain decoding on gsm8k 0.50 (0.50–0.50)"
    assert any(line.startswith(slower) for line in lines)
    assert any("not told apart from plain decoding on mbpp 1.00 (" in line for line in lines)
    assert not any("aime25" in line for line in lines if line.startswith("Miss: jetspec"))
    assert any(line.startswith("Miss: plain decoding on gsm8k is slower than hf-generate") for line in lines)
    assert [line for line in lines if line.startswith("Not measured")] == [
        "Not measured: mtp (no head: none is packaged)",
        "Not measured: hf-assisted (no assistant: give one)",
    ]
    assert findings(summarise(items(3, 2.0)), {}) == []


def test_an_undecided_baseline_is_not_called_faster() -> None:
    """Guards the line about transformers' own decoding: it was said to be faster wherever the interval only
    reached above 1."""
    for seconds, line in (
        ([4.0, 4.0, 7.0, 7.0], "Miss: plain decoding on gsm8k is not told apart from hf-generate: "),
        ([4.0, 4.0, 4.0, 4.0], "Miss: plain decoding on gsm8k is slower than hf-generate: "),
    ):
        records = items(4, 2.0)
        for record, time in zip(records, seconds, strict=True):
            record["methods"].append(method("hf-generate", 0, time, [50], [50]))
        assert [text[: len(line)] for text in findings(summarise(records), {})] == [line]
    records = items(4, 2.0)
    for record in records:
        record["methods"].append(method("hf-generate", 0, 9.0, [50], [50]))
    assert findings(summarise(records), {}) == []


def test_all_tables_of_all_cases() -> None:
    """Guards the list: main, details, split and both kinds of acceptance, for each temperature and batch."""
    tree = method("jetspec-tree", 8, 1.0, [20], [10], by_depth=[[10, 6], [8, 4]])
    one = item(0, [method("plain", 0, 2.0, [20], [20]), tree])
    found = grids(summarise([one, {**one, "temperature": 1.0}]), {})
    assert len(found) == 10 and len({grid.title for grid in found}) == 10
    details, split = found[1], found[2]
    assert dict(zip(details.columns, details.rows[1], strict=True))["identical"] == "1/1"
    assert dict(zip(split.columns, split.rows[1], strict=True))["÷ plain round"] == "1.00"
    assert found[3].rows == [("jetspec-tree 8", "0.60", "0.40")]
    assert found[4].rows == [("jetspec-tree 8", "0.60", "0.67")]
    assert len(grids(summarise([one]), {}, depths=False)) == 3


def test_markdown_and_html_are_escaped() -> None:
    """Guards pages and READMEs against set names that are markup."""
    grid = Grid("a < b", ("x", "y|z"), [("<b>", "0.50×/1.00 ✗")])
    assert "y\\|z" not in grid.markdown() or grid.markdown().count("\n") == 2
    assert "&lt;b&gt;" in grid.html() and "<caption>a &lt; b</caption>" in grid.html()
    assert '<td class="miss">0.50×/1.00 ✗</td>' in grid.html()


@pytest.mark.parametrize("width", [40, 60, 80, 140, 200, None])
def test_no_digit_is_lost_on_a_narrow_terminal(width: int | None) -> None:
    """Guards numbers against rich, which cuts cells where a table is too wide: tables are divided instead,
    every part names its rows, and every cell of every grid is there whole."""
    rows = summarise([*items(3, 2.0, "gsm8k"), *items(2, 0.5, "livecodebench"), *items(2, 1.0, "mt_bench")])
    for grid in grids(rows, SKIPPED):
        tables = grid.tables(width)
        out = Console(file=io.StringIO(), width=width or 10_000, force_terminal=False)
        for table in tables:
            out.print(table)
        lines = out.file.getvalue().splitlines()  # type: ignore[attr-defined]
        assert all(len(line) <= (width or 10_000) for line in lines)
        shown = [cell.strip() for line in lines for cell in line.split("│")]
        for row in grid.rows:
            assert all(cell in shown for cell in row), (row, lines)
            assert shown.count(row[0]) >= len(tables)
        assert "…" not in "".join(lines) and (width is not None or len(tables) == 1)


def test_wide_titles_wrap_before_a_table_is_divided() -> None:
    """Guards readability: long column titles alone are no reason for a second table."""
    grid = Grid("t", ("method", *("some quite long title",) * 6), [("a", *("1.23",) * 6)])
    assert len(grid.tables(80)) == 1 and len(grid.tables(40)) == 2
    assert grid.tables(40)[1].columns[0].header == "method"


def test_one_group_has_no_mark_and_no_miss() -> None:
    """Guards false certainty: a single group per set was marked and listed as slower with an interval of no
    width. The caption names methods whose intervals come from few groups."""
    rows = summarise(items(1, 0.5))
    assert main_grid(rows, {}, "").rows[1] == ("jetspec-tree 8", "0.50×/2.50")
    assert findings(rows, {}) == [] and "0.50 (–)" in grids(rows, {})[1].rows[1]
    assert "Some intervals are drawn from fewer than 5 groups" in legend(rows)
    records = items(6, 2.0)
    assert legend(summarise(records)) == LEGEND
    records[0]["methods"].append(method("hf-generate", 0, 0.01, [9], [9]))
    assert "Some intervals of hf-generate are drawn" in legend(summarise(records))
    assert not any("hf-generate" in line for line in findings(summarise(records), {}))


def test_a_method_of_fewer_prompts_says_so() -> None:
    """Guards the columns' counts: transformers' rows, measured on a few prompts, stood under `(10)`."""
    records = [*items(4, 2.0, "gsm8k"), *items(4, 2.0, "mbpp")]
    for record in (records[0], records[1], records[4], records[5]):
        record["methods"].append(method("hf-generate", 0, 0.01, [9], [9]))
    grid = main_grid(summarise(records), {}, "")
    assert [row[0] for row in grid.rows] == ["plain", "jetspec-tree 8", "hf-generate (2 a set)"]
    records[6]["methods"].append(method("hf-generate", 0, 0.01, [9], [9]))
    assert main_grid(summarise(records), {}, "").rows[2][0] == "hf-generate (2–3 a set)"
