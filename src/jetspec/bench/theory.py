"""Two models of the speedup: the formula of the papers, and the one that prices every part of a round.

The formula (JetSpec, arXiv 2606.18394, equations 1 and 2; Leviathan et al., arXiv 2211.17192): every drafted
token is accepted with the same probability `alpha`, drafting one costs `c` target steps, and verifying any
number costs one. A chain of N then emits E = (1 - alpha^(N+1)) / (1 - alpha) tokens in N c + 1 steps.

The one by phases takes tau and the four phases of a round from measurements: tau(B) / ((t_draft + t_build +
t_verify(B) + t_commit) / t_plain). Verification is not free, and acceptance falls with depth.
"""

from __future__ import annotations

import math
from collections.abc import Sequence as Many
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jetspec.bench.methods import METHODS, PLAIN
from jetspec.bench.summary import Row
from jetspec.bench.table import Grid, totals
from jetspec.errors import DataError, OptionError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = (0.6, 0.7, 0.8, 0.9)
COSTS = (0.05, 0.0005)  # of the article's figure: a head that runs per token, and one that drafts a block
LENGTHS = (1, 2, 4, 8, 16, 32, 64, 128, 256)


def expected_tokens(alpha: float, length: float) -> float:
    """Tokens per round of a chain of `length` if each is accepted with probability `alpha`: tau.

    Raises OptionError unless 0 <= alpha <= 1 and length >= 0.
    """
    if not 0.0 <= alpha <= 1.0:
        raise OptionError(f"alpha is a probability, from 0 to 1, got {alpha}")
    if not 0.0 <= length < math.inf:
        raise OptionError(f"a chain has 0 or more tokens, got {length}")
    if 1.0 - alpha < 1e-9:
        return length + 1.0
    return (1.0 - alpha ** (length + 1.0)) / (1.0 - alpha)


def predicted_speedup(alpha: float, cost: float, length: float) -> float:
    """The formula. Raises OptionError unless cost is 0 or more, and as `expected_tokens` does."""
    if not 0.0 <= cost < math.inf:
        raise OptionError(f"c is the cost of a drafted token in target steps, 0 or more, got {cost}")
    return expected_tokens(alpha, length) / (length * cost + 1.0)


def best_length(alpha: float, cost: float, most: int = 1024) -> int:
    """The length of the chain with the highest predicted speedup; the shortest of equal ones."""
    return max(range(most + 1), key=lambda length: (predicted_speedup(alpha, cost, length), -length))


def fitted_alpha(tau: float, length: float) -> float:
    """The alpha at which a chain of `length` would have this tau; 0 and 1 where none does."""
    low, high = 0.0, 1.0
    if tau >= length + 1.0:
        return 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (middle, high) if expected_tokens(middle, length) < tau else (low, middle)
    return (low + high) / 2.0


@dataclass(frozen=True)
class Mark:
    """Where a measured method stands.

    budget     drafted nodes allowed per round, or "auto"
    length     drafted nodes per round: N; below the budget where an answer ends or a chain is cut, and the
               mean of what "auto" chose
    alpha      that explains tau, where the method drafts a chain; None for trees, which it does not describe
    cost       c: plain steps per drafted token; building counts, as some heads draft while the tree grows
    formula    what the formula predicts for that alpha and c; None for trees
    by_phases  tau / (sum of the phases / plain step), and how that sum is made up: terms, in plain steps
    measured   speedup on the clock, which also has the engine's own work between the phases
    """

    method: str
    budget: int | str
    length: float
    tau: float
    alpha: float | None
    cost: float
    formula: float | None
    by_phases: float
    terms: dict[str, float]
    measured: float

    @property
    def name(self) -> str:
        """The method and its budget."""
        return f"{self.method} {self.budget}"

    def values(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def marks(rows: Many[Row], temperature: float | None = None, batch: int = 1) -> list[Mark]:
    """Every drafting method of a run at one temperature (the lowest by default) and batch size, pooled.

    Raises DataError if there is none.
    """
    own = [row for row in rows if row.batch == batch]
    if temperature is None:
        temperature = min((row.temperature for row in own), default=0.0)
    own = totals([row for row in own if row.temperature == temperature])
    plain = next((row for row in own if row.method == PLAIN and row.round_ms), None)
    drafting = [row for row in own if row.budget and row.round_ms]
    if plain is None or not drafting:
        raise DataError(
            f"the records hold no drafting method beside plain decoding at T = {temperature:g}, batch {batch}"
        )
    return [_mark(row, plain) for row in drafting]


def _mark(row: Row, plain: Row) -> Mark:
    step = _step(plain)
    length = row.nodes_per_token * row.tau.value
    terms = {phase: value / step for phase, value in row.round_ms_median.items()}
    chain = row.method in METHODS and METHODS[row.method].is_chain
    alpha = fitted_alpha(row.tau.value, length) if chain and length else None
    cost = (terms["draft"] + terms["build"]) / length if length else 0.0
    return Mark(
        method=row.method,
        budget=row.budget,
        length=length,
        tau=row.tau.value,
        alpha=alpha,
        cost=cost,
        formula=None if alpha is None else predicted_speedup(alpha, cost, length),
        by_phases=row.tau.value / sum(terms.values()),
        terms=terms,
        measured=row.speedup.value,
    )


def _step(plain: Row) -> float:
    """Milliseconds of a plain round, medians."""
    return sum(plain.round_ms_median.values())


def verify_curve(rows: Many[Row]) -> list[tuple[float, float]]:
    """(drafted nodes per round, verify time in plain steps) of the rows of one temperature and batch, pooled,
    with plain decoding at 0; one point per number of nodes, the median of several.
    """
    own = [row for row in totals(rows) if row.round_ms]
    plain = next(row for row in own if row.method == PLAIN)
    found: dict[float, list[float]] = {}
    for row in own:
        nodes = round(row.nodes_per_token * row.tau.value, 1)
        found.setdefault(nodes, []).append(row.round_ms_median["verify"] / _step(plain))
    return [(nodes, sorted(values)[len(values) // 2]) for nodes, values in sorted(found.items())]


def chain_curve(row: Row, rows: Many[Row]) -> list[tuple[int, float]]:
    """The model by phases of a chain at every length up to the measured one: (length, speedup).

    tau(N) = 1 + S_1 + … + S_N from the measured survival; verification is read off `verify_curve` of `rows`,
    with straight lines between the measured sizes; drafting as measured, which is right for a head that
    drafts a block at once and too much for short chains of one that runs per token.
    """
    mark = _mark(row, next(r for r in totals(rows) if r.method == PLAIN))
    curve = verify_curve(rows)
    other = sum(value for phase, value in mark.terms.items() if phase != "verify")
    points = []
    for length in range(1, len(row.survival) + 1):
        tau = 1.0 + sum(row.survival[:length])
        points.append((length, tau / (other + _between(curve, float(length)))))
    return points


def _between(curve: list[tuple[float, float]], x: float) -> float:
    """The value at x on straight lines through the points; the last line goes on at the right end."""
    if len(curve) == 1:
        return curve[0][1]
    index = next((i for i in range(1, len(curve)) if curve[i][0] >= x), len(curve) - 1)
    (x0, y0), (x1, y1) = curve[index - 1], curve[index]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


# --- what is shown


def formula_grids(alphas: Many[float], costs: Many[float]) -> list[Grid]:
    """The formula's values: a table per c."""
    grids = []
    for cost in costs:
        rows = [
            (
                f"{alpha:g}",
                *(f"{predicted_speedup(alpha, cost, length):.2f}" for length in LENGTHS),
                str(best_length(alpha, cost)),
            )
            for alpha in alphas
        ]
        columns = ("alpha", *(f"N = {length}" for length in LENGTHS), "best N up to 1024")
        grids.append(Grid(f"(1 - alpha^(N+1)) / ((1 - alpha)(N c + 1)), c = {cost:g}", columns, rows))
    return grids


def mark_grid(found: Many[Mark]) -> Grid:
    """The measured methods beside both models."""

    def optional(value: float | None, digits: int = 2) -> str:
        return "–" if value is None else f"{value:.{digits}f}"

    rows = [
        (
            mark.name,
            f"{mark.length:.1f}",
            f"{mark.tau:.2f}",
            optional(mark.alpha, 3),
            f"{mark.cost:.4f}",
            *(f"{mark.terms[phase]:.3f}" for phase in ("draft", "build", "verify", "commit")),
            optional(mark.formula),
            f"{mark.by_phases:.2f}",
            f"{mark.measured:.2f}",
        )
        for mark in found
    ]
    columns = (
        "method",
        "nodes",
        "τ",
        "alpha",
        "c",
        *(f"{phase}/plain" for phase in ("draft", "build", "verify", "commit")),
        "formula",
        "by phases",
        "measured",
    )
    return Grid("Measured: c and alpha, and what the two models make of them", columns, rows)


def draw(alphas: Many[float], costs: Many[float], found: Many[Mark] = (), rows: Many[Row] = ()) -> Figure:
    """The figure: a panel of the formula per c, measured chains marked in the panel whose c is nearest; and,
    with measurements, a panel of the model by phases."""
    from jetspec.bench.plot import new_figure, style_of

    figure, panels = new_figure(4.6 * (len(costs) + bool(found)), 4.4, len(costs) + bool(found))
    lengths = range(LENGTHS[-1] + 1)
    for axes, cost in zip(panels, costs, strict=False):
        for number, alpha in enumerate(alphas):
            values = [predicted_speedup(alpha, cost, length) for length in lengths]
            axes.plot(lengths, values, color=f"C{number}", label=f"α = {alpha:g}")
        axes.set_xscale("symlog", base=2, linthresh=1)
        axes.set_xticks([0, *LENGTHS], ["0", *map(str, LENGTHS)], fontsize="small")
        axes.set_title(f"formula, c = {cost:g}", fontsize="medium")
        axes.set_xlabel("N (drafted tokens)")
        axes.axhline(1.0, color="black", lw=0.8)
    panels[0].set_ylabel("speedup over plain decoding")
    for mark in found:
        if mark.formula is not None and mark.alpha is not None:
            nearest = min(range(len(costs)), key=lambda i: _distance(costs[i], mark.cost))
            label = f"{mark.name}: α {mark.alpha:.2f}, c {mark.cost:.4f}"
            panels[nearest].plot(mark.length, mark.formula, ls="", label=label, **style_of(mark.method))
    if found:
        _phases_panel(panels[-1], found, rows)
    for axes in panels:
        axes.legend(fontsize="x-small")
    return figure


def _place(mark: Mark) -> float:
    """Where a mark stands over the budget."""
    return float(mark.budget) if isinstance(mark.budget, int) else mark.length


def _distance(a: float, b: float) -> float:
    return abs(math.log(max(a, 1e-9) / max(b, 1e-9)))


def _phases_panel(axes: Any, found: Many[Mark], rows: Many[Row]) -> None:
    from jetspec.bench.plot import style_of

    for method in dict.fromkeys(mark.method for mark in found):
        own = sorted((mark for mark in found if mark.method == method), key=_place)
        fixed = [mark for mark in own if isinstance(mark.budget, int)]
        style = style_of(method)
        axes.plot([_place(m) for m in fixed], [m.by_phases for m in fixed], ls="-", label=method, **style)
        for mark in own:
            if not isinstance(mark.budget, int):  # apart from the line, at the mean of what it chose
                axes.plot(_place(mark), mark.by_phases, ls="", label=f"{mark.name} (mean nodes)", **style)
        axes.plot(
            [_place(m) for m in own], [m.measured for m in own], ls="", mfc="none", ms=9, mec=style["color"],
            marker=style["marker"],
        )  # fmt: skip
        longest = (fixed or own)[-1]
        row = next((r for r in totals(rows) if (r.method, r.budget) == (method, longest.budget)), None)
        if longest.alpha is not None and row is not None and row.survival:
            curve = chain_curve(row, rows)
            axes.plot(*zip(*curve, strict=True), ls=":", color=style["color"])
    axes.axhline(1.0, color="black", lw=0.8)
    axes.set_xscale("log", base=2)
    axes.set_title("τ(B) / (round / plain step); hollow: measured", fontsize="medium")
    axes.set_xlabel("B (budget)")
