"""Tables of a run, in one form for the terminal, Markdown and HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from jetspec.bench.clock import PHASES
from jetspec.bench.methods import OUTSIDE_PLAIN, PLAIN
from jetspec.bench.summary import ENOUGH, POOLED, Interval, Row

if TYPE_CHECKING:
    from rich.table import Table

SLOWER, EVEN = "✗", "≈"  # marks of cells that are no gain
LEGEND = (
    "Cells: speedup over plain decoding / τ, both pooled over prompts. "
    f"{SLOWER} slower than plain decoding, {EVEN} not told apart from it by the 95 % interval. "
    "Budgets do not count the root."
)


def legend(rows: Many[Row]) -> str:
    """What the cells mean, and which intervals are drawn from too few groups of prompts."""
    drafting = [row for row in rows if row.method != PLAIN]
    few = list(dict.fromkeys(row.method for row in drafting if row.groups < ENOUGH))
    if not few:
        return LEGEND
    of = "" if len(few) == len({row.method for row in drafting}) else f" of {', '.join(few)}"
    return (
        f"{LEGEND} Some intervals{of} are drawn from fewer than {ENOUGH} groups of prompts and rough; "
        "from one group there is none, and no mark."
    )


@dataclass(frozen=True)
class Grid:
    """A table: the first `names` columns are text that says what a row is, the others are numbers."""

    title: str
    columns: tuple[str, ...]
    rows: Many[tuple[str, ...]]
    names: int = 1

    def markdown(self) -> str:
        """GitHub's table."""
        lines = [
            "| " + " | ".join(self.columns) + " |",
            "|---|" + "---:|" * (len(self.columns) - 1),
            *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in self.rows),
        ]
        return "\n".join(lines)

    def html(self) -> str:
        """A table with a caption; cells that are no gain have a class of their own."""

        def cell(text: str, tag: str = "td") -> str:
            kind = ' class="miss"' if SLOWER in text else ""
            return f"<{tag}{kind}>{html.escape(text)}</{tag}>"

        head = "".join(cell(name, "th") for name in self.columns)
        body = "\n".join("<tr>" + "".join(map(cell, row)) + "</tr>" for row in self.rows)
        return (
            f"<table>\n<caption>{html.escape(self.title)}</caption>\n"
            f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"
        )

    def tables(self, width: int | None = None) -> list[Table]:
        """For a terminal of `width` columns: one table if it fits (None always fits), else several, each with
        the columns that name the rows. Titles wrap before a table is divided, cells never do.
        """
        whole = [max(self._cells(n, self.columns[n])) for n in range(len(self.columns))]
        if width is None or _table_width(whole) <= width:
            return [self._rich(range(len(self.columns)), whole, self.title)]
        narrow = [max(self._cells(n, *self.columns[n].split())) for n in range(len(self.columns))]
        parts: list[list[int]] = [list(range(self.names))]
        for n in range(self.names, len(self.columns)):
            room = _table_width([narrow[m] for m in (*parts[-1], n)]) <= width
            if not room and len(parts[-1]) > self.names:
                parts.append(list(range(self.names)))
            parts[-1].append(n)
        numbers = [f" ({n} of {len(parts)})" if len(parts) > 1 else "" for n in range(1, len(parts) + 1)]
        return [
            self._rich(part, narrow, self.title + number) for part, number in zip(parts, numbers, strict=True)
        ]

    def _cells(self, column: int, *title: str) -> list[int]:
        """Widths of a column's cells and of the pieces of its title."""
        from rich.cells import cell_len

        return [cell_len(text) for text in (*title, *(row[column] for row in self.rows))]

    def _rich(self, columns: Many[int], widths: Many[int], title: str) -> Table:
        from rich.table import Table

        table = Table(title=title, title_justify="left")
        for n in columns:
            side: Literal["left", "right"] = "left" if n < self.names else "right"
            table.add_column(self.columns[n], justify=side, width=widths[n])
        for row in self.rows:
            table.add_row(*(row[n] for n in columns))
        return table


def _table_width(widths: Many[int]) -> int:
    """Columns of the terminal that a table takes: cells, a space on both sides of each, and the rules."""
    return sum(widths) + 3 * len(widths) + 1


def grids(rows: Many[Row], skipped: dict[str, str], depths: bool = True) -> list[Grid]:
    """Everything there is to tabulate: per temperature and batch the main table, the details, the split of a
    round and, with `depths`, acceptance by depth."""
    found: list[Grid] = []
    for temperature, batch in dict.fromkeys((row.temperature, row.batch) for row in rows):
        own = [row for row in rows if (row.temperature, row.batch) == (temperature, batch)]
        where = f"T = {temperature:g}, batch {batch}"
        found += [main_grid(own, skipped, where), detail_grid(own, where), split_grid(own, where)]
        if depths and any(row.survival for row in own):
            found += [depth_grid(own, where, conditional) for conditional in (False, True)]
    return found


def main_grid(rows: Many[Row], skipped: dict[str, str], where: str) -> Grid:
    """The papers' layout: a row per method and budget, a column per set, cells speedup/τ.

    Plain decoding's row holds tokens per second. A method without a head has a row that says so.
    """
    sets = list(dict.fromkeys(row.set for row in rows))
    counts = {row.set: row.prompts for row in rows if row.method == PLAIN}
    by_place = {(row.method, row.budget, row.set): row for row in rows}
    lines: list[tuple[str, ...]] = []
    for method, budget in dict.fromkeys((row.method, row.budget) for row in rows):
        found = [by_place.get((method, budget, name)) for name in sets]
        title = next(row.name for row in found if row is not None) + _own_count(found, counts)
        if method == PLAIN:
            cells = ["–" if row is None else f"{row.per_second:.1f} tok/s" for row in found]
        else:
            cells = [speed_cell(row) for row in found]
        lines.append((title, *cells))
    for name, reason in skipped.items():
        short = "no head" if reason.startswith("no head") else "left out"
        lines.append((name, *([short] * len(sets))))
    columns = tuple(f"{'all' if name == POOLED else name} ({counts.get(name, 0)})" for name in sets)
    return Grid(f"Speedup / τ, {where}", ("method", *columns), lines)


def _own_count(rows: Many[Row | None], counts: dict[str, int]) -> str:
    """The prompts of a method, ` (2 a set)`, where they are fewer than the columns say."""
    there = [row for row in rows if row is not None]
    if all(row.prompts == counts.get(row.set, 0) for row in there):
        return ""
    own = sorted({row.prompts for row in there if row.set != POOLED})
    return f" ({'–'.join(map(str, dict.fromkeys((own[0], own[-1]))))} a set)"


def speed_cell(row: Row | None) -> str:
    """`1.52×/2.31`, with a mark if it is no gain; without one if a single group of prompts cannot tell."""
    if row is None:
        return "–"
    mark = "" if row.verdict is None else f" {SLOWER if row.speedup.high < 1.0 else EVEN}"
    return f"{row.speedup.value:.2f}×/{row.tau.value:.2f}{mark}"


def detail_grid(rows: Many[Row], where: str) -> Grid:
    """Everything about each method, pooled over the sets (or of the only one)."""
    lines = []
    for row in totals(rows):
        ties = f" + {row.ties} ties" if row.ties else ""
        broken = f", {row.broken} DIFFER" if row.broken else ""
        cache = "–" if row.cache_bytes is None else f"{row.cache_bytes / 2**20:.1f}"
        lines.append((
            row.name,
            f"{row.per_second:.1f}",
            _interval(row.speedup),
            f"{row.median:.2f}",
            f"{row.whole:.2f}",
            _interval(row.tau),
            _interval(row.tau_response),
            f"{row.nodes_per_token:.2f}",
            cache,
            "in law" if row.in_law else f"{row.same}/{row.answers}{ties}{broken}",
        ))  # fmt: skip
    columns = (
        "method",
        "tok/s",
        "speedup, 95 %",
        "median",
        "with prefill",
        "τ pooled, 95 %",
        "τ per answer, 95 %",
        "nodes/token",
        "cache MiB",
        "identical",
    )
    return Grid(f"Details, all prompts together, {where}", columns, lines)


def split_grid(rows: Many[Row], where: str) -> Grid:
    """Where the time of a round goes: means per phase, and the whole as a multiple of plain decoding's."""
    own = totals(rows)
    plain = next((row for row in own if row.method == PLAIN), None)
    lines = []
    for row in own:
        total = sum(row.round_ms.values())
        cells = [f"{row.round_ms[phase]:.2f}" if row.round_ms else "–" for phase in PHASES]
        times = f"{row.step_ms / plain.step_ms:.2f}" if plain is not None and plain.step_ms else "–"
        share = f"{(row.round_ms['draft'] + row.round_ms['build']) / total:.0%}" if total else "–"
        lines.append((row.name, *cells, share, f"{row.step_ms:.2f}", times))
    columns = (
        "method",
        *(f"{phase} ms" for phase in PHASES),
        "draft + build",
        "round ms (median)",
        "÷ plain round",
    )
    return Grid(f"Split of a round, {where}", columns, lines)


def depth_grid(rows: Many[Row], where: str, conditional: bool) -> Grid:
    """Acceptance by depth: share of all rounds, or of the rounds that accepted the depth above."""
    own = [row for row in totals(rows) if row.survival]
    depth = max(len(row.survival) for row in own)
    lines = []
    for row in own:
        values = row.conditional if conditional else row.survival
        lines.append((row.name, *(f"{v:.2f}" for v in values), *(["–"] * (depth - len(values)))))
    kind = "conditional, of rounds that accepted the depth above" if conditional else "of all rounds"
    columns = ("method", *(str(level) for level in range(1, depth + 1)))
    return Grid(f"Acceptance by depth, {kind}, {where}", columns, lines)


def totals(rows: Many[Row]) -> list[Row]:
    """The pooled rows, or those of the only set."""
    pooled = [row for row in rows if row.set == POOLED]
    return pooled or list(rows)


def findings(rows: Many[Row], skipped: dict[str, str]) -> list[str]:
    """What must not be overlooked, a line each: differences, misses, methods that are not there."""
    lines = []
    for row in rows:
        if row.broken and row.set != POOLED:
            start, end = ("", ": transformers rounds differently") if row.outside else ("NOT LOSSLESS: ", "")
            lines.append(
                f"{start}{row.name} on {row.where}: {row.broken} of {row.answers} answers differ from plain"
                f" decoding by more than {'a tie' if row.outside else 'rounding'}{end}"
            )
    lines += _misses([row for row in rows if not row.outside])
    lines += [
        f"Miss: plain decoding on {row.where} is {what} {row.name}: {_interval(row.speedup)}"
        for row in rows
        if row.method == OUTSIDE_PLAIN and row.speedup.high > 1.0
        for what in ["slower than" if row.speedup.low > 1.0 else "not told apart from"]
    ]
    lines += [f"Not measured: {name} ({reason})" for name, reason in skipped.items()]
    return lines


def _misses(rows: Many[Row]) -> list[str]:
    """One line per method, budget, temperature, batch and kind of miss."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if row.verdict is not None:
            what = "slower than plain" if row.speedup.high < 1.0 else "not told apart from plain"
            where = f"T = {row.temperature:g}, batch {row.batch}"
            name = "all sets" if row.set == POOLED else row.set
            found.setdefault(f"Miss: {row.name}, {where}: {what} decoding on ", []).append(
                f"{name} {_interval(row.speedup)}"
            )
    return [start + ", ".join(places) for start, places in found.items()]


def _interval(value: Interval) -> str:
    bounds = f"{value.low:.2f}–{value.high:.2f}" if value.known else "–"
    return f"{value.value:.2f} ({bounds})"
