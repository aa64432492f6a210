"""Where prompts are read from: files of JSON lines, JSON arrays or text, and data sets of the hub.

A source yields a record or an error per line, so that its reader decides what a broken line means.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from jetspec.errors import DataError, OptionError
from jetspec.train.text_file import read_text, unpacked_name

HUB = "hf:"
_SHOWN = 20  # names of configurations or splits that a message lists
HUB_LIMIT = 50_000  # records of a hub data set that are read where no limit is given; some hold 200 GB


@dataclass(frozen=True)
class Item:
    """One record of a source: its line (or its number in an array or data set), and what it holds or why it
    cannot be read.
    """

    line: int
    record: Any
    error: str | None = None


def read_items(source: str, limit: int | None = None) -> Iterator[Item]:
    """The records of a source, in order; at most `limit`.

    source: a path (.jsonl and .json hold JSON, anything else is text with one prompt per line; with .gz
    behind it, packed) or `hf:org/name[/config][:split]`.
    Raises DataError if the source cannot be read at all.
    """
    items = _hub_items(source, limit) if source.startswith(HUB) else _file_items(Path(source))
    return items if limit is None else islice(items, limit)


def source_name(source: str) -> str:
    """A short name for ids: the file's stem or the data set's name."""
    if source.startswith(HUB):
        return source.removeprefix(HUB).replace("/", "-").replace(":", "-")
    return unpacked_name(Path(source)).stem


def _file_items(path: Path) -> Iterator[Item]:
    text = read_text(path, "the prompt file")
    is_json = unpacked_name(path).suffix in (".jsonl", ".json")
    if is_json and _is_array(text):
        yield from _array_items(path, text)
        return
    for line, content in enumerate(text.split("\n"), start=1):  # not splitlines: JSON may hold U+2028
        if content.strip():
            yield _json_item(line, content) if is_json else Item(line, {"turns": [content.strip()]})


def _is_array(text: str) -> bool:
    """Whether a file is one JSON array of objects, and not a line per record."""
    return text.lstrip().startswith("[") and text.lstrip()[1:].lstrip()[:1] in ("{", "]")


def _array_items(path: Path, text: str) -> Iterator[Item]:
    try:
        records = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not a JSON array ({error}); fix it, or write one object per line"
        ) from None
    for number, record in enumerate(records, start=1):
        yield Item(number, record)


def _json_item(line: int, content: str) -> Item:
    try:
        return Item(line, json.loads(content))
    except (ValueError, RecursionError) as error:
        return Item(line, None, str(error))


def _hub_items(source: str, limit: int | None) -> Iterator[Item]:
    """Stream a data set of the hub: only what is read is fetched."""
    name, _, split = source.removeprefix(HUB).partition(":")
    parts = name.split("/")
    if len(parts) not in (2, 3) or not all(parts):
        raise OptionError(
            f"{source!r} names no data set; write hf:org/name, hf:org/name/config, or either with :split"
        )
    try:
        datasets = importlib.import_module("datasets")
    except ImportError:
        raise DataError(f"{source} needs the package `datasets`: pip install datasets") from None
    dataset, config = "/".join(parts[:2]), parts[2] if len(parts) == 3 else None
    number = 0
    try:
        rows = datasets.load_dataset(dataset, config, split=split or "train", streaming=True)
        for number, record in enumerate(islice(rows, limit or HUB_LIMIT), start=1):
            yield Item(number, record)
    except Exception as error:  # the library has many, and passes on those of the network
        where = f" behind record {number}" if number else ""
        reason = " ".join(str(error).split()) or repr(error)
        advice = "" if number else _advice(datasets, error, dataset, config)
        raise DataError(f"{source} cannot be read{where}: {reason}{advice}") from error


def _advice(datasets: Any, error: Exception, dataset: str, config: str | None) -> str:
    """What to write or do instead, as far as the library knows."""
    if type(error).__name__ == "DatasetNotFoundError":  # which old versions do not have
        return "; check the name, and for a gated or private one log in with `hf auth login` or set HF_TOKEN"
    if not isinstance(error, ValueError):  # as the library calls configurations and splits that are not there
        return ""
    try:
        configs = datasets.get_dataset_config_names(dataset)
        if (config is None and len(configs) > 1) or config not in (None, *configs):
            valid = [f"{HUB}{dataset}/{name}" for name in configs]
        else:
            named = f"{HUB}{dataset}" if config is None else f"{HUB}{dataset}/{config}"
            valid = [f"{named}:{name}" for name in datasets.get_dataset_split_names(dataset, config)]
    except Exception:  # it has said what it could
        return ""
    more = f", and {len(valid) - _SHOWN} more" if len(valid) > _SHOWN else ""
    return f"; valid: {', '.join(valid[:_SHOWN])}{more}"
