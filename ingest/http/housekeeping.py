"""What every proxy does beside its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rollbook.ingest.http.options import ProxyOptions
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.sweep import sweep


@asynccontextmanager
async def housekeeping(recorder: Recorder, options: ProxyOptions) -> AsyncIterator[None]:
    """End what is abandoned, and read keys again as they change, while the context lasts."""
    beside = (sweep(recorder, options.abandoned_s), options.keys.follow())
    tasks = [asyncio.create_task(one) for one in beside]
    yield
    for task in tasks:
        task.cancel()
