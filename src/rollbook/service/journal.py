"""The service's part of the log: what is written and folded, and who waits for it."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import SimpleQueue
from typing import TypeVar

from rollbook.service.metrics import ServiceMetrics
from rollbook.service.order import Order, OwnOrder
from rollbook.store import Event, Store
from rollbook.store.errors import (
    CatalogError,
    RequestError,
    RollbookError,
    StoreError,
    UnstorableError,
    WriteFailedError,
)
from rollbook.store.events import Json, OperationAccepted, OperationEnded, WeightsFreed
from rollbook.store.ids import now_us
from rollbook.store.log.writer import LaneWriter
from rollbook.train.tenants.history import fold_operations, older_request, record_at
from rollbook.train.tenants.operations import Operation, Saved, not_there, run_of, saved_at
from rollbook.train.tenants.snapshot import read_snapshot, write_snapshot

HELD_S = 25.0
"""A question for a result is held so long: clients give up after 45 s."""
AGAIN_S = 1.0
"""Between two tries to write to a log that has no room, or is broken for a while."""
SNAPSHOT_EVENTS, SNAPSHOT_LEAST = 200_000, 1000
"""Events after which the fold is written as a snapshot; and at the end, if there were so many."""
MOST_RECENT = 1024
"""Results that are kept in memory; older ones are read from the log."""
_log = logging.getLogger(__name__)
T = TypeVar("T")


def failure_of(error: Exception) -> Json:
    """What a client is told of an operation that failed: it is at fault where it was refused."""
    if isinstance(error, RequestError):
        return {"category": "user", "error": error.message}
    told = str(error) if isinstance(error, RollbookError) else type(error).__name__
    return {"category": "server", "error": told}


ALONE = "alone"
"""Key of what is written together with nothing else."""


@dataclass(slots=True, eq=False)
class _Entry:
    """Events to be written together; without any, what others wrote is folded.

    Attributes:
        admitted: asked once everything before them is folded, with the operations that are written at once
            with them; False, or what it raises: they are not written.
        key: of what is written at once only one has it; "" is none.
        written: whether they were.
    """

    events: Sequence[Event]
    admitted: Callable[[Sequence[OperationAccepted]], bool]
    key: str
    written: Future[bool] = field(default_factory=Future)


class Journal:
    """What clients asked and how it ended: durable before anybody is told. A thread of its own writes.

    Args:
        order: of what this and other processes write; None: there are no others.
        now_us: the clock by which weights expire: microseconds since 1970.

    Attributes:
        operations: the fold of it; metrics: of what is done in this process.
        order: who does what, too.
    """

    def __init__(
        self, log: Store, writer: LaneWriter, order: Order | None = None, now_us: Callable[[], int] = now_us
    ) -> None:
        self.log, self._writer, self.now_us = log, writer, now_us
        self.order = order or OwnOrder(log, writer)
        self.metrics = ServiceMetrics()
        self._entries: SimpleQueue[_Entry | None] = SimpleQueue()
        self._watching: list[Callable[[], None]] = []
        self._hearing: list[Callable[[str], None]] = []
        self._looking = False
        self._gate, self._closed = threading.Lock(), False
        self._broken: Exception | None = None
        snapshot = read_snapshot(log)  # before the cut, which then holds it
        cut = self.order.begin(snapshot, self._come, self._hear)
        self._folded = fold_operations(log, cut, snapshot)
        self.operations, self._since = self._folded.operations, 0
        for operation in self.operations.waiting():
            self.metrics.accepted(operation.accepted)
        self._recent = OrderedDict[str, OperationEnded]()
        self._waiting: dict[str, asyncio.Event] = {}
        self._reading = asyncio.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopped = False
        self._thread = threading.Thread(target=self._run, name="journal", daemon=True)
        self._thread.start()

    def start(self) -> None:
        """Begin, on the running event loop."""
        self._loop = asyncio.get_running_loop()

    def stop(self) -> None:
        """Try no more to write what cannot be written."""
        self._stopped = True
        self.order.stop()

    def close(self) -> None:
        """End behind what is to be written, and leave the rest to other processes."""
        with self._gate:
            self._closed = True
            self._entries.put(None)
        self._thread.join()
        if self._since >= SNAPSHOT_LEAST:
            self._write_snapshot()
        self.order.close()

    def watch(self, watching: Callable[[], None]) -> None:
        """Have this called, on any thread, where something was folded."""
        self._watching.append(watching)

    def hear(self, hearing: Callable[[str], None]) -> None:
        """Have this called, on any thread, with what any process tells all."""
        self._hearing.append(hearing)

    # Writing ----------------------------------------------------------------------------------------

    async def write(
        self, events: Sequence[Event], *, key: str = "", unless: Callable[[], bool] = lambda: False
    ) -> bool:
        """Write events together, and fold them.

        Args:
            unless: asked once everything before them is folded: then they are not written; it may raise.
            key: of those that exclude each other.
        """
        return await asyncio.wrap_future(self._put(events, lambda _: not unless(), key))

    async def accept(
        self, wanted: OperationAccepted, *before: Event, run: str, needs: str | None = None
    ) -> bool:
        """Write that an operation came, behind other events; False: it did before.

        Args:
            needs: the checkpoint that it refers to.

        Raises:
            RequestError: as `Operations.repeated`; 404, the files of the checkpoint are gone.
        """

        def admitted(coming: Sequence[OperationAccepted]) -> bool:
            if self.operations.repeated(wanted, coming):
                return False
            self.check_kept(needs)
            return True

        events = [*before, Event(wanted, run=run)]
        return await asyncio.wrap_future(self._put(events, admitted, wanted.request_id))

    def open(self, events: Sequence[Event]) -> None:
        """Write events before anything else. Not on the event loop."""
        self._put(events, lambda _: True).result()

    async def current(self) -> None:
        """Fold what other processes wrote until now."""
        if self.order.shared:
            await self.write([])

    async def ask(self, question: Callable[[], T]) -> T:
        """The answer to a question about the fold, while nothing is folded."""
        answers = list[T]()

        def answer() -> bool:
            answers.append(question())
            return False

        await self.write([], unless=answer)
        return answers[0]

    def look(self) -> None:
        """As `current`. Not on the event loop.

        Raises:
            CatalogError: it cannot be known.
        """
        if self.order.shared:
            self._put([], lambda _: True).result()

    async def take(self, names: Sequence[str]) -> set[str]:
        """As `Order.take`, of requests to sample; none while the catalog is out of reach."""
        if not self.order.shared:
            return {*names}
        try:
            return await asyncio.to_thread(self.order.take, names)
        except CatalogError as error:
            _log.warning("what is to be sampled waits: %s", error)
            return set()

    def end(self, events: Sequence[Event]) -> bool:
        """Write how an operation ended, the last of these events, and tell who waits; False: another process
        did so before. Not on the event loop.

        If the log cannot be written, again until it can: until then nobody is told, and what was done is not
        lost.

        Raises:
            StoreError, OSError: it was stopped before it could.
            UnstorableError: there is no room for it in an event.
        """
        ended = events[-1].record
        assert isinstance(ended, OperationEnded)
        operation = self.operations.by_request[ended.request_id]
        while True:
            try:
                return self._put(events, lambda _: operation.ended is None, ended.request_id).result()
            except UnstorableError:
                raise
            except (StoreError, OSError) as error:
                if self._stopped:
                    raise
                _log.warning("the end of an operation waits: %s", error)
                time.sleep(AGAIN_S)

    async def free(self, freed: Sequence[WeightsFreed], unless: Callable[[], bool]) -> bool:
        """Write that the files of checkpoints are removed; from then on nothing may begin to refer to them.

        Args:
            unless: asked while nothing can begin to: whether something does.
        """
        events = [Event(record, run=run_of(record.model_id)) for record in freed]
        return await self.write(events, key=ALONE, unless=unless)

    def _put(
        self, events: Sequence[Event], admitted: Callable[[Sequence[OperationAccepted]], bool], key: str = ""
    ) -> Future[bool]:
        entry = _Entry(events, admitted, key)
        entry.written.set_running_or_notify_cancel()
        with self._gate:
            if self._closed:
                entry.written.set_exception(WriteFailedError("the service is ending"))
            else:
                self._entries.put(entry)
        return entry.written

    def _come(self) -> None:
        """Others may have written."""
        if not self._looking:
            self._looking = True
            self._put([], lambda _: True)

    def _hear(self, message: str) -> None:
        for hearing in self._hearing:
            hearing(message)

    def _run(self) -> None:
        entries, ending = deque[_Entry](), False
        while not ending or entries:
            while not ending and (not entries or not self._entries.empty()):
                if (entry := self._entries.get()) is None:
                    ending = True
                else:
                    entries.append(entry)
            self._write(next_batch(entries))

    def _write(self, batch: Sequence[_Entry]) -> None:
        """Write what is admitted of these; the others are told why they are not."""
        self._looking = False
        try:
            admitted = self._settled(batch)
        except Exception as error:  # also a bug: nobody waits for ever
            left = [entry for entry in batch if not entry.written.done()]
            alone = isinstance(error, UnstorableError) and len(batch) > 1
            for entry in left:
                if alone:  # which of them it is, each is told by itself
                    self._write([entry])
                else:
                    entry.written.set_exception(error)
            return
        for entry in admitted:
            entry.written.set_result(True)

    def _settled(self, batch: Sequence[_Entry]) -> Sequence[_Entry]:
        """Those of these that were admitted; their events are written and folded."""
        if self._broken is not None:
            raise WriteFailedError(f"start this process again: {self._broken!r}")
        if any(entry.events for entry in batch):
            return self._written(batch)
        self.order.look(self._fold)
        return [entry for entry in batch if _is_admitted(entry, ())]

    def _written(self, batch: Sequence[_Entry]) -> Sequence[_Entry]:
        """Those of these that were admitted, written and folded."""
        admitted, coming = list[_Entry](), list[OperationAccepted]()
        with self.order.turn(self._fold) as place:
            for entry in batch:
                if _is_admitted(entry, coming):
                    admitted.append(entry)
                    coming += [e.record for e in entry.events if isinstance(e.record, OperationAccepted)]
            events = [event for entry in admitted for event in entry.events]
            heading = place(len(events)) if events else []
        if events:
            try:
                first = self._writer.append([*heading, *events]).result()
            except StoreError:
                with suppress(CatalogError):  # it is given up later, as soon as others are looked for
                    self.order.done(None)
                raise
            self.order.done(first)
            lane, numbered = self._writer.lane, enumerate([*heading, *events], first)
            self._fold(replace(event, lane=lane, seq=seq) for seq, event in numbered)
        return admitted

    def _fold(self, events: Iterable[Event]) -> None:
        try:
            self._add(events)
        except Exception as error:  # a bug: nothing may be written by a fold that is not whole
            _log.exception("the log cannot be folded")
            self._broken = error
            raise
        for watching in self._watching:
            watching()
        if self._since >= SNAPSHOT_EVENTS:
            self._write_snapshot()

    def _add(self, events: Iterable[Event]) -> None:
        for event in events:
            record = event.record
            if isinstance(record, OperationAccepted):
                self.metrics.accepted(record)
            elif isinstance(record, OperationEnded):
                self.metrics.ended(self.operations.by_request[record.request_id].accepted, record)
            self._folded.add(event)
            self._since += 1
            if isinstance(record, OperationEnded):
                self._keep(record)

    def _write_snapshot(self) -> None:
        """Write the fold, from which the next start goes on; it may fail, for it is in the log."""
        self._since = 0
        try:
            write_snapshot(self.log, self._folded)
        except Exception as error:
            _log.warning("the next start folds more of the log: %s", error)

    def _keep(self, ended: OperationEnded) -> None:
        """Keep a result for those who wait for it, and tell them."""
        self._recent[ended.request_id] = ended
        while len(self._recent) > MOST_RECENT:
            self._recent.popitem(last=False)
        if self._loop is not None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._tell, ended.request_id)

    # Weights ----------------------------------------------------------------------------------------

    def saved(self, path: str, caller: str | None, owned: bool = False) -> Saved:
        """The weights that a path names now.

        Raises:
            RequestError: as `saved_at`.
        """
        return saved_at(self.operations.models, path, caller, self.now_us(), owned)

    def check_kept(self, checkpoint: str | None) -> bool:
        """Check that the files of a checkpoint stay, if there is one.

        Raises:
            RequestError: 404, they do not.
        """
        if checkpoint in self.operations.freed:
            raise not_there(f"checkpoint {checkpoint!r}")
        return True

    # Reading ----------------------------------------------------------------------------------------

    async def request(self, request_id: str, caller: str | None) -> Operation:
        """An operation of a caller's own; one that ended long ago is looked for in the log.

        Raises:
            RequestError: 404, there is none.
        """
        operations, sampler_id = self.operations, request_id.rpartition(":")[0]
        if sampler_id in operations.older:
            operations.sampler(sampler_id, caller)
            if (older := await self.older(request_id)) is not None:
                return older
        return operations.request(request_id, caller)

    async def older(self, request_id: str) -> Operation | None:
        """A request to sample that ended so long ago that the log alone knows it; None: it is none such."""
        model_id, _, number = request_id.rpartition(":")
        if not number.isdecimal() or not self.operations.is_older(model_id, int(number)):
            return None
        async with self._reading:
            return await asyncio.to_thread(older_request, self.log, request_id)

    async def result(
        self, request_id: str, caller: str | None, wait_s: float = HELD_S
    ) -> OperationEnded | None:
        """How an operation ended; None where it did not in time."""
        operation = await self.request(request_id, caller)
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


def next_batch(entries: deque[_Entry]) -> list[_Entry]:
    """Take what may be written at once: of each key the first, the others stay."""
    batch, keys, left = list[_Entry](), set[str](), list[_Entry]()
    for entry in entries:
        alone = entry.key == ALONE or ALONE in keys
        if batch and (alone or (entry.key and entry.key in keys)):
            left.append(entry)
        else:
            batch.append(entry)
        keys.add(entry.key)
    entries.clear()
    entries.extend(left)
    return batch


def _is_admitted(entry: _Entry, coming: Sequence[OperationAccepted]) -> bool:
    try:
        admitted = entry.admitted(coming)
    except Exception as error:  # why it is not: whoever asked is told
        entry.written.set_exception(error)
        return False
    if not admitted:
        entry.written.set_result(False)
    return admitted
