"""Records of older versions are read as this release's; newer ones and unknown kinds are refused by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook.store import Event
from rollbook.store.errors import FormatError
from rollbook.store.events import RECORDS, SampleDropped
from rollbook.store.events import upcast as module
from rollbook.store.events.batches import to_batch
from rollbook.store.events.codec import conform, decode
from rollbook.store.events.schema import LOG_SCHEMA, ROW_NAMES, row_of
from rollbook.store.events.upcast import UPCASTERS, VERSIONS, upcast, version_of


def _batch(record: Any, without: str | None = None, **columns: Any) -> pa.RecordBatch:
    """One event's batch with some columns changed, and a field of `extra` left out."""
    row = dict(zip(ROW_NAMES, row_of(Event(record, "run", "e1")), strict=True)) | columns
    extra = orjson.loads(row["extra"])
    if without is not None:
        del extra[without]
    return to_batch([tuple((row | {"extra": orjson.dumps(extra)}).values())], 0)


DROPPED = SampleDropped("t", "u", "split", "rd", 3, {"split": "eval"}, 2)


def test_a_dropped_sample_of_version_1() -> None:
    """Before version 2 there was the first attempt only."""
    [event] = decode(_batch(DROPPED, "attempt", schema_version=1), "a")
    assert event.record == SampleDropped("t", "u", "split", "rd", 3, {"split": "eval"}, 1)
    [event] = decode(_batch(DROPPED), "a")
    assert event.record == DROPPED


def test_turns_of_version_1() -> None:
    """Before version 2 every request was a chat completion, and every engine Rollbook's own."""
    requested = turn_requested("t", "u", root_reason="first_turn", context_key="key")
    [event] = decode(_batch(requested, "wire", schema_version=1), "a")
    assert event.record == requested
    assert event.record.wire == {}
    ids = np.array([1], np.int32)
    done = turn_completed(
        "t", "u", policy=None, prompt_ids=ids, completion_ids=ids, prompt_length=1, prompt_sha256="sha"
    )
    [event] = decode(_batch(done, "upstream", schema_version=1), "a")
    assert event.record.upstream == {}
    assert event.record.prompt_sha256 == "sha"


def test_every_step_has_an_upcaster() -> None:
    """From version 1 of each kind there is a way to this release's, and none beyond it."""
    steps = {(kind, version) for kind in RECORDS for version in range(1, version_of(kind))}
    assert set(UPCASTERS) == steps
    assert set(VERSIONS) <= set(RECORDS)


def test_upcasting_goes_one_version_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of version 1 passes through every step; one of the newest through none."""
    monkeypatch.setattr(module, "VERSIONS", {"k": 3})
    steps = {("k", 1): lambda v: v | {"b": v["a"] + 1}, ("k", 2): lambda v: {"c": v["b"] * 10}}
    monkeypatch.setattr(module, "UPCASTERS", steps)
    assert upcast("k", 1, {"a": 1}) == {"c": 20}
    assert upcast("k", 2, {"b": 5}) == {"c": 50}
    assert upcast("k", 3, {"c": 7}) == {"c": 7}
    assert upcast("other", 1, {"x": 1}) == {"x": 1}


@pytest.mark.parametrize("version", [0, -1, 4, 99])
def test_a_version_that_is_not_known(version: int) -> None:
    """A version above this release's, or below 1, is refused with the remedy."""
    with pytest.raises(FormatError, match=f"e1 .*sample.dropped.*version {version}.*update rollbook"):
        list(decode(_batch(DROPPED, schema_version=version), "a"))


def test_a_kind_that_is_not_known() -> None:
    """A kind of a later release is refused with the remedy, not passed over."""
    with pytest.raises(FormatError, match=r"e1 .*'dream.dreamt'.*update rollbook"):
        list(decode(_batch(DROPPED, kind="dream.dreamt"), "a"))


def test_columns_of_other_releases() -> None:
    """A column that was not there yet is null; one that is not known is refused with the remedy."""
    batch = _batch(DROPPED)
    older = batch.drop_columns(["reward", "version_spans"])
    assert conform(older).equals(batch)
    assert conform(older).schema.equals(LOG_SCHEMA)
    with pytest.raises(FormatError, match=r"\['mood'\].*update rollbook"):
        conform(batch.append_column("mood", pa.array(["good"])))
