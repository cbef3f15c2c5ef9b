"""The trainer's stream: equal, value by value, to what one gets event by event; whatever the batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.cut import holds
from rollbook.store.errors import CutError
from rollbook.store.events import TurnCompleted, TurnFailed, VersionSpan
from rollbook.store.log.stream import Packed, packed

TURN = st.fixed_dictionaries(
    {
        "prompt": st.lists(st.integers(-(2**31), 2**31 - 1), max_size=6),
        "sampled": st.lists(
            st.tuples(st.integers(0, 2**31 - 1), st.floats(width=32, allow_nan=True)), max_size=5
        ),
        "scored": st.booleans(),
        "policy": st.sampled_from(["actor", "critic", None]),
        "version": st.sampled_from([None, 0, 1, 2, 3]),
    }
)
APPENDS = st.lists(st.lists(st.one_of(TURN, st.none()), min_size=1, max_size=12), max_size=6)


def _event(number: int, turn: dict[str, Any] | None) -> Event:
    if turn is None:
        return Event(TurnFailed("t", f"u{number}", "gone"), "run")
    ids = np.array([i for i, _ in turn["sampled"]], np.int32)
    logprobs = np.array([p for _, p in turn["sampled"]], np.float32) if turn["scored"] else None
    spans = (VersionSpan("actor", 1, 0, len(ids)),)
    head = ("t", f"u{number}", turn["policy"], turn["version"], np.array(turn["prompt"], np.int32), ids)
    return Event(TurnCompleted(*head, logprobs, spans, 0, "0" * 64, "stop", {}, {}, [], {}), "run")


def _write(store: Store, lane: str, appends: list[list[Any]], first: int = 0) -> None:
    number = first
    with store.writer(lane) as writer:
        for append in appends:
            writer.append([_event(number + i, turn) for i, turn in enumerate(append)]).result(30)
            number += len(append)


def _rows(store: Store, **which: Any) -> Iterator[tuple[str, int, bytes, bytes, bytes]]:
    """What the stream should say, one turn after the other, from decoded events."""
    start = which.get("start") or {}
    for event in store.events(which.get("cut")):
        turn = event.record
        if not isinstance(turn, TurnCompleted) or holds(start, event.lane, event.seq):
            continue
        version, minimum = turn.policy_version, which.get("min_version", 0)
        if turn.policy != which.get("policy", "actor") or version is None or version < minimum:
            continue
        if turn.logprobs is None:
            continue
        ids, logprobs, mask = [], [], []
        for token in turn.prompt_ids.tolist():
            ids, logprobs, mask = [*ids, token], [*logprobs, 0.0], [*mask, 0]
        for token, logprob in zip(turn.completion_ids.tolist(), turn.logprobs, strict=True):
            ids, logprobs, mask = [*ids, token], [*logprobs, logprob], [*mask, 1]
        arrays = np.array(ids, np.int32), np.array(logprobs, np.float32), np.array(mask, np.uint8)
        yield (turn.turn_id, version, *(array.tobytes() for array in arrays))  # type: ignore[misc]


def _unpacked(batches: list[Packed]) -> Iterator[tuple[str, int, bytes, bytes, bytes]]:
    for batch in batches:
        assert (batch.ids.dtype, batch.logprobs.dtype, batch.loss_mask.dtype) == (
            np.int32,
            np.float32,
            np.uint8,
        )
        assert len(batch.ids) == len(batch.logprobs) == len(batch.loss_mask) == batch.offsets[-1]
        assert len(batch.turn_ids) == len(batch.versions) == len(batch.offsets) - 1
        bounds = zip(batch.offsets, batch.offsets[1:], strict=False)
        for (begin, end), turn_id, version in zip(bounds, batch.turn_ids, batch.versions, strict=True):
            arrays = (batch.ids[begin:end], batch.logprobs[begin:end], batch.loss_mask[begin:end])
            yield (turn_id, int(version), *(array.tobytes() for array in arrays))  # type: ignore[misc]


@settings(max_examples=40, deadline=None)
@given(APPENDS, APPENDS, st.integers(1, 9), st.integers(0, 3), st.data())
def test_the_stream_is_the_events(one: Any, two: Any, turns: int, fresh: int, data: st.DataObject) -> None:
    """For any events in any frames, at any cut from any start, every turn comes once, whole, and in order."""
    with TemporaryDirectory() as folder:
        store = rb.open(Path(folder) / "store", create=True)
        _write(store, "a", one)
        _write(store, "b", two, 1000)
        head = store.head()
        cut = {lane: data.draw(st.integers(0, count)) for lane, count in head.items()}
        start = {lane: data.draw(st.integers(0, count)) for lane, count in cut.items()}
        which: dict[str, Any] = {"cut": cut, "start": start, "min_version": fresh}
        batches = list(packed(store, turns=turns, **which))
        assert list(_unpacked(batches)) == list(_rows(store, **which))
        assert [len(b.turn_ids) for b in batches[:-1]] == [turns] * (len(batches) - 1)
        assert all(0 < len(b.turn_ids) <= turns for b in batches)


def test_two_turns(store: Store) -> None:
    """The values of a batch, written out: prompts are masked, logprobs stand under their tokens."""
    made: dict[str, Any] = {"scored": True, "policy": "actor", "version": 5}
    _write(
        store,
        "a",
        [
            [
                made | {"prompt": [7, 8], "sampled": [(9, -0.5)]},
                made | {"prompt": [], "sampled": [(1, -1.0), (2, -2.0)], "version": 4},
                made | {"prompt": [3], "sampled": []},
            ]
        ],
    )
    (batch,) = packed(store)
    assert batch.ids.tolist() == [7, 8, 9, 1, 2, 3]
    assert batch.logprobs.tolist() == [0.0, 0.0, -0.5, -1.0, -2.0, 0.0]
    assert batch.loss_mask.tolist() == [0, 0, 1, 1, 1, 0]
    assert batch.offsets.tolist() == [0, 3, 5, 6]
    assert (batch.turn_ids, batch.versions.tolist()) == (["u0", "u1", "u2"], [5, 4, 5])
    assert [b.turn_ids for b in packed(store, min_version=5)] == [["u0", "u2"]]
    assert list(packed(store, policy="critic")) == []


def test_what_is_handed_out_is_the_callers(store: Store) -> None:
    """Batches may be written to: nothing in them is the log's own memory."""
    made: dict[str, Any] = {"scored": True, "policy": "actor", "version": 0, "prompt": [1]}
    _write(store, "a", [[made | {"sampled": [(2, -0.5)]} for _ in range(9)]])
    for batch in packed(store):
        batch.ids[:], batch.logprobs[:], batch.loss_mask[:] = 0, 0, 0
    assert next(iter(packed(store))).ids.tolist() == [1, 2] * 9


def test_what_cannot_be_streamed(store: Store) -> None:
    """A batch of no turns, and a cut beyond the store."""
    with pytest.raises(ValueError, match="turns is 0"):
        next(packed(store, turns=0))
    with pytest.raises(CutError, match="lane 'a'"):
        next(packed(store, {"a": 1}))
