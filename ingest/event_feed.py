"""The tail as a stream of bytes: server-sent events, or Arrow.

Everything that reads the log runs in worker threads, one batch at a time and only when the client has
taken the one before: a slow client slows nobody else down and takes no memory. All clients that wait are
woken by one look at the watermarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson
import pyarrow as pa

from rollbook.store import Event, Store, format_cut
from rollbook.store.codec import decode, inline_bodies
from rollbook.store.errors import RollbookError
from rollbook.store.event_json import json_bytes
from rollbook.store.lane.marks import wait_for_growth
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.tail import Tail

KEEP_ALIVE_S = 15.0
MESSAGE_BYTES = 1 << 20
"""A message is sent once it has grown to about this many bytes; one event is never cut in two."""
SEARCH_S = 0.2
"""How long a thread reads on without anything wanted before it lets others have their turn."""
THREADS = 4
END_OF_ARROW_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"

T = TypeVar("T")


class Feed:
    """A tail as the bytes of server-sent events. It belongs to one worker thread at a time.

    Args:
        limit: send so many events in all, if given.
    """

    def __init__(self, tail: Tail, limit: int | None) -> None:
        self._tail, self._left = tail, limit
        self._events: Iterator[Event] = iter(())
        self._cut = tail.cut()
        self._told: dict[str, int] | None = None
        self._round_ended = False

    @property
    def done(self) -> bool:
        """Whether the limit is reached."""
        return self._left == 0

    def next(self) -> bytes | None:
        """The next message; empty where none was found in `SEARCH_S`; None at the head, once it was told."""
        if self._round_ended:
            return self._head()
        deadline = time.monotonic() + SEARCH_S
        parts: list[bytes] = []
        size = 0
        while not self.done and size < MESSAGE_BYTES:
            event = next(self._events, None)
            if event is not None:
                parts.append(json_bytes(event))
                size += len(parts[-1])
                self._cut[event.lane] = event.seq + 1
                self._left = None if self._left is None else self._left - 1
                continue
            if parts or time.monotonic() > deadline:
                break
            # What was passed over since the last event counts as told too.
            self._cut = self._tail.cut()
            if (step := self._tail.next_batch()) is None:
                if not parts:
                    return self._head()
                self._round_ended = True
                break
            reader, batch = step
            self._events = decode(batch, reader.lane, reader.body)
        return b"id: %s\ndata: [%s]\n\n" % (self._id(), b",".join(parts)) if parts else b""

    def _head(self) -> bytes | None:
        self._round_ended = False
        self._cut = self._tail.cut()
        if self._cut == self._told:
            return None
        self._told = dict(self._cut)
        return b'event: head\nid: %s\ndata: {"cut":"%s"}\n\n' % (self._id(), self._id())

    def _id(self) -> bytes:
        return format_cut(self._cut).encode()


class Growth:
    """Wakes everybody who waits for the log to grow, with one thread that watches it for all of them."""

    def __init__(self, store: Path, pool: ThreadPoolExecutor) -> None:
        self.count = 0
        """Rises whenever the log has grown."""
        self._store, self._pool = store, pool
        self._head: dict[str, int] = {}
        self._waiting = 0
        self._grown = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def after(self, seen: int, timeout_s: float) -> None:
        """Return when `count` is no longer `seen`, or after so many seconds."""
        if self.count != seen:
            return
        self._waiting += 1
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._watch())
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._grown.wait(), timeout_s)
        finally:
            self._waiting -= 1

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            try:
                head = await loop.run_in_executor(self._pool, wait_for_growth, self._store, self._head, 1.0)
            except RollbookError:
                head = {}  # whoever reads the damaged lane next says what is wrong with it
                await asyncio.sleep(1.0)
            if head != self._head or not head:
                self._head = head
                self.count += 1
                self._grown.set()
                self._grown = asyncio.Event()


class EventStreams:
    """The streams that are open now, and the threads that read for them."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.open = 0
        """Streams being sent now."""
        self.stopping: Callable[[], bool] = lambda: False
        """Whether the server is shutting down, so that endless streams end."""
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-log")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="watch-log")
        self._growth = Growth(store.path, self._watcher)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do work in a reading thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    async def messages(self, feed: Feed, follow: bool) -> AsyncIterator[bytes]:
        """The feed's messages until its end, for ever with `follow`, with signs of life between them."""
        self.open += 1
        sent = time.monotonic()
        try:
            while not (feed.done or self.stopping()):
                seen = self._growth.count
                message = await self.run(feed.next)
                if message is None:
                    if not follow:
                        return
                    await self._growth.after(seen, min(1.0, KEEP_ALIVE_S))
                elif message:
                    yield message
                    sent = time.monotonic()
                if time.monotonic() - sent >= KEEP_ALIVE_S:
                    yield b": still here\n\n"
                    sent = time.monotonic()
        except RollbookError as error:  # the status went out long ago
            body = {"error": {"message": str(error), "type": "server_error", "code": "store_failed"}}
            yield b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"
        finally:
            self.open -= 1

    async def arrow(self, tail: Tail) -> AsyncIterator[bytes]:
        """One round of the tail as an Arrow IPC stream."""
        self.open += 1
        try:
            yield TABLE_SCHEMA.serialize().to_pybytes()
            while (message := await self.run(_arrow_message, tail)) is not None:
                if message:
                    yield message
            yield END_OF_ARROW_STREAM
        finally:
            self.open -= 1

    def close(self) -> None:
        """Let the threads go."""
        self._pool.shutdown(wait=False)
        self._watcher.shutdown(wait=False)


def _arrow_message(tail: Tail) -> bytes | None:
    """The next record batch, with the lane first and requests whole; empty or None at the round's end."""
    if (step := tail.next_batch()) is None:
        return None
    reader, batch = step
    if not batch.num_rows:
        return b""
    whole = inline_bodies(batch, reader.body)
    lanes = pa.repeat(pa.scalar(reader.lane), whole.num_rows)
    table = pa.record_batch([lanes, *whole.columns], schema=TABLE_SCHEMA)
    message: bytes = table.serialize().to_pybytes()
    return message
