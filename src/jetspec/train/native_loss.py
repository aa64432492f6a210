"""The compiled form of what `loss._learn` computes: a chunk's losses and, in place of its logits, their
gradient.

`native_loss.h` does in one walk over a row what takes torch a dozen, each with its own start and result. Same
values up to rounding, and the same bits for any number of threads.
"""

from __future__ import annotations

import ctypes
from typing import NamedTuple

import torch
from torch import Tensor

from jetspec.native import library
from jetspec.train.weighting import LossOptions


class _Job(ctypes.Structure):
    """`loss_job` of native_loss.h."""

    _fields_ = (
        ("rows", ctypes.c_int64),
        ("teachers", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("logits", ctypes.c_void_p),
        ("target", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("labels", ctypes.c_void_p),
        ("kl", ctypes.c_double),
        ("ce", ctypes.c_double),
        ("l1", ctypes.c_double),
        ("laws", ctypes.c_void_p),
        ("top", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("shared", ctypes.c_void_p),
        ("agree", ctypes.c_void_p),
    )


class Learned(NamedTuple):
    """Of rows [c]: loss, same top token in both laws, and sum_v min(p, q)."""

    value: Tensor
    agree: Tensor
    overlap: Tensor


def native_learn(
    logits: Tensor, target: Tensor, place: Tensor, labels: Tensor | None, options: LossOptions
) -> Learned | None:
    """logits [c, Vd], which the gradient of each row's loss takes the place of; None, and nothing done, where
    the compiled form cannot run: other devices and types, softened laws, no compiler.

    target: [u, Vd] logits of the teachers; place [c]: which of them each row has; labels [c]: index of the
    written token, -1 for none, needed for cross-entropy.
    """
    lib = library()
    tensors = (logits, target)
    if lib is None or any(x.device.type != "cpu" or x.dtype != torch.float32 for x in tensors):
        return None
    if options.kl and options.temperature != 1:
        return None
    rows, width = logits.shape
    teachers = len(target)
    assert logits.is_contiguous() and target.is_contiguous() and target.shape[1] == width
    assert place.shape == (rows,) and (rows == 0 or 0 <= int(place.min()) <= int(place.max()) < teachers)
    place = place.to(torch.int64).contiguous()
    if options.ce:
        assert labels is not None and labels.shape == (rows,), "cross-entropy needs labels"
        assert rows == 0 or int(labels.max()) < width
        labels = labels.to(torch.int64).contiguous()
    value, overlap, laws = (torch.empty(n, device="cpu", dtype=torch.float32) for n in (rows, rows, teachers))
    agree = torch.empty(rows, dtype=torch.bool, device="cpu")
    top = torch.empty(teachers, dtype=torch.int64, device="cpu")
    job = _Job(
        rows,
        teachers,
        width,
        logits.data_ptr(),
        target.data_ptr(),
        place.data_ptr(),
        labels.data_ptr() if options.ce and labels is not None else None,
        options.kl,
        options.ce,
        options.l1,
        laws.data_ptr(),
        top.data_ptr(),
        value.data_ptr(),
        overlap.data_ptr(),
        agree.data_ptr(),
    )
    lib.jetspec_loss(ctypes.byref(job))
    return Learned(value, agree, overlap)
