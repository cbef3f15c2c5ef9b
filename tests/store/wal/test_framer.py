"""What a group of appends becomes: frames of either kind, segments, bodies; no file is touched."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pyarrow as pa
import pytest
from tests.fakes.stories.records import turn_requested

from rollbook.store import Event
from rollbook.store.errors import UnstorableError
from rollbook.store.events import BodyStored, RewardAssigned, TurnFailed
from rollbook.store.events.batches import encode_batch
from rollbook.store.settings import AppendSettings
from rollbook.store.wal import framer as framer_module
from rollbook.store.wal.files import Watermark
from rollbook.store.wal.flusher import Job
from rollbook.store.wal.frame import (
    BATCH_FRAME,
    EMPTY_CHAIN,
    FEW,
    HEADER_FRAME,
    ROW_FRAME,
    Frame,
    decode_rows,
    read_frame,
    scan,
)
from rollbook.store.wal.framer import EventWindow, Framer
from rollbook.store.wal.segment import LaneState, Start

NEW = LaneState((), Start(1, 0, EMPTY_CHAIN), Watermark(0, 0, 0), EMPTY_CHAIN, 0, 0)


def _framer(**settings: Any) -> Framer:
    return Framer("a", "store-id", NEW, EventWindow(lambda event_id: None), AppendSettings(**settings))


def _frames(jobs: list[Job], chain: bytes = EMPTY_CHAIN) -> list[Frame]:
    data = b"".join(bytes(buffer) for job in jobs for buffer in job.buffers)
    return list(scan(memoryview(data), 0, len(data), chain))


def _group(*appends: list[Event]) -> list[tuple[list[Event], Future[int]]]:
    return [(events, Future()) for events in appends]


def test_a_segment_begins_with_its_header() -> None:
    """The header frame names lane, segment and store, and the segments are counted."""
    framer = _framer()
    jobs = [framer.begin_segment(), framer.begin_segment()]
    assert [job.new_segment for job in jobs] == [1, 2]
    frames = _frames(jobs)
    assert [(f.kind, f.first_seq, f.count) for f in frames] == [(HEADER_FRAME, 0, 0)] * 2
    schema = pa.ipc.read_schema(pa.py_buffer(frames[1].payload))
    assert schema.metadata == {b"lane": b"a", b"segment": b"2", b"store": b"store-id"}


def test_few_events_are_rows_and_more_are_a_batch(notes: Callable[..., list[Event]]) -> None:
    """A commit of fewer than FEW events is a row frame; each append learns the number of its first event."""
    framer = _framer()
    jobs = [framer.begin_segment()]
    jobs += framer.jobs(_group(notes(3), notes(FEW - 4, 10)))
    jobs += framer.jobs(_group(notes(3, 20), notes(FEW - 3, 30)))
    frames = _frames(jobs)[1:]
    assert [(f.kind, f.first_seq, f.count) for f in frames] == [
        (ROW_FRAME, 0, FEW - 1),
        (BATCH_FRAME, FEW - 1, FEW),
    ]
    assert [[seq for _, seq in job.acknowledged] for job in jobs] == [[], [0, 3], [7, 10]]
    assert [job.next_seq for job in jobs] == [0, 7, 15]


def test_what_is_held_already_is_not_framed(notes: Callable[..., list[Event]]) -> None:
    """A group of nothing new writes nothing, and its appends get the old numbers."""
    framer = _framer()
    framer.begin_segment()
    old = notes(2)
    list(framer.jobs(_group(old)))
    [job] = framer.jobs(_group(old[1:], old))
    assert (job.buffers, job.next_seq, [seq for _, seq in job.acknowledged]) == ([], 2, [1, 0])


def test_a_bad_append_leaves_no_trace(notes: Callable[..., list[Event]]) -> None:
    """Its future fails; the numbers and the chain go on as if it had not been there."""
    good, bad = _framer(), _framer()
    wrong = [Event(TurnFailed("t", "\ud800", "x"), "run")]
    events = notes(2)
    expected = [good.begin_segment(), *good.jobs(_group(events))]
    group = _group(wrong, events)
    jobs = [bad.begin_segment(), *bad.jobs(group)]
    assert [f.chain for f in _frames(jobs)] == [f.chain for f in _frames(expected)]
    with pytest.raises(ValueError, match="cannot be stored"):
        group[0][1].result(0)


@pytest.mark.parametrize("count", [1, FEW])
@pytest.mark.parametrize(
    "wrong",
    [
        Event(TurnFailed("t", "u", "x"), "run", event_id=None),  # type: ignore[arg-type]
        Event(TurnFailed("t", "u", "x"), "run", event_id=7),  # type: ignore[arg-type]
        Event(TurnFailed("t", "u", "x"), "run", time_us=None),  # type: ignore[arg-type]
        Event(TurnFailed(None, "u", "x"), "run"),  # type: ignore[arg-type]
        Event(TurnFailed("t", "u", {1}), "run"),  # type: ignore[arg-type]
        Event("nothing", "run"),  # type: ignore[arg-type]
    ],
)
def test_what_has_no_form_is_refused_alone(
    notes: Callable[..., list[Event]], wrong: Event, count: int
) -> None:
    """However many events it comes with, its append fails and every other one is framed."""
    framer = _framer()
    jobs = [framer.begin_segment()]
    group = _group(notes(2), [*notes(count, 10), wrong], notes(3, 40))
    jobs += framer.jobs(group)
    assert isinstance(group[1][1].exception(0), ValueError)
    assert sum(frame.count for frame in _frames(jobs)) == 5
    assert [seq for job in jobs for _, seq in job.acknowledged] == [0, 2]
    [job] = framer.jobs(_group(notes(1, 50)))
    assert job.acknowledged[0][1] == 5


def test_a_group_that_is_too_much_is_framed_in_parts(
    notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one frame does not hold, though each append could be framed, stops nobody."""

    def at_most_ten(rows: Any, first_seq: int) -> bytes:
        if len(rows) > 10:
            raise ValueError("more than one append can hold")
        return encode_batch(rows, first_seq)

    monkeypatch.setattr(framer_module, "encode_batch", at_most_ten)
    framer = _framer()
    jobs = [framer.begin_segment()]
    group = _group(notes(9), notes(9, 20), notes(11, 40))
    jobs += framer.jobs(group)
    assert [frame.count for frame in _frames(jobs)] == [0, 9, 9]
    assert [seq for job in jobs for _, seq in job.acknowledged] == [0, 9]
    with pytest.raises(ValueError, match="more than one append can hold"):
        group[2][1].result(0)


def test_a_stored_body_is_an_event_like_others() -> None:
    """Appended again to its own lane, as a copy of the lane would, it is not stored twice."""
    framer = _framer(body_bytes=256)
    framer.begin_segment()
    long = [{"role": "system", "content": "x" * 1000}]
    record = turn_requested("t", "u", root_reason="first", messages=long, context_key="key")
    jobs = list(framer.jobs(_group([Event(record, "run")])))
    payload = memoryview(b"".join(bytes(b) for b in jobs[0].buffers))
    event_id = decode_rows(read_frame(payload, 0).payload, 2)[0][0]
    [job] = framer.jobs(_group([Event(BodyStored("d", 1), "run", event_id=event_id)]))
    assert (job.buffers, job.acknowledged[0][1]) == ([], 0)


def test_segments_end_by_size_and_by_age(
    notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A segment beyond its size ends before the next commit; one with an old event ends by itself."""
    framer = _framer(segment_bytes=2000, segment_age_s=60)
    framer.begin_segment()
    assert framer.seconds_until_old() is None
    assert len(list(framer.jobs(_group(notes(20))))) == 1
    jobs = list(framer.jobs(_group(notes(1, 20))))
    assert [job.new_segment for job in jobs] == [2, None]
    assert 59 < (framer.seconds_until_old() or 0) <= 60
    now = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: now + 61)
    assert [job.new_segment for job in framer.jobs([])] == [3]
    assert list(framer.jobs([])) == []  # an empty segment does not grow old


def test_bodies_are_stored_once_a_segment() -> None:
    """A body comes before the first request of a segment that refers to it, and again in the next one."""
    framer = _framer(body_bytes=256)
    long = [{"role": "system", "content": "x" * 1000}]

    def ask(turn: str) -> list[Event]:
        record = turn_requested("t", turn, root_reason="first", messages=long, context_key="key")
        return [Event(record, "run")]

    framer.begin_segment()
    counts = []
    for turn in ("u1", "u2"):
        [job] = framer.jobs(_group(ask(turn)))
        counts.append((job.next_seq, job.acknowledged[0][1]))
    framer.begin_segment()
    [job] = framer.jobs(_group(ask("u3")))
    counts.append((job.next_seq, job.acknowledged[0][1]))
    assert counts == [(2, 1), (3, 2), (5, 4)]


def test_a_large_group_is_written_in_several_frames(
    notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No frame holds much more than its share, and appends stay in order."""
    size = framer_module._with_rows((notes(3, 10), Future())).bytes  # type: ignore[union-attr]
    monkeypatch.setattr(framer_module, "FRAME_BYTES", 2 * size)
    framer = _framer()
    jobs = [framer.begin_segment()]
    jobs += framer.jobs(_group(*(notes(3, start) for start in range(10, 60, 10))))
    assert [frame.count for frame in _frames(jobs)] == [0, 6, 6, 3]
    assert [seq for job in jobs for _, seq in job.acknowledged] == [0, 3, 6, 9, 12]


def test_an_append_beyond_any_frame_is_refused_alone(
    notes: Callable[..., list[Event]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is not put together with others first, nor encoded."""
    size = framer_module._with_rows((notes(3), Future())).bytes  # type: ignore[union-attr]
    monkeypatch.setattr(framer_module, "APPEND_BYTES", 2 * size)
    framer = _framer()
    jobs = [framer.begin_segment()]
    group = _group(notes(3), notes(9, 10), notes(3, 20))
    jobs += framer.jobs(group)
    assert [frame.count for frame in _frames(jobs)] == [0, 6]
    with pytest.raises(UnstorableError, match="more than"):
        group[1][1].result(0)


@pytest.mark.parametrize("reward", [float("nan"), float("inf"), float("-inf")])
def test_a_reward_that_is_no_number_is_refused(reward: float) -> None:
    """With its trajectory's name, and alone: what others append is stored."""
    framer = _framer()
    events = [Event(RewardAssigned("t", None, value), "r") for value in (1.0, reward)]
    group = _group([events[0]], [events[1]])
    jobs = [framer.begin_segment(), *framer.jobs(group)]
    assert sum(frame.count for frame in _frames(jobs)) == 1
    message = f"the reward of trajectory t is {reward}: give a finite number"
    with pytest.raises(UnstorableError, match=message):
        group[1][1].result(0)
