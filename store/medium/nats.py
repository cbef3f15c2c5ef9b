"""Sequences in NATS JetStream: a subject each, in one stream of the store.

An entry is a message whose header has its number. It is put only if the newest message of its subject is the
one before (`Expected-Last-Subject-Sequence`), which the stream's leader decides. Three servers keep three
copies. The client's coroutines run on a loop of their own thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any, TypeVar
from urllib.parse import quote, unquote

import nats
import orjson
from nats.errors import Error as NatsError
from nats.js.api import DiscardPolicy, RawStreamMsg, RetentionPolicy, StorageType, StreamConfig
from nats.js.errors import APIError, NotFoundError

from rollbook.store.errors import MediumError
from rollbook.store.medium.loop_thread import LoopThread
from rollbook.store.medium.medium import LANES, UNITS, Wanted

NUMBER = "Rollbook-Number"
EXPECTED = "Nats-Expected-Last-Subject-Sequence"
_WRONG_LAST = 10071
"""JetStream's code of the error for another newest message than was expected."""
_UNDECIDED = (10163, 10164)
"""Codes of its errors while another message of the subject is with the copies, or the leader is new: nobody
knows yet whose the number is, and it may be that of an earlier attempt whose answer was lost."""
AGAIN_S = 0.02
TIMEOUT_S = 5.0
COPIES = 3

T = TypeVar("T")
At = tuple[int, int]
"""(number of an entry, its message's place in the stream)"""


class NatsMedium:
    """Sequences of a store in the servers of an address such as nats://host:4222,host:4222; see `Medium`.

    Credentials are read from the file that NATS_CREDS names, if it is set.

    Raises:
        MediumError: no server answers.
    """

    most_bytes = 900 << 10
    """Below a server's default limit of 1 MiB for a message, header and all."""
    pace_s = (0.005, 0.02)

    def __init__(self, address: str, store_id: str) -> None:
        self.address = address
        hosts = address.removeprefix("nats://").split(",")
        self._servers = [f"nats://{host}" for host in hosts if host]
        self._prefix, self._stream = f"rollbook.{store_id}", f"rollbook-{store_id}"
        self._newest: dict[str, At] = {}
        """Of sequences that this process puts."""
        self._reached: dict[str, At] = {}
        """Of sequences that are read, the entry that was read last."""
        self._heard: Callable[[str], None] = lambda sequence: None
        self._loop = LoopThread("nats")
        self._closed = False
        try:
            self._run(self._connect())
        except BaseException:
            self.close()
            raise

    async def _connect(self) -> None:
        options: dict[str, Any] = {}
        if creds := os.environ.get("NATS_CREDS"):
            options["user_credentials"] = creds
        self._nc = await nats.connect(
            servers=self._servers,
            name="rollbook",
            connect_timeout=2,
            max_reconnect_attempts=-1,
            reconnect_time_wait=0.2,
            allow_reconnect=True,
            error_cb=_ignored,
            **options,
        )
        self._js = self._nc.jetstream(timeout=TIMEOUT_S)
        try:
            await self._js.stream_info(self._stream)
        except NotFoundError:
            await self._js.add_stream(
                StreamConfig(
                    name=self._stream,
                    subjects=[f"{self._prefix}.>"],
                    retention=RetentionPolicy.LIMITS,
                    discard=DiscardPolicy.NEW,
                    storage=StorageType.FILE,
                    num_replicas=min(len(self._servers), COPIES),
                    allow_direct=True,
                )
            )

    def put(self, sequence: str, number: int, data: bytes) -> bool:
        """See `Medium`."""
        return self._run(self._put(sequence, number, data))

    async def _put(self, sequence: str, number: int, data: bytes) -> bool:
        clock = asyncio.get_running_loop().time
        until = clock() + TIMEOUT_S
        while True:
            try:
                return await self._put_once(sequence, number, data)
            except APIError as error:
                if error.err_code not in (_WRONG_LAST, *_UNDECIDED) or clock() > until:
                    raise
                if error.err_code != _WRONG_LAST:
                    await asyncio.sleep(AGAIN_S)

    async def _put_once(self, sequence: str, number: int, data: bytes) -> bool:
        newest = self._newest.pop(sequence, None)
        if newest is None or newest[0] != number - 1:
            newest = await self._last(sequence)
        if newest is not None and newest[0] >= number:
            return await self._read(sequence, number, 1, newest=True) == [data]
        if number > (-1 if newest is None else newest[0]) + 1:
            raise MediumError(
                f"{self.address}, {sequence}: entry {number} cannot be put before those in front of it"
            )
        headers = {NUMBER: str(number), EXPECTED: str(0 if newest is None else newest[1])}
        ack = await self._js.publish(self._subject(sequence), data, TIMEOUT_S, self._stream, headers)
        self._newest[sequence] = number, ack.seq
        return True

    def read(self, sequence: str, start: int, most: int = 1) -> list[bytes]:
        """See `Medium`."""
        return self._run(self._read(sequence, start, most, newest=True))

    def read_each(self, wanted: Sequence[Wanted], *, newest: bool = False) -> list[list[bytes]]:
        """See `Medium`."""
        return self._run(self._read_each(wanted, newest))

    async def _read_each(self, wanted: Sequence[Wanted], newest: bool) -> list[list[bytes]]:
        return list(await asyncio.gather(*(self._read(*one, newest=newest) for one in wanted)))

    async def _read(self, sequence: str, start: int, most: int, *, newest: bool = False) -> list[bytes]:
        entries = await self._read_of(sequence, start, most, leader=False)
        if newest and len(entries) < most:
            # Any copy may have answered, and one that is behind does not have what the leader has.
            last, following = await self._last(sequence), start + len(entries)
            if last is not None and last[0] >= following:
                entries += await self._read_of(sequence, following, most - len(entries), leader=True)
        return entries

    async def _read_of(self, sequence: str, start: int, most: int, *, leader: bool) -> list[bytes]:
        reached = self._reached.get(sequence)
        if reached is None or reached[0] != start - 1:
            reached = await self._before(sequence, start, leader=leader)
        if reached is None:
            return []
        entries: list[bytes] = []
        for at, data in await self._next(sequence, reached[1] + 1, most, leader=leader):
            if at[0] != start + len(entries):
                break
            self._reached[sequence] = at
            entries.append(data)
        return entries

    async def _before(self, sequence: str, number: int, *, leader: bool = True) -> At | None:
        """An entry's place less one: where its number has just been, or None where it is not there."""
        newest = await self._last(sequence)
        if newest is None or newest[0] < number:
            return None
        low, high = 1, newest[1]  # the entry's message is among these
        while low < high:
            middle = (low + high) // 2
            found = await self._next(sequence, middle, 1, leader=leader)
            if not found or found[0][0][0] >= number:
                high = min(middle, found[0][0][1]) if found else middle
            else:
                low = found[0][0][1] + 1
        return number - 1, low - 1

    async def _next(self, sequence: str, place: int, most: int, *, leader: bool) -> list[tuple[At, bytes]]:
        """The messages of a sequence from a place in the stream on, at most so many: of any copy, or of the
        leader, one by one."""
        if leader:
            return [found async for found in self._next_of_leader(sequence, place, most)]
        inbox = self._nc.new_inbox()
        listening = await self._nc.subscribe(inbox)
        found: list[tuple[At, bytes]] = []
        try:
            wanted = {
                "seq": place,
                "next_by_subj": self._subject(sequence),
                "batch": most,
                "max_bytes": 32 << 20,
            }
            await self._nc.publish(f"$JS.API.DIRECT.GET.{self._stream}", orjson.dumps(wanted), reply=inbox)
            while len(found) < most:
                message = await listening.next_msg(TIMEOUT_S)
                headers = message.headers or {}
                if "Status" in headers or NUMBER not in headers:
                    break  # there are no more
                found.append(((int(headers[NUMBER]), int(headers["Nats-Sequence"])), message.data))
        finally:
            await listening.unsubscribe()
        return found

    async def _next_of_leader(self, sequence: str, place: int, most: int) -> AsyncIterator[tuple[At, bytes]]:
        for _ in range(most):
            try:
                message = await self._js.get_msg(
                    self._stream, place, self._subject(sequence), direct=False, next=True
                )
            except NotFoundError:
                return
            at = _at(message)
            yield at, message.data or b""
            place = at[1] + 1

    def last(self, sequence: str) -> int | None:
        """See `Medium`."""
        newest = self._run(self._last(sequence))
        return None if newest is None else newest[0]

    async def _last(self, sequence: str) -> At | None:
        # Of the stream's leader: a copy that is behind would say that a number is free.
        try:
            message = await self._js.get_last_msg(self._stream, self._subject(sequence), direct=False)
        except NotFoundError:
            return None
        return _at(message)

    def first(self, sequence: str) -> int | None:
        """See `Medium`."""
        found = self._run(self._next(sequence, 1, 1, leader=True))
        return found[0][0][0] if found else None

    def sequences(self, kind: str) -> list[str]:
        """See `Medium`."""
        return self._run(self._sequences(kind))

    async def _sequences(self, kind: str) -> list[str]:
        info = await self._js.stream_info(self._stream, subjects_filter=f"{self._prefix}.{kind}.>")
        return sorted(map(self._sequence_of, info.state.subjects or {}))

    def forget(self, sequence: str, before: int) -> None:
        """See `Medium`."""
        self._run(self._forget(sequence, before))

    async def _forget(self, sequence: str, before: int) -> None:
        newest = await self._last(sequence)
        if newest is None:
            return
        kept = await self._before(sequence, min(before, newest[0]))
        if kept is not None:
            await self._js.purge_stream(self._stream, seq=kept[1] + 1, subject=self._subject(sequence))

    def listen(self, heard: Callable[[str], None]) -> None:
        """See `Medium`."""
        self._heard = heard
        self._run(self._listen())

    async def _listen(self) -> None:
        async def told(message: Any) -> None:
            self._heard(self._sequence_of(message.subject))

        for kind in (LANES, UNITS):
            await self._nc.subscribe(f"{self._prefix}.{kind}.>", cb=told)

    def close(self) -> None:
        """See `Medium`."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(Exception):
            self._run(self._nc.close())
        self._loop.close()

    def _subject(self, sequence: str) -> str:
        parts = (quote(part, safe="").replace(".", "%2E") for part in sequence.split("/"))
        return f"{self._prefix}.{'.'.join(parts)}"

    def _sequence_of(self, subject: str) -> str:
        return "/".join(unquote(part) for part in subject.removeprefix(f"{self._prefix}.").split("."))

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        try:
            return self._loop.run(work, 3 * TIMEOUT_S)
        except (NatsError, OSError, TimeoutError) as error:
            raise MediumError(
                f"{self.address}: {error or type(error).__name__}: see that the servers run, with "
                "JetStream, and that NATS_CREDS names credentials that may use the store's subjects"
            ) from error


def _at(message: RawStreamMsg) -> At:
    assert message.headers is not None
    assert message.seq is not None
    return int(message.headers[NUMBER]), message.seq


async def _ignored(_: Exception) -> None:
    """What is wrong is said where it matters: to whoever waits."""
