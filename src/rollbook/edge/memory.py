"""Returns unused memory to the operating system, not only to the allocators."""

from __future__ import annotations

import asyncio
import ctypes
from collections.abc import Callable

import pyarrow as pa

GIVE_BACK_S = 1.0
"""Delay before memory is returned: much is freed at once, and returning it takes a few milliseconds."""
_LIBC = ctypes.CDLL(None)


def give_back() -> None:
    """Give back unused memory: that of Arrow's pool for this thread, and that of the C library."""
    pa.default_memory_pool().release_unused()
    if hasattr(_LIBC, "malloc_trim"):
        _LIBC.malloc_trim(0)


class MemoryTrimmer:
    """Returns memory shortly after being told that it is worthwhile, once however often it was told.

    Args:
        work: gives it back, without blocking the loop.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work = work
        self._timer: asyncio.TimerHandle | None = None

    def soon(self) -> None:
        """Note that much memory was freed."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(GIVE_BACK_S, self._now)

    def close(self) -> None:
        """Cancel the pending return."""
        if self._timer is not None:
            self._timer.cancel()

    def _now(self) -> None:
        self._timer = None
        self._work()
