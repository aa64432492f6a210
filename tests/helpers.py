"""What tests of several stages share: a tiny model on disk, the command line run in this process, a test of
statistics.
"""

from __future__ import annotations

import contextlib
import io
import json
import shutil
import sys
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jetspec.cli.main import main
from tests.target.tiny import save_tokenizer, tiny_backend, tiny_model

CONTEXT = 256


def save_tiny_model(folder: Path) -> Path:
    """Write a random three-layer Llama with a byte-level tokenizer and a chat template, as transformers does.

    Large initial weights spread the logits, so that its greedy text varies and ties do not happen by chance.
    """
    torch.manual_seed(1)
    vocab = tiny_backend().get_vocab_size()
    model = tiny_model(
        "llama", vocab_size=vocab, max_position_embeddings=CONTEXT, initializer_range=0.4, bos_token_id=1
    )
    model.save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def changed_model(folder: Path, to: Path, **changes: Any) -> Path:
    """A copy of a model folder with other values in config.json."""
    shutil.copytree(folder, to)
    path = to / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    return to


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny model; read only. Import this name into a test module to use it."""
    return save_tiny_model(tmp_path_factory.mktemp("tiny"))


@dataclass(frozen=True)
class Finished:
    """What a run of the command line left behind."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The one line of an error. Fails if there is anything else."""
        assert self.code == 2, self
        assert self.out == "", self.out
        lines = self.err.splitlines()
        assert len(lines) == 1 and lines[0].startswith("jetspec: error: "), self.err
        return lines[0].removeprefix("jetspec: error: ")

    @property
    def json(self) -> dict[str, Any]:
        """The object on standard output. Fails if there is anything else."""
        assert self.code == 0, self
        values = json.loads(self.out)
        assert isinstance(values, dict)
        return values


def jetspec(*arguments: object, stdin: bytes | None = b"") -> Finished:
    """Run `jetspec` with these arguments in this process; no stream is a terminal, and without bytes for it
    standard input is closed.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2))
    stdin_before, threads = sys.stdin, torch.get_num_threads()
    sys.stdin = None if stdin is None else io.TextIOWrapper(io.BytesIO(stdin), encoding="ascii")
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main([str(argument) for argument in arguments])
            out.flush()
            err.flush()
    finally:
        sys.stdin = stdin_before
        torch.set_num_threads(threads)
    return Finished(code, *(stream.buffer.getvalue().decode("utf-8") for stream in (out, err)))  # type: ignore[attr-defined]


def chi_square_odds(statistic: float, freedom: int) -> float:
    """Chance that a chi-square variable with `freedom` degrees of freedom exceeds `statistic`."""
    return float(
        torch.special.gammaincc(torch.tensor(freedom / 2.0).double(), torch.tensor(statistic / 2.0).double())
    )


class CountedCalls(TorchDispatchMode):
    """Counts torch's operators by name while it is entered: on a GPU each of them is a launch."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))
