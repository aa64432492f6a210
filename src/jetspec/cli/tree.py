"""`jetspec tree`: draw what one round drafted and what the target accepted of it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich.text import Text

from jetspec.cli import options
from jetspec.cli.loading import budget_of, from_argument, open_model, read_prompt
from jetspec.cli.screen import Screen, printable
from jetspec.errors import OptionError

if TYPE_CHECKING:
    from jetspec.decode.round import Outcome
    from jetspec.target.target import Target

_AUTO_TOKENS = 64  # of a round; a head drafts no deeper
_STYLES = {
    "root": "bold",
    "branch": "dim",
    "accepted": "green",
    "rejected": "red",
    "bonus": "yellow",
    "prob": "dim",
    "mark": "bold",
}


def tree(
    prompt: options.Prompt = None,
    round_number: options.Round = 3,
    model: options.Model = options.DEFAULT_MODEL,
    head: options.Head = "auto",
    budget: options.AutoBudget = options.AUTO_BUDGET,
    grow: options.Grow = None,
    temperature: options.Temperature = 0.0,
    seed: options.Seed = 0,
    raw: options.Raw = False,
    system: options.System = None,
    dtype: options.Dtype = "float32",
    device: options.Device = "cpu",
    threads: options.Threads = None,
    json: options.Json = False,
    quiet: options.Quiet = False,
    no_color: options.NoColor = False,
) -> None:
    """Draw the draft tree of one round.

    A percentage is the draft's probability of the whole path down to the token.
    """
    from jetspec.api import check_growth
    from jetspec.cli import report
    from jetspec.config import Options, Request

    if round_number < 1:
        raise OptionError(f"round must be an integer of at least 1, got {round_number}")
    nodes = budget_of(budget)
    most = round_number * (nodes + 1 if isinstance(nodes, int) else _AUTO_TOKENS)  # a round emits no more
    system = None if system is None else from_argument(system, "--system")
    wanted = Options(temperature=temperature, seed=seed, raw=raw, system=system, max_tokens=max(most, 256))
    request = Request.of(wanted)
    check_growth(nodes, grow)
    text = read_prompt(prompt, raw)
    screen = Screen(no_color=no_color, quiet=quiet)
    loaded = open_model(
        screen, model, head, budget=nodes, grow=grow, dtype=dtype, device=device, threads=threads
    )
    number, before, outcome = _find(loaded.rounds(text, **wanted), round_number)
    if json:
        settings = report.settings_values(loaded, head, request)
        values = {"round": number, "before": before, **_values(outcome, loaded.target)}
        screen.json({"prompt": text, **values, "settings": settings, "versions": report.versions()})
        return
    if number < round_number:
        screen.note(f"jetspec: the text ended after round {number}, so that is the one drawn")
    _draw(screen, loaded.target, number, before, outcome)


def _find(rounds: Iterator[Outcome], wanted: int) -> tuple[int, str, Outcome]:
    """Round `wanted`, or the last if there are fewer: its number, the text before it, and its outcome."""
    before = after = ""
    for number, outcome in enumerate(rounds, start=1):
        before, after = after, outcome.sequence.text
        if number == wanted:
            break
    return number, before, outcome


def _bonus(outcome: Outcome) -> int | None:
    """The bonus token, or None where the text ended before it."""
    last = outcome.emissions[-1]
    return None if last.kind == "accepted" else last.token


def _draw(screen: Screen, target: Target, number: int, before: str, outcome: Outcome) -> None:
    from jetspec.tree import draw_segments

    def decode(token: int) -> str:
        return target.tokenizer.decode([token], skip_special=False)

    drafted, path, bonus = outcome.tree, outcome.path, _bonus(outcome)
    tail = before[-160:]
    screen.line(f"…{tail}" if len(tail) < len(before) else tail, "dim")
    emitted = len(outcome.emissions)
    screen.line(
        f"round {number}: {drafted.budget} nodes drafted, {len(path) - 1} accepted, {emitted} emitted"
    )
    for line in draw_segments(drafted, decode, path, None if bonus is None else decode(bonus)):
        pieces = [(printable(text), _STYLES[style]) for text, style in line]
        screen.out.print(Text.assemble(*pieces), soft_wrap=True)
    legend = (
        ("accepted ✓", "green"),
        " · ",
        ("bonus: the target's own", "yellow"),
        " · ",
        ("rejected", "red") if screen.colours else "without a mark: rejected",
    )
    screen.out.print(Text.assemble(*legend), soft_wrap=True)
    screen.line("percent: the draft's probability of the path down to the token", "dim")


def _values(outcome: Outcome, target: Target) -> dict[str, Any]:
    """A round for JSON."""
    drafted, kept = outcome.tree, set(outcome.path)

    def decode(token: int) -> str:
        return target.tokenizer.decode([token], skip_special=False)

    nodes = [
        {
            "token": drafted.tokens[node],
            "text": decode(drafted.tokens[node]),
            "parent": drafted.parents[node],
            "depth": drafted.depths[node],
            "probability": math.exp(drafted.logps[node]),
            "state": "root" if node == 0 else "accepted" if node in kept else "rejected",
        }
        for node in range(drafted.size)
    ]
    bonus = _bonus(outcome)
    return {
        "nodes": nodes,
        "path": list(outcome.path),
        "bonus": None if bonus is None else {"token": bonus, "text": decode(bonus)},
        "emitted": [{"id": piece.token, "kind": piece.kind} for piece in outcome.emissions],
    }
