"""Trajectories whose agents were not heard of for too long are finished, so that nothing waits for ever."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rollbook.ingest.recording.recorder import Recorder
from rollbook.store.errors import RequestError, StoreError

EVERY_S = 5.0


async def sweep(recorder: Recorder, abandoned_s: float) -> None:
    """Finish them as aborted, for as long as this runs; 0: none."""
    while abandoned_s:
        await asyncio.sleep(min(EVERY_S, abandoned_s))
        late = time.monotonic() - abandoned_s
        for live in recorder.open_trajectories():
            if not live.running and not live.sending and live.active_s < late:
                with contextlib.suppress(RequestError, StoreError, OSError):  # the next round tries again
                    await recorder.abandon(live)
