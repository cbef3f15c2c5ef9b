"""A medium that is slow, full, or loses its answers, credentials that end, and cursors that are torn: lanes
are the same on all hosts afterwards."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.storage.s3_server import ObjectStorage
from tests.store.hosts.conftest import Hosts, rows

from rollbook.store.errors import LaneLockedError, MediumError
from rollbook.store.events import Event
from rollbook.store.hosts.carrier import SHARED
from rollbook.store.hosts.join import join
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_store
from rollbook.store.wal.files import REPLICAS, lane_folder

Note = Callable[..., Event]
LEASE_S = 1.6


@pytest.mark.more_but("medium")
@pytest.mark.parametrize("ack", ["local", "medium"])
def test_a_slow_medium_keeps_the_order(
    object_hosts: Hosts, storage: ObjectStorage, note: Note, ack: str
) -> None:
    """Every request takes a third of a second; what waited goes in few chunks."""
    a, b = object_hosts.open("a", ack=ack), object_hosts.open("b", ack=ack)
    storage.before = lambda number: time.sleep(0.3)
    with a.writer("work") as writer:
        for future in [writer.append([note(str(i))]) for i in range(200)]:
            future.result(20)
    b.carrier.catch_up()
    assert [e.record.value for e in b.events()] == [str(i) for i in range(200)]
    assert rows(a) == rows(b)


@pytest.mark.more_but("credentials")
@pytest.mark.parametrize("refusal", ["507 Insufficient Storage", "403 Forbidden", "credentials"])
def test_what_a_medium_refuses_is_not_acknowledged_beyond_the_lease(
    object_hosts: Hosts, storage: ObjectStorage, note: Note, refusal: str
) -> None:
    """It is full, or knows the credentials no more: appends wait, and go on once it takes them again."""
    a = object_hosts.open("a", lease_s=LEASE_S)

    def refuse(yes: bool) -> None:
        if refusal == "credentials":
            storage.check_credentials(yes)
        else:
            storage.refused = lambda method: refusal if yes and method == "PUT" else None

    with a.writer("work") as writer:
        writer.append([note("0")]).result(10)
        refuse(True)
        try:
            time.sleep(LEASE_S)
            late = writer.append([note("1")])
            with pytest.raises(TimeoutError):
                late.result(0.5)
        finally:
            refuse(False)
        assert late.result(20) == 1
        assert writer.fenced is None
    b = object_hosts.open("b")
    assert [e.record.value for e in b.events()] == ["0", "1"]


@pytest.mark.more_but("local")
@pytest.mark.parametrize("ack", ["local", "medium"])
def test_an_answer_that_is_lost_is_no_other_writer(
    object_hosts: Hosts, storage: ObjectStorage, note: Note, ack: str
) -> None:
    """The server has stored a chunk, and says 500; asked again it says 412, of one's own bytes."""
    a, count, gate = object_hosts.open("a", ack=ack), 0, threading.Lock()

    def spoilt(method: str) -> str | None:
        nonlocal count
        with gate:
            count += method == "PUT"
            return "500 Internal Server Error" if method == "PUT" and count % 2 else None

    storage.spoilt = spoilt
    with a.claim("x", "wait"), a.writer("work") as writer:
        for i in range(20):
            assert writer.append([note(str(i))]).result(20) == i
        assert writer.fenced is None
        assert a.carrier.session.fenced is None
    assert count > 10
    storage.spoilt = lambda method: None
    b = object_hosts.open("b")
    assert rows(a) == rows(b)
    assert len(rows(b)) == 20
    with b.claim("x", "wait"), pytest.raises(LaneLockedError), a.claim("x", "wait"):
        pass


def test_who_joins_while_the_medium_fails_can_join_again(
    object_hosts: Hosts, storage: ObjectStorage, note: Note, tmp_path: Path
) -> None:
    """Nothing is left of the first try."""
    a = object_hosts.open("a")
    with a.writer("work") as writer:
        writer.append([note("0")]).result(10)
    first = len(storage.requests)
    storage.refused = lambda method: "403 Forbidden" if len(storage.requests) > first + 1 else None
    url = f"{object_hosts.settings.url}/{object_hosts.store_id}"
    with pytest.raises(MediumError):
        join(tmp_path / "late", url, object_hosts.settings)
    assert not (tmp_path / "late").exists()
    storage.refused = lambda method: None
    assert join(tmp_path / "late", url, object_hosts.settings).lanes == a.head()


def _halved(data: bytes) -> bytes:
    return data[: len(data) // 2]


def _flipped(data: bytes) -> bytes:
    return bytes([*data[:-1], data[-1] ^ 1]) if data else b"?"


@pytest.mark.parametrize("damage", [_halved, _flipped, lambda data: b""], ids=["halved", "flipped", "empty"])
@pytest.mark.parametrize("name", ["SHIPPED", "FOLLOWED", "WATERMARK", REPLICAS, SHARED, "AS_OF"])
def test_a_torn_cursor_is_made_anew(
    folder_hosts: Hosts, note: Note, name: str, damage: Callable[[bytes], bytes]
) -> None:
    """Of the host that writes a lane, and of the one that follows it."""
    a, b = folder_hosts.open("a"), folder_hosts.open("b")
    with a.writer("work") as writer:
        for i in range(20):
            writer.append([note(f"{i}" * 20)]).result(10)
    b.carrier.catch_up()
    log = a if name == "SHIPPED" else b
    path = {
        REPLICAS: log.path / REPLICAS,
        SHARED: log.path / SHARED,
        "AS_OF": log.path / "claims" / "AS_OF",
    }.get(name, lane_folder(log.path, writer.lane) / name)
    log.carrier.close()
    path.write_bytes(damage(path.read_bytes() if path.exists() else b""))
    log = folder_hosts.open("a" if name == "SHIPPED" else "b")
    with (a if log.path == b.path else log).writer("work") as writer:
        writer.append([note("again")]).result(10)
    b = folder_hosts.open("b")
    assert rows(a) == rows(b)
    assert b.head() == {writer.lane: 21}
    assert not any(found.fault for found in verify_store(b))


def test_two_sealers_of_a_host_and_one_of_another(
    object_hosts: Hosts, storage: ObjectStorage, note: Note
) -> None:
    """All at once, while the lane is written: what is sealed is the owner's, and whole on both hosts."""
    object_hosts.tables = {
        "remote": {"uri": f"s3://{storage.BUCKET}/units", "endpoint": storage.endpoint},
        "seal": {"keep_wal_bytes": 0},
    }
    a, b = object_hosts.open("a"), object_hosts.open("b")
    over, damage = threading.Event(), list[str]()

    def seal(log) -> None:
        sealer = Sealer(log)
        while not over.is_set():
            with contextlib.suppress(LaneLockedError):  # the other one is at it
                damage.extend(map(str, sealer.run_once().damage))

    sealers = [threading.Thread(target=seal, args=(log,)) for log in (a, a, b)]
    for one in sealers:
        one.start()
    with a.writer("work", AppendSettings(segment_bytes=4000)) as writer:
        for i in range(120):
            writer.append([note(f"{i}" * 50)]).result(10)
    over.set()
    for one in sealers:
        one.join()
    damage.extend(map(str, Sealer(a).run_once(10).damage))  # those may have ended before the lane did
    b.carrier.catch_up()
    assert damage == []
    assert rows(a) == rows(b)
    assert len(rows(b)) == 120
    for log in (a, b):
        assert [found.fault for found in verify_store(log)] == [None]
    assert current_units(a.path, writer.lane)
    assert set(a.head()) == {writer.lane}
