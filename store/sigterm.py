"""Keeps this process's SIGTERM its own."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def kept_sigterm() -> Iterator[None]:
    """Context: SIGTERM is handled afterwards as before, whatever a library makes of it meanwhile."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, before)
