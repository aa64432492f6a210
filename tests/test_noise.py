"""Rows of noise that are kept, and the picks that use them."""

from __future__ import annotations

import threading

import torch

from jetspec import noise
from jetspec.noise import add_noise, gumbel_noise


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
    rows = noise._Rows(most_bytes=10 * 4 * 64)
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
    rows, wrong = noise._Rows(most_bytes=5 * 4 * 16), []

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
