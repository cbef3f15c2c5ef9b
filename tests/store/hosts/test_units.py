"""Sealed units of other hosts' lanes: in object storage, where everybody reads them; erased and dropped for
all."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING
from unittest.mock import Mock

import orjson
import pyarrow.parquet as pq
import pytest
from tests.store.hosts.conftest import Hosts, rows

from rollbook import store as rb
from rollbook.store.events import Event, LabelAdded, TrajectoryFinished, TrajectoryOpened
from rollbook.store.hosts.replica import opened_replica
from rollbook.store.hosts.units import take_units
from rollbook.store.log.reader import LaneReader
from rollbook.store.medium.chunk import decode_chunk
from rollbook.store.medium.medium import lane_sequence
from rollbook.store.sealed.unit import all_units, current_units
from rollbook.store.settings import AppendSettings, MediumSettings
from rollbook.store.upkeep import compact, elsewhere
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.retain import retain
from rollbook.store.upkeep.sealer import Sealer
from rollbook.store.upkeep.verify import verify_store
from rollbook.store.wal.files import CARRIED_OUT, lane_folder, segment_numbers

if TYPE_CHECKING:
    from tests.fakes.storage.s3_server import ObjectStorage

Note = Callable[..., Event]
SECRET = "the-secret-word-of-t1"


def _fill(log, note: Note) -> str:
    """Two trajectories in several segments; the lane."""
    with log.writer("serve", AppendSettings(segment_bytes=3000)) as writer:
        for name in ("t1", "t2"):
            writer.append([Event(TrajectoryOpened(name, name), "r")]).result(10)
            for i in range(12):
                value = f"{SECRET} {i}" if name == "t1" else f"open word {i}"
                writer.append([note(value * 10, name)]).result(10)
            writer.append([Event(TrajectoryFinished(name), "r")]).result(10)
        return writer.lane


def _everywhere(hosts: Hosts, storage: ObjectStorage) -> dict[str, bytes]:
    """All bytes of all hosts and of the bucket, unpacked where they are chunks or Parquet."""
    found = {str(path): path.read_bytes() for path in hosts.folder.rglob("*") if path.is_file()}
    found |= {key: storage.read(key) for key in storage.objects()}
    return {name: _unpacked(data) for name, data in found.items()}


def _forget(log, lane: str) -> None:
    """Remove all chunks whose bytes are in units in object storage."""
    last = current_units(log.path, lane)[-1].last
    log.carrier.forget_erased(lane, last, last)


def _unpacked(data: bytes) -> bytes:
    if data.startswith(b"RBMC"):
        return b"".join(bytes(part.data) for part in decode_chunk(data, "test").parts)
    if data.startswith(b"PAR1"):
        return str(pq.read_table(io.BytesIO(data)).to_pylist()).encode()
    return data


def test_units_are_read_where_they_are_and_a_late_host_needs_no_chunks(
    object_hosts: Hosts, storage: ObjectStorage, note: Note
) -> None:
    """Sealed and moved by their host; a host that comes when the chunks are gone has the same events."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    lane = _fill(a, note)
    b.carrier.catch_up()
    Sealer(a).run_once(10)
    units = current_units(a.path, lane)
    assert units
    assert all(unit.remote is not None for unit in units)
    sequence = lane_sequence(a.carrier.host, lane)
    with a.writer("serve") as writer:
        writer.append([note("later")]).result(10)
    _forget(a, lane)
    assert a.carrier.medium.first(sequence) > 0
    c = object_hosts.open("c")
    b.carrier.catch_up()
    assert rows(c) == rows(b) == rows(a)
    assert [u.name for u in current_units(b.path, lane)] == [u.name for u in current_units(a.path, lane)]
    assert not Sealer(b).run_once(10).damage, "another host's lane is not its own to seal"
    assert [lane.fault for lane in verify_store(c)] == [None]


def test_a_lane_whose_last_segment_holds_no_event_is_sealed_whole(hosts: Hosts, note: Note) -> None:
    """A segment that had grown old was closed, and nothing came after it: the medium has the one before."""
    a = hosts.open("a")
    with a.writer("serve", AppendSettings(segment_age_s=0.05)) as writer:
        writer.append([note("the only one")]).result(10)
        while segment_numbers(lane_folder(a.path, writer.lane)) != [1, 2]:
            time.sleep(0.01)
    assert not Sealer(a).run_once(10).damage
    [unit] = current_units(a.path, writer.lane)
    assert [(segment.number, segment.events) for segment in unit.segments] == [(1, 1), (2, 0)]
    with a.writer("serve") as writer:
        assert writer.append([note("later")]).result(10) == 1


def test_a_host_that_joins_copies_nothing_that_is_in_units(
    object_hosts: Hosts, storage: ObjectStorage, note: Note
) -> None:
    """Its first chunk is the first behind them: those before may be damaged, and nobody looks."""
    a = object_hosts.open("a")
    lane = _fill(a, note)
    Sealer(a).run_once(10)
    with a.writer("serve") as writer:
        writer.append([note("later")]).result(10)
    prefix = f"team/{object_hosts.store_id}/log/{lane_sequence(a.carrier.host, lane)}"
    listed = storage.client.list_objects_v2(Bucket=storage.BUCKET, Prefix=prefix)["Contents"]
    assert len(listed) > 1
    storage.client.put_object(Bucket=storage.BUCKET, Key=listed[0]["Key"], Body=b"damaged")
    b = object_hosts.open("b")
    assert rows(b) == rows(a)
    assert segment_numbers(lane_folder(b.path, lane))[0] > current_units(b.path, lane)[-1].last
    assert [found.fault for found in verify_store(b)] == [None]


def test_a_segment_that_came_in_part_before_it_was_sealed(object_hosts: Hosts, note: Note) -> None:
    """What is here of it goes, as its unit holds all of it; the next segment is taken from its beginning."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    with a.writer("serve") as writer:
        writer.append([note("in part")]).result(10)
        while not rows(b):
            b.carrier.catch_up()
        b.carrier.close()
        for i in range(20):
            writer.append([note(f"the rest {i}")]).result(10)
    Sealer(a).run_once(10)
    for text in ("", "later"):
        if text:
            with a.writer("serve") as writer:
                writer.append([note(text)]).result(10)
        b = object_hosts.open("b")
        assert rows(b) == rows(a)
        assert [found.fault for found in verify_store(b)] == [None]
        b.carrier.close()


def test_a_process_that_begins_where_units_replaced_what_was_not_shown(
    object_hosts: Hosts, note: Note
) -> None:
    """Some frames came, and then the unit with all of them: readers see them one after the other."""
    a, b = object_hosts.open("a", ack="medium"), object_hosts.open("b")
    b.carrier.close()
    with a.writer("serve") as writer:
        for i in range(6):
            writer.append([note(f"{i}")]).result(10)
    host, lane = a.carrier.host, writer.lane
    replica = opened_replica(b.path, b.store_id, host, lane)
    for entry in a.carrier.medium.read(lane_sequence(host, lane), 0, 4):
        replica.take(entry)
    assert (replica.held, replica.visible) == (4, 0)
    Sealer(a).run_once(10)
    take_units(b.path, replica, [str(unit.remote) for unit in current_units(a.path, lane)])
    assert segment_numbers(lane_folder(b.path, lane)) == []
    replica.save()
    again = opened_replica(b.path, b.store_id, host, lane)
    for count in (2, 3, 6):
        again.show(count)
        [batch] = LaneReader(b.path, lane, count - 1).poll(count)
        assert batch["seq"].to_pylist() == [count - 1]
    with a.writer("serve") as writer:
        writer.append([note("in a segment of its own")]).result(10)
    for entry in a.carrier.medium.read(again.sequence, again.number, 32):
        again.take(entry)
    again.visible = 0  # what was shown is not written down before the process is killed
    again.save()
    again.show(7)
    last = opened_replica(b.path, b.store_id, host, lane)
    last.show(7)
    seqs = [seq for batch in LaneReader(b.path, lane).poll(7) for seq in batch["seq"].to_pylist()]
    assert seqs == list(range(7))


def test_what_a_host_knows_of_units_stays(object_hosts: Hosts, note: Note) -> None:
    """In its next process, and the one after that."""
    object_hosts.tables = {"seal": {"keep_wal_bytes": 0}}
    a = object_hosts.open("a")
    lane = _fill(a, note)
    Sealer(a).run_once(10)
    with a.writer("serve") as writer:
        writer.append([note("later")]).result(10)
    for _ in range(3):
        b = object_hosts.open("b")
        assert current_units(b.path, lane)
        assert rows(b) == rows(a)
        assert [found.fault for found in verify_store(b)] == [None]
        b.carrier.close()


def test_a_host_that_was_away_for_longer_than_chunks_stay(object_hosts: Hosts, note: Note) -> None:
    """It goes on behind the units, with nothing missing."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    with a.writer("serve", AppendSettings(segment_bytes=2000)) as writer:
        for i in range(10):
            writer.append([note(f"{i}" * 100)]).result(10)
    b.carrier.catch_up()
    b.carrier.close()
    with a.writer("serve", AppendSettings(segment_bytes=2000)) as writer:
        for i in range(20):
            writer.append([note(f"x{i}" * 100)]).result(10)
        lane = writer.lane
    Sealer(a).run_once(10)
    _forget(a, lane)
    b = object_hosts.open("b")
    assert rows(b) == rows(a)
    assert len(rows(b)) == 30


def test_an_erasure_reaches_every_copy(object_hosts: Hosts, storage: ObjectStorage, note: Note) -> None:
    """Ordered on a host that has only a replica: gone from the lane's host, from units, chunks and replicas;
    what is not the trajectory's stays, bit for bit."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    lane = _fill(a, note)
    b.carrier.catch_up()
    assert any(SECRET.encode() in data for data in _everywhere(object_hosts, storage).values())
    report = erase_trajectory(b, "t1", "a leaked word")
    assert (report.units, report.elsewhere) == ((), (lane,))
    a.carrier.catch_up()
    sealer = Sealer(a)
    for _ in range(3):
        sealer.run_once(10)
    with a.writer("serve") as writer:
        writer.append([note("later", "t2")]).result(10)
    for log in (a, b):
        log.carrier.catch_up()
        labels = [e.record for e in log.events() if isinstance(e.record, LabelAdded)]
        assert {str(label.value) for label in labels if label.trajectory_id == "t1"} == {"{'erased': True}"}
    c = object_hosts.open("c")
    assert rows(a) == rows(b) == rows(c)
    texts = {str(e.record) for e in c.events()}
    assert not any(SECRET in text for text in texts)
    assert sum("open word" in text for text in texts) == 12
    left = [name for name, data in _everywhere(object_hosts, storage).items() if SECRET.encode() in data]
    assert left == []
    for log in (a, b, c):
        with rb.connect(log.path) as connection:
            held = connection.execute("select count(*) from events where trajectory_id = 't1'").fetchone()
        assert held == (15,), "its events are there, without their text, and the order to erase it"


def test_what_stands_last_in_a_lane_is_erased_too(
    object_hosts: Hosts, storage: ObjectStorage, note: Note
) -> None:
    """Nobody writes the lane any more, so that its newest chunk, and the newest segment of its replica, are
    those with the text."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    with a.writer("serve") as writer:
        writer.append([Event(TrajectoryOpened("t1", "t1"), "r")]).result(10)
        writer.append([note(f"{SECRET} {'x' * 99}", "t1")]).result(10)
        writer.append([Event(TrajectoryFinished("t1"), "r")]).result(10)
    Sealer(a).run_once(10)
    b.carrier.catch_up()
    erase_trajectory(b, "t1", "a leaked word")
    a.carrier.catch_up()
    for _ in range(2):
        Sealer(a).run_once(10)
    b.carrier.catch_up()
    left = [name for name, data in _everywhere(object_hosts, storage).items() if SECRET.encode() in data]
    assert left == []
    with a.writer("serve") as writer:
        writer.append([note("later", "t2")]).result(10)
    b.carrier.catch_up()
    assert rows(a) == rows(b)
    assert len(rows(b)) == 5
    c = object_hosts.open("c")
    assert rows(c) == rows(b)


def test_an_order_is_carried_out_once(
    object_hosts: Hosts, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next sealer knows how far the one before it was."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    _fill(a, note)
    b.carrier.catch_up()
    erase_trajectory(b, "t1", "a leaked word")
    a.carrier.catch_up()
    erased = Mock(wraps=elsewhere.erase_own)
    monkeypatch.setattr(elsewhere, "erase_own", erased)
    Sealer(a).run_once(10)
    Sealer(a).run_once(10)
    assert erased.call_count == 1
    erase_trajectory(b, "t2", "another one")
    a.carrier.catch_up()
    Sealer(a).run_once(10)
    assert erased.call_count == 2
    assert not any("open word" in text for _, text in rows(a).values())


def test_orders_are_carried_out_after_a_lane_was_ended(object_hosts: Hosts, note: Note) -> None:
    """It has fewer events then than a sealer has seen in it: what this host alone had acknowledged."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    lane = _fill(a, note)
    (a.path / CARRIED_OUT).write_bytes(orjson.dumps({lane: a.head()[lane] + 2}))
    b.carrier.catch_up()
    erase_trajectory(b, "t1", "a leaked word")
    a.carrier.catch_up()
    Sealer(a).run_once(10)
    assert not any(SECRET in text for _, text in rows(a).values())


def test_an_order_waits_for_object_storage(object_hosts: Hosts, storage: ObjectStorage, note: Note) -> None:
    """It does not answer while an erasure is carried out: the same sealer does that in a later pass."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    _fill(a, note)
    b.carrier.catch_up()
    erase_trajectory(b, "t1", "a leaked word")
    a.carrier.catch_up()
    sealer = Sealer(a)
    sealer.run_once(10)
    erase_trajectory(b, "t2", "another one")
    a.carrier.catch_up()
    storage.refused = lambda method: "503 Service Unavailable" if method == "PUT" else None
    sealer.run_once(10)
    storage.refused = lambda method: None
    for _ in range(2):
        sealer.run_once(10)
    with a.writer("serve") as writer:
        writer.append([note("later")]).result(10)
    b.carrier.catch_up()
    left = [name for name, data in _everywhere(object_hosts, storage).items() if b"open word" in data]
    assert left == []


def test_retention_on_the_lane_s_host_is_everybody_s(object_hosts: Hosts, note: Note) -> None:
    """What it drops is gone from the others' replicas too; on another host it is refused by name."""
    a, b = object_hosts.open("a"), object_hosts.open("b")
    lane = _fill(a, note)
    Sealer(a).run_once(10)
    b.carrier.catch_up()
    verdicts = retain(b, "1KiB").units
    assert not any(v.dropped for v in verdicts)
    assert any("another host's" in " ".join(v.why_kept) for v in verdicts), verdicts
    dropped = [v for v in retain(a, "1KiB").units if v.dropped]
    assert dropped
    Sealer(a).run_once(10)
    with a.writer("serve") as writer:
        writer.append([note("later", "t2")]).result(10)
    b.carrier.catch_up()
    assert rows(a) == rows(b)
    first, last = current_units(b.path, lane)[0].first, current_units(b.path, lane)[0].last
    assert not [n for n in segment_numbers(lane_folder(b.path, lane)) if first <= n <= last]


def test_a_unit_that_was_replaced_since_its_owner_told_of_it(object_hosts: Hosts, note: Note) -> None:
    """Several are merged, and removed; a host that comes then reads of the first, and has the new one."""
    object_hosts.tables = {"seal": {"keep_wal_bytes": 0, "compact_bytes": 1 << 20}}
    a = object_hosts.open("a")
    for _ in range(3):
        lane = _fill(a, note)
        Sealer(a).run_once(10)
    b = object_hosts.open("b")
    assert rows(b) == rows(a)
    merged = {unit.name for unit in current_units(a.path, lane) if unit.generation > 1}
    assert merged
    assert {unit.name for unit in current_units(b.path, lane)} >= merged
    assert [found.fault for found in verify_store(b)] == [None]


def test_units_that_others_know_of_stay_until_they_are_told(
    object_hosts: Hosts, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Merged after the lane's writer has ended: whoever reads the first ones still can, until a while after
    all were told of what replaces them."""
    object_hosts.tables = {"seal": {"keep_wal_bytes": 0, "compact_bytes": 0}}
    a = object_hosts.open("a")
    for _ in range(2):
        lane = _fill(a, note)
        Sealer(a).run_once(10)
    b = object_hosts.open("b")
    known = {unit.name for unit in current_units(b.path, lane)}
    assert len(known) > 1
    object_hosts.tables = {"seal": {"keep_wal_bytes": 0, "compact_bytes": 1 << 20}}
    a.carrier.close()
    a = object_hosts.open("a")
    for _ in range(2):
        Sealer(a).run_once(10)
    assert known.isdisjoint(unit.name for unit in current_units(a.path, lane))
    assert known <= {unit.name for unit in all_units(a.path, lane)}
    assert rows(b) == rows(a)
    b.carrier.catch_up()
    assert known.isdisjoint(unit.name for unit in all_units(b.path, lane))
    monkeypatch.setattr(compact, "READ_S", 0.0)
    Sealer(a).run_once(10)
    assert known.isdisjoint(unit.name for unit in all_units(a.path, lane))
    assert rows(b) == rows(a)
    assert [found.fault for found in verify_store(b)] == [None]


def test_a_lane_that_was_ended_is_merged_and_erased_for_all(
    object_hosts: Hosts, storage: ObjectStorage, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is put behind its end; others hear of its units all the same, and read on."""
    monkeypatch.setattr(compact, "READ_S", 0.0)
    object_hosts.tables = {"seal": {"keep_wal_bytes": 0, "compact_bytes": 0}}
    a, b = object_hosts.open("a"), object_hosts.open("b")
    for _ in range(2):
        lane = _fill(a, note)
        Sealer(a).run_once(10)
    b.carrier.catch_up()
    assert b.carrier.session.valid
    b.carrier.end_lanes(a.carrier.session.name)
    known = {unit.name for unit in current_units(b.path, lane)}
    assert len(known) > 1
    (a.path / "store.toml").write_text((a.path / "store.toml").read_text().replace("compact_bytes = 0", ""))
    for _ in range(3):
        Sealer(a).run_once(10)
    assert known.isdisjoint(unit.name for unit in all_units(a.path, lane))
    b.carrier.catch_up()
    assert rows(b) == rows(a)
    erase_trajectory(b, "t1", "a leaked word")
    a.carrier.catch_up()
    for _ in range(2):
        Sealer(a).run_once(10)
    b.carrier.catch_up()
    assert rows(b) == rows(a)
    left = [name for name, data in _everywhere(object_hosts, storage).items() if SECRET.encode() in data]
    assert left == []


def test_a_reader_waits_until_it_hears_what_replaces_a_unit(object_hosts: Hosts, note: Note) -> None:
    """Erased on its host: the files are gone before a reader elsewhere has heard of it."""
    object_hosts.tables = {"seal": {"keep_wal_bytes": 0}}
    a, b = object_hosts.open("a"), object_hosts.open("b")
    _fill(a, note)
    Sealer(a).run_once(10)
    b.carrier.catch_up()
    b.carrier.close()
    erase_trajectory(a, "t1", "a leaked word")
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(lambda: len(list(b.events_of({LabelAdded.KIND}, b.head()))))
        time.sleep(0.5)
        assert not reading.done()
        again = object_hosts.open("b")
        assert reading.result(20) == 24
    assert rows(again) == rows(a)


def test_lanes_are_followed_while_object_storage_is_away(
    tmp_path: Path, storage: ObjectStorage, note: Note, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Units are there and cannot be read, and the log is in another medium: it is whole without them."""
    service = storage.endpoint.removeprefix("http://")
    monkeypatch.setenv("ROLLBOOK_ALLOW", f"{tmp_path},{service},s3://{storage.BUCKET}")
    hosts = Hosts(tmp_path, MediumSettings(url=f"file://{tmp_path}/medium"))
    remote = {"uri": f"s3://{storage.BUCKET}/units", "endpoint": storage.endpoint}
    hosts.tables = {"remote": remote, "seal": {"keep_wal_bytes": 0}}
    a = hosts.open("a")
    _fill(a, note)
    Sealer(a).run_once(10)
    expected = rows(a)
    storage.refused = lambda method: "503 Service Unavailable"
    b = hosts.open("b")
    assert rows(b) == expected
    storage.refused = lambda method: None
    hosts.close()
