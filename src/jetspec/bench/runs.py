"""Runs as they lie in files of records: provenance, and groups of prompts under one key.

Records of the older `speedup.jsonl` (kind "prompt": one head, builders instead of methods) are read as well.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, NamedTuple

from jetspec.bench.methods import PLAIN
from jetspec.errors import DataError

_OLD_NAMES = {
    "plain": PLAIN,
    "best-first": "jetspec-tree",
    "chain": "jetspec-chain",
    "accum": "jetspec-accum",
}


class Run(NamedTuple):
    """A run as it lies in a file: its key, provenance and groups of prompts.

    planned, done   groups that its last start asked for, and those of them that are recorded; 0 and 0 where
                    the records do not say
    """

    key: str
    facts: dict[str, Any]
    items: list[dict[str, Any]]
    planned: int = 0
    done: int = 0

    @property
    def unfinished(self) -> str | None:
        """How far a run came that was stopped; None for one that reached its end."""
        if self.done >= self.planned:
            return None
        return f"{self.done} of {self.planned} groups of prompts, unfinished"


def place_of(record: dict[str, Any]) -> tuple[str, float, int, int, str]:
    """What tells a group of prompts apart within a run: set, temperature, seed, batch and the hash of its
    token ids. Not the ids of its prompts: files may repeat them, and another text may stand under one.
    """
    return record["set"], record["temperature"], record["seed"], len(record["ids"]), record["digest"]


def prompts_of(item: dict[str, Any]) -> list[tuple[str, str]]:
    """What tells each prompt of a group from all others of the run, as far as the record says."""
    alone = [item["digest"]] if len(item["ids"]) == 1 else item["ids"]
    return [(item["set"], name) for name in item.get("digests", alone)]


def runs_of(records: Many[dict[str, Any]]) -> list[Run]:
    """All runs that measured anything, the one that was started last at the end; each group of prompts once
    (the newest, should there be two; none that a later start with --fresh has not come to).
    """
    facts = {r["key"]: r["run"] for r in records if r["kind"] == "run"}
    items: dict[str, dict[tuple[Any, ...], dict[str, Any]]] = {}
    counts: dict[str, tuple[int, int]] = {}
    for record in records:
        if record["kind"] == "run":
            counts[record["key"]] = record.get("planned", 0), record.get("done", 0)
            for place in record.get("fresh", []):  # measured anew from here on
                items.get(record["key"], {}).pop(tuple(place), None)
        if record["kind"] in ("item", "prompt") and record["key"] in facts:
            item = record if record["kind"] == "item" else _from_old(record, facts[record["key"]])
            items.setdefault(record["key"], {})[place_of(item)] = item
            planned, done = counts.get(record["key"], (0, 0))
            counts[record["key"]] = planned, done + 1
    runs = [Run(key, facts[key], list(found.values()), *counts[key]) for key, found in items.items() if found]
    return sorted(runs, key=lambda run: run.facts["date"])


def choose_run(runs: Many[Run], key: str | None, name: str) -> Run:
    """The newest run, or the one whose key begins with `key`. Raises DataError naming the valid ones."""
    found = [run for run in runs if key is None or run.key.startswith(key)]
    if not runs:
        raise DataError(f"{name} holds no records of a finished prompt; make some with jetspec bench")
    if not found:
        raise DataError(f"{name} holds no run {key!r}; valid: {', '.join(run.key for run in runs)}")
    return found[-1]


def volume(run: Run) -> str:
    """How much was measured, and how busy the machine was."""
    prompts = {prompt for item in run.items for prompt in prompts_of(item)}
    tokens = sum(sum(method["tokens"]) for item in run.items for method in item["methods"])
    loads = [item["load"] for item in run.items if item.get("load") is not None]
    peaks = [item["peak_memory"] for item in run.items if item.get("peak_memory") is not None]
    more = [f"load {min(loads):.1f} to {max(loads):.1f} while measuring"] if loads else []
    more += [run.unfinished] if run.unfinished else []
    more += [f"peak memory of the process {max(peaks) / 2**30:.2f} GiB"] if peaks else []
    return (
        ", ".join([f"{len(prompts)} prompts, {tokens} tokens decoded by all methods together", *more]) + "."
    )


def _from_old(record: dict[str, Any], facts: dict[str, Any]) -> dict[str, Any]:
    """A line of `speedup.jsonl` in the form of today: one prompt, one head, builders instead of methods."""
    methods = [
        {
            **method,
            "method": _OLD_NAMES.get(method["grow"], method["grow"]),
            "tokens": [method["tokens"]],
            "rounds": [method["rounds"]],
            "finish": [method["finish"]],
            "clocked": method["tokens"],
            "steps": method["rounds"],
            "step_ms": 1e3 * method["seconds"] / method["rounds"],
            "split_ms": {phase: 1e3 * value / method["rounds"] for phase, value in method["split"].items()},
            "by_depth": method.get("by_depth", []),
            "cache_bytes": None,
            "divergence": [method["divergence"]],
        }
        for method in record["methods"]
    ]
    return {
        "set": record["set"],
        "temperature": facts["arguments"].get("temperature", 0.0),
        "seed": facts["arguments"].get("seed", 0),
        "batch": 1,
        "ids": [record["id"]],
        "digest": record["id"],  # it had none, and no file of its time had an id twice
        "prompt_tokens": [record.get("prompt_tokens", 0)],
        "methods": methods,
    }
