"""What becomes of weights that were saved: the fold of it, what holds their files, and the clock. Without a
process or a model."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rollbook import store as rb
from rollbook.service.downloads import SIGNED_S, Downloads
from rollbook.service.journal import Journal
from rollbook.service.requests import CopyWeights
from rollbook.service.weights import Weights
from rollbook.store import Event
from rollbook.store.errors import RequestError
from rollbook.store.events import (
    OperationAccepted,
    OperationEnded,
    SamplerOpened,
    SessionEnded,
    SessionOpened,
    WeightsChanged,
    WeightsCopied,
    WeightsFreed,
)
from rollbook.store.log.writer import LaneWriter
from rollbook.train.tenants.effects import start_before
from rollbook.train.tenants.held import held_checkpoints
from rollbook.train.tenants.operations import Operations, path_of, run_of, saved_at

MODEL, COPY = "s1:train:0", "s2:train:0"
HOUR = 3_600_000_000
STATE, FACTORS = path_of(MODEL, "weights", "best"), path_of(MODEL, "sampler_weights", "best")


def at(number: int) -> str:
    """Where an operation wrote."""
    return f"checkpoints/{run_of(MODEL)}/operation-{number:08d}"


def operation(number: int, what: str, **resolved: Any) -> list[Any]:
    """An operation of the model that ended."""
    named = f"{MODEL}:{number}", MODEL, number
    wrote = at(number) if what.startswith("save") else None
    settings = {"kind": "weights", "name": None} | resolved
    return [
        OperationAccepted(*named, what, {}, "d", settings),
        OperationEnded(*named, {}, None, {"adapter": f"a{number}"}, wrote),
    ]


def begun() -> list[Any]:
    """Sessions of alice's and of bob's, and a model of alice's with a state, factors and a step behind."""
    lora = {"lora": {"rank": 4, "targets": ["q_proj"]}}
    sampler = {"kind": "sampler_weights", "name": "best"}
    return [
        SessionOpened("s1", None, {}, "alice"),
        SessionOpened("s2", None, {}, "bob"),
        *operation(0, "create_model", **lora),
        *operation(1, "save_weights", name="best", ttl_seconds=3600, user_metadata={"a": "b"}),
        *operation(2, "save_weights_for_sampler", **sampler),
    ]


def changed(change: str, number: int = 1, path: str = STATE, expires_us: int | None = None) -> WeightsChanged:
    """A change of what an operation saved."""
    return WeightsChanged(
        path.removeprefix("tinker://").partition("/")[0], path, at(number), change, expires_us
    )


def copied(number: int = 1, once: str | None = None) -> WeightsCopied:
    """A copy for bob."""
    path = path_of(COPY, "weights", "best")
    what = MODEL, number, 0, at(number), {"adapter": f"a{number}"}, None, None
    return WeightsCopied(COPY, path, STATE, *what, once, "bob")


@pytest.fixture
def operations() -> Operations:
    """The fold of it, all at the beginning of 1970."""
    fold = Operations()
    for record in begun():
        fold.add(record, time_us=5)
    return fold


def is_there(operations: Operations, path: str, caller: str, now_us: int = 5, owned: bool = False) -> bool:
    """Whether somebody may have weights."""
    try:
        saved_at(operations.models, path, caller, now_us, owned)
    except RequestError:
        return False
    return True


def test_weights_are_there_from_their_save_on_for_as_long_as_was_asked(operations: Operations) -> None:
    """To the microsecond; those of which nothing was asked, for ever."""
    saved = saved_at(operations.models, STATE, "alice", 5)
    assert (saved.number, saved.saved_us, saved.expires_us, saved.metadata) == (1, 5, HOUR + 5, {"a": "b"})
    assert is_there(operations, STATE, "alice", HOUR + 4)
    assert not is_there(operations, STATE, "alice", HOUR + 5)
    assert is_there(operations, FACTORS, "alice", 1 << 62)
    operations.add(changed("kept", expires_us=9))
    assert [is_there(operations, STATE, "alice", now) for now in (8, 9)] == [True, False]
    operations.add(changed("kept"))
    assert is_there(operations, STATE, "alice", 1 << 62)


def test_published_weights_are_for_all_and_their_owners_to_change(operations: Operations) -> None:
    """Until they are not any more; another path of the same model is as it was."""
    assert not is_there(operations, STATE, "bob")
    operations.add(changed("published"))
    assert is_there(operations, STATE, "bob")
    assert not is_there(operations, STATE, "bob", owned=True)
    assert not is_there(operations, FACTORS, "bob")
    operations.add(changed("unpublished"))
    assert not is_there(operations, STATE, "bob")


@pytest.mark.parametrize("change", ["deleted", "expired", "published", "kept"])
def test_nothing_is_said_of_what_was_saved_there_later(operations: Operations, change: str) -> None:
    """What was decided of weights that were written over meanwhile is not done to the new ones."""
    for record in operation(3, "save_weights", name="best"):
        operations.add(record, time_us=7)
    before = saved_at(operations.models, STATE, "alice", 7)
    operations.add(changed(change, 1, expires_us=6))
    assert saved_at(operations.models, STATE, "alice", 7) == before
    assert before.checkpoint == at(3)
    assert not operations.gone


def test_a_copy_is_another_path_of_the_same_files(operations: Operations) -> None:
    """Of another's model, which is not trained; it stays when the first path goes."""
    operations.add(copied(once="k"), time_us=9)
    saved = saved_at(operations.models, path_of(COPY, "weights", "best"), "bob", 9)
    assert (saved.model_id, saved.checkpoint, saved.saved_us, saved.expires_us) == (MODEL, at(1), 9, None)
    assert operations.copies == {("bob", "k"): path_of(COPY, "weights", "best")}
    with pytest.raises(RequestError, match="s2:train:0 holds copies of weights") as error:
        operations.model(COPY, "bob")
    assert error.value.status == 400
    assert operations.model(COPY, "bob", trained=False).next is None
    operations.add(changed("deleted"))
    assert at(1) in held_checkpoints(operations)
    operations.add(changed("deleted", path=path_of(COPY, "weights", "best")))
    assert operations.gone == {at(1): (MODEL, 1)}


def test_what_holds_files(operations: Operations) -> None:
    """A path; a sampler until its session is over and it has sampled; a model, what it is made from and its
    newest state."""
    operations.add(SamplerOpened("s2:sample:0", "s2", "tiny", MODEL, FACTORS, 0, "a2", at(2)))
    assert held_checkpoints(operations) == {at(1), at(2)}
    operations.add(changed("deleted"))
    operations.add(changed("deleted", 2, FACTORS))
    assert held_checkpoints(operations) == {at(1), at(2)}
    asked = "s2:sample:0:0", "s2:sample:0", 0
    operations.add(OperationAccepted(*asked, "sample", {}, "d", {"sequence_ids": ["q"]}))
    operations.add(SessionEnded("s2", {}))
    assert held_checkpoints(operations) == {at(1), at(2)}
    operations.add(OperationEnded(*asked, {}, None, {"sequences": ["k"]}))
    assert held_checkpoints(operations) == {at(1)}
    for record in operation(3, "save_weights", name="next"):
        operations.add(record)
    assert held_checkpoints(operations) == {at(3)}
    made_from = {"checkpoint": at(1), "digests": {}}
    operations.add(OperationAccepted("s2:train:1:0", "s2:train:1", 0, "load_weights", {}, "d", made_from))
    assert held_checkpoints(operations) == {at(1), at(3)}


def test_no_training_starts_where_files_are_gone(operations: Operations) -> None:
    """But at a state before them."""
    for number in (3, 4):
        for record in operation(number, "save_weights", name=f"n{number}"):
            operations.add(record)
    model = operations.models[MODEL]

    def start() -> int:
        before, _ = start_before(model, 4)
        return 0 if before is None else before.accepted.number

    assert start() == 3
    operations.add(changed("deleted", 3, path_of(MODEL, "weights", "n3")))
    assert start() == 3
    operations.add(WeightsFreed(MODEL, 3, at(3), 10))
    assert (start(), operations.gone, operations.freed) == (1, {}, {at(3)})


# With a log and files -------------------------------------------------------------------------------


class Clock:
    """A time that is set."""

    us = 0

    def __call__(self) -> int:
        """That time."""
        return self.us


@pytest.fixture
def clock() -> Clock:
    """At the beginning of 1970."""
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[[], Journal]]:
    """Opens the log, in which that began, with a file in each state; again, as after a crash."""
    log = rb.open(tmp_path / "store", create=True)
    for number in (1, 2, 3):
        (log.path / at(number)).mkdir(parents=True)
        (log.path / at(number) / "file").write_text("abc")
    later = [*begun(), *operation(3, "save_weights", name="next")]
    writers: list[LaneWriter] = []
    with log.writer("service") as writer:
        writer.append([Event(record, "r", time_us=5) for record in later]).result()

    def reopened() -> Journal:
        for writer in writers:
            writer.close()
        writers[:] = [log.writer("service")]
        return Journal(log, writers[0], now_us=clock)

    yield reopened
    for writer in writers:
        writer.close()


def _folders(journal: Journal) -> list[int]:
    """Whose files are there."""
    return [number for number in (1, 2, 3) if (journal.log.path / at(number)).exists()]


def test_weights_expire_by_the_clock(opened: Callable[[], Journal], clock: Clock) -> None:
    """One event says so; their files go, and are gone for good."""
    journal = opened()
    weights = Weights(journal)
    clock.us = HOUR + 4
    asyncio.run(weights.sweep())
    assert (_folders(journal), journal.saved(STATE, "alice").number) == ([1, 2, 3], 1)
    clock.us += 1
    with pytest.raises(RequestError, match="is not there"):
        journal.saved(STATE, "alice")
    for _ in range(2):
        asyncio.run(weights.sweep())
    assert _folders(journal) == [2, 3]
    records = [e.record for e in journal.log.events() if e.kind.startswith("weights.")]
    assert [(record.KIND, record.checkpoint) for record in records] == [
        ("weights.changed", at(1)),
        ("weights.freed", at(1)),
    ]
    assert records[1].bytes == 3
    clock.us = 0
    with pytest.raises(RequestError, match="is not there"):
        opened().saved(STATE, "alice")


def test_nothing_begins_to_refer_to_files_that_go(opened: Callable[[], Journal]) -> None:
    """They stay if something began to before their removal was written; behind that nothing may."""
    journal = opened()
    weights, rest = Weights(journal), (MODEL, None, 1, "d")
    opening = [SamplerOpened(f"s1:sample:{number}", "s1", "tiny", *rest, at(2)) for number in (1, 2)]

    async def delete_in_between() -> None:
        journal.saved(FACTORS, "alice")
        await weights.delete(FACTORS, "alice")
        await journal.write([Event(opening[0], "r")], unless=lambda: not journal.check_kept(at(2)))
        await weights.sweep()

    asyncio.run(delete_in_between())
    assert _folders(journal) == [1, 2, 3]
    asyncio.run(journal.write([Event(SessionEnded("s1", {}), "r")]))
    asyncio.run(weights.sweep())
    assert _folders(journal) == [1, 3]
    with pytest.raises(RequestError, match="is not there"):
        asyncio.run(journal.write([Event(opening[1], "r")], unless=lambda: not journal.check_kept(at(2))))


def test_a_removal_that_was_interrupted_is_done_at_the_next_start(opened: Callable[[], Journal]) -> None:
    """It was written before a file was touched."""
    journal = opened()
    freed = [changed("deleted", 2, FACTORS), WeightsFreed(MODEL, 2, at(2), 3)]
    asyncio.run(journal.write([Event(record, "r") for record in freed]))
    assert _folders(journal) == [1, 2, 3]
    weights = Weights(opened())

    async def start_and_stop() -> None:
        weights.start()
        await asyncio.sleep(0)
        await weights.stop()

    asyncio.run(start_and_stop())
    assert _folders(journal) == [1, 3]


def test_a_copy_is_made_once(opened: Callable[[], Journal]) -> None:
    """Its request may be repeated, at once or after a crash; where something is, none is made."""
    journal, sent = opened(), CopyWeights(source_path=STATE, destination_project_id="p")
    weights = Weights(journal)

    async def twice() -> list[str]:
        return [*await asyncio.gather(*(weights.copy(sent, "k", "alice") for _ in range(2)))]

    [path, again] = asyncio.run(twice())
    assert path == again != STATE
    journal = opened()
    assert asyncio.run(Weights(journal).copy(sent, "k", "alice")) == path
    assert len([event for event in journal.log.events() if event.kind == "weights.copied"]) == 1
    into = CopyWeights(source_path=STATE, session_id="s1", model_seq_id=4)
    weights = Weights(journal)
    assert asyncio.run(weights.copy(into, None, "alice")) == path_of("s1:train:4", "weights", "best")
    with pytest.raises(RequestError, match="s1:train:4 is there") as error:
        asyncio.run(weights.copy(into, None, "alice"))
    assert error.value.status == 422
    with pytest.raises(RequestError, match="is not there"):
        asyncio.run(weights.copy(into, None, "bob"))


@pytest.mark.parametrize(
    "place",
    [
        {},
        {"session_id": "s1"},
        {"model_seq_id": 1},
        {"session_id": "s1", "model_seq_id": 1, "destination_project_id": "p"},
        {"session_id": "s1", "destination_project_id": "p"},
    ],
)
def test_a_copy_has_one_place(place: dict[str, Any]) -> None:
    """A number in a session, or a project."""
    with pytest.raises(ValidationError, match="give session_id and model_seq_id, or destination_project_id"):
        CopyWeights(source_path=STATE, **place)


def test_an_address_is_good_for_a_while(opened: Callable[[], Journal], clock: Clock) -> None:
    """For the file, the weights and the time that it was signed for."""
    journal = opened()
    path = path_of(MODEL, "external_weights", "out")
    ends = operation(4, "save_weights_external", kind="external_weights", name="out")
    (journal.log.path / at(4)).mkdir()
    (journal.log.path / at(4) / "file").write_text("abc")
    asyncio.run(journal.write([Event(record, "r") for record in ends]))
    downloads = Downloads(journal)
    with pytest.raises(RequestError, match="download what save_weights_external saved"):
        asyncio.run(downloads.urls(STATE, "alice", "http://h"))
    told = asyncio.run(downloads.urls(path, "alice", "http://h"))
    assert told["expires"] == "1970-01-01T01:00:00+00:00"
    [url] = told["urls"].values()
    assert url.startswith(f"http://h/downloads/{MODEL}/out/file?expires={SIGNED_S}&signature=")
    signature = url.rpartition("=")[2]
    assert downloads.file(path, "file", str(SIGNED_S), signature).read_text() == "abc"
    odd = [
        (path, "other", str(SIGNED_S), signature),
        (path, "file", str(SIGNED_S + 1), signature),
        (STATE, "file", str(SIGNED_S), signature),
        (path, "file", "soon", signature),
        (path, "file", str(SIGNED_S), "é"),
    ]
    clock.us = SIGNED_S * 1_000_000 - 1
    assert downloads.file(path, "file", str(SIGNED_S), signature)
    clock.us += 1
    odd.append((path, "file", str(SIGNED_S), signature))
    for one in odd:
        with pytest.raises(RequestError, match="this file is not there"):
            downloads.file(*one)
    with pytest.raises(RequestError, match="is not there"):
        asyncio.run(downloads.urls(path, "bob", "http://h"))
