"""Pictures of a run: matplotlib figures without pyplot, so no state is shared and no window opens."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence as Many
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jetspec.bench.clock import PHASES
from jetspec.bench.methods import METHODS, PLAIN
from jetspec.bench.summary import Interval, Row
from jetspec.bench.table import totals
from jetspec.errors import OptionError
from jetspec.storage import storage_errors

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKERS = "osD^vPX*<>hdp"
COLORS = ("black", *(f"C{number}" for number in range(10)), "navy", "gold")


def figures(rows: Many[Row]) -> dict[str, Figure]:
    """All pictures that the rows allow, by file name: tau and speedup against budget, speedup by set, the
    split of a round, acceptance by depth, and speedup against batch size where there are several.

    Lines over the budget are drawn per temperature and batch. Raises OptionError without matplotlib.
    """
    found: dict[str, Figure] = {}
    cases = list(dict.fromkeys((row.temperature, row.batch) for row in rows))
    for temperature, batch in cases:
        own = [row for row in rows if (row.temperature, row.batch) == (temperature, batch)]
        where = f"T = {temperature:g}, batch {batch}"
        suffix = "" if len(cases) == 1 else f"-t{temperature:g}-b{batch}"
        drafting = [row for row in totals(own) if row.method != PLAIN]
        if any(row.fixed for row in drafting):
            found[f"tau-budget{suffix}"] = _against(drafting, "fixed", "tau", f"τ against budget, {where}")
            found[f"speedup-budget{suffix}"] = _against(
                drafting, "fixed", "speedup", f"Speedup against budget, {where}"
            )
        if drafting:
            found[f"speedup-sets{suffix}"] = _by_set(own, f"Speedup by set, {where}")
        found[f"round{suffix}"] = _split(totals(own), f"Split of a round, {where}")
        if any(row.survival for row in drafting):
            found[f"depth{suffix}"] = _depths(drafting, where)
    for temperature in dict.fromkeys(row.temperature for row in rows):
        own = [row for row in rows if row.temperature == temperature]
        if len({row.batch for row in own}) > 1:
            pooled = [
                row
                for batch in dict.fromkeys(row.batch for row in own)
                for row in totals([r for r in own if r.batch == batch])
                if row.method != PLAIN and not row.outside
            ]
            title = f"Speedup against batch size, T = {temperature:g}"
            found[f"speedup-batch-t{temperature:g}"] = _against(pooled, "batch", "speedup", title)
    return found


def new_figure(width: float = 7.0, height: float = 4.2, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with axes side by side. Raises OptionError if matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("plots need matplotlib; install it with: pip install matplotlib") from None
    figure = Figure(figsize=(width, height), layout="constrained")
    axes: Any = figure.subplots(1, columns, squeeze=False)
    for one in axes[0]:
        one.grid(alpha=0.3)
        one.spines[["top", "right"]].set_visible(False)
    return figure, list(axes[0])


def save(figure: Figure, path: Path) -> None:
    """Write a picture in the format that the file's name asks for. Raises StorageError."""
    with storage_errors(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".svg":
            path.write_text(svg(figure, path.stem, inline=False), "utf-8")
        else:
            figure.savefig(path, dpi=150)


def svg(figure: Figure, name: str, inline: bool = True) -> str:
    """A picture as SVG text that is the same whenever it is drawn.

    name: makes the ids in it unique in a page. inline: for a page; without the XML head.
    """
    from matplotlib import rc_context

    buffer = io.StringIO()
    with rc_context({"svg.hashsalt": name, "svg.fonttype": "none", "font.family": "sans-serif"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", buffer.getvalue(), flags=re.DOTALL)
    # Ids of figures, axes and markers repeat from picture to picture.
    text = re.sub(r'(\bid="|url\(#|xlink:href="#)', lambda found: f"{found[1]}{name}-", text)
    return text[text.index("<svg") :] if inline else text


def style_of(method: str) -> dict[str, Any]:
    """Colour and marker of a method, the same in every picture."""
    names = list(METHODS)
    number = names.index(method) if method in names else len(names)
    return {"color": COLORS[number % len(COLORS)], "marker": MARKERS[number % len(MARKERS)]}


def _against(rows: Many[Row], over: str, what: str, title: str) -> Figure:
    """Tau or speedup with its interval, against budget or batch size; a line per method (and per budget,
    where that is not the axis)."""
    figure, (axes,) = new_figure()
    lines: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if over == "fixed" and not row.fixed:
            value = getattr(row, what).value
            axes.axhline(value, ls=":", color=style_of(row.method)["color"], label=row.name)
            continue
        label = row.method if over == "fixed" else row.name
        lines.setdefault((row.method, label), []).append(row)
    if over == "fixed" and all(len(found) == 1 for found in lines.values()):
        _side_by_side(axes, [found[0] for found in lines.values()], what)
        _finish(axes, what, title)
        return figure
    for number, ((method, label), found) in enumerate(lines.items()):
        found.sort(key=lambda row: getattr(row, over))
        values = [getattr(row, what) for row in found]
        axes.errorbar(
            [getattr(row, over) for row in found],
            [value.value for value in values],
            yerr=[[v.value - v.low for v in values], [v.high - v.value for v in values]],
            label=label,
            capsize=2,
            ls=("-", "--", "-.")[number % 3],
            **style_of(method),
        )
    ticks = sorted({getattr(row, over) for row in rows if getattr(row, over)})
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [str(tick) for tick in ticks])
    axes.minorticks_off()
    axes.set_xlabel("budget (drafted nodes, root excluded)" if over == "fixed" else "batch (prompts at once)")
    _finish(axes, what, title)
    return figure


def _side_by_side(axes: Axes, rows: Many[Row], what: str) -> None:
    """Methods of one budget each, beside each other: over the budget their points would lie on each other."""
    for place, row in enumerate(rows):
        value: Interval = getattr(row, what)
        bounds = [[value.value - value.low], [value.high - value.value]]
        axes.errorbar(
            [place], [value.value], yerr=bounds, label=row.name, capsize=2, ls="", **style_of(row.method)
        )
    axes.set_xticks(range(len(rows)), [str(row.budget) for row in rows])
    axes.set_xlabel("budget of each method (drafted nodes, root excluded)")


def _by_set(rows: Many[Row], title: str) -> Figure:
    """Speedup of each method on each set, at its best budget overall."""
    best: dict[str, Row] = {}
    for row in totals(rows):
        if row.method != PLAIN and (
            row.method not in best or row.speedup.value > best[row.method].speedup.value
        ):
            best[row.method] = row
    sets = list(dict.fromkeys(row.set for row in rows))
    figure, (axes,) = new_figure(max(7.0, 1.4 * len(sets)))
    width = 0.84 / max(1, len(best))
    for number, (method, chosen) in enumerate(best.items()):
        by_set = {row.set: row for row in rows if (row.method, row.budget) == (method, chosen.budget)}
        places = [index for index, name in enumerate(sets) if name in by_set]
        axes.bar(
            [place - 0.42 + width * (number + 0.5) for place in places],
            [by_set[sets[place]].speedup.value for place in places],
            width,
            label=chosen.name,
            color=style_of(method)["color"],
        )
    axes.set_xticks(range(len(sets)), sets)
    _finish(axes, "speedup", title)
    return figure


def _split(rows: Many[Row], title: str) -> Figure:
    """Where a round's time goes, a bar per method."""
    known = [row for row in rows if row.round_ms]
    figure, (axes,) = new_figure(7.5, 1.6 + 0.28 * len(known))
    left = [0.0] * len(known)
    for number, phase in enumerate(PHASES):
        values = [row.round_ms[phase] for row in known]
        axes.barh(range(len(known)), values, left=left, label=phase, color=f"C{number}")
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_yticks(range(len(known)), [row.name for row in known])
    axes.invert_yaxis()
    axes.set_xlabel("ms per round (mean)")
    axes.set_title(title)
    figure.legend(fontsize="small", ncols=len(PHASES), loc="outside lower center")
    return figure


def _depths(rows: Many[Row], where: str) -> Figure:
    """Acceptance by depth of each method at its largest budget: of all rounds, and conditional."""
    largest: dict[str, Row] = {}
    for row in rows:
        if row.survival and (row.method not in largest or row.fixed > largest[row.method].fixed):
            largest[row.method] = row
    figure, panels = new_figure(10.0, 4.2, columns=2)
    titles = ("of all rounds", "of rounds that accepted the depth above")
    for axes, name, title in zip(panels, ("survival", "conditional"), titles, strict=True):
        for number, row in enumerate(largest.values()):
            values = getattr(row, name)
            axes.plot(
                range(1, len(values) + 1),
                values,
                label=row.name,
                ls=("-", "--", "-.")[number % 3],
                **style_of(row.method),
            )
        axes.set_ylim(0.0, 1.02)
        axes.set_xlabel("depth")
        axes.set_title(f"Accepted {title}", fontsize="medium")
    panels[0].set_ylabel("share")
    figure.suptitle(f"Acceptance by depth, {where}")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    return figure


def _finish(axes: Axes, what: str, title: str) -> None:
    if what == "speedup":
        axes.axhline(1.0, color="black", lw=0.8)
    axes.set_ylabel("speedup over plain decoding" if what == "speedup" else "τ (tokens per target forward)")
    axes.set_title(title)
    axes.figure.legend(loc="outside right upper", fontsize="small")
