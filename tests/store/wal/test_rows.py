"""What frames hold: rows where events are few, else a batch; both say the same, and refuse the same."""

from __future__ import annotations

import struct
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.fakes.storage.arrow_rows import by_pyarrow
from tests.fakes.stories.records import turn_completed

from rollbook.store import Event
from rollbook.store.events import LabelAdded, RewardAssigned, VersionSpan
from rollbook.store.events.batches import encode_batch, to_batch
from rollbook.store.events.schema import LOG_SCHEMA, REQUIRED, ROW_NAMES, row_of
from rollbook.store.sealed.parquet import same_bits
from rollbook.store.wal.frame import decode_rows, encode_rows

TEXT = st.none() | st.text(max_size=6) | st.just("\ud800") | st.integers()
NUMBER = st.none() | st.integers(-(2**65), 2**65) | st.floats() | st.booleans() | st.just("x")
IDS = (
    st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4).map(lambda v: np.array(v, np.int32))
    | st.lists(st.integers(-(2**33), 2**33), max_size=3)
    | st.just(np.array([2**40]))
    | st.just(np.zeros((2, 2), np.int32))
    | st.just(np.array([1.5]))
    | st.none()
)
LOGPROBS = (
    st.lists(st.integers(0, 2**32 - 1), max_size=4).map(lambda v: np.array(v, np.uint32).view(np.float32))
    | st.lists(st.floats(width=32), max_size=3)
    | st.none()
    | st.just(np.array(["x"]))
)
SPANS = st.none() | st.lists(st.builds(VersionSpan, TEXT, NUMBER, NUMBER, NUMBER), max_size=2).map(tuple)
EVENTS = st.builds(
    lambda t, u, p, v, ids, done, logprobs, spans, run, time: Event(
        turn_completed(
            t,
            u,
            policy=p,
            policy_version=v,
            prompt_ids=ids,
            completion_ids=done,
            logprobs=logprobs,
            version_spans=spans,
            prompt_length=1,
        ),
        run,
        "id",
        time,
    ),
    *(TEXT, TEXT, TEXT, NUMBER, IDS, IDS, LOGPROBS, SPANS),
    st.text(max_size=4),
    st.integers(-(2**63), 2**63 - 1),
)

REFUSALS = (struct.error, ValueError, TypeError, AttributeError, OverflowError)


@given(st.lists(EVENTS, min_size=1, max_size=12))
@settings(max_examples=400)
def test_rows_say_what_a_batch_says(events: list[Event]) -> None:
    """What is taken as rows reads back as the batch of the same events, bit for bit; else both refuse.

    A batch frame is put together by hand: its bytes are those of pyarrow.
    """
    try:
        rows = [row_of(event) for event in events]
    except TypeError:
        assert any(event.record.trajectory_id is None for event in events)  # type: ignore[union-attr]
        return
    try:
        data = encode_rows(rows)
    except REFUSALS:
        for refuses in (by_pyarrow, encode_batch):
            with pytest.raises(REFUSALS):
                refuses(rows, 7)
        return
    assert encode_batch(rows, 7) == by_pyarrow(rows, 7).serialize().to_pybytes()
    back = to_batch(decode_rows(memoryview(data), len(rows)), 7)
    ours, theirs = (pa.Table.from_batches([batch]) for batch in (by_pyarrow(rows, 7), back))
    assert same_bits(ours, theirs) is None


def test_a_row_takes_80_bytes_and_its_values() -> None:
    """Nothing is padded."""
    event = Event(RewardAssigned("trajectory", None, 0.5), "run", "id", 1)
    row = row_of(event)
    assert len(encode_rows([row])) == 80 + len("idreward.assignedruntrajectory") + len(row[-1])


@pytest.mark.parametrize(
    "span",
    [
        VersionSpan("a", 2**63, 0, 1),
        VersionSpan("a", 0, 0, 2**31),
        VersionSpan("a", 0, -(2**31) - 1, 0),
        VersionSpan("a", 0, 0.5, 1),  # type: ignore[arg-type]
        VersionSpan("\ud800", 0, 0, 1),
        VersionSpan(7, 0, 0, 1),  # type: ignore[arg-type]
    ],
)
def test_a_span_that_no_column_takes_is_not_written(span: VersionSpan) -> None:
    """It would be acknowledged, and then no reader could make a batch of it."""
    ids = np.array([1], np.int32)
    record = turn_completed(
        "t",
        "u",
        policy="a",
        policy_version=0,
        prompt_ids=ids,
        completion_ids=ids,
        version_spans=(span,),
        prompt_length=1,
    )
    with pytest.raises(REFUSALS):
        encode_rows([row_of(Event(record, "run"))])


@pytest.mark.parametrize("cut", [1, 79, 80, 100])
def test_rows_that_are_cut_short_are_refused(cut: int) -> None:
    """Too few bytes, or some that follow, are a ValueError and no shorter row."""
    data = encode_rows([row_of(Event(RewardAssigned("t", None, 0.5), "run"))] * 2)
    for wrong, count in ((data[:-cut], 2), (data, 1), (data + b"x", 2), (data, 3)):
        with pytest.raises(ValueError, match=r"cut short|follow the last row"):
            decode_rows(memoryview(wrong), count)


def test_what_is_refused_names_no_row(notes: Callable[..., list[Event]]) -> None:
    """One value without a stored form refuses all rows of the frame."""
    bad = Event(RewardAssigned("t", None, 0.5), "run", time_us=2**63)
    with pytest.raises(Exception, match=r"format|range|int too large"):
        encode_rows([row_of(e) for e in (*notes(2), bad)])


def test_arrays_of_any_layout_are_framed_as_they_read() -> None:
    """Every other token of an array, or one stored the other way round, is no reason for other bytes."""
    ids = np.arange(20, dtype=np.int32)
    kinds = (ids[::2], ids.astype(">i4"), ids.reshape(2, 10)[1], ids.tolist())
    rows = [row_of(_turn(array)) for array in kinds]
    batch = pa.ipc.read_record_batch(pa.py_buffer(encode_batch(rows, 0)), LOG_SCHEMA)
    batch.validate(full=True)
    assert batch.column("completion_ids").to_pylist() == [list(map(int, array)) for array in kinds]


def test_a_later_change_of_an_array_changes_no_frame() -> None:
    """What was framed is on its way to the disk, and its checksum is made."""
    ids = np.arange(5, dtype=np.int32)
    framed = encode_batch([row_of(_turn(ids))], 0)
    before = bytes(framed)
    ids[:] = 7
    assert framed == before


def _turn(ids: Any) -> Event:
    record = turn_completed(
        "t", "u", policy="a", policy_version=0, prompt_ids=ids, completion_ids=ids, prompt_length=1
    )
    return Event(record, "run", "id", 9)


@pytest.mark.parametrize("column", REQUIRED)
def test_what_every_event_has_is_never_null(column: str) -> None:
    """Neither form of a frame takes it, so that it does not depend on how many are appended together."""
    row = list(row_of(_turn(np.arange(3, dtype=np.int32))))
    row[ROW_NAMES.index(column)] = None
    for refuses in (encode_rows, lambda rows: encode_batch(rows, 0)):
        with pytest.raises(REFUSALS):
            refuses([tuple(row)])


@pytest.mark.parametrize(
    ("reward", "stored"),
    [(0.5, 0.5), (1, 1.0), (True, 1.0), (np.float32(0.5), 0.5), (None, None), (2**60, 2.0**60)]
    + [(wrong, ValueError) for wrong in (2**60 + 1, Decimal("0.1"))]
    + [("1e", ValueError), (10**400, OverflowError), ([], TypeError)],
)
def test_a_reward_is_the_number_that_was_given(reward: Any, stored: Any) -> None:
    """Or it is refused: by rows and by batches alike."""
    rows = [row_of(Event(RewardAssigned("t", None, reward), "run"))]
    if isinstance(stored, type):
        for refuses in (encode_rows, lambda rows: encode_batch(rows, 0)):
            with pytest.raises(stored):
                refuses(rows)
        return
    framed = pa.ipc.read_record_batch(pa.py_buffer(encode_batch(rows, 0)), LOG_SCHEMA)
    decoded = to_batch(decode_rows(memoryview(encode_rows(rows)), 1), 0)
    assert framed.column("reward").to_pylist() == decoded.column("reward").to_pylist() == [stored]


def test_json_that_is_no_utf_8_is_refused() -> None:
    """It would be acknowledged, and then nobody could read it."""
    rows = [row_of(Event(LabelAdded("t", None, "n", orjson.Fragment(b'"\xff"')), "run"))]
    for refuses in (encode_rows, lambda rows: encode_batch(rows, 0)):
        with pytest.raises(UnicodeDecodeError):
            refuses(rows)


def test_a_list_that_grows_is_framed_as_it_was_read() -> None:
    """Its length is that of what was taken from it."""

    class Growing(list[int]):
        def __len__(self) -> int:
            self.append(7)
            return super().__len__()

    row = row_of(_turn(Growing([1, 2, 3])))
    batch = pa.ipc.read_record_batch(pa.py_buffer(encode_batch([row] * 3, 0)), LOG_SCHEMA)
    batch.validate(full=True)
    assert all(ids[:3] == [1, 2, 3] for ids in batch.column("completion_ids").to_pylist())
