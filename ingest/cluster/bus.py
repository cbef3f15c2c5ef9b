"""Messages between the workers of a proxy, with descriptors of connections that go from one to another.

Each worker has an inbox, a pair of Unix sockets that the parent keeps open too: what is sent to a worker
that has died waits there for the one that takes its place. A message is a JSON object and perhaps bytes; many
bytes go as a file in memory.

`Asks` is the one interface by which workers of a proxy, and proxies of a run, ask each other.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import struct
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import orjson

from rollbook.ingest.trajectories.place import Place
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

INLINE_BYTES = 64 << 10
"""More bytes than that go as a file in memory: a socket's buffer takes a fifth of a megabyte."""
MESSAGE_BYTES = 128 << 10
"""Most bytes of a message, its words included."""
MOST_QUEUED = 8192
"""Messages that wait for a worker's inbox, such as while it is started again."""
MOST_FDS = 2
SHORT_S = 0.05
"""Pause where the system takes no more descriptors on their way."""
AT_ONCE = 64
"""Messages taken from the inbox before the loop gets to do something else."""
_LENGTH = struct.Struct("<I")

logger = logging.getLogger(__name__)


class AwayError(RequestError):
    """A worker cannot be reached now, or did not answer in time; it is being started again."""

    def __init__(self, number: int) -> None:
        text = f"worker {number} of this proxy does not answer now: try again"
        super().__init__(503, "worker_away", text)


@dataclass(frozen=True, slots=True)
class Inboxes:
    """The sockets of all workers; made before they are forked."""

    takes: Sequence[socket.socket]
    gives: Sequence[socket.socket]

    @classmethod
    def made(cls, workers: int) -> Inboxes:
        """Inboxes for so many workers."""
        pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(workers)]
        for end in itertools.chain(*pairs):
            end.setblocking(False)
        return cls([pair[0] for pair in pairs], [pair[1] for pair in pairs])


@dataclass(slots=True, eq=False)
class _PendingQuestion:
    """What was asked and not answered yet."""

    to: int
    words: Json
    answer: asyncio.Future[tuple[Json, bytes]]


@dataclass(slots=True, eq=False)
class Bus:
    """A worker's end of it.

    Attributes:
        on_connection: called with a connection's descriptor, what was said of it, and bytes that were read.
    """

    place: Place
    inboxes: Inboxes
    on_connection: Callable[[int, Json, bytes], None] = lambda fd, words, data: os.close(fd)
    _handlers: dict[str, Handler] = field(default_factory=dict)
    _begun: list[Callable[[int], None]] = field(default_factory=list)
    _waiting: dict[int, deque[tuple[bytes, list[int]]]] = field(default_factory=dict)
    _asked: dict[int, _PendingQuestion] = field(default_factory=dict)
    _numbers: Any = field(default_factory=lambda: itertools.count(os.getpid() << 32))
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)

    def on(self, kind: str, handler: Handler) -> Callable[[], object]:
        """Have a handler answer questions of this kind."""
        self._handlers[kind] = handler
        return lambda: self._handlers.pop(kind, None)

    def on_begun(self, callback: Callable[[int], None]) -> Callable[[], object]:
        """Call back with the number of each sibling that begins, perhaps in the place of one that died."""
        self._begun.append(callback)
        return lambda: self._begun.remove(callback)

    @property
    def siblings(self) -> list[int]:
        """The numbers of the others."""
        return [number for number in range(self.place.workers) if number != self.place.number]

    def start(self) -> None:
        """Take messages from now on, and tell the others so."""
        inbox = self.inboxes.takes[self.place.number]
        asyncio.get_running_loop().add_reader(inbox.fileno(), self._take, inbox)
        for number in self.siblings:
            self.send(number, {"is": "begun"})

    def stop(self) -> None:
        """Take no more messages."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(self.inboxes.takes[self.place.number].fileno())
        for number in self._waiting:
            loop.remove_writer(self.inboxes.gives[number].fileno())
        for task in self._tasks:
            task.cancel()

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Take messages while the context lasts."""
        self.start()
        try:
            yield
        finally:
            self.stop()

    # Asking ---------------------------------------------------------------------------------------

    async def ask(
        self, to: int, kind: str, words: Json | None = None, patience_s: float | None = 5.0
    ) -> tuple[Json, bytes]:
        """Ask a sibling and return its answer; if another process takes its place meanwhile, ask that.

        Raises:
            AwayError: it did not answer in time.
            RequestError: what it raised.
        """
        number = next(self._numbers)
        question = {"is": "ask", "kind": kind, "number": number, "words": words or {}}
        answer: asyncio.Future[tuple[Json, bytes]] = asyncio.get_running_loop().create_future()
        self._asked[number] = _PendingQuestion(to, question, answer)
        try:
            self.send(to, question)
            async with asyncio.timeout(patience_s):
                reply, data = await answer
        except TimeoutError:
            raise AwayError(to) from None
        finally:
            del self._asked[number]
        if "error" in reply:
            raise RequestError(*reply["error"])
        return reply["words"], data

    async def ask_all(self, kind: str, words: Json | None = None) -> dict[int, tuple[Json, bytes] | None]:
        """What each sibling answers, by number; None: it did not."""

        async def ask_one(number: int) -> tuple[Json, bytes] | None:
            with contextlib.suppress(RequestError):
                return await self.ask(number, kind, words, 2.0)
            return None

        answers = await asyncio.gather(*(ask_one(number) for number in self.siblings))
        return dict(zip(self.siblings, answers, strict=True))

    async def _answer(self, sender: int, question: Json) -> None:
        reply: Json = {"is": "answer", "number": question["number"]}
        data = b""
        try:
            handler = self._handlers[question["kind"]]
            words, data = await handler(sender, question["number"], question["words"])
            reply["words"] = words
        except RequestError as error:
            reply["error"] = [error.status, error.code, error.message]
        except Exception as error:
            logger.exception("rollbook: a worker's question %r failed", question["kind"])
            reply["error"] = [500, "internal_error", f"{type(error).__name__} in another worker of the proxy"]
        with contextlib.suppress(AwayError):  # who asked asks again
            self.send(sender, reply, data)

    # Sending --------------------------------------------------------------------------------------

    def send(self, to: int, words: Json, data: bytes = b"", fd: int | None = None) -> None:
        """Send a message; what the inbox has no room for goes when it has.

        Args:
            fd: a descriptor to go along, which is closed here.

        Raises:
            AwayError: too many messages wait for that worker, or the system has no descriptors left.
        """
        fds = [] if fd is None else [fd]
        waiting = self._waiting.get(to)
        try:
            if waiting is not None and len(waiting) >= MOST_QUEUED:
                raise AwayError(to)
            head = {"from": self.place.number, "fd": fd is not None, **words}
            if len(data) > INLINE_BYTES:
                try:
                    fds.append(in_memory(data))
                except OSError as error:
                    raise AwayError(to) from error
                head["file"] = len(data)
                data = b""
            header = orjson.dumps(head)
            message = _LENGTH.pack(len(header)) + header + data
            if waiting is not None:
                waiting.append((message, fds))
                return
            if self._sent(to, message, fds):
                _close(fds)
                return
        except BaseException:
            _close(fds)
            raise
        self._waiting[to] = deque([(message, fds)])
        asyncio.get_running_loop().add_writer(self.inboxes.gives[to].fileno(), self._go_on, to)

    def _sent(self, to: int, message: bytes, fds: Sequence[int]) -> bool:
        """Whether the inbox took it."""
        try:
            socket.send_fds(self.inboxes.gives[to], [message], fds)
        except BlockingIOError:
            return False
        except OSError as error:  # too many descriptors are on their way
            raise AwayError(to) from error
        return True

    def _go_on(self, to: int) -> None:
        """Send what waited."""
        waiting, loop = self._waiting[to], asyncio.get_running_loop()
        fd = self.inboxes.gives[to].fileno()
        while waiting:
            message, fds = waiting[0]
            try:
                if not self._sent(to, message, fds):
                    return
            except AwayError:
                loop.remove_writer(fd)
                loop.call_later(SHORT_S, loop.add_writer, fd, self._go_on, to)
                return
            _close(fds)
            waiting.popleft()
        del self._waiting[to]
        loop.remove_writer(fd)

    # Taking ---------------------------------------------------------------------------------------

    def _take(self, inbox: socket.socket) -> None:
        for _ in range(AT_ONCE):
            try:
                message, fds, _, _ = socket.recv_fds(inbox, MESSAGE_BYTES, MOST_FDS, socket.MSG_CMSG_CLOEXEC)
            except (BlockingIOError, InterruptedError):
                return
            size = _LENGTH.unpack_from(message)[0]
            words = orjson.loads(message[_LENGTH.size : _LENGTH.size + size])
            data = message[_LENGTH.size + size :]
            if "file" in words and len(fds) == 1 + words["fd"]:
                data = from_memory(fds.pop(), words["file"])
            self._taken(words, data, fds)

    def _taken(self, words: Json, data: bytes, fds: list[int]) -> None:
        sender = words["from"]
        match words["is"]:
            case "connection" if fds:
                self.on_connection(fds[0], words, data)
                return
            case "begun":
                for pending in [a for a in self._asked.values() if a.to == sender]:
                    with contextlib.suppress(AwayError):
                        self.send(sender, pending.words)
                for callback in self._begun:
                    callback(sender)
            case "ask":
                task = asyncio.get_running_loop().create_task(self._answer(sender, words))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            case "answer":
                question = self._asked.get(words["number"])
                if question is not None and not question.answer.done():
                    question.answer.set_result((words, data))
        _close(fds)  # of a connection that came without its descriptor, or with more than that


def _close(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def in_memory(data: bytes) -> int:
    """The descriptor of a file in memory that holds these bytes."""
    fd = os.memfd_create("rollbook", os.MFD_CLOEXEC)
    try:
        left = memoryview(data)
        while left:
            left = left[os.write(fd, left) :]
    except BaseException:
        os.close(fd)
        raise
    return fd


def from_memory(fd: int, size: int) -> bytes:
    """The bytes of such a file, which is closed."""
    with os.fdopen(fd, "rb") as file:
        file.seek(0)
        return file.read(size)


Handler = Callable[[int, int, Json], Awaitable[tuple[Json, bytes]]]
"""Answers (the asking one, what tells its question from all others, the question) with JSON and bytes."""


class Asks(Protocol):
    """One process's end of the connection to the others."""

    def on(self, kind: str, handler: Handler) -> Callable[[], object]:
        """Have a handler answer questions of this kind.

        Returns:
            What ends that.
        """

    def on_begun(self, callback: Callable[[int], None]) -> Callable[[], object]:
        """Call back with the number of each other process that begins, perhaps in the place of one that died.

        Returns:
            What ends that.
        """

    async def ask(
        self, to: int, kind: str, words: Json | None = None, patience_s: float | None = 5.0
    ) -> tuple[Json, bytes]:
        """Ask another process and return its answer; if a new one takes its place meanwhile, ask that.

        Raises:
            RequestError: 503, it did not answer in time; or what it raised.
        """

    async def ask_all(self, kind: str, words: Json | None = None) -> dict[int, tuple[Json, bytes] | None]:
        """What each other one answers, by number; None: it did not."""
