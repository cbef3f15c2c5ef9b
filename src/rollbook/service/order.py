"""The order in which counts what a service's processes write, the same for all of them.

A process alone needs nothing for it: its lane is the order. Several agree in the store's catalog (SQLite on
one host, PostgreSQL for several). Who writes has seen everything before, takes the next position there, in a
transaction of which there is one at a time, and then appends to its own lane, behind a `lane.ordered` with
the position. Another that comes to a position waits until its events are durable; where their process ended
before, its lane says so once it is recovered, and the position stays empty. So the log has the order, and the
catalog only what is under way: which positions were taken last, and who trains which model.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from sqlalchemy import delete, func, select, text
from sqlalchemy.orm import Session

from rollbook.store import Event, Store
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.catalog.database import (
    Database,
    ServiceBatchRow,
    ServiceHeadRow,
    ServiceProcessRow,
    ServiceSeatRow,
)
from rollbook.store.cut import Cut
from rollbook.store.errors import CatalogError, LaneLockedError, StoreError
from rollbook.store.events import LaneOrdered, codec
from rollbook.store.ids import new_id
from rollbook.store.log.reader import LaneReader
from rollbook.store.log.recovery import may_hold_more, recovered_lane
from rollbook.store.log.writer import LaneWriter
from rollbook.store.wal.files import lane_folder, read_watermark
from rollbook.train.tenants.history import Folded, last_position

LANE = "service"
"""Of a process alone, and of the first of several."""
LANES = re.compile(r"service(-\d+)?")
MOST_PROCESSES = 64
RUN = "service"
"""Of events that are of no model."""
ALIVE_S, SIGN_S = 10.0, 3.0
"""A process is alive for so long behind a sign of life; and it gives one so often."""
PATIENCE_S = 2.0
"""A model is left to a process that trains fewer for so long, if nobody does its operations."""
KEPT_BATCHES = 100_000
"""Positions whose places are kept: a process that falls behind by more stops."""
CHANNEL = "rollbook_service"
_AT_ONCE = 500
"""Names that a query asks for."""
_PAUSES_S = (0.0, 0.001, 0.002, 0.005, 0.02)
STILL_S, _STOPPING_S = 30.0, 1.0
"""So long others are waited for whose events are not durable yet; and where this process is to end."""
_LOOK_S = 0.25
"""Between two looks at whether a process ended before its events were durable."""
_POLL_S = 0.05
"""Between two looks for news in a catalog that does not tell them."""
_log = logging.getLogger(__name__)
Fold = Callable[[Iterable[Event]], None]


class Order(Protocol):
    """The order of what a process and the others write, and what it has to do of what is asked of all."""

    lane: str
    """The process's own."""
    shared: bool
    """Whether there may be other processes."""

    def begin(self, start: Folded, news: Callable[[], None], heard: Callable[[str], None]) -> Cut:
        """The cut to be folded first, once.

        Args:
            start: what is folded already.
            news: called where others may have written; heard: told what was told to all.
        """

    def turn(self, fold: Fold) -> contextlib.AbstractContextManager[Callable[[int], list[Event]]]:
        """Context: all that counts so far is folded. It gives what takes the next position for so many
        events, which are then to be appended behind the events that it returns."""

    def done(self, first: int | None) -> None:
        """Note that the events of the position that was taken last were appended, from this number of the
        lane on; None: they never will be."""

    def look(self, fold: Fold) -> None:
        """Fold what others wrote since."""

    def take(self, names: Iterable[str], waited_s: float | None = None) -> set[str]:
        """Of these models, or requests to sample, those that this process does from now on.

        Args:
            waited_s: how long a model's operation waits already; None: it is no model.
        """

    def leave(self, names: Sequence[str]) -> None:
        """Do them no more."""

    def tell(self, message: str) -> None:
        """Tell all processes something, which may be lost."""

    def stop(self) -> None:
        """Wait for others no longer than needed: the process is to end."""

    def close(self) -> None:
        """Leave everything to the others."""


class OwnOrder:
    """Of a process alone.

    Args:
        writer: of its lane.
    """

    shared = False

    def __init__(self, log: Store, writer: LaneWriter) -> None:
        self._log, self._writer, self.lane = log, writer, writer.lane
        self._heard: Callable[[str], None] = lambda _: None

    def begin(self, start: Folded, news: Callable[[], None], heard: Callable[[str], None]) -> Cut:
        """The head. Behind what several processes wrote, the lane goes on at a position of its own."""
        self._heard = heard
        recover_lanes(self._log, self.lane)
        head = self._log.head()
        if last := last_position(self._log, head, start):
            self._writer.append([Event(LaneOrdered(last + 1), run=RUN)]).result()
            head = self._log.head()
        return head

    @contextlib.contextmanager
    def turn(self, fold: Fold) -> Iterator[Callable[[int], list[Event]]]:
        """As `Order.turn`."""
        yield lambda _: []

    def done(self, first: int | None) -> None:
        """Nothing was taken."""

    def look(self, fold: Fold) -> None:
        """There are no others."""

    def take(self, names: Iterable[str], waited_s: float | None = None) -> set[str]:
        """All."""
        return {*names}

    def leave(self, names: Sequence[str]) -> None:
        """Nobody else would do them."""

    def tell(self, message: str) -> None:
        """It hears itself."""
        self._heard(message)

    def stop(self) -> None:
        """Nobody is waited for."""

    def close(self) -> None:
        """There is nobody to leave anything to."""


@dataclass(frozen=True, slots=True)
class _Batch:
    """Events of a position: so many from a number of a lane on."""

    position: int
    lane: str
    seq: int
    events: int
    process: str


class SharedOrder:
    """Of several processes. Its turns, and what it reads, are of one thread.

    Args:
        lane: the process's own, which it writes.
        end: the number of the lane's next event.
        trains: whether it does operations of models.

    Raises:
        CatalogError: the catalog cannot be reached.
    """

    shared = True

    def __init__(self, log: Store, lane: str, end: int, trains: bool) -> None:
        self.lane, self.process = lane, new_id()
        self._log, self._end, self._trains = log, end, trains
        self._news: Callable[[], None] = lambda: None
        self._heard: Callable[[str], None] = lambda _: None
        self._url = catalog_url(log.path)
        self._database = Database(self._url)
        self._epoch, self._position = "", 0
        self._taken: _Batch | None = None
        self._readers: dict[str, LaneReader] = {}
        self._stopped, self._stopping = threading.Event(), False
        self._begun: Cut = {}
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._live, self._listen)]

    # The order --------------------------------------------------------------------------------------

    def begin(self, start: Folded, news: Callable[[], None], heard: Callable[[str], None]) -> Cut:
        """A cut that has all positions which were taken so far, and no more.

        Raises:
            CatalogError: the catalog cannot be reached, or another process stands still.
        """
        self._news, self._heard = news, heard
        recover_lanes(self._log, self.lane)
        # A process that needs no order may have written behind the others, or the catalog is a new one.
        last = last_position(self._log, self._log.head(), start)
        with self._database.write() as session:
            self._note_alive(session)
            if (head := session.get(ServiceHeadRow, 1)) is None:
                session.add(head := ServiceHeadRow(id=1, epoch=new_id(), position=0))
            head.position, self._epoch = max(head.position, last), head.epoch
            # What an earlier process of this lane was to append, and did not.
            lost = ServiceBatchRow.lane == self.lane, ServiceBatchRow.seq >= self._end
            session.execute(delete(ServiceBatchRow).where(*lost))
        while (newest := self._newest()) is not None:  # those before it are durable: its process saw them
            self._await(newest)
        for thread in self._threads:
            thread.start()
        return self._begun

    def _newest(self) -> _Batch | None:
        """The newest batch, if it is not durable yet; None: the head of the log is where to begin."""
        with self._database.write() as session:
            newest = select(ServiceBatchRow).order_by(ServiceBatchRow.position.desc()).limit(1)
            row = session.scalars(newest).first()
            if row is not None and not self._is_durable(batch := _batch_of(row)):
                return batch
            self._begun, self._position = self._log.head(), session.get_one(ServiceHeadRow, 1).position
        return None

    @contextlib.contextmanager
    def turn(self, fold: Fold) -> Iterator[Callable[[int], list[Event]]]:
        """As `Order.turn`.

        Raises:
            CatalogError: the catalog cannot be reached, or it cannot be told from it what others wrote.
        """
        self._taken = None
        while True:
            with self._database.write() as session:
                if self._head(session).position == self._position:
                    yield partial(self._take_position, session)
                    return
            self.look(fold)

    def _head(self, session: Session) -> ServiceHeadRow:
        head = session.get(ServiceHeadRow, 1)
        if head is None or head.epoch != self._epoch:
            raise CatalogError("the catalog was made anew while the service ran: start its processes again")
        return head

    def _take_position(self, session: Session, events: int) -> list[Event]:
        head = self._head(session)
        head.position += 1
        self._taken = _Batch(head.position, self.lane, self._end, events + 1, self.process)
        taken = self._taken
        session.add(
            ServiceBatchRow(
                position=taken.position,
                lane=self.lane,
                seq=taken.seq,
                events=taken.events,
                process=self.process,
            )
        )
        if head.position % 1000 == 0:
            old = ServiceBatchRow.position <= head.position - KEPT_BATCHES
            session.execute(delete(ServiceBatchRow).where(old))
        self._notify(session, "")
        return [Event(LaneOrdered(taken.position), run=RUN)]

    def done(self, first: int | None) -> None:
        """As `Order.done`.

        Raises:
            CatalogError: the catalog cannot be told now.
        """
        taken = self._taken
        assert taken is not None
        if first is None:
            self._give_up(taken)
        else:
            assert first == taken.seq, "a lane has one writer"
            self._end += taken.events
        self._position, self._taken = taken.position, None

    def look(self, fold: Fold) -> None:
        """As `Order.look`.

        Raises:
            CatalogError: the catalog cannot be reached, or it cannot be told from it what others wrote.
        """
        with self._database.read() as session:
            end = self._head(session).position
            if end == self._position:
                return
            if end < self._position:
                raise CatalogError("the catalog has fewer positions than it had: start its processes again")
            later = ServiceBatchRow.position > self._position
            rows = session.scalars(select(ServiceBatchRow).where(later).order_by(ServiceBatchRow.position))
            batches = [*map(_batch_of, rows)]
        if end - self._position > KEPT_BATCHES:
            raise CatalogError(f"{end - self._position} positions were missed: start this process again")
        for batch in batches:
            if batch.process == self.process:  # whose transaction was thought to have failed
                self._give_up(batch)
            elif self._await(batch):
                events = [*self._read(batch)]
                # Where it was given up, its place in the lane may be another position's by now.
                if isinstance(noted := events[0].record, LaneOrdered) and noted.position == batch.position:
                    fold(events)
            self._position = batch.position
        self._position = end

    def _is_durable(self, batch: _Batch) -> bool:
        return read_watermark(lane_folder(self._log.path, batch.lane)).next_seq >= batch.seq + batch.events

    def _await(self, batch: _Batch) -> bool:
        """Wait until the events of a position are durable; False: they never will be.

        Raises:
            CatalogError: whoever took it stands still.
        """
        tries, begun = 0, time.monotonic()
        look_at = begun + _LOOK_S
        while not self._is_durable(batch):
            if (now := time.monotonic()) > begun + (_STOPPING_S if self._stopping else STILL_S):
                text = f"a process that writes lane {batch.lane!r} stands still, and others wait for it"
                raise CatalogError(f"{text}: have it go on, or end it")
            if now > look_at:
                look_at = now + _LOOK_S
                with self._database.read() as session:
                    if session.get(ServiceBatchRow, batch.position) is None:
                        return False
                if recovers(self._log, batch.lane):  # its process has ended
                    break
            time.sleep(_PAUSES_S[min(tries, len(_PAUSES_S) - 1)])
            tries += 1
        if self._is_durable(batch):
            return True
        self._give_up(batch)
        return False

    def _give_up(self, batch: _Batch) -> None:
        """Leave a position empty."""
        mine = ServiceBatchRow.position == batch.position, ServiceBatchRow.process == batch.process
        with self._database.write() as session:
            session.execute(delete(ServiceBatchRow).where(*mine))

    def _read(self, batch: _Batch) -> Iterator[Event]:
        reader = self._readers.get(batch.lane)
        if reader is None or reader.next_seq != batch.seq:
            reader = self._readers[batch.lane] = LaneReader(self._log.path, batch.lane, batch.seq)
        for rows in reader.poll(batch.seq + batch.events):
            yield from codec.decode(rows, batch.lane, reader.body)

    # Who does what ----------------------------------------------------------------------------------

    def take(self, names: Iterable[str], waited_s: float | None = None) -> set[str]:
        """As `Order.take`. What a process did that is not alive any more is anybody's.

        Raises:
            CatalogError: the catalog cannot be reached.
        """
        wanted, trains = [*names], waited_s is not None
        with self._database.read() as session:
            held = self._held(session, wanted)
        mine = {name for name in wanted if held.get(name) == self.process}
        if len(held) == len(wanted):
            return mine
        with self._database.write() as session:
            self._note_alive(session)
            held = self._held(session, wanted)
            free = [name for name in wanted if name not in held]
            if trains and (waited_s or 0.0) < PATIENCE_S:
                free = free[: self._share(session)]
            for name in free:
                session.merge(ServiceSeatRow(name=name, process=self.process, trains=trains))
        return mine | {*free}

    def _held(self, session: Session, names: Sequence[str]) -> dict[str, str]:
        """Those of these that a process has which is alive, and which one."""
        held, alive = dict[str, str](), self._alive(session)
        for at in range(0, len(names), _AT_ONCE):
            some = ServiceSeatRow.name.in_(names[at : at + _AT_ONCE])
            seats = session.scalars(select(ServiceSeatRow).where(some))
            held |= {seat.name: seat.process for seat in seats if seat.process in alive}
        return held

    def _share(self, session: Session) -> int:
        """How many models more this process may have before another has fewer."""
        counts = select(ServiceSeatRow.process, func.count()).where(ServiceSeatRow.trains)
        models = {row[0]: row[1] for row in session.execute(counts.group_by(ServiceSeatRow.process))}
        trainers = session.scalars(select(ServiceProcessRow.id).where(ServiceProcessRow.trains))
        alive = self._alive(session)
        fewest = min((models.get(process, 0) for process in trainers if process in alive), default=0)
        return max(fewest + 1 - models.get(self.process, 0), 0)

    def leave(self, names: Sequence[str]) -> None:
        """As `Order.leave`.

        Raises:
            CatalogError: the catalog cannot be reached.
        """
        mine = ServiceSeatRow.name.in_(names), ServiceSeatRow.process == self.process
        with self._database.write() as session:
            session.execute(delete(ServiceSeatRow).where(*mine))

    def _alive(self, session: Session) -> set[str]:
        now = self._now(session)  # a sign of the far future is of a clock that went back
        alive = ServiceProcessRow.until.between(now, now + 2 * ALIVE_S)
        return {*session.scalars(select(ServiceProcessRow.id).where(alive))}

    def _note_alive(self, session: Session) -> None:
        now = self._now(session)
        session.execute(delete(ServiceProcessRow).where(ServiceProcessRow.until < now - 10 * ALIVE_S))
        session.merge(ServiceProcessRow(id=self.process, until=now + ALIVE_S, trains=self._trains))

    def _now(self, session: Session) -> float:
        """Seconds since 1970, by the clock that all processes share."""
        if not self._tells:
            return time.time()
        return float(session.scalar(text("select extract(epoch from clock_timestamp())")) or 0.0)

    # News -------------------------------------------------------------------------------------------

    @property
    def _tells(self) -> bool:
        """Whether the catalog tells its processes of news."""
        return self._url.get_backend_name() == "postgresql"

    def tell(self, message: str) -> None:
        """As `Order.tell`. A catalog in SQLite tells nothing to others."""
        self._heard(message)
        if self._tells:
            with self._database.write() as session:
                self._notify(session, message)

    def _notify(self, session: Session, message: str) -> None:
        if self._tells:
            session.execute(
                text("select pg_notify(:channel, :message)"), {"channel": CHANNEL, "message": message}
            )

    def _live(self) -> None:
        """Give signs of life."""
        while not self._stopped.wait(SIGN_S):
            with contextlib.suppress(CatalogError), self._database.write() as session:
                self._note_alive(session)

    def _listen(self) -> None:
        """Hear of news."""
        while not self._stopped.is_set():
            if not self._tells:
                self._stopped.wait(_POLL_S)
                self._news()
                continue
            try:
                self._hear()
            except Exception as error:  # of the driver: whatever it is, it is tried again
                _log.warning("the catalog tells no news for now: %s", error)
                self._stopped.wait(1.0)
                self._news()

    def _hear(self) -> None:
        with self._database.listening(CHANNEL) as notifies:
            while not self._stopped.is_set():
                for message in notifies(1.0):
                    if message:
                        self._heard(message)
                    else:
                        self._news()
                self._news()

    def stop(self) -> None:
        """As `Order.stop`."""
        self._stopping = True

    def close(self) -> None:
        """As `Order.close`."""
        self._stopped.set()
        with contextlib.suppress(StoreError), self._database.write() as session:
            session.execute(delete(ServiceProcessRow).where(ServiceProcessRow.id == self.process))
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._database.close()


def _batch_of(row: Any) -> _Batch:
    return _Batch(row.position, row.lane, row.seq, row.events, row.process)


def recover_lanes(log: Store, own: str) -> None:
    """Have what processes that were killed wrote, and did not say so, count from now on."""
    for lane in log.lanes():
        if LANES.fullmatch(lane) and lane != own and may_hold_more(log.path, lane):
            recovers(log, lane)


def recovers(log: Store, lane: str) -> bool:
    """Recover a lane, unless a process writes it: then False."""
    with contextlib.suppress(LaneLockedError), recovered_lane(log.path, lane):
        _log.info("lane %s is recovered", lane)
        return True
    return False
