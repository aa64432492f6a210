"""The model card beside a head: what it was trained for, on what and how, what it reaches, how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec.train.log import read_log, write_whole
from jetspec.train.validate import FEW

_TITLES = {
    "jetspec": ("JetSpec", "arXiv 2606.18394"),
    "dflash": ("DFlash", "arXiv 2602.06036"),
    "dspark": ("DSpark", "arXiv 2607.05147"),
    "eagle3": ("EAGLE-3", "arXiv 2503.01840"),
    "mtp": ("MTP", "arXiv 2412.19437"),
}

_MEANS = {"answers": "per batch", "anchors": "per answer", "part": "answers worked on at once"}


def write_card(head: Path, manifest: Mapping[str, Any], log: Path) -> None:
    """Write `README.md` into a head's folder from manifest and log. Raises StorageError."""
    write_whole(head / "README.md", card(manifest, read_log(log)))


def card(manifest: Mapping[str, Any], records: list[dict[str, Any]]) -> str:
    """The text of a model card."""
    target = manifest.get("target", {})
    name, paper = _TITLES.get(str(manifest.get("method")), (str(manifest.get("method")), ""))
    data = manifest.get("data", {})
    lines = [
        "---",
        "library_name: jetspec",
        f"base_model: {target.get('name')}",
        "tags: [speculative-decoding, draft-head]",
        "---",
        "",
        f"# {name} draft head for {target.get('name')}",
        "",
        f"It drafts tokens for {target.get('name')}, which verifies them: the text is the target's own, only "
        f"sooner. Method: {name}{f' ({paper})' if paper else ''}.",
        "",
        "```sh",
        f'jetspec --model {target.get("name")} --head FOLDER "your prompt"',
        "```",
        "",
        "FOLDER is the folder of this file. The head is refused on a target of another shape or tokenizer "
        f"(hash {str(target.get('tokenizer_hash'))[:16]}). It was trained with the target's chat template "
        f"(hash {str(target.get('template_hash'))[:16]}) and drafts worse without it. Layers of the target "
        "that it reads are counted from 0 and mean a layer's output.",
        "",
        "## What it reaches",
        "",
        *_reached(manifest, records),
        "",
        "## How it was trained",
        "",
        *_beginning(manifest.get("started_from")),
        f"- data: {data.get('answers')} answers that the target wrote itself, {data.get('answer_tokens')} "
        f"tokens for training, {_count(data.get('held_out'), 'answer')} held out",
        f"- loss: {manifest.get('loss')}",
        f"- {_count(manifest.get('steps'), 'step')}, {_hours(float(manifest.get('training_seconds', 0)))}, "
        f"{manifest.get('supervised_blocks')} blocks; products in {manifest.get('products')}, "
        f"{_count(manifest.get('threads'), 'thread')}, torch {manifest.get('torch')}, "
        f"commit {manifest.get('commit')}",
        "",
        *_table("head", _head_options(manifest)),
        "",
        *_table("training", _training_options(manifest.get("options", {}))),
        "",
        "## Licence",
        "",
        f"The head is derived from {target.get('name')} and from its answers. Check the licence of the "
        "target, and of the prompts, before you pass the head on.",
    ]
    return "\n".join(lines) + "\n"


def _beginning(source: Mapping[str, Any] | None) -> list[str]:
    """Which head the weights were those of before training, if they were not untrained."""
    if not source:
        return []
    blocks = source.get("supervised_blocks")
    before = "" if blocks is None else f", trained on {blocks} blocks before"
    return [
        f"- it began from the head {source.get('name')} (weights {str(source.get('sha256'))[:16]}){before}"
    ]


def _reached(manifest: Mapping[str, Any], records: list[dict[str, Any]]) -> list[str]:
    """tau at the end and on the way, as tables."""
    final = manifest.get("validation", {}).get("tau", {})
    if not final:
        return ["Not validated: there were no held-out greedy answers."]
    curve = [record for record in records if record.get("validation")]
    rows = [[f"{record['seconds'] / 60:.1f}", *_taus(record["validation"]["tau"], final)] for record in curve]
    return [
        "τ, tokens per forward of the target, on held-out greedy answers, by way of growing and budget "
        "(drafted nodes per round), against minutes of training:",
        "",
        f"| minutes | {' | '.join(final)} |",
        f"|---|{'---|' * len(final)}",
        *(f"| {' | '.join(row)} |" for row in rows),
        *_seen(manifest["validation"].get("seen"), final),
        *_few(manifest["validation"].get("answers", 0)),
    ]


def _few(answers: int) -> list[str]:
    """A warning about a tau of very few answers; heads from before they were counted have 0."""
    if not 0 < answers < FEW:
        return []
    return [
        "",
        f"τ rests on {_count(answers, 'held-out answer')} and means little. A training with more answers "
        "(`--tokens`) holds more of them out.",
    ]


def _seen(seen: Mapping[str, float] | None, final: Mapping[str, float]) -> list[str]:
    """What the head reaches on answers that it was trained on; nothing of a head that was not asked."""
    if not seen:
        return []
    return [
        f"| on answers of the training | {' | '.join(_taus(seen, final))} |",
        "",
        "The last line is the head at the end on as many greedy answers that it was trained on. What it is "
        "above the line before is what new answers could give; more steps on the same ones would not.",
    ]


def _taus(found: Mapping[str, float], names: Mapping[str, float]) -> list[str]:
    return [f"{found[name]:.2f}" if name in found else "" for name in names]


def _count(number: Any, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _head_options(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the head, and of its taps those that an option left open, too."""
    options = dict(manifest.get("head_options", {}))
    if "taps" in options:
        options["taps"] = options["taps"] or manifest.get("taps", [])
    return options


def _training_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of the training, of the three that may fix its length only the one that did."""
    used = next((key for key in ("steps", "epochs") if options.get(key) is not None), "minutes")
    kept = [key for key in options if key == used or key not in ("steps", "epochs", "minutes")]
    return {f"{key} ({_MEANS[key]})" if key in _MEANS else key: options[key] for key in kept}


def _hours(seconds: float) -> str:
    return f"{seconds / 60:.1f} minutes" if seconds < 5400 else f"{seconds / 3600:.1f} hours"


def _table(what: str, options: Mapping[str, Any]) -> list[str]:
    rows = [f"| {key} | {value} |" for key, value in options.items()]
    return [f"| {what} option | value |", "|---|---|", *rows]
