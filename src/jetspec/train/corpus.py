"""The answers that a head is trained and validated on: an index of the shards in some folders."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence as Many
from copy import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from jetspec.errors import DataError
from jetspec.train.answers import ANSWERS_FILE
from jetspec.train.features import shard_columns, shard_paths, shard_taps
from jetspec.train.shard_check import check_shard


@dataclass(frozen=True)
class Entry:
    """Where one answered prompt lies: rows [start, start + length) of a shard."""

    path: Path
    start: int
    length: int
    prompt_len: int
    temperature: float


_FEATURES = ("taps", "hidden")


class Corpus:
    """All answers in some folders, indexed; features are read from memory-mapped shards when a batch needs
    them.

    Every `holdout`-th answer is kept for validation, by its place in the data, so the split does not depend
    on a seed. If none of these is greedy, though others are, the first greedy one takes the place of the
    first of these: validation needs it.

    hold_greedy: False leaves this exchange out, for a run that began without it.
    shards: how many shards of each folder to take, None for all. A run that goes on takes what it began
    with, though more have been written since.

    Raises DataError if there are no answers, or none but held-out ones, if a folder is given twice, if shards
    hold different taps, or if a shard is damaged or gone.
    """

    def __init__(
        self,
        folders: Many[Path],
        holdout: int = 40,
        shards: Many[int] | None = None,
        *,
        hold_greedy: bool = True,
    ) -> None:
        check_distinct(folders)
        self.folders = [str(Path(folder).absolute()) for folder in folders]
        found = [shard_paths(folder) for folder in folders]
        if shards is not None:
            if len(shards) != len(found) or any(
                len(have) < count for have, count in zip(found, shards, strict=True)
            ):
                raise DataError(
                    "answers that the run began with are gone; give the same folders, or start in another one"
                )
            found = [have[:count] for have, count in zip(found, shards, strict=True)]
        self.shards = [len(have) for have in found]
        paths = [path for have in found for path in have]
        if not paths:
            raise DataError(_nothing_in(folders))
        self.recorded = shard_taps(paths[0])
        self.taps = self.recorded
        self._columns: list[int] | None = None
        self._resident: dict[Path, dict[str, Tensor]] = {}
        if any(shard_taps(path) != self.recorded for path in paths):
            raise DataError(
                "the answer folders hold different taps; train from folders made with the same ones"
            )
        self._shapes = {path: check_shard(path) for path in paths}
        for path, shape in self._shapes.items():
            if shape.width != self._shapes[paths[0]].width:
                raise DataError(
                    f"{path} holds states of width {shape.width}, but {paths[0]} of width "
                    f"{self._shapes[paths[0]].width}; train from answers of one target"
                )
        entries = [entry for path in paths for entry in _index(path)]
        usable = [entry for entry in entries if entry.length - entry.prompt_len >= 2]
        self.hold_greedy = hold_greedy
        held = set(_held_out(usable, holdout, hold_greedy))
        self.training = [entry for n, entry in enumerate(usable) if n not in held]
        self.held_out = [entry for n, entry in enumerate(usable) if n in held]
        if not usable:
            raise DataError("all answers are shorter than 2 tokens, nothing can be learnt from them")
        if not self.training:
            raise DataError(
                "there is a single answer of 2 tokens or more, which is held out for validation; answer more "
                "prompts"
            )

    def check_ids(self, vocab: int) -> None:
        """Raise DataError naming a shard with a token id that a target of `vocab` ids does not have."""
        for path, shape in self._shapes.items():
            if shape.largest_id >= vocab:
                raise DataError(
                    f"{path} holds the token id {shape.largest_id}, but the target has {vocab} ids; it is of "
                    "another target, or damaged: delete it and run again"
                )

    def check_finite(self, entries: Many[Entry]) -> None:
        """Raise DataError naming the first shard in which features of these answers are not finite."""
        for entry in entries:
            for name in _FEATURES:
                if not bool(torch.isfinite(self._features(entry, name)).all()):
                    raise DataError(
                        f"{entry.path} holds {name} that are not finite, in its rows {entry.start} to "
                        f"{entry.start + entry.length - 1}; delete it and make its answers again"
                    )

    def with_taps(self, taps: Many[int]) -> Corpus:
        """The same answers, of whose recorded taps only `taps` are handed out, in the given order.

        Raises DataError naming a layer that was not recorded.
        """
        lacking = [layer for layer in taps if layer not in self.recorded]
        if lacking:
            raise DataError(
                f"the answers hold the taps of layers {list(self.recorded)}, but the head reads layer "
                f"{lacking[0]}; give the head taps among these, or answer the prompts again with its own"
            )
        chosen = copy(self)
        chosen.taps = tuple(taps)
        same = chosen.taps == self.recorded
        chosen._columns = None if same else [self.recorded.index(layer) for layer in taps]
        return chosen

    def resident(self, device: torch.device | str) -> Corpus:
        """The same answers with all features on a device, float16 as they are on disk, so that batches are
        put together there.
        """
        moved = copy(self)
        paths = {entry.path for entry in (*self.training, *self.held_out)}
        moved._resident = {
            path: dict(zip(_FEATURES, (x.to(device) for x in shard_columns(path, *_FEATURES)), strict=True))
            for path in sorted(paths)
        }
        return moved

    @property
    def answer_tokens(self) -> int:
        """Answer tokens for training."""
        return sum(entry.length - entry.prompt_len for entry in self.training)

    def frequent_ids(self, count: int, vocab: int) -> Tensor:
        """The `count` most frequent ids of the answers, ascending int64 [Vd]; rare ties go to lower ids."""
        counts: Counter[int] = Counter()
        for entry in self.training:
            counts.update(self.tokens(entry)[entry.prompt_len :].tolist())
        ranked = sorted(range(vocab), key=lambda token: (-counts[token], token))
        return torch.tensor(sorted(ranked[:count]))

    def tokens(self, entry: Entry) -> Tensor:
        """Token ids [length] int64."""
        return _rows(entry, "tokens").long()

    def taps_of(self, entry: Entry) -> Tensor:
        """Taps [length, taps * H] float32."""
        return self.stored_taps(entry).float()

    def hidden_of(self, entry: Entry) -> Tensor:
        """Final normed states [length, H] float32; row t gives the law of token t + 1."""
        return self.stored_hidden(entry).float()

    def stored_taps(self, entry: Entry) -> Tensor:
        """`taps_of` as it is stored, float16."""
        rows = self._features(entry, "taps")
        if self._columns is None:
            return rows
        return rows.view(len(rows), len(self.recorded), -1)[:, self._columns].flatten(1)

    def stored_hidden(self, entry: Entry) -> Tensor:
        """`hidden_of` as it is stored, float16."""
        return self._features(entry, "hidden")

    def _features(self, entry: Entry, name: str) -> Tensor:
        if not self._resident:
            return _rows(entry, name)
        return self._resident[entry.path][name][entry.start : entry.start + entry.length]


def check_distinct(folders: Many[Path]) -> None:
    """Raise DataError for a folder that is given twice: its held-out answers would be trained on, too."""
    seen = set[Path]()
    for folder in folders:
        place = Path(folder).resolve()
        if place in seen:
            raise DataError(f"the folder of answers {folder} is given twice; give each folder once")
        seen.add(place)


def _nothing_in(folders: Many[Path]) -> str:
    """Why folders without shards cannot be trained on, and which command changes that."""
    texts = [Path(folder) / ANSWERS_FILE for folder in folders if (Path(folder) / ANSWERS_FILE).exists()]
    if texts:
        return (
            f"{texts[0].parent} holds answers as text, without features; compute them with "
            f"`jetspec answers --from {texts[0]} --out FOLDER` and give that folder"
        )
    return f"no answers in {', '.join(map(str, folders))}; run `jetspec answers` first"


def made_by(folder: Path) -> str | None:
    """The target that made the answers in a folder, as it was named there; None where nothing says so."""
    try:
        target = dict(json.loads((Path(folder) / "answers.json").read_text("utf-8"))).get("target")
    except (OSError, ValueError, TypeError):
        return None
    return target if isinstance(target, str) else None


def _held_out(entries: Many[Entry], holdout: int, hold_greedy: bool) -> list[int]:
    """Which answers are kept for validation."""
    held = list(range(0, len(entries), holdout))
    greedy = [n for n, entry in enumerate(entries) if entry.temperature == 0.0]
    if hold_greedy and greedy and not set(greedy) & set(held):
        held[0] = greedy[0]
    return held


def _index(path: Path) -> list[Entry]:
    names = ("lengths", "prompt_lens", "temperatures")
    lengths, prompt_lens, temperatures = (column.tolist() for column in shard_columns(path, *names))
    starts = [sum(lengths[:n]) for n in range(len(lengths))]
    return [Entry(path, *row) for row in zip(starts, lengths, prompt_lens, temperatures, strict=True)]


_files: dict[Path, object] = {}  # open memory maps; reading a slice touches only its pages


def _rows(entry: Entry, name: str) -> Tensor:
    if entry.path not in _files:
        _files[entry.path] = safe_open(entry.path, framework="pt").__enter__()
    return _files[entry.path].get_slice(name)[entry.start : entry.start + entry.length]  # type: ignore[attr-defined]
