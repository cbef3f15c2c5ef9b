"""A replica by itself: bytes in chunks of any size become the same files, and others are refused."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from rollbook import store as rb
from rollbook.store.errors import CorruptionError
from rollbook.store.events import Event, LabelAdded
from rollbook.store.hosts.replica import Replica, opened_replica
from rollbook.store.hosts.shipper import read_parts
from rollbook.store.hosts.units import settle
from rollbook.store.ids import new_id
from rollbook.store.log.reader import LaneReader
from rollbook.store.medium.chunk import Chunk, Part, decode_chunk, encode_chunk
from rollbook.store.sealed.seal import seal_segments
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.wal.files import Shipped, lane_folder, read_watermark, segment_numbers, segment_path

STORE = "01900000-0000-7000-8000-0000000000aa"
BEGIN = Shipped(0, 1, 1, 0, 0, 0, False)


def _lane(folder: Path, values: list[str]) -> Path:
    """A lane of one event for each value, in several segments."""
    log = rb.open(folder, create=True)
    with log.writer("x", AppendSettings(segment_bytes=3000)) as writer:
        for value in values:
            writer.append([Event(LabelAdded(new_id(), None, "n", value), "r")]).result()
    return lane_folder(log.path, "x")


def _chunks(folder: Path, most: int) -> list[bytes]:
    """The lane's chunks of at most so many bytes."""
    at, end, entries = BEGIN, read_watermark(folder).next_seq, list[bytes]()
    while at.next_seq < end:
        parts, after = read_parts(folder, at, end, most)
        chunk = Chunk(STORE, "x", "a", at.number, 1, "a.s", after.next_seq, parts=parts)
        assert sum(len(part.data) for part in parts) <= most
        entries.append(encode_chunk(chunk))
        at = after
    return entries


def _replica(folder: Path) -> Replica:
    (folder / "lanes").mkdir(parents=True, exist_ok=True)
    return opened_replica(folder, STORE, "a", "x")


@given(
    most=st.integers(64, 20_000),
    sizes=st.lists(st.integers(0, 3_000), min_size=1, max_size=12),
    again=st.data(),
)
def test_any_chunks_give_the_same_files(
    most: int, sizes: list[int], again: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """However they are cut, and wherever the follower begins again in between, or takes chunks twice."""
    folder = tmp_path_factory.mktemp("chunks")
    source = _lane(folder / "a", ["v" * size for size in sizes])
    entries = _chunks(source, most)
    replica = _replica(folder / "b")
    stop = again.draw(st.integers(0, len(entries)))
    for entry in entries[:stop]:
        replica.take(entry)
    replica.save()
    replica = _replica(folder / "b")
    replica.number = again.draw(st.integers(0, stop)) if stop else 0
    for entry in entries[replica.number :]:
        replica.take(entry)
    replica.show(replica.held)
    there = lane_folder(folder / "b", "x")
    assert replica.held == len(sizes)
    for number in segment_numbers(there):
        whole = segment_path(source, number).read_bytes()
        assert whole.startswith(segment_path(there, number).read_bytes())
    assert read_watermark(there).next_seq == len(sizes)


@given(
    most=st.integers(64, 4_000),
    sizes=st.lists(st.integers(0, 1_500), min_size=4, max_size=12),
    program=st.data(),
)
@settings(phases=[Phase.explicit, Phase.reuse, Phase.generate])  # to shrink takes minutes
def test_units_that_come_at_any_time_change_nothing_for_readers(
    most: int, sizes: list[int], program: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Between any chunks, before or behind what may be read, and wherever the follower begins again, with or
    without having written down where it was: what may be read can be."""
    folder = tmp_path_factory.mktemp("units")
    source = _lane(folder / "a", ["v" * size for size in sizes])
    entries = _chunks(source, most)
    sealed = segment_numbers(source)[: program.draw(st.integers(1, 3))]
    units = [seal_segments(folder / "a", "x", [number], SealSettings()) for number in sealed]
    replica, known = _replica(folder / "b"), 0
    steps = st.sampled_from(["take", "take", "show", "units", "save", "begin"])
    for step in program.draw(st.lists(steps, max_size=25)):
        if step == "take" and replica.number < len(entries):
            replica.take(entries[replica.number])
        elif step == "show":
            replica.show(program.draw(st.integers(replica.visible, replica.held)))
        elif step == "units" and known < len(units):
            name = units[known].name
            shutil.copytree(folder / "a" / "sealed" / "x" / name, folder / "b" / "sealed" / "x" / name)
            settle(folder / "b", replica, program.draw(st.sampled_from([0, 1 << 20])))
            known += 1
        elif step == "save":
            replica.save()
        elif step == "begin":
            replica = _replica(folder / "b")
        batches = LaneReader(folder / "b", "x").poll(replica.visible) if replica.visible else ()
        assert [seq for batch in batches for seq in batch["seq"].to_pylist()] == list(range(replica.visible))


def test_a_follower_that_begins_again_within_a_frame(tmp_path: Path) -> None:
    """A large frame goes in several chunks; one that ended between two of them goes on with the next."""
    source = _lane(tmp_path / "a", ["v" * 3_000, "w"])
    entries = _chunks(source, 512)
    for number, entry in enumerate(entries):
        replica = _replica(tmp_path / "b")
        assert replica.number == number
        replica.take(entry)
        replica.save()
    assert replica.held == 2
    there = lane_folder(tmp_path / "b", "x")
    for number in segment_numbers(there):
        assert segment_path(source, number).read_bytes() == segment_path(there, number).read_bytes()


def test_frames_of_another_history_are_refused(tmp_path: Path) -> None:
    """Whole frames, at the right place, with the right numbers, of a lane that is not this one."""
    ours, others = (
        _chunks(_lane(tmp_path / "a", ["a"] * 8), 400),
        _chunks(_lane(tmp_path / "z", ["z"] * 8), 400),
    )
    replica = _replica(tmp_path / "b")
    replica.take(ours[0])
    replica.take(ours[1])
    with pytest.raises(CorruptionError, match="it does not follow the frame before"):
        _take_all(replica, others[2:])


def _take_all(replica: Replica, entries: list[bytes]) -> None:
    for entry in entries:
        replica.take(entry)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"store": "another"}, "it was copied there"),
        ({"lane": "y"}, "it was copied there"),
        ({"number": 5}, "it was copied there"),
        ({"parts": (Part(1, 640, b"x" * 64),)}, "a chunk before it was removed"),
        ({"parts": (Part(4, 0, b"x" * 64),)}, "a chunk before it was removed"),
        ({"parts": (Part(1, 0, b"RBLF" + bytes(124)),)}, "not the bytes that were sent"),
        ({"parts": (Part(1, 0, b"y" * 128),)}, "no frame header here"),
    ],
)
def test_chunks_that_do_not_belong_there_are_refused(
    changed: dict[str, object], message: str, tmp_path: Path, replaced: Callable[..., Chunk]
) -> None:
    """By name, and the replica stays as it was."""
    [first, *_] = _chunks(_lane(tmp_path / "a", ["a"] * 3), 10_000)
    replica = _replica(tmp_path / "b")
    with pytest.raises(CorruptionError, match=message):
        replica.take(encode_chunk(replaced(decode_chunk(first, ""), **changed)))
    assert (replica.held, replica.number) == (0, 0)


@pytest.fixture
def replaced() -> Callable[..., Chunk]:
    """`dataclasses.replace`."""
    from dataclasses import replace

    return replace
