"""Plots and the page made of them."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from jetspec.bench.plot import figures, save, svg
from jetspec.bench.report import page
from jetspec.bench.runs import Run
from jetspec.bench.summary import summarise
from tests.bench.tiny import facts, item, items, method


def records(batches: tuple[int, ...] = (1,)) -> list[dict[str, Any]]:
    """Two budgets on two sets, with acceptance by depth, and a baseline from outside."""
    found = []
    for batch in batches:
        for name in ("gsm8k", "mbpp"):
            counts = ([20] * batch, [10] * batch)
            depths = [[10 * batch, 6 * batch], [8 * batch, 4 * batch]]
            methods = [
                method("plain", 0, 2.0, [20] * batch, [20] * batch),
                *(method("jetspec-tree", n, 1.0 + n / 64, *counts, by_depth=depths) for n in (8, 16)),
                method("dflash", 7, 2.5, *counts, by_depth=depths),
                method("hf-generate", 0, 4.0, [20] * batch, [20] * batch, split={}, split_ms={}),
            ]
            ids = [f"{name}-{n}" for n in range(batch)]
            found.append(item(0, methods, name, batch=batch, ids=ids))
    return found


def test_every_picture_is_there() -> None:
    """Guards the list of the docs: tau and speedup against budget, sets, split, depth; batch sizes only where
    there are several."""
    one = {"tau-budget", "speedup-budget", "speedup-sets", "round", "depth"}
    assert set(figures(summarise(records()))) == one
    several = set(figures(summarise(records((1, 4)))))
    assert several == {"speedup-batch-t0", *(f"{name}-t0-b{batch}" for name in one for batch in (1, 4))}
    only_plain = [{**record, "methods": record["methods"][:1]} for record in records()]
    assert set(figures(summarise(only_plain))) == {"round"}


def test_pictures_hold_the_numbers() -> None:
    """Guards what is drawn: each line's points are budgets and pooled speedups of its method."""
    rows = summarise(records())
    (axes,) = figures(rows)["speedup-budget"].axes
    lines = {box.get_label(): box.lines[0] for box in axes.containers}
    assert set(lines) == {"jetspec-tree", "dflash"}
    assert lines["jetspec-tree"].get_xdata().tolist() == [8, 16]
    expected = [row.speedup.value for row in rows if row.set == "all" and row.method == "jetspec-tree"]
    assert lines["jetspec-tree"].get_ydata().tolist() == expected
    assert expected == pytest.approx([2.0 / 1.125, 2.0 / 1.25])


def test_files_are_written_and_reproducible(tmp_path: Path) -> None:
    """Guards committed pictures: the same records give the same SVG, with nothing of the day in it."""
    figure = figures(summarise(records()))["tau-budget"]
    for name in ("a.svg", "b.svg", "a.png"):
        save(figure, tmp_path / "new" / name)
    first = (tmp_path / "new" / "a.svg").read_text("utf-8")
    save(figures(summarise(records()))["tau-budget"], tmp_path / "new" / "a.svg")
    assert (tmp_path / "new" / "a.svg").read_text("utf-8") == first and "<metadata" not in first
    assert ElementTree.fromstring(first).tag.endswith("svg")
    assert (tmp_path / "new" / "a.png").read_bytes().startswith(b"\x89PNG")


def test_ids_are_unique_in_a_page() -> None:
    """Guards clipping and markers: matplotlib gives the same ids in every picture, and in one page the first
    would win."""
    figure = figures(summarise(records()))["tau-budget"]
    one, other = svg(figure, "one"), svg(figure, "other")
    ids = [set(re.findall(r'\bid="([^"]+)"', text)) for text in (one, other)]
    assert ids[0] and not ids[0] & ids[1]
    used = set(re.findall(r'(?:url\(#|xlink:href="#)([^)"]+)', one))
    assert used and used <= ids[0]


class _Links(HTMLParser):
    """Everything that a browser would fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.fetched += [
            value
            for name, value in attrs
            if name in ("src", "href", "xlink:href") and value and value[0] != "#"
        ]


def test_page_is_self_contained() -> None:
    """Guards the report: all pictures and tables inside, no request to anywhere, no script, and data shown as
    text; it must open from a disk without a network."""
    run = Run("key", facts(model="<script>x</script>", skipped={"mtp": "no head: none"}), records((1, 4)))
    text = page(run)
    links = _Links()
    links.feed(text)
    assert links.fetched == [] and "script" not in links.tags and "link" not in links.tags
    assert "@import" not in text and not re.search(r"url\((?!#)", text)
    assert links.tags.count("svg") == len(figures(summarise(run.items))) == 11
    assert links.tags.count("table") == 10
    assert (
        "Miss: dflash 7" in text and "Not measured: mtp" in text and "peak memory of the process 1.00" in text
    )
    assert "&lt;script&gt;" in text


def test_one_budget_per_method_is_no_line() -> None:
    """Guards pictures of runs with one budget: points over the same budget lay on each other; now each method
    has a place of its own, with its budget below."""
    found = [{**r, "methods": [m for m in r["methods"] if m["budget"] != 16]} for r in records()]
    (axes,) = figures(summarise(found))["speedup-budget"].axes
    places = {box.get_label(): box.lines[0].get_xdata().tolist() for box in axes.containers}
    assert places == {"jetspec-tree 8": [0], "dflash 7": [1]}
    assert [label.get_text() for label in axes.get_xticklabels()] == ["8", "7"]


def test_the_legend_of_the_split_is_outside_the_bars() -> None:
    """Guards the last bar, which the legend covered."""
    figure = figures(summarise(records()))["round"]
    assert figure.axes[0].get_legend() is None and len(figure.legends) == 1


def test_a_page_of_good_news_is_exact() -> None:
    """Guards the sentence without misses: it said that no method was slower above a table where those of
    transformers are marked as slower; and of one group of prompts nothing is known."""
    text = page(Run("key", facts(), items(3, 2.0)))
    assert "None of jetspec&#x27;s methods was" in text or "None of jetspec's methods was" in text
    assert "transformers that were" not in text and "nothing is said" not in text
    slow = items(3, 2.0)
    for record in slow:
        record["methods"].append(method("hf-generate", 0, 99.0, [20], [20]))
    assert "Methods of transformers that were are marked" in page(Run("key", facts(), slow))
    assert "one group of prompts, nothing is said" in page(Run("key", facts(), items(1, 2.0)))
    assert "2 of 4 groups of prompts, unfinished" in page(Run("key", facts(), items(2, 2.0), 4, 2))
