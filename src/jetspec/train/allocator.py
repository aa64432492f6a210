"""Keep freed memory in the process.

A training step frees and takes hundreds of megabytes. glibc hands blocks of that size back to the system
and gets them again as pages that have to be zeroed, which was measured to cost as much processor time as
the step itself.
"""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _MMAP_MAX = -1, -4  # parameters of mallopt(3)


def keep_freed_memory() -> bool:
    """Serve large blocks from the heap and never trim it. Returns whether the C library took the settings
    (glibc only).
    """
    if not sys.platform.startswith("linux"):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    return bool(mallopt(_MMAP_MAX, 0)) and bool(mallopt(_TRIM_THRESHOLD, 2**31 - 1))
