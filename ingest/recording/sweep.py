"""Finishes trajectories that had no traffic for too long, so that nothing waits for them for ever."""

from __future__ import annotations

import asyncio
import contextlib
import time

from rollbook.ingest.recording.recorder import Recorder
from rollbook.store.errors import RequestError, StoreError

EVERY_S = 5.0


async def sweep(recorder: Recorder, abandoned_s: float) -> None:
    """Finish them as aborted, until cancelled; 0: never."""
    while abandoned_s:
        await asyncio.sleep(min(EVERY_S, abandoned_s))
        late = time.monotonic() - abandoned_s
        for live in recorder.open_trajectories():
            if not live.running and not live.sending and live.active_s < late:
                with contextlib.suppress(RequestError, StoreError, OSError):  # retried in the next round
                    await recorder.abandon(live)
