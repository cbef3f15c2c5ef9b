"""Who writes: a process alone, or several that agree in a catalog, which is SQLite or a real PostgreSQL."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine
from tests.fakes.processes.postgresql import DATABASE, EMPTY, Server

from rollbook import store as rb
from rollbook.service import order as orders
from rollbook.service.journal import Journal
from rollbook.service.order import SharedOrder
from rollbook.store import Event, Store
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.errors import CatalogError, RequestError, WriteFailedError
from rollbook.store.events import LaneOrdered, OperationAccepted, OperationEnded, SessionOpened
from rollbook.store.log.writer import LaneWriter
from rollbook.train.tenants.history import events_of_clients, fold_operations
from rollbook.train.tenants.operations import model_id_of, request_id_of

SEVERAL = ["sqlite", "postgresql"]
MODEL = model_id_of("s1", 0)


@dataclass(slots=True, eq=False)
class Process:
    """One of a service's processes, as far as it writes."""

    journal: Journal
    writer: LaneWriter
    order: SharedOrder | None

    def accept(self, number: int, digest: str = "d", model_id: str = MODEL, **settings: Any) -> bool:
        """Accept an operation, at once."""
        named = request_id_of(model_id, number), model_id, number
        wanted = OperationAccepted(*named, "forward_backward", {}, digest, settings)
        return asyncio.run(self.journal.accept(wanted, run="r"))

    def end(self, number: int, what: str = "done", model_id: str = MODEL) -> bool:
        """End an operation."""
        named = request_id_of(model_id, number), model_id, number
        return self.journal.end([Event(OperationEnded(*named, {"by": what}, None, {}), run="r")])

    def result(self, number: int) -> Any:
        """How an operation ended."""
        return asyncio.run(self.journal.result(request_id_of(MODEL, number), None, 5.0))

    def fold(self) -> list[tuple[str, str, bool]]:
        """Its requests in the order in which they count, their digests, and whether they ended."""
        self.journal.look()
        return of(self.journal.operations)

    def die(self) -> None:
        """End as by `kill -9`: nothing is said to the others."""
        if self.order is not None:
            self.order._stopped.set()
        self.writer.close()


def of(operations: Any) -> list[tuple[str, str, bool]]:
    """The requests of a fold, in the order in which they count."""
    by_request = operations.by_request.items()
    return [(name, o.accepted.body_digest, o.ended is not None) for name, o in by_request]


@dataclass(slots=True, eq=False)
class Stage:
    """A store, and processes that write it."""

    log: Store
    shared: bool
    processes: list[Process] = field(default_factory=list)

    def process(self, lane: str = "", trains: bool = True) -> Process:
        """Another process."""
        lane = lane or f"service-{len(self.processes)}"
        writer = self.log.writer(lane)
        order = SharedOrder(self.log, lane, writer.recovered.next_seq, trains) if self.shared else None
        self.processes.append(Process(Journal(self.log, writer, order), writer, order))
        return self.processes[-1]

    def ordered(self) -> list[int]:
        """The positions of the log, as they stand in it."""
        events = self.log.events_of([LaneOrdered.KIND])
        return [event.record.position for event in events if isinstance(event.record, LaneOrdered)]


@pytest.fixture(params=["own", *SEVERAL])
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """A store with a session and a model, over each kind of order."""
    backend = str(request.param)
    log = rb.open(tmp_path / "store", create=True)
    if backend == "postgresql":
        server: Server = request.getfixturevalue("postgres")
        url = server.url(DATABASE).render_as_string(hide_password=False)
        (log.path / "store.toml").write_text(f'[catalog]\nurl = "{url}"\n')
    stage = Stage(log, backend != "own")
    first = stage.process()
    first.journal.open([Event(SessionOpened("s1", None, {}), "service")])
    first.accept(0)
    first.end(0)
    yield stage
    for process in stage.processes:
        process.journal.stop()
        process.journal.close()
        process.writer.close()
    if backend == "postgresql":
        request.getfixturevalue("postgres").run(*EMPTY, database=DATABASE)


several = pytest.mark.parametrize("stage", SEVERAL, indirect=True)


def test_a_request_is_accepted_once(stage: Stage) -> None:
    """The same again is the same; with another body it is refused, and nothing is written."""
    first = stage.processes[0]
    assert first.accept(1)
    assert not first.accept(1)
    with pytest.raises(RequestError, match="came before, with another body"):
        first.accept(1, "e")
    assert [name for name, _, _ in first.fold()] == [request_id_of(MODEL, n) for n in (0, 1)]
    assert of(fold_operations(stage.log).operations) == first.fold()


def test_an_end_counts_once(stage: Stage) -> None:
    """The first does; who waits is told that one, whichever process it asks."""
    one, other = stage.processes[0], stage.process() if stage.shared else stage.processes[0]
    one.accept(1)
    other.journal.look()
    assert other.end(1, "first")
    assert not one.end(1, "second")
    assert one.result(1).result == {"by": "first"} == other.result(1).result


@several
def test_all_see_the_same_whoever_writes(stage: Stage) -> None:
    """Requests that are sent to all at once are accepted once, and their order is that of the log."""
    processes = [*stage.processes, stage.process(), stage.process()]
    sent = [(process, number) for number in range(1, 13) for process in processes]
    random.Random(1).shuffle(sent)
    with ThreadPoolExecutor(6) as pool:
        accepted = [*pool.map(lambda one: one[0].accept(one[1]), sent)]
    assert accepted.count(True) == 12
    with ThreadPoolExecutor(3) as pool:
        ended = [[*pool.map(lambda p, n=number: p.end(n), processes)] for number in range(1, 13)]
    assert [ends.count(True) for ends in ended] == [1] * 12
    folds = [process.fold() for process in processes]
    assert folds[0] == folds[1] == folds[2] == of(fold_operations(stage.log).operations)
    assert len(folds[0]) == 13
    events = [*stage.log.events()]
    assert sum(isinstance(e.record, OperationAccepted) for e in events) == 13
    assert sum(isinstance(e.record, OperationEnded) for e in events) == 13
    assert len({*stage.ordered()}) == len(stage.ordered())
    assert [e.event_id for e in events_of_clients(stage.log)] != [
        e.event_id for e in events if not isinstance(e.record, LaneOrdered)
    ]


@several
def test_one_that_comes_later_has_what_was_before(stage: Stage) -> None:
    """And those that were there see what it writes."""
    first = stage.processes[0]
    for number in range(1, 5):
        first.accept(number)
    later = stage.process()
    assert later.fold() == first.fold()
    later.accept(5)
    first.accept(6)
    assert later.fold() == first.fold() == of(fold_operations(stage.log).operations)


class Stalled:
    """A writer whose appends wait for a word, or fail."""

    def __init__(self, writer: LaneWriter) -> None:
        self.writer, self.lane = writer, writer.lane
        self.asked, self.word = threading.Event(), threading.Event()
        self.fails = False

    def append(self, events: Any) -> Future[int]:
        """Append once the word is given."""
        self.asked.set()
        assert self.word.wait(60)
        if not self.fails:
            return self.writer.append(events)
        failed = Future[int]()
        failed.set_exception(WriteFailedError("no space left"))
        return failed


def stalled(process: Process) -> Stalled:
    waits = Stalled(process.writer)
    process.journal._writer = waits  # type: ignore[assignment]
    return waits


@several
def test_others_wait_for_what_comes_before_theirs(stage: Stage) -> None:
    """A position is taken before its events are durable: nobody writes as if they were not there."""
    slow, other = stage.process(), stage.processes[0]
    waits = stalled(slow)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(slow.accept, 1, "slow")
        assert waits.asked.wait(60)
        second = pool.submit(other.accept, 1, "slow")
        with pytest.raises(TimeoutError):
            second.result(0.5)
        waits.word.set()
        assert (first.result(10), second.result(10)) == (True, False)
    assert other.fold() == of(fold_operations(stage.log).operations)


@several
def test_what_could_not_be_appended_leaves_its_position_empty(stage: Stage) -> None:
    """Whoever sent it is told, and it may come again, to any process."""
    full, other = stage.process(), stage.processes[0]
    waits = stalled(full)
    waits.fails = True
    waits.word.set()
    with pytest.raises(WriteFailedError):
        full.accept(1)
    assert other.accept(1)
    waits.fails = False
    assert not full.accept(1)
    assert full.accept(2)
    assert other.fold() == full.fold() == of(fold_operations(stage.log).operations)


@several
@pytest.mark.parametrize("appended", [False, True])
def test_a_process_that_ends_in_between_stops_nobody(stage: Stage, appended: bool) -> None:
    """What it appended counts, also where it had not said so; what it did not never will."""
    other, dying = stage.processes[0], stage.process()
    waits = stalled(dying)
    asking = threading.Thread(target=lambda: _swallow(dying), daemon=True)
    asking.start()
    assert waits.asked.wait(60)
    if appended:
        taken = dying.order._taken if dying.order is not None else None
        assert taken is not None
        named = request_id_of(MODEL, 1), MODEL, 1
        wanted = OperationAccepted(*named, "forward_backward", {}, "dying", {})
        heading = Event(LaneOrdered(taken.position), "service")
        dying.writer.append([heading, Event(wanted, "r")]).result()
    dying.die()
    assert other.accept(1, "dying") is not appended
    assert other.accept(2)
    assert [name for name, _, _ in other.fold()] == [request_id_of(MODEL, n) for n in (0, 1, 2)]
    assert other.fold() == of(fold_operations(stage.log).operations)
    waits.fails = True
    waits.word.set()
    asking.join(10)


def _swallow(process: Process) -> None:
    with pytest.raises((WriteFailedError, CatalogError)):
        process.accept(1, "dying")


@several
def test_its_lane_goes_on_with_another_process(stage: Stage) -> None:
    """Which leaves empty what was taken and not written, before it takes anything."""
    dying = stage.process("service-9")
    waits = stalled(dying)
    asking = threading.Thread(target=lambda: _swallow(dying), daemon=True)
    asking.start()
    assert waits.asked.wait(60)
    dying.die()
    again = stage.process("service-9")
    assert again.accept(1, "again")
    assert stage.processes[0].fold() == again.fold() == of(fold_operations(stage.log).operations)
    waits.fails = True
    waits.word.set()
    asking.join(10)


def test_a_process_alone_goes_on_behind_several(tmp_path: Path) -> None:
    """And several behind it: each finds everything that was written, in its order."""
    log, counts = rb.open(tmp_path / "store", create=True), []
    for shared in (False, True, False, True, True):
        stage = Stage(log, shared)
        for lane in ("service", "service-2")[: 1 + shared]:
            process = stage.process(lane)
            if not counts:
                process.journal.open([Event(SessionOpened("s1", None, {}), "service")])
            process.accept(len(counts))
            process.end(len(counts))
            counts.append(process.fold())
        for process in stage.processes:
            process.journal.close()
            process.writer.close()
    assert (
        counts[-1]
        == of(fold_operations(log).operations)
        == [(request_id_of(MODEL, n), "d", True) for n in range(8)]
    )


@several
def test_a_catalog_made_anew_ends_it(stage: Stage) -> None:
    """Positions that were under way are not known any more: the process says what to do."""
    engine = create_engine(catalog_url(stage.log.path))
    with engine.begin() as connection:
        connection.exec_driver_sql("delete from service_head")
    engine.dispose()
    with pytest.raises(CatalogError, match="start its processes again"):
        stage.processes[0].accept(1)
    assert stage.process().accept(1)


@several
def test_a_catalog_out_of_reach_loses_nothing(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is accepted is refused meanwhile, and comes again; what was done waits until it can be written."""
    monkeypatch.setattr("rollbook.service.journal.AGAIN_S", 0.1)
    process = stage.processes[0]
    process.accept(1)
    away, ended = Away(), Future[bool]()
    with monkeypatch.context() as patch:
        patch.setattr("rollbook.store.catalog.database.Database.write", away)
        ending = threading.Thread(target=lambda: ended.set_result(process.end(1)))
        ending.start()
        assert away.asked.wait(60)
        with pytest.raises(CatalogError, match="out of reach"):
            process.accept(2)
        assert not ended.done()
    assert ended.result(10)
    assert process.accept(2)
    assert process.fold()[1:] == [(request_id_of(MODEL, 1), "d", True), (request_id_of(MODEL, 2), "d", False)]
    assert process.fold() == of(fold_operations(stage.log).operations)


class Away:
    """A catalog that is not reached."""

    def __init__(self) -> None:
        self.asked = threading.Event()

    def __call__(self, *_: object) -> Any:
        """Raise."""
        self.asked.set()
        raise CatalogError("it is out of reach")


@several
def test_a_model_is_one_processes_as_long_as_that_is_alive(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then it is anybody's. A process that gives it back has it no more."""
    monkeypatch.setattr(orders, "ALIVE_S", 3.0)
    monkeypatch.setattr(orders, "SIGN_S", 0.2)
    one, other = (stage.process().order for _ in range(2))
    assert one is not None
    assert other is not None
    assert one.take(["a"], 9.0) == one.take(["a"], 9.0) == {"a"}
    assert other.take(["a", "b"], 9.0) == {"b"}
    other.leave(["b"])
    assert one.take(["b"], 9.0) == {"b"}
    stage.processes[1].die()
    taken = _until(lambda: other.take(["a", "b"], 9.0))
    assert taken == {"a", "b"}


def _until(take: Callable[[], set[str]]) -> set[str]:
    """What is taken once anything is."""
    for _ in range(100):
        if taken := take():
            return taken
        threading.Event().wait(0.1)
    return set()


@several
def test_models_are_left_to_processes_that_train_fewer(stage: Stage) -> None:
    """For a while; those that train none do not count, nor does what is sampled."""
    one, other, _ = (stage.process(trains=trains).order for trains in (True, True, False))
    assert one is not None
    assert other is not None
    stage.processes[0].die()
    stage.processes[0].journal.close()
    assert one.take(["a"], 0.0) == {"a"}
    assert one.take(["b"], 0.0) == set()
    assert one.take(["sampled"]) == {"sampled"}
    assert other.take(["b"], 0.0) == {"b"}
    assert one.take(["c"], 0.0) == {"c"}
    assert one.take(["d"], 9.0) == {"d"}
