"""Several processes of a service at odd moments: one stands still, ends, or comes back, and the log is as if
none had; and what a service waits for while others do not answer."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sqlalchemy import create_engine
from tests.service.test_order import MODEL, Away, Process, Stage, of, several, stage, stalled

from rollbook.service import journal as journals
from rollbook.service import order as orders
from rollbook.service import weights as sweeping
from rollbook.service.weights import Weights
from rollbook.service.worker import Worker
from rollbook.store import Event
from rollbook.store.catalog.catalog import catalog_url
from rollbook.store.errors import CatalogError, RequestError, StoreError, UnstorableError
from rollbook.store.events import (
    OperationAccepted,
    OperationEnded,
    RunOpened,
    SamplerOpened,
    WeightsCopied,
)
from rollbook.store.sealed.seal import seal_closed
from rollbook.store.upkeep.retain import retain
from rollbook.train.tenants.history import fold_operations, older_request
from rollbook.train.tenants.operations import model_id_of, request_id_of
from rollbook.train.tenants.states import _folder

__all__ = ["stage"]
pytestmark = pytest.mark.timeout(120)
on_sqlite = pytest.mark.parametrize("stage", ["sqlite"], indirect=True)
NOBODY = cast(Any, SimpleNamespace())


def folded_by(process: Process) -> list[Event]:
    """What a process folds from now on."""
    folded, add = list[Event](), process.journal._add

    def noted(events: Iterable[Event]) -> None:
        whole = list(events)
        folded.extend(whole)
        add(whole)

    process.journal._add = noted  # type: ignore[method-assign]
    return folded


class Refuses:
    """A writer that takes long to refuse one append, as too large, and then appends."""

    def __init__(self, process: Process) -> None:
        self.writer, self.lane = process.writer, process.writer.lane
        self.asked, self.word, self.refuses = threading.Event(), threading.Event(), True
        process.journal._writer = self  # type: ignore[assignment]

    def append(self, events: Any) -> Future[int]:
        """Refuse, once the word is given."""
        if not self.refuses:
            return self.writer.append(events)
        self.refuses = False
        self.asked.set()
        assert self.word.wait(60)
        failed = Future[int]()
        failed.set_exception(UnstorableError("too large"))
        return failed


@several
def test_a_place_that_is_used_again_is_read_once(stage: Stage) -> None:
    """A position that was given up and one that has its place in the lane are two, for those who wait too."""
    slow, other = stage.process(), stage.processes[0]
    folded = folded_by(other)
    refuses = Refuses(slow)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(slow.accept, 1)
        assert refuses.asked.wait(60)
        looking = pool.submit(other.journal.look)
        second = pool.submit(slow.accept, 2)
        time.sleep(0.1)
        refuses.word.set()
        with pytest.raises(UnstorableError):
            first.result(10)
        assert second.result(10)
        looking.result(10)
    assert other.fold() == of(fold_operations(stage.log).operations)
    assert len(folded) == len({(event.lane, event.seq) for event in folded}) > 0


def test_one_that_cannot_be_stored_is_refused_alone(stage: Stage) -> None:
    """Not what was sent at once with it."""
    process = stage.processes[0]
    refuses = Refuses(process)
    with ThreadPoolExecutor(4) as pool:
        large = pool.submit(process.accept, 1)
        assert refuses.asked.wait(60)
        others = [pool.submit(process.accept, number) for number in (2, 3)]
        refuses.word.set()
        with pytest.raises(UnstorableError):
            large.result(10)
        assert [other.result(10) for other in others] == [True, True]


@on_sqlite
def test_a_snapshot_of_later_is_not_gone_on_from(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that another process writes while this one begins."""
    first, read = stage.processes[0], journals.read_snapshot

    def late(log: Any) -> Any:
        snapshot = read(log)
        first.accept(1)
        first.end(1)
        first.journal._write_snapshot()
        return snapshot

    monkeypatch.setattr(journals, "read_snapshot", late)
    later = stage.process()
    folded, known = folded_by(later), request_id_of(MODEL, 1) in later.journal.operations.by_request
    assert later.fold() == first.fold()
    assert known is not any(isinstance(event.record, OperationAccepted) for event in folded)


@several
def test_whoever_comes_next_sees_what_a_killed_process_did_not_say(
    stage: Stage,
) -> None:
    """Whole frames behind its watermark count, before any position is taken: also for a process alone."""
    dying, first = stage.process("service-3"), stage.processes[0]
    mark = stage.log.path / "lanes" / "service-3" / "WATERMARK"
    before = mark.read_bytes()
    dying.accept(1, "dying")
    for process in (dying, first):
        process.die()
        process.journal.stop()
        process.journal.close()
    stage.processes.clear()
    mark.write_bytes(before)
    alone = Stage(stage.log, shared=False)
    process = alone.process("service")
    assert not process.accept(1, "dying")
    process.journal.close()
    process.writer.close()
    assert stage.process().fold() == of(fold_operations(stage.log).operations)


@pytest.mark.parametrize("stage", ["own", "sqlite"], indirect=True)
def test_retention_leaves_what_a_service_folds(stage: Stage) -> None:
    """Else none could start any more."""
    process, sampler_id = stage.processes[0], "s1:sample:0"
    opened = SamplerOpened(sampler_id, "s1", "b", None, None, 0, "d", None)
    process.journal.open([Event(opened, "service")])
    named = request_id_of(sampler_id, 1), sampler_id, 1
    wanted = OperationAccepted(*named, "sample", {}, "x", {"sequence_ids": ["q"]})
    asyncio.run(process.journal.accept(wanted, run="service"))

    def closed() -> None:
        for one in stage.processes:
            one.journal.close()
            one.writer.close()
        stage.processes.clear()

    closed()
    process = stage.process("service-0")
    process.journal.end([Event(OperationEnded(*named, {}, None, {"sequences": ["k"]}), "service")])
    closed()
    before = of(fold_operations(stage.log).operations)
    for lane in stage.log.lanes():
        assert list(seal_closed(stage.log.path, lane, stage.log.settings().seal)) is not None
    retain(stage.log, "0B")
    assert of(fold_operations(stage.log).operations) == before


@on_sqlite
def test_an_old_request_is_looked_for_in_all_lanes(stage: Stage) -> None:
    """Its end may stand in an earlier one."""
    one, other = stage.processes[0], stage.process()
    other.accept(1)
    one.journal.look()
    one.end(1)
    assert one.writer.lane < other.writer.lane
    older = older_request(stage.log, request_id_of(MODEL, 1))
    assert older is not None
    assert older.ended is not None


# What waits, and what ends ---------------------------------------------------------------------------


@on_sqlite
def test_an_end_that_waits_when_its_process_ends(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Is told so, and does not wait for ever."""
    monkeypatch.setattr(journals, "AGAIN_S", 0.5)
    process, away = stage.process(), Away()
    process.accept(1)
    with monkeypatch.context() as patch, ThreadPoolExecutor(1) as pool:
        patch.setattr("rollbook.store.catalog.database.Database.write", away)
        ending = pool.submit(process.end, 1)
        assert away.asked.wait(60)
        process.journal.stop()
        process.journal.close()
        with pytest.raises(StoreError):
            ending.result(10)
    stage.processes.remove(process)
    process.writer.close()


@on_sqlite
def test_one_that_stands_still_does_not_hold_others_up(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """They say so after a while, and can end at once; when it goes on, so do they."""
    monkeypatch.setattr(orders, "STILL_S", 1.0)
    still, other, third = stage.process(), stage.processes[0], stage.process()
    waits = stalled(still)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(still.accept, 1)
        assert waits.asked.wait(60)
        with pytest.raises(CatalogError, match="stands still"):
            pool.submit(other.journal.look).result(10)
        third.journal.stop()
        pool.submit(third.journal.close).result(10)
        waits.word.set()
        assert first.result(10)
    assert other.accept(2)
    assert other.fold() == of(fold_operations(stage.log).operations)


@on_sqlite
def test_a_fold_that_fails_writes_nothing_more(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """And one whose snapshot cannot be written goes on."""
    process = stage.processes[0]
    monkeypatch.setattr(journals, "SNAPSHOT_EVENTS", 1)
    with monkeypatch.context() as patch:
        patch.setattr(journals, "write_snapshot", _raise)
        assert process.accept(1)
    with monkeypatch.context() as patch:
        patch.setattr(process.journal._folded.__class__, "add", _raise)
        with pytest.raises(ValueError, match="odd"):
            process.accept(2)
    with pytest.raises(StoreError, match="start this process again"):
        process.accept(3)


def _raise(*_: object) -> Any:
    raise ValueError("odd")


@on_sqlite
@pytest.mark.parametrize("error", [OSError(24, "too many open files"), KeyError("x")])
def test_a_worker_outlives_what_it_cannot_look_at(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """It looks again."""
    process, looks, done = stage.process(), list[int](), threading.Event()
    process.accept(1)
    worker, look = Worker(process.journal, {}, 2), process.journal.look

    def fails() -> None:
        looks.append(1)
        if len(looks) < 3:
            raise error
        look()

    monkeypatch.setattr(process.journal, "look", fails)
    monkeypatch.setattr("rollbook.service.worker.LOOK_S", 0.05)
    monkeypatch.setattr(worker, "_do", lambda *_: done.set())
    worker.start()
    assert done.wait(60)
    worker.stop()


@on_sqlite
def test_a_worker_whose_next_operation_another_ended(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two looks; it goes on."""
    process, other = stage.processes[0], stage.process()
    process.accept(1)
    other.journal.look()
    worker = Worker(process.journal, {}, 2)
    following, worked = worker._turns.next, list[int]()

    def late(costs: Any) -> str:
        if not worked:
            other.end(1)
            process.journal.look()
        return following(costs)

    worker._turns = cast(Any, SimpleNamespace(next=late))
    monkeypatch.setattr(worker, "_do", lambda *_: worked.append(1))
    assert worker._work()
    assert not worked
    assert not worker._work()


@pytest.mark.parametrize("stage", ["own"], indirect=True)
def test_a_worker_is_stopped_whenever(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also between its look at whether it is to stop and its wait."""
    worker = Worker(stage.processes[0].journal, {}, 2)
    wait = worker._news.wait

    def late(timeout: float | None = None) -> bool:
        worker._stopped = True
        worker._news.set()
        return wait(timeout)

    monkeypatch.setattr(worker._news, "wait", late)
    worker._thread.start()
    worker._thread.join(10)
    assert not worker._thread.is_alive()


@on_sqlite
def test_what_removes_weights_outlives_the_catalog(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """It looks again, and can be stopped."""
    monkeypatch.setattr(sweeping, "SWEEP_S", 0.05)
    weights, looks = Weights(stage.processes[0].journal), list[int]()

    async def away() -> None:
        looks.append(1)
        raise CatalogError("it is out of reach")

    async def run() -> None:
        monkeypatch.setattr(weights, "sweep", away)
        weights.start()
        while len(looks) < 3:
            await asyncio.sleep(0.01)
        await weights.stop()

    asyncio.run(asyncio.wait_for(run(), 20))


# Workers ---------------------------------------------------------------------------------------------


@contextmanager
def _worker(
    process: Process, write: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """Context: does the model's next operation, whose state this writes."""

    def written(model: Any, *_: object) -> str:
        with _folder(process.journal.log.path, model.run, model.done) as (building, name):
            write(building)
        return name

    worker = Worker(process.journal, {}, 2)
    monkeypatch.setattr(worker, "_written", written)
    monkeypatch.setattr(worker, "_opening", lambda _: [])
    digests = {"adapter": "d", "optimizer": "o"}
    held = SimpleNamespace(digests=lambda *_: digests, trained="adapter")
    worker._models[MODEL], worker._behind[MODEL] = cast(Any, held), 0
    model = process.journal.operations.models[MODEL]
    assert model.next is not None
    operation = model.next
    yield lambda: worker._do(model, operation)


@on_sqlite
@pytest.mark.parametrize("ends_first", ["a", "b"])
def test_a_state_is_whole_whoever_wrote_it(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, ends_first: str
) -> None:
    """A worker stands still while it writes one, another takes the model and writes the same: the log names
    one that is whole, and nothing else is left."""
    one, other = stage.processes[0], stage.process()
    settings = {"kind": "weights", "name": "n", "overwrite": False}
    named = request_id_of(MODEL, 1), MODEL, 1
    asyncio.run(
        one.journal.accept(OperationAccepted(*named, "save_weights", {}, "d", settings), run="s1.train.0")
    )
    other.journal.look()
    reached, go = ({who: threading.Event() for who in "ab"} for _ in range(2))

    def write(who: str) -> Callable[[Path], None]:
        def parts(building: Path) -> None:
            (building / "weights").write_text(who)
            reached[who].set()
            assert go[who].wait(60)
            (building / "optimizer").write_text(who)

        return parts

    with (
        _worker(one, write("a"), monkeypatch) as first,
        _worker(other, write("b"), monkeypatch) as second,
        ThreadPoolExecutor(2) as pool,
    ):
        doing = {"a": pool.submit(first)}
        assert reached["a"].wait(60)
        doing["b"] = pool.submit(second)
        assert reached["b"].wait(60)
        for who in sorted("ab", key=lambda name: name != ends_first):
            go[who].set()
            doing[who].result(10)
    one.journal.look()
    ended = one.journal.operations.models[MODEL].operations[1].ended
    assert ended is not None
    assert (ended.error, ended.checkpoint is None) == (None, False)
    folder = stage.log.path / str(ended.checkpoint)
    assert {(folder / part).read_text() for part in ("weights", "optimizer")} == {ends_first}
    assert [*folder.parent.iterdir()] == [folder]


@on_sqlite
def test_a_run_is_opened_by_whoever_trains_it(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where its first operation was another's by then."""
    process, other = stage.processes[0], stage.process()
    process.accept(1)
    process.accept(2)
    other.journal.look()
    worker, model = Worker(process.journal, {}, 2), process.journal.operations.models[MODEL]

    def done(_: object, operation: Any) -> list[Any]:
        accepted = operation.accepted
        opening = [] if MODEL in worker._opened else [RunOpened("service", {})]
        worker._opened.add(MODEL)
        return [*opening, OperationEnded(accepted.request_id, MODEL, accepted.number, {}, None, {})]

    monkeypatch.setattr(worker, "_done", done)
    first = model.next
    assert first is not None
    other.end(1)
    worker._do(model, first)
    second = model.next
    assert second is not None
    worker._do(model, second)
    assert sum(isinstance(event.record, RunOpened) for event in stage.log.events()) == 1


@on_sqlite
def test_a_clock_that_goes_back(stage: Stage, monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves no process alive that ended."""
    one, other = (stage.process() for _ in range(2))
    assert one.order is not None
    assert other.order is not None
    assert one.order.take(["a"], 9.0) == {"a"}
    one.die()
    now = time.time
    monkeypatch.setattr(orders.time, "time", lambda: now() - 3600 + orders.ALIVE_S + 1)
    assert other.order.take(["a"], 9.0) == {"a"}


@several
def test_a_catalog_that_went_back_ends_it(stage: Stage) -> None:
    """One that was restored from a copy has fewer positions: none is taken twice."""
    process = stage.processes[0]
    process.accept(1)
    engine = create_engine(catalog_url(stage.log.path))
    with engine.begin() as connection:
        connection.exec_driver_sql("update service_head set position = position - 2")
        newer = "delete from service_batches where position > (select position from service_head)"
        connection.exec_driver_sql(newer)
    engine.dispose()
    with pytest.raises(CatalogError, match="fewer positions"):
        process.accept(2)
    assert len({*stage.ordered()}) == len(stage.ordered())


def test_a_model_is_made_or_holds_copies(stage: Stage) -> None:
    """Whichever comes first, at once too."""
    journal, model_id = stage.processes[0].journal, model_id_of("s1", 5)
    path = f"tinker://{model_id}/weights/x"
    rest = (f"tinker://{MODEL}/weights/x", MODEL, 0, 0, "c", {}, None, None)
    made = OperationAccepted(request_id_of(model_id, 0), model_id, 0, "create_model", {}, "d", {})

    async def both() -> list[Any]:
        copied = [Event(WeightsCopied(model_id, path, *rest), "r")]
        return await asyncio.gather(
            journal.write(copied, key=made.request_id, unless=lambda: model_id in journal.operations.models),
            journal.accept(made, run="r"),
            return_exceptions=True,
        )

    first, second = asyncio.run(both())
    assert first is True
    assert isinstance(second, RequestError)
    model = journal.operations.models[model_id]
    assert (model.copy_of, [*model.operations]) == (MODEL, [])
