"""What a record must hold for its readers. One that lacks something is left out with a note."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from jetspec.bench.clock import PHASES

Check = Callable[[Any], bool]
PLAIN = "plain"  # the name in records, where it comes first


def fault(record: Mapping[str, Any]) -> str | None:
    """The first thing that is missing or wrong, as `methods: seconds`; None if there is nothing. Kinds that
    `jetspec bench` does not write are left alone.
    """
    kind = record["kind"]
    if kind == "run":
        return _fault(record, _RUN)
    if kind == "item":
        return _fault(record, _ITEM) or _methods_fault(record, len(record["ids"]))
    if kind == "prompt":
        return _fault(record, _OLD_PROMPT) or _each(record["methods"], _OLD_METHOD)
    return None


def _fault(values: Mapping[str, Any], checks: Mapping[str, Check]) -> str | None:
    return next((name for name, check in checks.items() if not check(values.get(name))), None)


def _each(methods: list[Any], checks: Mapping[str, Check]) -> str | None:
    for method in methods:
        wrong = _fault(method, checks)
        if wrong is not None:
            return f"methods: {wrong}"
    return None


def _methods_fault(record: Mapping[str, Any], prompts: int) -> str | None:
    methods = record["methods"]
    wrong = _each(methods, _METHOD)
    if wrong is not None:
        return wrong
    if methods[0]["method"] != PLAIN:
        return f"methods: {PLAIN}"
    per_prompt = ("tokens", "rounds", "divergence")
    uneven = [name for method in methods for name in per_prompt if len(method[name]) != prompts]
    return f"methods: {uneven[0]}" if uneven else None


def _text(value: Any) -> bool:
    return isinstance(value, str)


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _positive(value: Any) -> bool:
    return _whole(value) and value > 0


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < math.inf


def _list_of(check: Check, at_least: int = 0) -> Check:
    return lambda value: isinstance(value, list) and len(value) >= at_least and all(map(check, value))


def _optional(check: Check) -> Check:
    return lambda value: value is None or check(value)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _divergence(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("tie"), bool)


def _phases(value: Any) -> bool:
    """A number per phase, or nothing at all."""
    return isinstance(value, dict) and (not value or all(_number(value.get(phase)) for phase in PHASES))


def _depth(value: Any) -> bool:
    return _list_of(_whole)(value) and len(value) == 2


def _provenance(value: Any) -> bool:
    return isinstance(value, dict) and _fault(value, _FACTS) is None and {"commit", "dirty"} <= set(value)


def _arguments(value: Any) -> bool:
    return isinstance(value, dict) and _optional(_object)(value.get("skipped"))


_FACTS: dict[str, Check] = {
    "date": _text,
    "arguments": _arguments,
    "cpu": _text,
    "threads": _whole,
    "torch": _text,
    "transformers": _text,
}
_RUN: dict[str, Check] = {
    "key": _text,
    "run": _provenance,
    "planned": _optional(_whole),
    "done": _optional(_whole),
}
_ITEM: dict[str, Check] = {
    "key": _text,
    "set": _text,
    "temperature": _number,
    "seed": _whole,
    "batch": _positive,
    "ids": _list_of(_text, at_least=1),
    "digest": _text,
    "digests": _optional(_list_of(_text, at_least=1)),
    "load": _optional(_number),
    "peak_memory": _optional(_whole),
    "methods": _list_of(_object, at_least=1),
}
_METHOD: dict[str, Check] = {
    "method": _text,
    "budget": lambda value: _text(value) or _whole(value),
    "tokens": _list_of(_positive),
    "rounds": _list_of(_positive),
    "divergence": _list_of(_optional(_divergence)),
    "seconds": _number,
    "prefill": _number,
    "clocked": _whole,
    "steps": _positive,
    "step_ms": _number,
    "split": _phases,
    "split_ms": _phases,
    "nodes": _whole,
    "by_depth": _list_of(_depth),
    "cache_bytes": _optional(_whole),
}
_OLD_PROMPT: dict[str, Check] = {
    "key": _text,
    "set": _text,
    "id": _text,
    "methods": _list_of(_object, at_least=1),
}
_OLD_METHOD: dict[str, Check] = {
    "grow": _text,
    "budget": _whole,
    "tokens": _positive,
    "rounds": _positive,
    "finish": _text,
    "seconds": _number,
    "prefill": _number,
    "split": _phases,
    "nodes": _whole,
    "divergence": _optional(_divergence),
    "by_depth": _optional(_list_of(_depth)),
}
