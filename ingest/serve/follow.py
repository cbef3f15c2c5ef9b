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
from rollbook.store.log.tail import Filter, Tail

WAIT_S = 0.2
"""How long a wait for more lasts before it is looked whether to stop."""
GATHER_S = 0.02
"""What comes within this time is read together: with a busy lane that takes a fraction of the CPU."""
AGAIN_S = 1.0
"""After what could not be read, it is tried again."""


class Follower:
    """Hands over events of other lanes, on the event loop, as they become durable.

    Args:
        start: the cut that is known already.
        wanted: which events; those of the proxy's own lane are best left out.
        heard: takes them.
        failed: told why nothing comes, and None once it comes again. Damage is for good; what cannot be read
            for want of a descriptor, say, is tried again.
    """

    def __init__(
        self,
        store: Store,
        start: Cut,
        wanted: Filter,
        heard: Callable[[list[Event]], None],
        failed: Callable[[str | None], None],
    ) -> None:
        self._store, self._wanted = store, wanted
        self._start = {lane: count for lane, count in start.items() if lane not in wanted.skip_lanes}
        self._heard, self._failed = heard, failed
        self._stopping = threading.Event()
        self._troubled = False
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
        tail: Tail | None = None
        while not self._stopping.is_set():
            try:
                tail = tail or self._store.tail(self._start, self._wanted)
                self._follow(tail)
            except RollbookError as error:
                self._tell(self._failed, f"the log cannot be followed: {error}")
                return
            except OSError as error:
                self._troubled = True
                self._tell(self._failed, f"the log cannot be followed now: {error}")
                self._stopping.wait(AGAIN_S)

    def _follow(self, tail: Tail) -> None:
        """Hand over what comes, until it is to stop."""
        while not self._stopping.is_set():
            events = tail.poll()
            if self._troubled:
                self._troubled = False
                self._tell(self._failed, None)
            if events:
                self._tell(self._heard, events)
                self._stopping.wait(GATHER_S)
            else:
                tail.wait(WAIT_S)

    def _tell(self, whom: Callable[..., None], what: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(whom, what)
