"""Follows what other processes write into the store: the proxy learns of the trainer's syncs from the log."""

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
"""Longest wait for more events before the follower checks whether it is to stop."""
GATHER_S = 0.02
"""Pause after each read, so that a busy lane is read in batches, at a fraction of the CPU."""
RETRY_S = 1.0
"""Pause after a failed read."""


class Follower:
    """Hands over events of other lanes, on the event loop, as they become durable.

    Args:
        start: the cut that was read before.
        wanted: which events; leave out those of the proxy's own lane.
        on_events: called with the events.
        gather_s: pause after each read.
        on_error: called with the reason why the log cannot be followed, and with None once it can again.
            A damaged log ends the following; an error of the system, such as too few descriptors, is retried.
    """

    def __init__(
        self,
        store: Store,
        start: Cut,
        wanted: Filter,
        on_events: Callable[[list[Event]], None],
        on_error: Callable[[str | None], None],
        gather_s: float = GATHER_S,
    ) -> None:
        self._store, self._wanted = store, wanted
        self._start = {lane: count for lane, count in start.items() if lane not in wanted.skip_lanes}
        self._handed = self._start
        """The cut up to which events were handed over."""
        self._on_events, self._on_error = on_events, on_error
        self._gather_s = gather_s
        self._stopping = threading.Event()
        self._troubled = False
        self._thread = threading.Thread(target=self._run, name="rollbook-follow", daemon=True)

    def start(self) -> None:
        """Begin; call it on the event loop that the callbacks are to run on."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """Stop, and wait until the thread has ended."""
        self._stopping.set()
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join)

    async def caught_up(self) -> None:
        """Return once everything was handed over that is durable by now."""
        head = await asyncio.to_thread(self._store.head)
        wanted = {lane: count for lane, count in head.items() if lane not in self._wanted.skip_lanes}
        while any(self._handed.get(lane, 0) < count for lane, count in wanted.items()):
            await asyncio.sleep(GATHER_S)
        await asyncio.sleep(0)  # what was handed over last is called before this goes on

    def _run(self) -> None:
        tail: Tail | None = None
        while not self._stopping.is_set():
            try:
                tail = tail or self._store.tail(self._start, self._wanted)
                self._follow(tail)
            except RollbookError as error:
                self._call(self._on_error, f"the log cannot be followed: {error}")
                return
            except OSError as error:
                self._troubled = True
                self._call(self._on_error, f"the log cannot be followed now: {error}")
                self._stopping.wait(RETRY_S)

    def _follow(self, tail: Tail) -> None:
        """Hand over events until `stop`."""
        while not self._stopping.is_set():
            events = tail.poll()
            if self._troubled:
                self._troubled = False
                self._call(self._on_error, None)
            if events:
                self._call(self._on_events, events)
            self._handed = tail.cut()
            if events:
                self._stopping.wait(self._gather_s)
            else:
                tail.wait(WAIT_S)

    def _call(self, callback: Callable[..., None], argument: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(callback, argument)
