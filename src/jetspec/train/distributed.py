"""One process or many: who holds what, how the gradients of a step come together, and what all agree on.

Each process works off its share of a batch; the loss of every part is divided by the weight of the whole
batch (`TrainingMethod.accumulate`), so that summed gradients are those of the batch, whatever the number of
processes is. Nothing else in training knows how many there are.

Processes are started by `torchrun` or `accelerate launch`, which tell each its place in the environment.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Iterator
from collections.abc import Sequence as Many
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from jetspec.errors import DataError, OptionError, ProcessError, UserError
from jetspec.train.data import Batch
from jetspec.train.method import StepSums, TrainingMethod

# Others wait while one validates, writes, or answers the last prompts. A process that dies is noticed at once
# all the same: its connections close, and the launcher ends the others.
_TIMEOUT = timedelta(hours=12)
_GRACE = 5.0  # seconds that other processes leave to the first one to report what went wrong for all
_BUCKET = 1 << 24  # elements of gradient that travel together


@dataclass(frozen=True)
class Processes:
    """This process among those that train one head.

    rank, size   its number, and how many there are
    local_rank   its number on its machine, which is that of its GPU
    fsdp         weights, gradients and moments are sharded over the processes instead of copied
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    fsdp: bool = False

    @property
    def first(self) -> bool:
        """Whether this is the one that writes files and reports."""
        return self.rank == 0

    def place(self, device: str) -> str:
        """The device of this process, where `device` is what all were given. Raises OptionError."""
        if self.size == 1 or not device.startswith("cuda"):
            return device
        if device != "cuda":
            raise OptionError(
                f"device {device!r} would be shared by {self.size} processes; give 'cuda' and each takes one"
            )
        return f"cuda:{_gpu_of(self.local_rank)}"

    def sum(self, value: float) -> float:
        """The sum of a number over all processes."""
        if self.size == 1:
            return value
        number = torch.tensor([value], dtype=torch.float64)
        with _together():
            dist.all_reduce(number)
        return float(number)

    def agree(self, value: float) -> float:
        """The first process's number, for decisions that all must take alike (clocks differ)."""
        if self.size == 1:
            return value
        number = torch.tensor([value], dtype=torch.float64)
        with _together():
            dist.broadcast(number, 0)
        return float(number)

    def check_same(self, value: float, what: str) -> None:
        """Refuse to go on where a process has another number. Raises DataError."""
        given = self.agree(value)
        if self.sum(float(given != value)):
            raise DataError(
                f"the processes do not find the same {what}; their folders must be the same, on storage that "
                "all of them share"
            )

    def wait(self) -> None:
        """Until all processes are here."""
        self.agree(0.0)


def _gpu_of(local_rank: int) -> int:
    """The GPU of a process among those that it sees; some launchers show each process its own alone.

    Raises OptionError where there are several GPUs, but fewer than processes on this machine.
    """
    count = torch.cuda.device_count()
    if 1 < count <= local_rank:
        raise OptionError(
            f"process {local_rank} of this machine has no GPU of its own, there are {count}; start as many "
            f"processes as there are GPUs (torchrun --nproc-per-node {count})"
        )
    return local_rank % (count or local_rank + 1)


ALONE = Processes()


@contextmanager
def join_processes(device: str = "cpu", *, fsdp: bool = False) -> Iterator[Processes]:
    """This process's place among those that a launcher started; alone if there was none.

    device: what they will compute on: "cuda" connects them through NCCL, anything else through gloo.

    Raises OptionError for `fsdp` without other processes, ProcessError if the others cannot be reached.
    """
    size = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if size == 1:
        if fsdp:
            raise OptionError(
                "--fsdp shards a head over several processes; start them with torchrun, or leave it out"
            )
        yield ALONE
        return
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", "0"))
    processes = Processes(rank, size, local, fsdp)
    try:
        on_gpu = device.startswith("cuda") and torch.cuda.is_available()
        if on_gpu:
            torch.cuda.set_device(_gpu_of(local))
        with _together():
            dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", timeout=_TIMEOUT)
        yield processes
        processes.wait()
        dist.destroy_process_group()
    except UserError as error:
        # What is wrong is mostly wrong for all, and once is enough to say it: when the first process ends,
        # the launcher ends the others. The first one may itself be gone; then the second one speaks.
        if rank > isinstance(error, ProcessError):
            time.sleep(_GRACE)
        raise


@contextmanager
def _together() -> Iterator[None]:
    """What talks to other processes; if that fails, one of them is gone."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if not isinstance(error, dist.DistError) and "gloo" not in text.lower():
            raise
        reason = re.sub(r"^\[[^]]*\] *", "", text.splitlines()[0]).split(". ")[0][:80]  # [file of gloo:line]
        raise ProcessError(
            f"another process of this run ended or cannot be reached ({reason}); all end here. The same "
            "command goes on from the last checkpoint"
        ) from None


class Copies:
    """Every process holds the whole head; gradients are summed over them after each step.

    autocast: the type of matrix products on a device that has it, with float32 weights and sums; None
        computes in the weights' own.
    """

    def __init__(
        self, method: TrainingMethod, processes: Processes = ALONE, autocast: torch.dtype | None = None
    ) -> None:
        self.method, self.processes, self.autocast = method, processes, autocast
        self.parameters = list(method.module.parameters())
        if processes.size > 1:
            with _together(), torch.no_grad():
                for tensor in self.parameters:
                    dist.broadcast(tensor.data, 0)

    def learn(self, parts: Many[Batch]) -> StepSums:
        """Forward and backward of this process's parts; gradients and sums are those of all processes."""
        total = self.processes.sum(_weight(parts))
        with _together(), self._mixed(parts):
            sums = self.method.accumulate(parts, total)
        if self.processes.size == 1:
            return sums
        with _together():
            self._sum_gradients()
        return _summed(sums, self.processes)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """While `method.module` must hold whole weights; all processes enter together."""
        yield

    def _mixed(self, parts: Many[Batch]) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None:
            return contextlib.nullcontext()
        return torch.autocast(parts[0].anchors.device.type, self.autocast)

    def _sum_gradients(self) -> None:
        """All-reduce the gradients, small ones together. One that only some processes have counts as 0 in
        the others.
        """
        device = self.parameters[0].device
        have = torch.tensor([x.grad is not None for x in self.parameters], device=device).int()
        dist.all_reduce(have)
        used = [x for x, count in zip(self.parameters, have.tolist(), strict=True) if count]
        for tensor in used:
            if tensor.grad is None:
                tensor.grad = torch.zeros_like(tensor)
        for bucket in _buckets(used):
            flat = torch.cat([_grad(x).flatten() for x in bucket])
            dist.all_reduce(flat)
            for x, piece in zip(bucket, flat.split([x.numel() for x in bucket]), strict=True):
                _grad(x).copy_(piece.view_as(x))


class Shards(Copies):
    """Weights, gradients and moments are sharded (torch's fully_shard), and gathered for each step only.

    The optimiser must be made from `method.module` after this, since its parameters are then the shards.
    """

    def __init__(
        self, method: TrainingMethod, processes: Processes, autocast: torch.dtype | None = None
    ) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        super().__init__(method, processes, autocast)
        self._step: Any = _Step(method)
        with _together():
            mesh = init_device_mesh(self.parameters[0].device.type, (processes.size,))
            fully_shard(self._step, mesh=mesh)
        self.parameters = list(method.module.parameters())

    def learn(self, parts: Many[Batch]) -> StepSums:
        """As for copies. FSDP gives the mean over processes, so each divides by its part of the total."""
        size = self.processes.size
        total = self.processes.sum(_weight(parts))
        with _together():
            with self._mixed(parts):
                sums, touched = self._step(parts, total / size)
            touched.backward()
        return _summed(StepSums(sums.loss / size, sums.per_depth), self.processes)

    @contextmanager
    def whole(self) -> Iterator[None]:
        """Gather the weights for the block."""
        with _together():
            self._step.unshard()
        try:
            yield
        finally:
            self._step.reshard()


class _Step(nn.Module):
    """A training step as one module: FSDP gathers the weights before its forward, which does forward and
    backward of every part, and reduces the gradients when something that depends on all weights is
    differentiated. That is `touched`, a 0.
    """

    def __init__(self, method: TrainingMethod) -> None:
        super().__init__()
        self.method, self.head = method, method.module

    def forward(self, parts: Many[Batch], total: float) -> tuple[StepSums, Tensor]:
        """What the method returns, and `touched`."""
        sums = self.method.accumulate(parts, total)
        zeros = [x.flatten()[:1] * 0 for x in self.head.parameters()]
        return sums, torch.cat(zeros).sum()


def make_learner(
    method: TrainingMethod, processes: Processes = ALONE, autocast: torch.dtype | None = None
) -> Copies:
    """Copies, or shards where `processes` says so."""
    return (Shards if processes.fsdp else Copies)(method, processes, autocast)


def whole_tensor(tensor: Tensor) -> Tensor:
    """A parameter, gradient or moment with all its shards; all processes ask together."""
    return tensor.full_tensor() if _is_sharded(tensor) else tensor  # type: ignore[attr-defined]


def shard_like(whole: Tensor, like: Tensor) -> Tensor:
    """This process's shard of `whole`, where `like` is sharded; all processes ask together."""
    if not _is_sharded(like):
        return whole.to(like.device)
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = like.device_mesh, like.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.to(like.device), mesh, placements)


def _is_sharded(tensor: Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


def _weight(parts: Many[Batch]) -> float:
    return float(sum(batch.weight.sum() for batch in parts))


def _summed(sums: StepSums, processes: Processes) -> StepSums:
    """The sums of all processes."""
    per_depth = sums.per_depth.double()
    with _together():
        dist.all_reduce(per_depth)
    return StepSums(processes.sum(sums.loss), per_depth.to(sums.per_depth.dtype))


def _buckets(tensors: Many[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors in order, in groups of one type and of about `_BUCKET` elements."""
    bucket: list[Tensor] = []
    for tensor in tensors:
        full = bucket and sum(x.numel() for x in bucket) + tensor.numel() > _BUCKET
        if full or (bucket and bucket[0].dtype != tensor.dtype):
            yield bucket
            bucket = []
        bucket.append(tensor)
    if bucket:
        yield bucket


def _grad(tensor: Tensor) -> Tensor:
    assert tensor.grad is not None
    return tensor.grad
