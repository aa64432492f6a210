"""Who sees whom inside a tree. Only this file of the package needs torch, so `__init__` leaves it out."""

from __future__ import annotations

import numpy as np
import torch

from jetspec.tree.tree import Tree


def ancestor_mask(tree: Tree) -> torch.Tensor:
    """Bool [n, n] on the CPU; entry (i, j) is True if node j lies on the path from the root to i, i included.

    A row is its parent's row plus one bit, so rows are kept as Python integers and unpacked together: one
    pass whatever the shape of the tree.
    """
    size = tree.size
    width = (size + 7) // 8  # bytes per row
    rows: list[int] = []
    for node, parent in enumerate(tree.parents):
        rows.append((rows[parent] if parent >= 0 else 0) | 1 << node)
    packed = np.frombuffer(b"".join(row.to_bytes(width, "little") for row in rows), dtype=np.uint8)
    bits = np.unpackbits(packed.reshape(size, width), axis=1, count=size, bitorder="little")  # [n, n]
    return torch.from_numpy(bits).bool()
