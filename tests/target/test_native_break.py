"""Faults that a hunt for crashes of the compiled decoder found: what happens around it, not in its sums."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from jetspec.native import library, native_available
from jetspec.target import packed
from jetspec.target.attention import Visibility, attend
from jetspec.target.cache import KVCache
from jetspec.target.config import ModelConfig, RopeConfig
from jetspec.target.packed import PackedMatrix
from jetspec.target.plan import chunk
from jetspec.target.rope import RotaryTable
from jetspec.target.transformer import ForwardOutput, Transformer
from tests.target.tiny import tiny_model

needs_kernel = pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")


@pytest.fixture
def double_by_default() -> Any:
    """What another part of the process may do; float64 only wastes memory, 16 bits would be written past."""
    before = torch.get_default_dtype()
    yield lambda: torch.set_default_dtype(torch.float64)
    torch.set_default_dtype(before)


@needs_kernel
def test_the_default_dtype_does_not_matter(double_by_default: Any) -> None:
    """Guards results allocated in torch's default dtype, which a caller (or a library that loads a model)
    may have changed: the kernel writes float32, so 16 bits mean a write past the end, and a crash.
    """
    torch.manual_seed(0)
    model = tiny_model("llama")
    target = Transformer(ModelConfig.from_dict(model.config.to_dict()), model.state_dict())
    matrix, x = PackedMatrix(torch.randn(40, 16)), torch.randn(3, 16)
    q, k, v = torch.randn(4, 4, 16), torch.randn(4, 2, 16), torch.randn(4, 2, 16)

    def run() -> list[torch.Tensor | None]:
        cache = target.new_cache()
        cache.add(0)
        plan = chunk([(0, [5, 6, 7, 8])], cache, logits=True)
        output: ForwardOutput = target.forward(plan, cache, (0,), hidden=True)
        own = KVCache(1, 2, 16, dtype=torch.float32)
        own.add(0)
        plan = chunk([(0, [5, 6, 7, 8])], own)
        mixed = attend(q, k, v, plan, own, 0, Visibility(plan, own, 2, None, torch.float32))
        return [*output, matrix.product(x), mixed]

    wanted = run()
    double_by_default()
    for one, other in zip(run(), wanted, strict=True):
        assert one is not None and other is not None
        assert one.dtype == torch.float32 and torch.equal(one, other)


@needs_kernel
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_a_library_cut_short_is_built_again(share: float, tmp_path: Path) -> None:
    """Guards a cache file that a full disk or a power cut left short: loading half a library ends the
    process with a bus error at every start, and an empty one means the slow path for ever.
    """
    built = Path(library()._name)  # type: ignore[union-attr]
    data = built.read_bytes()
    (tmp_path / "native").mkdir()
    (tmp_path / "native" / built.name).write_bytes(data[: int(share * len(data))])
    script = (
        "import torch\nfrom jetspec.native.build import load_library\n"
        "print(load_library('native') is not None)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "JETSPEC_CACHE": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, (done.returncode, done.stderr)
    assert done.stdout.strip() == "True"


@needs_kernel
def test_loading_without_memory_is_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the message: mmap reports a lack of memory as an OSError, which reads like a broken file."""

    def none_left(*args: object, **kwargs: object) -> NoReturn:
        raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

    monkeypatch.setattr(packed, "_arena", packed._Arena())
    monkeypatch.setattr(packed.mmap, "mmap", none_left)
    with pytest.raises(MemoryError):
        PackedMatrix(torch.ones(4, 4))


@needs_kernel
def test_huge_negative_gates_are_zero() -> None:
    """Guards silu far to the left: a bound on exp must not turn x / (1 + exp(-x)) into a number of size 1."""
    weight, bias = torch.tensor([[1.0], [0.0]]), torch.tensor([0.0, 1.0])  # gate = x, up = 1
    matrix = PackedMatrix(weight, bias, gated=True)
    for x in (-1e3, -1e10, -1e30, -3e38):
        assert abs(matrix.product(torch.tensor([[x]])).item()) < 1e-30, x


def test_a_rotary_table_grows_for_several_threads() -> None:
    """Guards engines that share a target: a slower thread's smaller table must not replace a larger one, nor
    cosines be longer than sines.
    """
    config = RopeConfig.from_dict({}, 4096)
    errors: list[str] = []

    def work(table: RotaryTable, start: int) -> None:
        for position in range(start, 4000, 377):
            try:
                table.at(torch.tensor([position]), position)
            except IndexError as error:
                errors.append(str(error))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(30):
            table = RotaryTable(config, 64, torch.float32, torch.device("cpu"))
            threads = [threading.Thread(target=work, args=(table, 91 * n)) for n in range(5)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors, errors[:3]
