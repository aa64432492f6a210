"""The compiled path scorer: candidates and conditional log-probs of a batch in one call.

`MarkovScorer` in `path_scorer.py` says what it computes, in some forty operations that cost more to start
than to run for one sequence; `native_scorer.h` is the same up to rounding. A sequence has the same bits in
any batch and for any number of threads. Of equal log-probs the lower row of the draft vocabulary comes first.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from jetspec.native import library
from jetspec.target.packed import MatrixStruct, PackedMatrix

Floats = npt.NDArray[np.float32]


class _HeadStruct(ctypes.Structure):
    """`markov_head` of native_scorer.h."""

    _fields_ = (
        ("depth", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("rank", ctypes.c_int64),
        ("candidates", ctypes.c_int64),
        ("parents", ctypes.c_int64),
        ("parent_rows", ctypes.c_void_p),
        ("child_rows", ctypes.c_void_p),
        ("vocab", ctypes.c_void_p),
        ("children", MatrixStruct),
        ("state_gate", MatrixStruct),
        ("row_gate", MatrixStruct),
    )


class _Job(ctypes.Structure):
    """`markov_job` of native_scorer.h."""

    _fields_ = (
        ("batch", ctypes.c_int64),
        ("roots", ctypes.c_void_p),
        ("hidden", ctypes.c_void_p),
        ("base", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("first", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
    )


class MarkovTables(NamedTuple):
    """Candidates of every depth with their log-probs, for a batch.

    tokens [B, D, K] ids; first [B, K], below the root; table [B, D-1, K, K], below each candidate.
    """

    tokens: npt.NDArray[np.int64]
    first: Floats
    table: Floats


class NativeMarkov:
    """The compiled scorer for the weights of one head; `build` says where it can run.

    Args:
        parent_rows: [V, r], by token id.
        child_rows: [Vd, r], by row of the draft vocabulary; `children` is the same, packed.
        vocab: ids [Vd], each below V.
        gate: [r, H + r] and its bias [r], or None for the vanilla form.
    """

    def __init__(
        self,
        parent_rows: Tensor,
        child_rows: Tensor,
        children: PackedMatrix,
        vocab: Tensor,
        gate: tuple[Tensor, Tensor] | None,
    ) -> None:
        self._parent_rows, self._child_rows = parent_rows.contiguous(), child_rows.contiguous()
        self._children, self._vocab = children, vocab.contiguous()
        self._rank = parent_rows.shape[1]
        self._gates: tuple[PackedMatrix, PackedMatrix] | None = None
        if gate is not None:
            weight, bias = gate
            states = weight.shape[1] - self._rank
            self._gates = PackedMatrix(weight[:, :states], bias), PackedMatrix(weight[:, states:])

    @staticmethod
    def build(
        parent_rows: Tensor,
        child_rows: Tensor,
        children: PackedMatrix | None,
        vocab: Tensor,
        gate: tuple[Tensor, Tensor] | None,
    ) -> NativeMarkov | None:
        """The compiled scorer, or None where the children are not packed: other dtypes and devices, no
        compiler.
        """
        if children is None:
            return None
        return NativeMarkov(parent_rows, child_rows, children, vocab, gate)

    def tables(
        self,
        hidden: Tensor,
        base: Tensor,
        roots: list[int],
        scale: Tensor | None,
        candidates: int,
        parents: int,
    ) -> MarkovTables:
        """hidden [B, D, H] states and base [B, D, Vd] scores, noise included, to the tables.

        scale: [B, D, 1], weight of what the scorer adds to the scores. candidates and parents: K and the
        number of likely tokens that the expected parent is made of, if the draft vocabulary has as many.
        Raises MemoryError.
        """
        batch, depth, width = base.shape
        k = min(candidates, width)
        assert width == self._vocab.shape[0] and base.dtype == torch.float32
        assert len(roots) == batch and all(0 <= root < self._parent_rows.shape[0] for root in roots)
        assert self._gates is None or hidden.shape == (batch, depth, self._gates[0].k)
        ids = np.array(roots, dtype=np.int64)
        base, hidden = base.contiguous(), hidden.float().contiguous()
        scale = None if scale is None else scale.float().contiguous()
        found = MarkovTables(
            np.empty((batch, depth, k), np.int64),
            np.empty((batch, k), np.float32),
            np.empty((batch, depth - 1, k, k), np.float32),
        )
        head = self._head(depth, k, min(parents, width))
        job = _Job(
            batch,
            ids.ctypes.data,
            hidden.data_ptr(),
            base.data_ptr(),
            None if scale is None else scale.data_ptr(),
            *(part.ctypes.data for part in found),
        )
        lib = library()
        assert lib is not None
        if lib.jetspec_markov(ctypes.byref(head), ctypes.byref(job)):
            raise MemoryError(f"no memory to score {batch} blocks of {depth} depths")
        return found

    def _head(self, depth: int, candidates: int, parents: int) -> _HeadStruct:
        state_gate, row_gate = (
            (MatrixStruct(), MatrixStruct())
            if self._gates is None
            else (self._gates[0].struct, self._gates[1].struct)
        )
        return _HeadStruct(
            depth,
            self._vocab.shape[0],
            self._rank,
            candidates,
            parents,
            self._parent_rows.data_ptr(),
            self._child_rows.data_ptr(),
            self._vocab.data_ptr(),
            self._children.struct,
            state_gate,
            row_gate,
        )
