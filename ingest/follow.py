"""Follows what other processes write into the store, such as the trainer: the log is how they are heard."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable

from rollbook.store import Store
from rollbook.store.cut import Cut
from rollbook.store.errors import RollbookError
from rollbook.store.events import Event
from rollbook.store.tail import Filter

WAIT_S = 0.2
"""How long a wait for more lasts before it is looked whether to stop."""
GATHER_S = 0.02
"""What comes within this time is read together: with a busy lane that takes a fraction of the CPU."""


class Follower:
    """Hands over events of other lanes, on the event loop, as they become durable.

    Args:
        start: the cut that is known already.
        wanted: which events; those of the proxy's own lane are best left out.
        heard: takes them.
        failed: told why no more will come.
    """

    def __init__(
        self,
        store: Store,
        start: Cut,
        wanted: Filter,
        heard: Callable[[list[Event]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._store, self._wanted = store, wanted
        self._start = {lane: count for lane, count in start.items() if lane not in wanted.skip_lanes}
        self._heard, self._failed = heard, failed
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="rollbook-follow", daemon=True)

    def start(self) -> None:
        """Begin; call it on the loop that is to hear."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End, and wait for the end."""
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    def _run(self) -> None:
        try:
            with self._store.tail(self._start, self._wanted) as tail:
                while not self._stopping.is_set():
                    events = tail.poll()
                    if events:
                        self._tell(self._heard, events)
                        self._stopping.wait(GATHER_S)
                    else:
                        tail.wait(WAIT_S)
        except (RollbookError, OSError) as error:
            self._tell(self._failed, f"the log cannot be followed: {error}")

    def _tell(self, whom: Callable[..., None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(whom, what)
