"""Lanes on other hosts: the same files, event by event, whatever ends in between."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tests.store.hosts.conftest import Hosts, rows

from rollbook.store.errors import CorruptionError, FencedError
from rollbook.store.events import Event
from rollbook.store.medium.chunk import decode_chunk
from rollbook.store.medium.medium import Medium, Wanted, lane_sequence
from rollbook.store.settings import AppendSettings
from rollbook.store.wal.files import lane_folder, read_shipped, segment_numbers, segment_path

Note = Callable[..., Event]


@pytest.mark.parametrize("ack", ["local", "medium"])
def test_a_lane_is_the_same_on_another_host(hosts: Hosts, note: Note, ack: str) -> None:
    """Events, ids, and every byte of the segments; each host's lanes have its name."""
    a, b = hosts.open("a", ack=ack), hosts.open("b", ack=ack)
    small = AppendSettings(segment_bytes=20_000)
    with a.writer("serve", small) as first, b.writer("serve", small) as second:
        for i in range(120):
            first.append([note(f"a{i}" * 50)]).result(10)
            if i % 3 == 0:
                second.append([note(f"b{i}")]).result(10)
        lanes = {first.lane, second.lane}
    for log in (a, b):
        log.carrier.catch_up()
    assert set(a.head()) == lanes
    assert all(lane.startswith("serve.") for lane in lanes)
    assert a.head() == b.head() == {first.lane: 120, second.lane: 40}
    assert rows(a) == rows(b)
    assert len(rows(b)) == 160
    here, there = (lane_folder(log.path, first.lane) for log in (a, b))
    numbers = segment_numbers(here)
    assert len(numbers) > 2
    assert segment_numbers(there) == numbers
    for number in numbers:
        assert segment_path(here, number).read_bytes() == segment_path(there, number).read_bytes()


def test_what_is_acknowledged_by_the_medium_is_there(hosts: Hosts, note: Note) -> None:
    """With `ack = "medium"` an append's event can be read in the medium once it is acknowledged, and not
    before here."""
    a = hosts.open("a", ack="medium")
    with a.writer("serve") as writer:
        for i in range(20):
            assert writer.append([note(str(i))]).result(10) == i
            assert a.head() == {writer.lane: i + 1}
            sequence = lane_sequence(a.carrier.host, writer.lane)
            newest = a.carrier.medium.last(sequence)
            chunk = decode_chunk(a.carrier.medium.read(sequence, newest)[0], "")
            assert chunk.next_seq >= i + 1


def test_an_event_larger_than_a_chunk_goes_in_parts(hosts: Hosts, note: Note) -> None:
    """And those before and behind it, in order."""
    a, b = hosts.open("a"), hosts.open("b")
    large = a.carrier.medium.most_bytes * 2 + 12_345
    with a.writer("serve") as writer:
        for size in (10, large, 10, 3 * large, 10):
            writer.append([note("x" * size)]).result(30)
    b.carrier.catch_up()
    assert [len(e.record.value) for e in b.events()] == [10, large, 10, 3 * large, 10]


def test_a_head_is_closed_on_every_host(folder_hosts: Hosts, note: Note) -> None:
    """Two hosts answer each other: whenever a third one has an answer, it has what that answers."""
    a, b, c = (folder_hosts.open(name) for name in "abc")
    stop, seen = threading.Event(), list[tuple[int, int]]()
    with a.writer("ping") as ping, b.writer("pong") as pong:

        def answer(log, writer, other: str) -> None:
            said = 0
            while not stop.is_set():
                heard = log.head().get(other, 0)
                writer.append([note(f"{heard}")]).result(10)
                said += 1
                time.sleep(0.005)

        talk = [
            threading.Thread(target=answer, args=(a, ping, pong.lane)),
            threading.Thread(target=answer, args=(b, pong, ping.lane)),
        ]
        for one in talk:
            one.start()
        until = time.monotonic() + 4
        while time.monotonic() < until:
            head = c.head()
            heard = {ping.lane: 0, pong.lane: 0}
            for event in c.events(head):
                other = pong.lane if event.lane == ping.lane else ping.lane
                heard[other] = max(heard[other], int(event.record.value))
            assert all(head.get(lane, 0) >= count for lane, count in heard.items()), (head, heard)
            seen.append((head.get(ping.lane, 0), head.get(pong.lane, 0)))
            time.sleep(0.02)
        stop.set()
        for one in talk:
            one.join()
    assert len(set(seen)) > 3, "the third host saw them grow"
    for log in (a, b, c):
        log.carrier.catch_up()
    assert c.head() == a.head() == b.head()


class Hiding:
    """A medium in which one host sees nothing new of some lanes, as if their chunks were slow to come."""

    def __init__(self, medium: Medium) -> None:
        self._medium, self.hidden = medium, set[str]()

    def __getattr__(self, name: str) -> object:
        return getattr(self._medium, name)

    def read_each(self, wanted: Sequence[Wanted], *, newest: bool = False) -> list[list[bytes]]:
        """Nothing of what is hidden."""
        read = self._medium.read_each(wanted, newest=newest)
        return [[] if of[0] in self.hidden else entries for of, entries in zip(wanted, read, strict=True)]


def test_an_event_is_not_readable_before_what_it_names(folder_hosts: Hosts, note: Note) -> None:
    """One host answers another, whose chunks are slow to come to a third: that one sees neither, and then
    both."""
    a, b, c = (folder_hosts.open(name) for name in "abc")
    hiding = Hiding(c.carrier.medium)
    with a.writer("ping") as ping, b.writer("pong") as pong:
        ping.append([note("first")]).result(10)
        pong.append([note("first")]).result(10)
        _until(lambda: c.head() == {ping.lane: 1, pong.lane: 1})
        c.carrier._follower._medium = hiding
        hiding.hidden.add(lane_sequence(a.carrier.host, ping.lane))
        ping.append([note("question")]).result(10)
        _until(lambda: b.head().get(ping.lane) == 2)
        pong.append([note("answer")]).result(10)
        _until(lambda: c.carrier._follower.replica(pong.lane).held == 2)
        time.sleep(0.3)
        assert c.head() == {ping.lane: 1, pong.lane: 1}
        hiding.hidden.clear()
        _until(lambda: c.head() == {ping.lane: 2, pong.lane: 2})


def _until(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 15
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_a_process_goes_on_where_the_one_before_was_killed(folder_hosts: Hosts, note: Note) -> None:
    """Also where its cursors are torn, on either side: nothing is doubled, lost or changed."""
    a = folder_hosts.open("a")
    for torn in ("", "SHIPPED", "FOLLOWED"):
        b = folder_hosts.open("b")
        with a.writer("serve") as writer:
            for i in range(20):
                writer.append([note(f"{torn}{i}" * 20)]).result(10)
            lane = writer.lane
        b.carrier.catch_up()
        assert rows(a) == rows(b)
        b.carrier.close()
        if torn:
            log = a if torn == "SHIPPED" else b
            path = lane_folder(log.path, lane) / torn
            path.write_bytes(path.read_bytes()[:-3] + b"xyz")
    b = folder_hosts.open("b")
    assert rows(a) == rows(b)
    assert b.head() == {lane: 60}


def test_a_replica_that_was_damaged_by_a_power_cut_is_made_anew(folder_hosts: Hosts, note: Note) -> None:
    """After a start of the machine all of it is checked, and what is not whole comes again."""
    a, b = folder_hosts.open("a"), folder_hosts.open("b")
    with a.writer("serve", AppendSettings(segment_bytes=4000)) as writer:
        for i in range(60):
            writer.append([note(f"{i}" * 50)]).result(10)
    b.carrier.catch_up()
    b.carrier.close()
    folder = lane_folder(b.path, writer.lane)
    number = segment_numbers(folder)[-2]
    data = bytearray(segment_path(folder, number).read_bytes())
    data[len(data) // 2] ^= 1
    segment_path(folder, number).write_bytes(data)
    cursor = (folder / "FOLLOWED").read_bytes()
    (folder / "FOLLOWED").write_bytes(cursor[:-1] + b"!")
    b = folder_hosts.open("b")
    assert rows(a) == rows(b)
    assert b.head() == {writer.lane: 60}


def test_what_a_killed_process_left_is_shipped_by_another_of_its_host(
    folder_hosts: Hosts, note: Note
) -> None:
    """The lane has no process any more; the follower of the host sees to it."""
    a, b = folder_hosts.open("a"), folder_hosts.open("b")
    with a.writer("serve") as writer:
        writer.append([note("shipped")]).result(10)
        lane = writer.lane
    alone = type(a)(a.path, a.store_id)  # without a carrier: as one that was killed before it shipped
    with alone.writer(lane) as writer:
        writer.append([note("left")]).result(10)
    assert read_shipped(lane_folder(a.path, lane)).next_seq == 1
    a.carrier._ship_leftovers()
    b.carrier.catch_up()
    assert [e.record.value for e in b.events()] == ["shipped", "left"]


def test_chunks_that_were_changed_are_refused(folder_hosts: Hosts, note: Note, tmp_path: Path) -> None:
    """A bit of one is flipped in the medium: the follower names it, shows nothing of it, and goes on once it
    is mended."""
    a = folder_hosts.open("a")
    with a.writer("serve") as writer:
        for i in range(5):
            writer.append([note(str(i))]).result(10)
            time.sleep(0.3)
    chunks = sorted((tmp_path / "medium" / a.store_id / "log").rglob(f"{writer.lane}/*"))
    whole = chunks[2].read_bytes()
    chunks[2].write_bytes(whole[:-20] + bytes([whole[-20] ^ 4]) + whole[-19:])
    with pytest.raises(CorruptionError, match=f"chunk 2 of lane '{writer.lane}'"):
        folder_hosts.open("b")
    chunks[2].write_bytes(whole)
    b = folder_hosts.open("b")
    assert rows(a) == rows(b)


def _append_for_long(writer, note: Note) -> None:
    for i in range(20):
        writer.append([note(f"x{i}")]).result(10)
        time.sleep(0.1)


def test_a_copied_host_is_found_out(folder_hosts: Hosts, note: Note, tmp_path: Path) -> None:
    """Two folders with the same name and lanes: the second one to write is refused, and nothing of the first
    is touched."""
    import shutil

    a = folder_hosts.open("a")
    with a.writer("serve") as writer:
        writer.append([note("1")]).result(10)
    a.carrier.close()
    shutil.copytree(tmp_path / "a", tmp_path / "copy")
    a, copy = folder_hosts.open("a"), folder_hosts.open("copy")
    with a.writer("serve") as writer, copy.writer("serve") as other:
        writer.append([note("2")]).result(10)
        time.sleep(0.5)
        with pytest.raises(FencedError, match="another copy of this host's folder"):
            _append_for_long(other, note)
    b = folder_hosts.open("b")
    assert [e.record.value for e in b.events()] == ["1", "2"]


def test_what_another_process_of_the_host_follows_is_waited_for(folder_hosts: Hosts, note: Note) -> None:
    """The second process of a host has what was there when it began; and goes on when the first one ends.
    What was written down before the machine was started again counts for nothing."""
    a, first = folder_hosts.open("a"), folder_hosts.open("b")
    with a.writer("serve") as writer:
        writer.append([note("1")]).result(10)
    second = folder_hosts.open("b")
    assert second.head() == {writer.lane: 1}
    first.carrier.close()
    written = folder_hosts.folder / "b" / "claims" / "AS_OF"
    values = json.loads(written.read_text())
    written.write_text(json.dumps(values | {"boot": "another", "as_of": values["as_of"] + 1e9}))
    with a.writer("serve") as writer:
        writer.append([note("2")]).result(10)
    second.carrier.catch_up()
    assert second.head() == {writer.lane: 2}


def test_a_host_takes_over_whichever_of_its_processes_follows(folder_hosts: Hosts, note: Note) -> None:
    """The one that stands in is not the one that follows."""
    a = folder_hosts.open("a")
    with a.writer("serve") as writer:
        writer.append([note("1")]).result(10)
    following, other = folder_hosts.open("b"), folder_hosts.open("b")
    assert not other.carrier.take_over(writer.lane), "its process runs"
    a.carrier.close()
    assert other.carrier.take_over(writer.lane)
    assert following.head() == other.head() == {writer.lane: 1}
