"""The service's part of the log: what is written and folded, and who waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager

from rollbook.service.metrics import ServiceMetrics
from rollbook.store import Event, Store
from rollbook.store.errors import RequestError, RollbookError, WriteFailedError
from rollbook.store.events import Json, OperationAccepted, OperationEnded, WeightsFreed
from rollbook.store.ids import now_us
from rollbook.store.log.writer import LaneWriter
from rollbook.train.tenants.history import fold_operations, record_at
from rollbook.train.tenants.operations import Saved, not_there, run_of, saved_at

HELD_S = 25.0
"""A question for a result is held so long: clients give up after 45 s."""
AGAIN_S = 1.0
"""Between two tries to write to a log that has no room, or is broken for a while."""
MOST_RECENT = 1024
"""Results that are kept in memory; older ones are read from the log."""
_log = logging.getLogger(__name__)


def failure_of(error: Exception) -> Json:
    """What a client is told of an operation that failed: it is at fault where it was refused."""
    if isinstance(error, RequestError):
        return {"category": "user", "error": error.message}
    told = str(error) if isinstance(error, RollbookError) else type(error).__name__
    return {"category": "server", "error": told}


class Journal:
    """What clients asked and how it ended: durable before anybody is told.

    Args:
        now_us: the clock by which weights expire: microseconds since 1970.

    Attributes:
        operations: the fold of it; metrics: of what is done in this process.
        pinned: checkpoints to which something is being written that will refer to them.
    """

    def __init__(self, log: Store, writer: LaneWriter, now_us: Callable[[], int] = now_us) -> None:
        self.log, self._writer, self.now_us = log, writer, now_us
        self.operations, self.metrics, self.pinned = fold_operations(log), ServiceMetrics(), Counter[str]()
        for operation in self.operations.waiting():
            self.metrics.accepted(operation.accepted)
        self._recent = OrderedDict[str, OperationEnded]()
        self._folding = threading.Lock()
        self._arriving: dict[str, asyncio.Future[None]] = {}
        self._coming: dict[str, OperationAccepted] = {}
        self._waiting: dict[str, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Try no more to write what cannot be written."""
        self._stopped = True

    # Writing ----------------------------------------------------------------------------------------

    async def write(self, events: Sequence[Event]) -> None:
        """Write events together, and fold them."""
        self._fold(events, await asyncio.wrap_future(self._writer.append(events)))

    async def accept(self, wanted: OperationAccepted, *before: Event, run: str) -> bool:
        """Write that an operation came, behind other events; False: it did before.

        Raises:
            RequestError: as `Operations.repeated`.
        """
        async with self.alone(wanted.request_id):
            if self.operations.repeated(wanted, self._coming.values()):
                return False
            self._coming[wanted.request_id] = wanted
            try:
                await self.write([*before, Event(wanted, run=run)])
            finally:
                del self._coming[wanted.request_id]
        return True

    @asynccontextmanager
    async def alone(self, name: str) -> AsyncIterator[None]:
        """Context: who comes with the same name waits, and then finds what was written."""
        while (arriving := self._arriving.get(name)) is not None:
            await asyncio.wait([arriving])
        written = self._arriving[name] = asyncio.get_running_loop().create_future()
        try:
            yield
        finally:
            del self._arriving[name]
            written.set_result(None)

    def end(self, events: Sequence[Event]) -> None:
        """Write how an operation ended, the last of these events, and tell who waits. Not on the event loop.

        If the log cannot be written, again until it can: until then nobody is told, and what was done is not
        lost.

        Raises:
            WriteFailedError: it was stopped before it could.
        """
        while True:
            try:
                first = self._writer.append(events).result()
            except WriteFailedError as error:
                if self._stopped:
                    raise
                _log.warning("the end of an operation waits: %s", error)
                time.sleep(AGAIN_S)
            else:
                break
        ended = events[-1].record
        assert isinstance(ended, OperationEnded)
        self._recent[ended.request_id] = ended
        while len(self._recent) > MOST_RECENT:
            self._recent.popitem(last=False)
        self._fold(events, first)
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._tell, ended.request_id)

    def _fold(self, events: Sequence[Event], first: int) -> None:
        with self._folding:  # the threads that operations end in fold, too
            for at, event in enumerate(events):
                record = event.record
                if isinstance(record, OperationAccepted):
                    self.metrics.accepted(record)
                elif isinstance(record, OperationEnded):
                    self.metrics.ended(self.operations.by_request[record.request_id].accepted, record)
                self.operations.add(record, (self._writer.lane, first + at), event.time_us)

    async def free(self, freed: Sequence[WeightsFreed]) -> None:
        """Write that the files of checkpoints are removed; from now on nothing may begin to refer to them."""
        self.operations.freed.update(record.checkpoint for record in freed)
        await self.write([Event(record, run=run_of(record.model_id)) for record in freed])

    # Weights ----------------------------------------------------------------------------------------

    def saved(self, path: str, caller: str | None, owned: bool = False) -> Saved:
        """The weights that a path names now.

        Raises:
            RequestError: as `saved_at`.
        """
        return saved_at(self.operations.models, path, caller, self.now_us(), owned)

    @contextmanager
    def pin(self, checkpoint: str) -> Iterator[None]:
        """Context: the files of a checkpoint stay, until what is written in it refers to them.

        Raises:
            RequestError: 404, they do not.
        """
        if checkpoint in self.operations.freed:
            raise not_there(f"checkpoint {checkpoint!r}")
        self.pinned[checkpoint] += 1
        try:
            yield
        finally:
            self.pinned[checkpoint] -= 1

    # Reading ----------------------------------------------------------------------------------------

    async def result(
        self, request_id: str, caller: str | None, wait_s: float = HELD_S
    ) -> OperationEnded | None:
        """How an operation ended; None where it did not in time."""
        operation = self.operations.request(request_id, caller)
        if operation.ended is None:
            waiting = self._waiting.setdefault(request_id, asyncio.Event())
            if operation.ended is None:
                try:
                    await asyncio.wait_for(waiting.wait(), wait_s)
                except TimeoutError:
                    return None
        if (recent := self._recent.get(request_id)) is not None:
            return recent
        ended = await asyncio.to_thread(record_at, self.log, operation.ended_at)
        assert isinstance(ended, OperationEnded)
        return ended

    def _tell(self, request_id: str) -> None:
        if (waiting := self._waiting.pop(request_id, None)) is not None:
            waiting.set()
