"""A tail as messages: server-sent events, or Arrow. Each is read by one worker thread at a time.

A feed at rest holds a cut and nothing else: it can be put aside at any time, and goes on behind the last
event that it handed out.

Feeds are sent to clients, which may be slow or stop reading. Everything that reads the log runs in worker
threads, one message at a time and only when the client has taken the one before. What a stream holds is
bounded: one message, and what reading needs, which is kept for a few streams alone; the others rest at their
cut and read on from there. A client that takes nothing is let go. All clients that wait are woken by one look
at the watermarks.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, TypeVar

import orjson
import pyarrow as pa
import pyarrow.compute as pc
from starlette.responses import Response

from rollbook.edge.memory import MemoryTrimmer, give_back
from rollbook.edge.requests import ClientGone, ClientWatch
from rollbook.store import Event, Store, format_cut
from rollbook.store.errors import LimitError, RollbookError
from rollbook.store.events.codec import decode, inline_bodies, refers
from rollbook.store.events.event_json import json_bytes
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.tail import Tail
from rollbook.store.sealed.parquet import TABLE_SCHEMA
from rollbook.store.wal.files import wait_for_growth

MESSAGE_BYTES = 256 << 10
"""A message is sent once it has grown to about this many bytes; one event is never cut in two."""
SEARCH_S = 0.2
"""How long a thread reads without finding a wanted event before it yields to other feeds."""
END_OF_ARROW_STREAM = b"\xff\xff\xff\xff\x00\x00\x00\x00"


class Feed(Protocol):
    """Messages of a tail, one after another."""

    @property
    def done(self) -> bool:
        """Whether nothing more will come."""

    def next(self) -> bytes | None:
        """The next message; empty where none came in `SEARCH_S`; None at a head that was announced."""

    @property
    def held(self) -> int:
        """Bytes of memory, about, that reading holds until it rests; 0 at the head."""

    def rest(self) -> None:
        """Let go of all that reading holds in memory."""


class SseFeed:
    """A tail as the bytes of server-sent events.

    Args:
        limit: send so many events in all, if given.
    """

    def __init__(self, tail: Tail, limit: int | None) -> None:
        self._tail, self._left = tail, limit
        self._events: Iterator[Event] = iter(())
        self._batch = 0
        self._cut = tail.cut()
        self._announced: dict[str, int] | None = None
        self._round_ended = False
        self._reading = Lock()

    @property
    def done(self) -> bool:
        """Whether the limit is reached."""
        return self._left == 0

    @property
    def held(self) -> int:
        """Bytes of memory, about, that reading holds until it rests; 0 at the head."""
        return 0 if self._tail.at_head else self._tail.held + self._batch

    def rest(self) -> None:
        """Let go of all that reading holds in memory."""
        with self._reading:
            if self._round_ended:
                self._cut = self._tail.cut()
            self._events, self._batch = iter(()), 0
            self._tail.rest(self._cut)

    def next(self) -> bytes | None:
        """The next message; empty where none came in `SEARCH_S`; None at a head that was announced."""
        with self._reading:
            return self._head() if self._round_ended else self._next()

    def _next(self) -> bytes | None:
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
            # Events that were skipped since the last one count as sent.
            self._cut = self._tail.cut()
            if (step := self._tail.next_batch()) is None:
                if not parts:
                    return self._head()
                self._round_ended = True
                break
            reader, batch = step
            self._batch = batch.nbytes
            self._events = decode(batch, reader.lane, reader.body)
        return b"id: %s\ndata: [%s]\n\n" % (self._id(), b",".join(parts)) if parts else b""

    def _head(self) -> bytes | None:
        self._round_ended = False
        self._cut = self._tail.cut()
        if self._cut == self._announced:
            return None
        self._announced = dict(self._cut)
        return b'event: head\nid: %s\ndata: {"cut":"%s"}\n\n' % (self._id(), self._id())

    def _id(self) -> bytes:
        return format_cut(self._cut).encode()


class ArrowFeed:
    """One round of a tail as an Arrow IPC stream, requests whole."""

    def __init__(self, tail: Tail) -> None:
        self._tail = tail
        self._cut = tail.cut()
        self._rows: Iterator[tuple[LaneReader, pa.RecordBatch]] = iter(())
        self._begun = self._ended = False
        self._reading = Lock()

    @property
    def done(self) -> bool:
        """Whether the stream has its end."""
        return self._ended

    @property
    def held(self) -> int:
        """Bytes of memory, about, that reading holds until it rests; 0 at the head."""
        return self._tail.held

    def rest(self) -> None:
        """Let go of all that reading holds in memory."""
        with self._reading:
            self._rows = iter(())
            self._tail.rest(self._cut)

    def next(self) -> bytes | None:
        """The next message: the schema, record batches, the end of the stream; empty where none is wanted."""
        with self._reading:
            if not self._begun:
                self._begun = True
                schema: bytes = TABLE_SCHEMA.serialize().to_pybytes()
                return schema
            step = next(self._rows, None)
            if step is not None:
                reader, rows = step
                self._cut[reader.lane] = rows.column("seq")[-1].as_py() + 1
                return _arrow_message(reader, rows)
            self._cut = self._tail.cut()
            if (batch := self._tail.next_batch()) is None:
                self._ended = True
                return END_OF_ARROW_STREAM
            self._rows = _parts(*batch)
            return b""


def _parts(reader: LaneReader, batch: pa.RecordBatch) -> Iterator[tuple[LaneReader, pa.RecordBatch]]:
    """The batch's rows in parts: those that refer to bodies by themselves, as these may be of any size."""
    start = 0
    for row in pc.indices_nonzero(refers(batch)).to_pylist():
        if row > start:
            yield reader, batch.slice(start, row - start)
        yield reader, batch.slice(row, 1)
        start = row + 1
    if start < batch.num_rows:
        yield reader, batch.slice(start)


def _arrow_message(reader: LaneReader, rows: pa.RecordBatch) -> bytes:
    """Rows as a record batch message, the lane first."""
    whole = inline_bodies(rows, reader.body)
    lanes = pa.repeat(pa.scalar(reader.lane), whole.num_rows)
    table: Any = pa.record_batch([lanes, *whole.columns], schema=TABLE_SCHEMA)
    message: bytes = table.serialize().to_pybytes()
    return message


KEEP_ALIVE_S = 15.0
THREADS = 2
WARM_BYTES = 96 << 20
"""Bytes that readers may keep in memory between messages; beyond it the least recently used are closed."""
PIECE_BYTES = 64 << 10
"""Bytes of a message that are passed to the connection at once; it buffers them until the client takes
them."""
HELD_BYTES = 64 << 20
"""Bytes of messages that wait for their clients, all together, before reading pauses."""
TAKE_S, TAKE_PRESSED_S = 120.0, 5.0
"""Longest time a client may take nothing, and the same while others wait for the room of its message."""

T = TypeVar("T")


class Growth:
    """Wakes all that wait for the log to grow, with one thread that watches it."""

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
            # Not `wait_for`, which forgets that it was cancelled where the wait ends at the same time.
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._grown.wait()
        finally:
            self._waiting -= 1

    async def _watch(self) -> None:
        loop = asyncio.get_running_loop()
        while self._waiting:
            try:
                head = await loop.run_in_executor(self._pool, wait_for_growth, self._store, self._head, 1.0)
            except RollbookError:
                head = {}  # the next reader of the damaged lane reports what is wrong
                await asyncio.sleep(1.0)
            if head != self._head or not head:
                self._head = head
                self.count += 1
                self._grown.set()
                self._grown = asyncio.Event()


class EventStreams:
    """The streams that are open now, and the threads that read for them.

    Args:
        most: streams at once; more are refused.
    """

    def __init__(self, store: Store, most: int = 64) -> None:
        self.store = store
        self.open = 0
        """Streams being sent now."""
        self.stopping: Callable[[], bool] = lambda: False
        """Whether the server is shutting down, so that endless streams end."""
        self._most = most
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="read-log")
        self._watcher = ThreadPoolExecutor(1, thread_name_prefix="watch-log")
        self._growth = Growth(store.path, self._watcher)
        self._warm: OrderedDict[Feed, int] = OrderedDict()
        self._warming = Lock()
        self._held = self._pressed = 0
        self._room = asyncio.Condition()
        self._memory = MemoryTrimmer(self._give_back)

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """Do work in a reading thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, work, *args)

    def check(self) -> None:
        """Refuse a stream beyond those that may be open at once.

        Raises:
            LimitError: 503.
        """
        if self.open >= self._most:
            text = f"{self.open} consumers read events, as many as --max-consumers allows: try again"
            raise LimitError(503, "too_many_consumers", text)

    def response(
        self, feed: Feed, media_type: str, *, follow: bool = False, headers: Mapping[str, str] | None = None
    ) -> EventStream:
        """The reply that sends the feed's messages until its end, for ever with `follow`.

        Raises:
            LimitError: 503, there are too many.
        """
        self.check()  # again: others may have come while the tail was opened
        self.open += 1
        return EventStream(self, feed, media_type, follow, dict(headers or {}))

    def ended(self, feed: Feed) -> None:
        """A stream is no longer sent."""
        self.open -= 1
        loop = asyncio.get_running_loop()
        # Not awaited: a thread may be reading for this very feed.
        loop.run_in_executor(self._pool, self._forget, feed)
        self._memory.soon()

    def _forget(self, feed: Feed) -> None:
        feed.rest()
        with self._warming:
            self._warm.pop(feed, None)

    def _give_back(self) -> None:
        with contextlib.suppress(RuntimeError):  # the threads have been let go
            for _ in range(THREADS):
                self._pool.submit(give_back)

    async def next(self, feed: Feed) -> bytes | None:
        """The feed's next message, for which there is room: see `sent`."""
        if self._held >= HELD_BYTES:
            self._pressed += 1
            try:
                async with self._room:
                    await self._room.wait_for(lambda: self._held < HELD_BYTES)
            finally:
                self._pressed -= 1
        message = await self.run(self._read, feed)
        self._held += len(message or b"")
        return message

    def _read(self, feed: Feed) -> bytes | None:
        """The feed's next message, in a thread, which then closes other readers if too much memory is
        held."""
        with self._warming:
            self._warm.pop(feed, None)  # no other thread closes it meanwhile
        message = feed.next()
        cold: list[Feed] = []
        with self._warming:
            if held := feed.held:
                self._warm[feed] = held
            while len(self._warm) > 1 and sum(self._warm.values()) > WARM_BYTES:
                cold.append(self._warm.popitem(last=False)[0])
        for other in cold:
            other.rest()
        if cold:
            pa.default_memory_pool().release_unused()
        return message

    async def sent(self, message: bytes) -> None:
        """Release the room of a message."""
        self._held -= len(message)
        async with self._room:
            self._room.notify_all()

    def patience_s(self) -> float:
        """How long a client may take nothing."""
        return TAKE_PRESSED_S if self._pressed else TAKE_S

    async def messages(self, feed: Feed, follow: bool) -> AsyncGenerator[bytes, None]:
        """The feed's messages, with keep-alive bytes between them."""
        sent = time.monotonic()
        try:
            while not (feed.done or self.stopping()):
                seen = self._growth.count
                message = await self.next(feed)
                if message is None:
                    if not follow:
                        return
                    await self._growth.after(seen, min(1.0, KEEP_ALIVE_S))
                elif message:
                    try:
                        yield message
                    finally:
                        await self.sent(message)
                    sent = time.monotonic()
                if time.monotonic() - sent >= KEEP_ALIVE_S:
                    yield b": still here\n\n"
                    sent = time.monotonic()
        except RollbookError as error:  # the status was sent long ago
            body = {"error": {"message": str(error), "type": "server_error", "code": "store_failed"}}
            yield b"event: error\ndata: " + orjson.dumps(body) + b"\n\n"

    def close(self) -> None:
        """Stop the threads."""
        self._memory.close()
        self._pool.shutdown(wait=False)
        self._watcher.shutdown(wait=False)


class EventStream(Response):
    """Sends a feed's messages to a client, as it takes them."""

    def __init__(
        self, streams: EventStreams, feed: Feed, media_type: str, follow: bool, headers: dict[str, str]
    ) -> None:
        self._streams, self._feed, self._follow = streams, feed, follow
        self.media_type, self.status_code, self.background = media_type, 200, None
        self.init_headers(headers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Send until the end, or until the client has gone or takes nothing."""
        watch = ClientWatch(receive)
        try:
            await watch.race(self._send(send))
        except ClientGone:
            pass
        finally:
            watch.close()
            self._streams.ended(self._feed)

    async def _send(self, send: Any) -> None:
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async with contextlib.aclosing(self._streams.messages(self._feed, self._follow)) as messages:
            async for message in messages:
                for at in range(0, len(message), PIECE_BYTES):
                    piece = message[at : at + PIECE_BYTES]
                    await self._taken(send({"type": "http.response.body", "body": piece, "more_body": True}))
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _taken(self, sending: Any) -> None:
        """Wait until the connection takes a piece, as long as may be.

        Raises:
            ClientGone: it does not, so its client counts as gone.
        """
        task = asyncio.ensure_future(sending)
        begun = time.monotonic()
        try:
            while not (await asyncio.wait({task}, timeout=min(TAKE_PRESSED_S, TAKE_S)))[0]:
                if time.monotonic() - begun >= self._streams.patience_s():
                    raise ClientGone
            task.result()
        finally:
            task.cancel()
