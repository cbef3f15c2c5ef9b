"""Work whose time grows with a body is done beside the event loop where the body is large.

It has threads of its own, one less than there are cores: however much of it there is, the loop has a core,
and who waits for a thread for something small does not wait behind it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")

LARGE_BYTES = 256 * 2**10
"""Tokenizing a megabyte takes a third of a second; what is below takes less than others notice."""
_THREADS = ThreadPoolExecutor(max((os.cpu_count() or 2) - 1, 1), thread_name_prefix="large-work")


def started(work: Callable[..., object], *args: Any) -> None:
    """Have a thread do work that no request waits for."""
    _THREADS.submit(work, *args)


async def aside(work: Callable[..., T], *args: Any, **options: Any) -> T:
    """The outcome of work that a thread does meanwhile."""
    return await asyncio.get_running_loop().run_in_executor(_THREADS, partial(work, *args, **options))


async def beside(size: int, work: Callable[..., T], *args: Any) -> T:
    """The outcome of work on so many bytes, done aside where they are many."""
    return await aside(work, *args) if size > LARGE_BYTES else work(*args)
