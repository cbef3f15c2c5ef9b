"""Waits that others may end."""

from __future__ import annotations

import asyncio


def end_now(patience: asyncio.Timeout) -> None:
    """End what runs within a timeout, as if its time were over. It must have been entered and not left."""
    if not patience.expired():
        patience.reschedule(asyncio.get_running_loop().time())
