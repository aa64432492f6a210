"""A tiny target that can be benchmarked without files, and records made by hand."""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path
from typing import Any

from jetspec.bench.methods import Heads, choose_methods, sort_out
from jetspec.bench.prompts import Question
from jetspec.bench.record import Journal
from jetspec.bench.run import Bench, Settings
from jetspec.target.target import Target
from tests.decode.tiny import VOCAB, TinyTokenizer
from tests.decode.tiny import tiny_target as bare_target


class Tokenizer(TinyTokenizer):
    """One id per letter; no template."""

    hash = "tokenizer-hash"
    template_hash = ""
    has_template = False

    def encode(self, text: str) -> list[int]:
        """Letters as ids."""
        return [ord(letter) % VOCAB for letter in text]


def tiny_target(**changes: Any) -> Target:
    """A random two-layer decoder in float64."""
    target = bare_target(**changes)
    target.tokenizer = Tokenizer()  # type: ignore[assignment]
    return target


def questions(count: int, set_name: str = "own") -> list[Question]:
    """Short prompts, all different."""
    return [
        Question(set_name, f"{set_name}-{n}", ({"role": "user", "content": f"{set_name} {n * 7}"},))
        for n in range(count)
    ]


def bench(
    target: Target, path: Path, names: Many[str], heads: dict[str, str], settings: Settings
) -> tuple[Bench, dict[str, str]]:
    """Everything put together with stubs for heads; also what was left out."""
    places = Heads(target, heads)
    usable, skipped = sort_out(choose_methods(names), places, lambda text: None)
    return Bench(target, usable, places, settings, Journal(path), None, skipped), skipped


def method(
    name: str, budget: int, seconds: float, tokens: list[int], rounds: list[int], **changes: Any
) -> dict[str, Any]:
    """One method's share of a record; phases take equal parts of the time."""
    phases = ("draft", "build", "verify", "commit")
    steps = max(rounds)
    return {
        "method": name,
        "budget": budget,
        "tokens": tokens,
        "rounds": rounds,
        "finish": ["length"] * len(tokens),
        "seconds": seconds,
        "clocked": sum(tokens),
        "prefill": 1.0,
        "steps": steps,
        "step_ms": 1e3 * seconds / steps,
        "split": dict.fromkeys(phases, seconds / 4),
        "split_ms": dict.fromkeys(phases, 1e3 * seconds / steps / 4),
        "accepted": sum(tokens) - sum(rounds),
        "nodes": budget * sum(rounds),
        "by_depth": [],
        "cache_bytes": 2**20,
        "divergence": [None] * len(tokens),
        **changes,
    }


def item(number: int, methods: list[dict[str, Any]], name: str = "gsm8k", **changes: Any) -> dict[str, Any]:
    """A record of one prompt."""
    return {
        "kind": "item",
        "key": "k",
        "set": name,
        "temperature": 0.0,
        "seed": 0,
        "batch": 1,
        "ids": [f"{name}-{number}"],
        "digest": f"{name}-{number}",
        "prompt_tokens": [10],
        "load": 0.5,
        "methods": methods,
        "peak_memory": 2**30,
        **changes,
    }


def items(count: int, speedup: float, name: str = "gsm8k", **changes: Any) -> list[dict[str, Any]]:
    """Prompts decoded plainly, with a tree of 8 at a given speedup, and a tau of (50 + n) / 20."""
    return [
        item(
            n,
            [
                method("plain", 0, 0.1 * (50 + n), [50 + n], [50 + n]),
                method("jetspec-tree", 8, 0.1 * (50 + n) / speedup, [50 + n], [20], **changes),
            ],
            name,
        )
        for n in range(count)
    ]


def facts(**arguments: Any) -> dict[str, Any]:
    """Provenance made by hand."""
    return {
        "jetspec": "0",
        "arguments": {
            "model": "tiny",
            "heads": {"jetspec-tree": {"name": "packaged"}},
            "skipped": {},
            "tokens": 64,
            "dtype": "float32",
            "clock": "the first round",
            **arguments,
        },
        "commit": "abc",
        "dirty": False,
        "date": "2030-01-01T00:00:00+0000",
        "cpu": "a processor",
        "threads": 2,
        "torch": "2",
        "transformers": "5",
    }
