"""From a model and a prompt file to a head folder: answers with features, then training. Every stage
resumes.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Many
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from jetspec.errors import DataError, OptionError, StorageError
from jetspec.target.target import Target
from jetspec.train.checkpoint import read_state
from jetspec.train.corpus import Corpus, check_distinct, made_by
from jetspec.train.distributed import ALONE, Processes
from jetspec.train.families import find_family
from jetspec.train.features import shard_paths
from jetspec.train.from_head import SourceHead, check_start
from jetspec.train.loop import Report, train
from jetspec.train.recipe import Settings
from jetspec.train.validate import unigram_coverage


def train_head(
    target: Target,
    answers: Many[Path],
    folder: Path,
    settings: Settings,
    *,
    source: SourceHead | None = None,
    on_report: Callable[[Report], None] = lambda report: None,
    processes: Processes = ALONE,
    pause: Callable[[], bool] | None = None,
    resident: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Path:
    """Train a head for `target` on folders of its answers; returns the head's folder, `folder/head`.

    Args:
        source: a head whose weights training begins with; the settings have its method and shape.
        processes, pause, say: see `train`.
        resident: keep all features on the target's device, which must have room for them.

    Raises DataError if the answers are unusable, OptionError for what the target cannot have.
    """
    chosen = resolve_products(settings.products, target.device)
    check_confidence(settings, further=source is not None)
    family = find_family(settings.method)
    if source is None:
        family.check(target, settings.head)
    else:
        source.check_options(settings)
        source.check(target, folder)
    try:
        folder.mkdir(parents=True, exist_ok=True)  # now, and not at the first checkpoint
    except OSError as error:
        raise StorageError(f"the run cannot be kept in {folder} ({error}); choose another folder") from None
    state = read_state(folder) or {}
    check_start(folder, state, source)
    hold_greedy = state.get("hold_greedy", not state)  # False: it began before there was this exchange
    corpus = Corpus(
        folders_of_run(folder, state, answers), shards=state.get("shards"), hold_greedy=hold_greedy
    )
    corpus.check_ids(target.config.vocab_size)
    for line in other_targets(target.name, answers):
        say(line)
    taps = family.taps(target, settings.head)
    if taps is not None:
        corpus = corpus.with_taps(taps)
    if resident:
        corpus = corpus.resident(target.device)
    manifest = provenance(target, corpus, settings, chosen)
    manifest["processes"] = processes.size
    if source is None:
        method = family.build(target, corpus, settings.head, settings.loss, settings.loop.seed)
    else:
        method = family.build_from(target, corpus, settings.head, settings.loss, source.head)
        manifest["started_from"] = source.record()
    vocab = getattr(method, "vocab", None)
    if vocab is not None:
        manifest["vocabulary_coverage"] = round(unigram_coverage(corpus, vocab), 5)
    # The CPU's instructions take float32 and round inside; CUDA's want bfloat16 tensors.
    mixed = torch.bfloat16 if chosen == "bfloat16" and target.device.type == "cuda" else None
    with _products(chosen):
        return train(
            method,
            corpus,
            folder,
            settings.loop,
            manifest,
            on_report,
            device=target.device,
            processes=processes,
            autocast=mixed,
            pause=pause,
            source=None if source is None else source.sha256,
            say=say,
        )


def folders_of_run(run: Path, state: Mapping[str, Any], given: Many[Path]) -> list[Path]:
    """The folders of answers of a run that goes on, in the order in which it began with them; those that are
    given for a new one.

    A folder may have moved: where its place is not found again, its name decides.

    Raises DataError naming a folder that is missing, holds less than it did, was not part of the run, or is
    given twice.
    """
    check_distinct(given)
    left = list(given)
    if "folders" not in state:  # a new run, or one of a version that did not keep them
        return left
    recorded = [Path(place) for place in state["folders"]]
    taken: dict[Path, Path] = {}
    for by_name in (False, True):
        for place in recorded:
            match = next((path for path in left if _is_folder(path, place, by_name)), None)
            if place not in taken and match is not None:
                taken[place] = match
                left.remove(match)
    for place, shards in zip(recorded, state["shards"], strict=True):
        if place not in taken:
            raise DataError(
                f"the run in {run} began with the answers in {place}, which are not given now; add --answers "
                f"{place}, or train in another folder"
            )
        if (there := len(shard_paths(taken[place]))) < shards:
            raise DataError(
                f"{taken[place]} holds {there} of the {shards} shards of answers that the run in {run} began "
                "with; bring the others back, or train in another folder"
            )
    if left:
        raise DataError(
            f"the run in {run} began without the answers in {left[0]}; leave them out, or train in another "
            "folder"
        )
    return [taken[place] for place in recorded]


def other_targets(name: str, folders: Many[Path]) -> list[str]:
    """A line of warning if folders of answers name another target. Their ends are compared, because one
    target may be a folder in one place and an id in the other.
    """
    made = [(folder, found) for folder in folders if (found := made_by(folder)) is not None]
    others = [pair for pair in made if Path(pair[1]).name.lower() != Path(name).name.lower()]
    if not others:
        return []
    folder, other = others[0]
    more = f" and {len(others) - 1} more of the folders" if len(others) > 1 else ""
    return [
        f"warning: the answers in {folder}{more} say that {other} made them, but the target is {name}; "
        "a head for it needs answers of its own"
    ]


def _is_folder(path: Path, recorded: Path, by_name: bool) -> bool:
    path = path.absolute()
    return path.name == recorded.name if by_name else path == recorded


def resolve_products(products: str, device: torch.device | str = "cpu") -> str:
    """The arithmetic that `products` asks for on a device of this machine. Raises OptionError."""
    if products not in ("auto", "float32", "bfloat16"):
        raise OptionError(f"products {products!r} is unknown; valid: auto, float32, bfloat16")
    if products == "auto":
        on_gpu = torch.device(device).type == "cuda"
        return "bfloat16" if on_gpu or torch.cpu._is_avx512_bf16_supported() else "float32"
    return products


def check_confidence(settings: Settings, *, further: bool) -> None:
    """Refuse a confidence head without a loss, or a loss without such a head. Raises OptionError.

    further: the head was trained before, so that its confidences may stay what they are.
    """
    there, weight = bool(getattr(settings.head, "confidence", False)), settings.loss.confidence
    if weight and not there:
        raise OptionError(
            f"loss.confidence is {weight:g}, but the head has no confidence head; set loss.confidence=0"
            + (", or head.confidence=true" if hasattr(settings.head, "confidence") and not further else "")
        )
    if there and not weight and not further:
        raise OptionError(
            "head.confidence is true, but loss.confidence is 0, so that nothing would train it; set "
            "loss.confidence=1, or head.confidence=false"
        )


class _products:
    """Within the block, float32 matrix products may use bfloat16 instructions (sums stay float32)."""

    def __init__(self, products: str) -> None:
        self._wanted = "medium" if products == "bfloat16" else "highest"

    def __enter__(self) -> None:
        self._before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision(self._wanted)

    def __exit__(self, *exception: object) -> None:
        torch.set_float32_matmul_precision(self._before)


def provenance(target: Target, corpus: Corpus, settings: Settings, products: str) -> dict[str, Any]:
    """What a reader of the head needs to know about how it was made."""
    return {
        "target": {
            "name": target.name if not Path(target.name).exists() else Path(target.name).name,
            "tokenizer_hash": target.tokenizer.hash,
            "template_hash": target.tokenizer.template_hash,
        },
        "method": settings.method,
        "data": {
            "answers": len(corpus.training) + len(corpus.held_out),
            "answer_tokens": corpus.answer_tokens,
            "held_out": len(corpus.held_out),
        },
        "loss": settings.loss.describe(),
        "taps": list(corpus.taps),
        "head_options": json.loads(json.dumps(asdict(settings.head))),
        "products": products,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "commit": _commit(),
    }


def _commit() -> str | None:
    """The commit of the code, where it runs from a checkout."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"],
            capture_output=True,
            text=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None if done.returncode == 0 else None
