"""Memory that nothing uses any more goes back to the system, not only to those who gave it."""

from __future__ import annotations

import ctypes
import gc

import pyarrow as pa

_LIBC = ctypes.CDLL(None)


def give_back() -> None:
    """Give back what nothing uses: Arrow's memory of this thread, Python's young objects, the C library's."""
    gc.collect(1)
    pa.default_memory_pool().release_unused()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)
