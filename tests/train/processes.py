"""Real processes for tests, forked from this one, so that they start at once."""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # every optimiser needs it, and a child would spend seconds on it

from jetspec.train.distributed import Processes, join_processes

_fork = multiprocessing.get_context("fork")


def start(function: Callable[..., Any], *arguments: Any) -> Any:
    """A child that runs a function and ends with exit code 0, or 1 after a traceback."""

    def child() -> None:
        torch.set_num_threads(1)
        try:
            function(*arguments)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # without the parent's exit handlers

    process = _fork.Process(target=child)
    process.start()
    return process


def finish(process: Any, seconds: float = 60.0) -> int:
    """Wait for a child; its exit code, negative for a signal."""
    process.join(seconds)
    if process.exitcode is None:
        process.kill()
        process.join()
        raise AssertionError("a process hangs")
    return int(process.exitcode)


def together(
    size: int, folder: Path, function: Callable[[Processes], Any], *, fsdp: bool = False
) -> list[tuple[int, Any]]:
    """Exit code and result of a function in `size` connected processes; results travel through `folder`."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    folder.mkdir(parents=True, exist_ok=True)

    def member(rank: int) -> None:
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
        os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
        with join_processes(fsdp=fsdp) as processes:
            torch.save(function(processes), folder / f"result-{rank}.pt")

    children = [start(member, rank) for rank in range(size)]
    codes = [finish(child) for child in children]
    paths = [folder / f"result-{rank}.pt" for rank in range(size)]
    results = [torch.load(path) if path.exists() else None for path in paths]
    return list(zip(codes, results, strict=True))
