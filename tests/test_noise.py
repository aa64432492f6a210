"""The noise, its statistics, and its rows that are kept."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from jetspec import noise
from jetspec.native import native_available
from jetspec.noise import _bits, _halves, _keys, add_noise, gumbel_noise
from tests.helpers import chi_square_odds


def test_noise_is_a_function_of_seed_position_and_token() -> None:
    """Guards against noise that depends on the other rows, on the vocabulary size or on which ids are asked
    for."""
    full = gumbel_noise(7, torch.tensor([3, 9, 4]), 1000)
    assert full.dtype == torch.float32 and full.shape == (3, 1000)
    assert torch.equal(gumbel_noise(7, torch.tensor([9]), 1000)[0], full[1])
    assert torch.equal(gumbel_noise(7, torch.tensor([3, 9, 4]), 37), full[:, :37])
    ids = torch.tensor([999, 0, 5])
    assert torch.equal(gumbel_noise(7, torch.tensor([3, 9, 4]), ids), full[:, ids])


def test_noise_values_are_pinned() -> None:
    """Guards against a silent change of the hash: after an update the same seed would give other text."""
    noise = gumbel_noise(2**63 + 12345, torch.tensor([0, 1, 100000]), torch.tensor([0, 1, 49151]))
    expected = torch.tensor(PINNED)
    torch.testing.assert_close(noise, expected, rtol=1e-6, atol=1e-6)


PINNED = [[0.892355, -0.10826, -0.184592], [0.448821, -0.148309, -0.531866], [-1.09154, 1.869473, 1.020299]]


def reference_noise(seed: int, position: int, token: int) -> float:
    """The noise in plain Python integers, with the published multipliers."""

    def mix(x: int) -> int:
        x ^= x >> 16
        x = x * 0x7FEB352D % 2**32
        x ^= x >> 15
        x = x * 0x846CA68B % 2**32
        return x ^ (x >> 16)

    low, high = seed % 2**32, seed // 2**32
    first, second = mix(low ^ mix(high ^ 0x9E3779B9)), mix(high ^ mix(low ^ 0x3C6EF372))
    key_a = mix(mix((position + first) % 2**32) ^ second)
    key_b = mix(mix(position ^ second) ^ first)
    bits = mix(mix((token + key_a) % 2**32) ^ key_b)
    return -math.log(-math.log((bits + 0.5) / 2**32))


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**31), st.integers(0, 2**20))
@settings(max_examples=200, deadline=None)
def test_noise_equals_plain_integers(seed: int, position: int, token: int) -> None:
    """Guards against int64 overflow, sign trouble with seeds of 64 bits, and lost high words."""
    noise = float(gumbel_noise(seed, torch.tensor([position]), torch.tensor([token])))
    assert noise == pytest.approx(reference_noise(seed, position, token), rel=1e-6, abs=1e-6)


def unmix(word: int) -> int:
    """The inverse of the hash's mixing."""
    word ^= word >> 16
    word = word * pow(0x846CA68B, -1, 2**32) % 2**32
    word ^= word >> 15 ^ word >> 30
    word = word * pow(0x7FEB352D, -1, 2**32) % 2**32
    return word ^ (word >> 16)


@pytest.fixture(params=["compiled", "portable"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way that noise is made in: by the compiled kernel, or by NumPy."""
    if request.param == "portable":
        monkeypatch.setattr(noise, "library", lambda: None)
    elif not native_available():
        pytest.skip("no C compiler, so there is no kernel")
    return str(request.param)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("bits", "value"), [(0, -3.12999), (2**32 - 1, 22.87386)])
def test_noise_stays_finite_at_both_ends(bits: int, value: float) -> None:
    """Guards against u = 0 or u = 1: the extreme hash values give the documented bounds."""
    keys = _keys(_halves(77, None), np.full((1, 1), 5, dtype=np.uint32))
    key_a, key_b = (int(key[0, 0]) for key in keys)
    token = (unmix(unmix(bits) ^ key_b) - key_a) % 2**32
    assert _bits(keys, np.array([token], dtype=np.uint32)).item() == bits
    assert float(gumbel_noise(77, torch.tensor([5]), torch.tensor([token]))) == pytest.approx(value, abs=1e-4)


@pytest.mark.skipif(not native_available(), reason="no C compiler, so there is no kernel")
@pytest.mark.parametrize("seed", [0, 2**63 + 5, [1, 2**64 - 1, 2**32, 7]])
def test_the_compiled_noise_is_the_readable_one(seed: int | list[int]) -> None:
    """Guards the kernel: the same bits at block borders, in part of a vector, for ids in any order, for any
    number of threads; but for a rounding of the logarithm's last bit, which one value in 2**28 shows.
    """
    positions = torch.tensor([0, 3, 2**31, 2**32 + 9])
    shuffled = torch.randperm(50_000, generator=torch.Generator().manual_seed(0))
    threads = torch.get_num_threads()
    for vocab in (
        1,
        15,
        17,
        4095,
        4097,
        49_152,
        300_000,
        shuffled,
        torch.tensor([2**32 - 1, 0]),
        shuffled[::7],
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(noise, "library", lambda: None)
            readable = gumbel_noise(seed, positions, vocab)
        for count in (1, 2):
            torch.set_num_threads(count)
            made = gumbel_noise(seed, positions, vocab)
            torch.set_num_threads(threads)
            assert made.shape == readable.shape
            other = made != readable
            assert int(other.sum()) <= 1
            torch.testing.assert_close(made, readable, rtol=2**-22, atol=0)  # two units in the last place


def test_arrays_and_tensors_give_the_same_bits() -> None:
    """Guards the way that a CPU takes (32-bit words that wrap) against that of other devices (64 bits)."""
    where, ids = torch.randint(0, 2**32, (4, 1)), torch.cat([torch.arange(2000), torch.tensor([2**31 - 1])])
    words = where.numpy().astype(np.uint32), ids.numpy().astype(np.uint32)
    seeds = [0, 12345, 2**63 + 5, 2**64 - 1]
    for seed in (*seeds, seeds):
        short = _bits(_keys(_halves(seed, None), words[0]), words[1])
        assert short.dtype == np.uint32
        long = _bits(_keys(_halves(seed, torch.device("cpu")), where), ids)
        assert torch.equal(torch.from_numpy(short.astype(np.int64)), long)


def test_every_bit_of_the_seed_counts() -> None:
    """Guards against a seed cut to 32 bits."""
    rows = [gumbel_noise(s, torch.tensor([0]), 20) for s in [0] + [1 << bit for bit in range(64)]]
    assert len({tuple(row[0].tolist()) for row in rows}) == 65


def uniform(noise: Tensor) -> Tensor:
    """Back from Gumbel noise to (0, 1)."""
    return (-(-noise.double()).exp()).exp()


@pytest.mark.parametrize("start", [0, 10**6])
def test_noise_is_uniform(start: int) -> None:
    """Guards against a biased hash: chi-square over 256 bins of 2.5 million values; a false alarm once in a
    million."""
    u = uniform(gumbel_noise(5, torch.arange(start, start + 50), 50000)).flatten()
    counts = torch.histc(u.float(), 256, 0, 1).double()
    expected = len(u) / 256
    assert chi_square_odds(float(((counts - expected) ** 2 / expected).sum()), 255) > 1e-6


NEIGHBOURS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "positions": lambda: (
        gumbel_noise(3, torch.arange(0, 400), 1000),
        gumbel_noise(3, torch.arange(1, 401), 1000),
    ),
    "tokens": lambda: (
        gumbel_noise(3, torch.arange(400), 1001)[:, 1:],
        gumbel_noise(3, torch.arange(400), 1001)[:, :-1],
    ),
    "seeds": lambda: (
        torch.cat([gumbel_noise(s, torch.arange(4), 1000) for s in range(100)]),
        torch.cat([gumbel_noise(s + 1, torch.arange(4), 1000) for s in range(100)]),
    ),
    "high seed words": lambda: (
        torch.cat([gumbel_noise(s << 32, torch.arange(4), 1000) for s in range(100)]),
        torch.cat([gumbel_noise((s + 1) << 32, torch.arange(4), 1000) for s in range(100)]),
    ),
    "seed against position": lambda: (
        torch.cat([gumbel_noise(s, torch.arange(1, 5), 1000) for s in range(100)]),
        torch.cat([gumbel_noise(s + 1, torch.arange(0, 4), 1000) for s in range(100)]),
    ),
}


@pytest.mark.parametrize("kind", list(NEIGHBOURS))
def test_neighbours_are_independent(kind: str) -> None:
    """Guards against rows that are shifted or shared copies. Chi-square of the 16 x 16 table of pairs; a
    false alarm once in a million."""
    left, right = (uniform(x).flatten() for x in NEIGHBOURS[kind]())
    cell = (left * 16).long().clamp(max=15) * 16 + (right * 16).long().clamp(max=15)
    counts = torch.bincount(cell, minlength=256).double()
    expected = len(cell) / 256
    assert chi_square_odds(float(((counts - expected) ** 2 / expected).sum()), 255) > 1e-6


def test_rows_are_not_shifted_copies() -> None:
    """Guards against noise of the form f(token + key): two rows would then share long runs of values. No
    shared value is expected."""
    rows = gumbel_noise(11, torch.arange(30), 3000).double()
    uniforms = (
        (uniform(rows) * 2**32).round().long()
    )  # float32 noise keeps about 24 bits: compare runs of two
    pairs = (uniforms[:, :-1] >> 12) * 2**20 + (uniforms[:, 1:] >> 12)
    assert (
        len(pairs.flatten().unique()) == pairs.numel()
    )  # 90 000 pairs in 2**40 cells: chance of a collision 0.4 %


# --- rows that are kept


def test_kept_rows_are_the_rows_themselves() -> None:
    """Guards the law: a row that was kept equals one that is made, whatever was asked for before."""
    for seeds, positions in (([7, 7, 7], [3, 4, 3]), ([7, 8, 7], [4, 4, 5]), ([2**63 + 5], [3])):
        scores = torch.zeros(len(seeds), 500)
        add_noise(scores, seeds, positions)
        wanted = [gumbel_noise(s, torch.tensor([p]), 500)[0] for s, p in zip(seeds, positions, strict=True)]
        assert torch.equal(scores, torch.stack(wanted))
    other = torch.zeros(1, 37)  # another vocabulary
    add_noise(other, [7], [3])
    assert torch.equal(other[0], gumbel_noise(7, torch.tensor([3]), 37)[0])


def test_scores_do_not_change_what_is_kept() -> None:
    """Guards against rows handed out to be written to: the next request would get other noise."""
    for _ in range(2):
        scores = torch.zeros(1, 100)
        add_noise(scores, [5], [9])
        assert torch.equal(scores[0], gumbel_noise(5, torch.tensor([9]), 100)[0])
        scores.fill_(3.0)


def test_memory_is_bounded_and_the_oldest_rows_go() -> None:
    """Guards a server that runs for weeks: noise of finished requests must not pile up."""
    rows = noise.NoiseRows(most_bytes=10 * 4 * 64)
    for position in range(25):
        rows.get([1], [position], 64)
    assert rows._bytes <= 10 * 4 * 64
    assert [at for _, at, _ in rows._rows] == list(range(15, 25))
    rows.get([1], [15], 64)
    rows.get([1], [99], 64)
    assert (1, 15, 64) in rows._rows and (1, 16, 64) not in rows._rows
    many = rows.get([1] * 40, range(100, 140), 64)  # more than may be kept at once
    assert len(many) == 40 and rows._bytes <= 10 * 4 * 64


def test_threads_share_the_rows() -> None:
    """Guards two engines in one process: eviction in one must not break the other, nor mix rows."""
    rows, wrong = noise.NoiseRows(most_bytes=5 * 4 * 16), []

    def work(seed: int) -> None:
        for position in range(60):
            got = rows.get([seed, seed], [position, position + 1], 16)
            expected = gumbel_noise(seed, torch.tensor([position, position + 1]), 16).numpy()
            if not all((a == b).all() for a, b in zip(got, expected, strict=True)):
                wrong.append((seed, position))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in (1, 1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert rows._bytes == sum(row.nbytes for row in rows._rows.values())
