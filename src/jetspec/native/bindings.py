"""The compiled library, with its functions declared."""

from __future__ import annotations

import ctypes
from functools import cache

from jetspec.native.build import load_library


@cache
def library() -> ctypes.CDLL | None:
    """The compiled library with its functions declared, or None where it could not be built."""
    found = load_library("native")
    if found is None or not hasattr(found, "jetspec_layers"):  # a compiler may write anything
        return None
    integer, pointer, real = ctypes.c_int64, ctypes.c_void_p, ctypes.c_double
    found.jetspec_kinds.restype = ctypes.c_int
    found.jetspec_packed_elements.argtypes = [pointer]
    found.jetspec_packed_elements.restype = integer
    found.jetspec_pack.argtypes = [pointer] * 3
    found.jetspec_product.argtypes = [pointer, pointer, integer, integer, integer, pointer, integer]
    found.jetspec_output.argtypes = [pointer, real, pointer, pointer, pointer, integer, pointer, pointer]
    found.jetspec_layers.argtypes = [pointer]
    found.jetspec_layers.restype = ctypes.c_int
    found.jetspec_attend.argtypes = [pointer] + [integer] * 5 + [pointer, integer] * 3 + [pointer]
    found.jetspec_attend.restype = ctypes.c_int
    found.jetspec_place.argtypes = [pointer] * 5 + [integer] * 7 + [real]
    found.jetspec_markov.argtypes = [pointer, pointer]
    found.jetspec_markov.restype = ctypes.c_int
    found.jetspec_loss.argtypes = [pointer]
    found.jetspec_noise.argtypes = [pointer] * 3 + [integer, pointer, integer, pointer]
    found.jetspec_cut.argtypes = [pointer, integer, integer, integer, real, real]
    found.jetspec_cut.restype = ctypes.c_int
    found.jetspec_pick.argtypes = [pointer, integer, pointer, real, integer, integer, pointer]
    found.jetspec_norm.argtypes = [pointer, pointer, real, integer, integer, pointer, pointer]
    found.jetspec_norm_back.argtypes = [pointer] * 4 + [integer, integer, pointer, pointer]
    found.jetspec_norm_back.restype = ctypes.c_int
    found.jetspec_gate.argtypes = [pointer, pointer, integer, pointer]
    found.jetspec_gate_back.argtypes = [pointer] * 3 + [integer, pointer, pointer]
    found.jetspec_read.argtypes = [pointer, integer]
    found.jetspec_read.restype = ctypes.c_float
    for name in ("pack", "product", "output", "place", "loss", "noise", "pick", "norm", "gate", "gate_back"):
        getattr(found, f"jetspec_{name}").restype = None
    return found


def native_available() -> bool:
    """Whether the compiled kernels run on this machine."""
    return library() is not None
