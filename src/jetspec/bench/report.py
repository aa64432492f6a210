"""One HTML page with all of a run: no script, no picture and no font from elsewhere."""

from __future__ import annotations

import html
import json
from typing import Any

from jetspec.bench.methods import PLAIN
from jetspec.bench.plot import figures, svg
from jetspec.bench.record import footer
from jetspec.bench.runs import Run, volume
from jetspec.bench.summary import Row, summarise
from jetspec.bench.table import Grid, findings, grids, legend

_STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 72rem; margin: 2rem auto; padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; }
table { border-collapse: collapse; margin: 1rem 0; font-variant-numeric: tabular-nums; display: block;
  overflow-x: auto; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .2rem .6rem; text-align: right; border-bottom: 1px solid #8884; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
td.miss { color: #c0392b; }
figure { margin: 1rem 0; background: white; padding: .5rem; border-radius: .4rem; display: inline-block; }
figure svg { max-width: 100%; height: auto; }
li.bad { color: #c0392b; font-weight: 600; }
dt { font-weight: 600; } dd { margin: 0 0 .4rem 1rem; }
pre { overflow-x: auto; background: #8881; padding: .6rem; border-radius: .4rem; }
"""
_WORDS = (
    ("speedup", "plain decoding's seconds per token / the method's; same engine, prompts, process and clock."
     " Pooled over prompts, so long answers weigh more; “median” weighs every group of prompts the same."),
    ("τ", "emitted tokens per target forward, seen from one sequence: accepted drafts and the bonus token."
     " Pooled over rounds, and as a mean over answers. Prefill counts nowhere."),
    ("interval", "95 %, from 10,000 bootstrap draws of prompts. It covers which prompts were drawn, not what"
     " else the machine did; methods take turns round by round so that disturbances hit all alike."),
    ("budget", "drafted nodes per round, root excluded. JetSpec's and EAGLE's papers count the root."),
    ("acceptance by depth", "S_d, the share of all rounds that accepted depth d; conditional acceptance is"
     " a_d = S_d / S_(d-1)."),
    ("identical", "the token ids are those of plain decoding. A tie is a difference where rounding decides"
     " between the target's two best scores."),
    ("clock", "each round of our engine: draft, build, verify (with picking tokens), commit (with text), and"
     " what lies between. Prefill is measured apart. transformers is timed from its first new token to its"
     " last. Warm-up uses a prompt of its own; no measured prompt has been seen before."),
    ("turns", "only the first user turn of a conversation is asked."),
)  # fmt: skip


def page(run: Run) -> str:
    """The page as text."""
    rows = summarise(run.items)
    skipped = run.facts["arguments"].get("skipped", {})
    parts = [
        f"<h1>jetspec bench: {_text(run.facts['arguments'].get('model', 'a run'))}</h1>",
        f"<p>{_text(footer(run.facts))}; {_text(run.facts['date'])}; run {_text(run.key)}.</p>",
        f"<p>{_text(volume(run))}</p>",
        _findings(rows, skipped),
        f"<h2>Tables</h2>\n<p>{_text(legend(rows))}</p>",
        *(grid.html() for grid in _ordered(grids(rows, skipped))),
        "<h2>Plots</h2>",
        *(f"<figure>{svg(figure, name)}</figure>" for name, figure in figures(rows).items()),
        "<h2>Words</h2>\n<dl>",
        *(f"<dt>{_text(word)}</dt><dd>{_text(meaning)}</dd>" for word, meaning in _WORDS),
        "</dl>",
        "<h2>Provenance</h2>",
        f"<pre>{_text(json.dumps(run.facts, ensure_ascii=False, indent=2))}</pre>",
    ]
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>jetspec bench</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def _findings(rows: list[Row], skipped: dict[str, str]) -> str:
    lines = findings(rows, skipped)
    if not lines:
        slower = any(row.outside and row.verdict is not None for row in rows)
        more = " Methods of transformers that were are marked in the tables." if slower else ""
        unknown = any(row.method != PLAIN and not row.outside and not row.speedup.known for row in rows)
        more += " Where there is one group of prompts, nothing is said." if unknown else ""
        return (
            "<p>None of jetspec's methods was slower than plain decoding, and no answer differed by more than"
            f" rounding.{more}</p>"
        )
    items = "\n".join(
        f"<li{' class=bad' if line.startswith('NOT') else ''}>{_text(line)}</li>" for line in lines
    )
    return f"<h2>Not to be overlooked</h2>\n<ul>\n{items}\n</ul>"


def _ordered(found: list[Grid]) -> list[Grid]:
    """Main tables of all cases first."""
    return sorted(found, key=lambda grid: not grid.title.startswith("Speedup"))


def _text(value: Any) -> str:
    return html.escape(str(value))
