"""Events come back from their stored form bit for bit, and unknown ones are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as nps

from rollbook.store.errors import FormatError
from rollbook.store.events import RECORDS, Event, RewardAssigned, TurnCompleted, TurnFailed, VersionSpan
from rollbook.store.events.batches import encode
from rollbook.store.events.codec import as_json, decode, from_json
from rollbook.store.events.event_json import json_bytes
from rollbook.store.events.schema import COLUMNS, LOG_SCHEMA

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
INT = st.integers(-(2**63), 2**63 - 1)
FINITE = st.floats(allow_nan=False, allow_infinity=False)
JSON = st.recursive(
    st.none() | st.booleans() | INT | FINITE | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
OBJECT = st.dictionaries(TEXT, JSON, max_size=3)
IDS = nps.arrays(np.int32, st.integers(0, 5), elements=st.integers(-(2**31), 2**31 - 1))
# Any 32 bits at all: every NaN payload, both zeros, infinities and subnormal numbers.
LOGPROBS = nps.arrays(np.uint32, st.integers(0, 5), elements=st.integers(0, 2**32 - 1)).map(
    lambda bits: bits.view(np.float32)
)
SPAN = st.builds(VersionSpan, TEXT, INT, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))
BY_TYPE: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXT,
    "int": INT,
    "float": FINITE,
    "bool": st.booleans(),
    "Json": OBJECT,
    "TokenIds": IDS,
    "Logprobs": LOGPROBS,
    "list[Json]": st.lists(OBJECT, max_size=2),
    "list[str]": st.lists(TEXT, max_size=2),
    "tuple[VersionSpan, ...]": st.lists(SPAN, max_size=3).map(tuple),
    "Any": JSON,
    "list[list[list[int]]]": st.lists(st.lists(st.lists(INT, max_size=2), max_size=2), max_size=2),
}


def _of(annotation: str) -> st.SearchStrategy[Any]:
    options = [st.none() if part == "None" else BY_TYPE[part] for part in annotation.split(" | ")]
    return st.one_of(options)


RECORD = st.one_of(
    [st.builds(kind, **{f.name: _of(str(f.type)) for f in fields(kind)}) for kind in RECORDS.values()]
)
EVENT = st.builds(Event, RECORD, TEXT, TEXT, INT)


@given(st.lists(EVENT, min_size=1, max_size=6), st.integers(0, 2**40))
@settings(max_examples=150)
def test_every_record_comes_back_bit_for_bit(plain: Any, events: list[Event], first: int) -> None:
    """Any mix of kinds decodes, after serialization, to the same values, arrays compared as bytes."""
    payload = encode(events, first).serialize()
    back = list(decode(pa.ipc.read_record_batch(payload, LOG_SCHEMA), "lane"))
    assert [e.seq for e in back] == list(range(first, first + len(events)))
    assert {e.lane for e in back} == {"lane"}
    assert [plain(e, place=False) for e in back] == [plain(e, place=False) for e in events]


@pytest.mark.parametrize("kind", sorted(RECORDS))
def test_the_examples_hold_every_kind(kind: str, story: Any, upkeep: Any, plain: Any) -> None:
    """The shared examples have each kind, and each comes back alone as well as among others."""
    events = [e for lane in (*story.values(), upkeep) for e in lane if e.kind == kind]
    assert events
    back = [next(decode(encode([e], 0), "")) for e in events]
    assert [plain(e, place=False) for e in back] == [plain(e, place=False) for e in events]


@given(st.lists(EVENT, min_size=2, max_size=6), st.data())
@settings(max_examples=50)
def test_slices_decode_as_their_own_rows(plain: Any, events: list[Event], data: Any) -> None:
    """A slice of a batch decodes to just those events: offsets are the slice's, not the buffer's."""
    start = data.draw(st.integers(0, len(events) - 1))
    stop = data.draw(st.integers(start, len(events)))
    back = decode(encode(events, 0).slice(start, stop - start), "")
    assert [plain(e, place=False) for e in back] == [plain(e, place=False) for e in events[start:stop]]


def _with_column(batch: pa.RecordBatch, name: str, value: Any) -> pa.RecordBatch:
    index = batch.schema.get_field_index(name)
    return batch.set_column(index, LOG_SCHEMA.field(name), pa.array([value], LOG_SCHEMA.field(name).type))


@pytest.mark.parametrize(("column", "value"), [("kind", "moon.landed"), ("schema_version", 3)])
def test_unknown_kind_or_newer_version_is_refused(column: str, value: Any) -> None:
    """What this release does not know raises FormatError, naming the event and the remedy."""
    batch = _with_column(encode([Event(TurnFailed("t", "u", "x"), "r", "the-id")], 0), column, value)
    with pytest.raises(FormatError, match=r"the-id.*update rollbook"):
        list(decode(batch, ""))


def test_hot_fields_are_columns_and_the_rest_is_extra(story: Any) -> None:
    """A field with a typed column is stored there only; all others are in `extra` only."""
    completed = next(e for e in story["serve"] if isinstance(e.record, TurnCompleted))
    row = encode([completed], 5).to_pylist()[0]
    extra = orjson.loads(row["extra"])
    assert row["completion_ids"] == [10, 11]
    assert row["logprobs"] == [-0.5, -0.25]
    assert row["version_spans"] == [{"policy": "actor", "version": 0, "start": 0, "end": 2}]
    assert (row["seq"], row["schema_version"], row["step"], row["reward"]) == (5, 3, None, None)
    assert set(extra) == {f.name for f in fields(TurnCompleted)} - {c.name for c in COLUMNS}
    assert extra["prompt_length"] == 3


def test_as_json_holds_envelope_and_record(story: Any) -> None:
    """as_json gives plain values that orjson can write, arrays as lists and spans as objects."""
    completed = next(e for e in story["serve"] if isinstance(e.record, TurnCompleted))
    value = orjson.loads(orjson.dumps(as_json(completed)))
    assert value["kind"] == "turn.completed"
    assert value["event_id"] == "e-serve-03"
    assert value["prompt_ids"] == [1, 2, 3]
    assert value["logprobs"] == [-0.5, -0.25]
    assert value["version_spans"] == [{"policy": "actor", "version": 0, "start": 0, "end": 2}]


@given(EVENT, st.none() | st.integers(0, 2**64 - 1))
@settings(max_examples=300)
def test_json_comes_back_bit_for_bit(plain: Any, event: Event, bits: int | None) -> None:
    """JSON text of any event gives the event again: every float, each NaN's payload, -0.0 and infinities."""
    if isinstance(event.record, RewardAssigned) and bits is not None:
        reward = float(np.uint64(bits).view(np.float64))
        event = replace(event, record=replace(event.record, reward=reward))
    text = json_bytes(event)
    assert text == orjson.dumps(as_json(event))
    back = from_json(orjson.loads(text))
    ours, theirs = plain(event), plain(back)
    for values in (ours, theirs):
        if isinstance(values.get("record.reward"), float):
            values["record.reward"] = np.float64(values["record.reward"]).tobytes()
    assert ours == theirs


def test_what_json_spells_in_words(story: Any) -> None:
    """Floats that JSON has no number for are words; a string of a request that looks like one stays one."""
    completed = next(e for e in story["serve"] if isinstance(e.record, TurnCompleted))
    odd = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x80000000], np.uint32).view(np.float32)
    record = replace(completed.record, logprobs=odd, flags=["NaN", "Infinity"])
    value = orjson.loads(orjson.dumps(as_json(replace(completed, record=record))))
    assert value["logprobs"] == ["Infinity", "-Infinity", "NaN", "NaN:ffc00001", -0.0]
    assert value["flags"] == ["NaN", "Infinity"]
    back = from_json(value).record
    assert isinstance(back, TurnCompleted)
    assert back.logprobs is not None
    assert back.logprobs.tobytes() == odd.tobytes()
    assert back.flags == ["NaN", "Infinity"]


def test_json_of_other_releases(story: Any) -> None:
    """An older version is read through its upcaster; a newer one, or an unknown kind, is refused."""
    dropped = next(as_json(e) for lane in story.values() for e in lane if e.kind == "sample.dropped")
    assert dropped["schema_version"] == 3
    newer = ("schema_version", "attempt", "policy_version", "cut")
    older = {k: v for k, v in dropped.items() if k not in newer}
    assert as_json(from_json(older)) == dropped
    for wrong in (dropped | {"schema_version": 4}, dropped | {"kind": "moon.landed"}, {"kind": None}, {}):
        with pytest.raises(FormatError, match="that this release reads"):
            from_json(wrong)
