"""The one way to read a request's body: within its limit, at a minimum pace, and within a memory
budget.

Budget is taken as bytes arrive: a declared length alone reserves none. The first bytes of each
body need none: they are in memory anyhow. When the budget is used up, further bytes wait in the
connection, and a slow sender that holds budget loses it to those who wait. One body at a time
may exceed the budget, the one that has waited longest: so a burst of large bodies, all begun and
none complete, still finishes.

Bodies of requests and of an upstream's replies are decoded by their content encoding, within
bounds.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import ClientDisconnect, Request

from rollbook.edge.bounds import LARGE_BYTES, run_in_thread, started
from rollbook.edge.memory import MemoryTrimmer, give_back
from rollbook.store.errors import EndingError, LimitError, RequestError

FREE_BYTES = 32 << 10
"""Bytes of each body that take no room: the connection buffers as much anyway."""
PART_BYTES = 32 << 10
"""Bytes reserved for one read: as much as the connection reads at once."""
PACE = 8 << 10
"""Bytes a second that a body must come at on average, beyond the time that a sender may be silent."""
PRESSED_S, PRESSED_PACE = 2.0, 256 << 10
"""Silence (seconds) and pace (bytes/s) that a sender is allowed while others wait for room."""
WAIT_S = 120.0
"""Longest wait for room."""
SHARE = 0.75
"""The share of the room that one address may take."""


@dataclass(slots=True, eq=False)
class _Upload:
    """A body that is being read, or was read and is being processed.

    Attributes:
        came: bytes so far.
        held: bytes of room that it takes.
        spent_s: for how long the sender was waited for.
        since: when the present wait for the sender began, or None.
        patience: of that wait.
        turn: resolved when it may read on, while it waits for room.
    """

    client: str
    came: int = 0
    held: int = 0
    spent_s: float = 0.0
    since: float | None = None
    patience: asyncio.Timeout | None = None
    turn: asyncio.Future[None] | None = None

    def slow(self, now: float) -> bool:
        """Whether it holds room that others wait for while its sender is slow."""
        if self.since is None or not self.held:
            return False
        spent = self.spent_s + now - self.since
        return now - self.since >= PRESSED_S or (spent >= PRESSED_S and self.came < spent * PRESSED_PACE)


class BodyBudget:
    """A memory budget for bodies: a body that finds none left waits, so a burst of large ones is
    read in turn.

    Args:
        most: bytes of one body.
        total: bytes of all bodies that are read and answered at once.
        silence_s: longest silence of a client in the middle of its body.
        free: bytes of each body that need no budget.
    """

    def __init__(
        self, most: int = 64 << 20, total: int = 512 << 20, silence_s: float = 30.0, free: int = FREE_BYTES
    ) -> None:
        self._most, self._free = most, free
        self._silence_s = silence_s
        self._room = max(total - most, 0)  # the rest is for `_beyond`
        self._taken = 0
        self._held: Counter[str] = Counter()
        self._reading: set[_Upload] = set()
        self._waiting: dict[_Upload, None] = {}
        self._beyond: _Upload | None = None
        self._press: asyncio.TimerHandle | None = None
        self._stopped = False
        self._memory = MemoryTrimmer(partial(started, give_back))

    @contextlib.asynccontextmanager
    async def body(self, request: Request, most: int | None = None) -> AsyncIterator[bytes]:
        """The request's body as it was sent, and room for it while the context lasts.

        Args:
            most: bytes, if less than what all bodies may have.

        Raises:
            LimitError: 408, it comes too slowly; 413, it is too large; 503, there is no room for it.
        """
        bound = self._bound(most)
        upload = self._begun(request, bound)
        try:
            yield await self._read(request, upload, bound)
        finally:
            self._leave(upload)

    @contextlib.asynccontextmanager
    async def plain(self, request: Request, most: int | None = None) -> AsyncIterator[bytes]:
        """The request's body without its content encoding, and room for it while the context lasts.

        Raises:
            LimitError: as `body`.
            RequestError: 415, its encoding is not supported; 400, it is not encoded as stated.
        """
        bound = self._bound(most)
        upload = self._begun(request, bound)
        try:
            yield await self._decoded(upload, request, await self._read(request, upload, bound), bound)
        finally:
            self._leave(upload)

    async def decoded(self, raw: bytes, encoding: str, *, whole: bool = True) -> bytes:
        """Bytes without their content encoding, within a body's limit.

        Raises:
            LimitError, RequestError: as `content_encoding.decoded`.
        """
        if not codings(encoding):
            return raw
        return await run_in_thread(decoded, raw, encoding, self._most, whole=whole)

    async def _decoded(self, upload: _Upload, request: Request, raw: bytes, most: int) -> bytes:
        encoding = request.headers.get("content-encoding", "")
        if not codings(encoding):
            return raw
        plain = await run_in_thread(decoded, raw, encoding, most)
        self._take(upload, len(plain))
        return plain

    # Reading -------------------------------------------------------------------------------------

    def _begun(self, request: Request, bound: int) -> _Upload:
        declared = request.headers.get("content-length", "")
        if declared.isascii() and declared.isdigit() and (len(declared) > 18 or int(declared) > bound):
            raise _too_large(bound)
        upload = _Upload(request.client.host if request.client else "")
        self._reading.add(upload)
        return upload

    def _bound(self, most: int | None) -> int:
        return self._most if most is None else min(most, self._most)

    async def _read(self, request: Request, upload: _Upload, bound: int) -> bytes:
        parts: list[bytes] = []
        more = True
        while more:
            await self._turn(upload)
            part, more = await self._part(request, upload)
            parts.append(part)
            upload.came += len(part)
            if upload.came > bound:
                raise _too_large(bound)
            self._take(upload, max(upload.came - self._free, 0) - upload.held)
        self._reading.discard(upload)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    async def _part(self, request: Request, upload: _Upload) -> tuple[bytes, bool]:
        """(the next bytes, whether more will come)"""
        upload.since = time.monotonic()
        patience = self._silence_s + min(upload.came / PACE - upload.spent_s, 0.0)
        try:
            async with asyncio.timeout(max(patience, 0.001)) as upload.patience:
                message = await request.receive()
        except TimeoutError:
            spent = upload.spent_s + time.monotonic() - upload.since
            text = (
                f"{upload.came} bytes of the body came in {spent:.0f} s: send it without pauses, or send less"
            )
            raise LimitError(408, "body_too_slow", text) from None
        finally:
            upload.spent_s += time.monotonic() - upload.since
            upload.since = upload.patience = None
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        return message.get("body", b""), message.get("more_body", False)

    # Room -------------------------------------------------------------------------------------

    async def _turn(self, upload: _Upload) -> None:
        """Wait until the upload may go on.

        Raises:
            LimitError: 503, there was none for a long time.
            EndingError: there is none now, and the proxy ends.
        """
        if upload.came < self._free or self._may(upload, self._taken):
            return
        upload.turn = asyncio.get_running_loop().create_future()
        self._waiting[upload] = None
        self._wake()  # it may be the one that goes on beyond the room
        self._press_later()
        try:
            if self._stopped:
                raise EndingError
            async with asyncio.timeout(WAIT_S):
                await upload.turn
        except TimeoutError:
            text = "the bodies of other requests take all room: try again, or send less at once"
            raise LimitError(503, "no_room_for_body", text) from None
        finally:
            self._waiting.pop(upload, None)
            upload.turn = None

    def stop(self) -> None:
        """Let nobody wait for room any more: present and later waiters are refused."""
        self._stopped = True
        for upload in self._waiting:
            if upload.turn is not None and not upload.turn.done():
                upload.turn.set_exception(EndingError())

    def _may(self, upload: _Upload, used: int) -> bool:
        if upload is self._beyond:
            return True
        theirs = self._held.get(upload.client, 0)
        return used + PART_BYTES <= self._room and theirs + PART_BYTES <= self._room * SHARE

    def _take(self, upload: _Upload, size: int) -> None:
        """Take room, or give it back where `size` is negative."""
        upload.held += size
        if upload is not self._beyond:
            self._count(upload.client, size)
        if size < 0:
            self._wake()

    def _count(self, client: str, size: int) -> None:
        self._taken += size
        self._held[client] += size
        if not self._held[client]:
            del self._held[client]

    def _leave(self, upload: _Upload) -> None:
        self._reading.discard(upload)
        self._take(upload, -upload.held)
        if upload is self._beyond:
            self._beyond = None
            self._wake()
        if upload.came > LARGE_BYTES:
            self._memory.soon()

    def _wake(self) -> None:
        """Wake the uploads for which there is room, in the order in which they began to wait."""
        used = self._taken
        for upload in [*self._waiting]:
            if self._beyond is not None and used + PART_BYTES > self._room:
                return
            if upload.turn is None or upload.turn.done():
                continue
            if not self._may(upload, used):
                if self._beyond is not None:
                    continue  # only its own address has taken its share
                self._count(upload.client, -upload.held)
                self._beyond = upload
            used += PART_BYTES
            upload.turn.set_result(None)

    def _press_later(self) -> None:
        if self._press is None and self._waiting:
            self._press = asyncio.get_running_loop().call_later(PRESSED_S / 4, self._press_now)

    def _press_now(self) -> None:
        """End the slow uploads whose room others wait for."""
        self._press = None
        if self._waiting:
            now = time.monotonic()
            for upload in self._reading:
                if upload.patience is not None and upload.slow(now):
                    upload.patience.reschedule(asyncio.get_running_loop().time())
        self._press_later()


class PacedBodies:
    """ASGI middleware: the same pace for bodies that routes read by themselves.

    Args:
        prefix: of the routes.
        silence_s: longest silence of a client in the middle of its body.
    """

    def __init__(self, app: Any, prefix: str, silence_s: float) -> None:
        self._app, self._prefix, self._silence_s = app, prefix, silence_s

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Have the application answer; a client that is silent too long counts as gone."""
        if scope["type"] != "http" or not scope["path"].startswith(self._prefix):
            await self._app(scope, receive, send)
            return
        more = True

        async def paced() -> Any:
            nonlocal more
            if not more:
                return await receive()
            try:
                async with asyncio.timeout(self._silence_s):
                    message = await receive()
            except TimeoutError:
                return {"type": "http.disconnect"}
            more = message.get("more_body", False)
            return message

        await self._app(scope, paced, send)


def _too_large(most: int) -> LimitError:
    text = f"the body is larger than {most} bytes, which --max-body-mb allows"
    return LimitError(413, "body_too_large", text)


MOST_CODINGS = 2
MOST_MEMBERS = 64
"""A gzip file may be several, one behind another; each costs a copy of what follows."""
_GZIP, _ZLIB, _RAW = 31, 15, -15


def codings(encoding: str) -> list[str]:
    """The codings that a `Content-Encoding` names, without those that change nothing."""
    names = [name.strip().lower() for name in encoding.split(",")]
    return [name for name in names if name not in ("", "identity")]


def decoded(body: bytes, encoding: str, limit: int, *, whole: bool = True) -> bytes:
    """The body without its content encoding. It blocks for a while: never call it on an event loop.

    Args:
        encoding: the header `Content-Encoding`; gzip, deflate and identity are supported.
        limit: most bytes it may have on the way and at the end.
        whole: whether a truncated body is refused; otherwise the part that came is returned.

    Raises:
        LimitError: 413, it is larger, or was encoded too often.
        RequestError: 415, its encoding is not supported; 400, it is not encoded as stated.
    """
    names = codings(encoding)
    if len(names) > MOST_CODINGS:
        text = f"the body is encoded {len(names)} times: encode it at most {MOST_CODINGS} times"
        raise LimitError(413, "encoded_too_often", text)
    for name in reversed(names):
        if name in ("gzip", "x-gzip"):
            body = _inflated(body, _GZIP, limit, whole=whole)
        elif name == "deflate":
            body = _inflated(body, _ZLIB if _has_zlib_header(body) else _RAW, limit, whole=whole)
        else:
            text = f"the body's content-encoding is {name[:100]!r}: send gzip, deflate or none"
            raise RequestError(415, "unsupported_encoding", text)
    return body


def _has_zlib_header(body: bytes) -> bool:
    """Whether it begins with the zlib header that HTTP asks for; some senders leave it out."""
    return len(body) < 2 or (body[0] & 15 == 8 and (body[0] << 8 | body[1]) % 31 == 0)


def _inflated(body: bytes, wbits: int, limit: int, *, whole: bool) -> bytes:
    parts: list[bytes] = []
    size = members = 0
    while body or not members:
        inflater = zlib.decompressobj(wbits)
        try:
            parts.append(inflater.decompress(body, limit - size + 1))
        except zlib.error as error:
            raise RequestError(400, "bad_encoding", f"the body is not encoded as it says: {error}") from error
        size, members = size + len(parts[-1]), members + 1
        if size > limit or members > MOST_MEMBERS:
            text = f"the body is larger than {limit} bytes without its content-encoding"
            text = text if size > limit else f"the body is made of more than {MOST_MEMBERS} gzip files"
            raise LimitError(413, "body_too_large", f"{text}: send less at once")
        if not inflater.eof:
            if whole:
                text = "the body ends before its content-encoding does: send all of it"
                raise RequestError(400, "bad_encoding", text)
            break
        body = inflater.unused_data if wbits == _GZIP else b""
    return b"".join(parts)
