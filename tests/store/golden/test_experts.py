"""Turns with routed experts, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from tests.fakes.stories.golden import digest_of, written_in
from tests.fakes.stories.records import turn_completed

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import BodyStored, TurnCompleted, token_ids
from rollbook.store.events.codec import decode, inline_bodies
from rollbook.store.events.routed_experts import pack, unpack
from rollbook.store.events.upcast import upcast
from rollbook.store.settings import AppendSettings
from rollbook.store.upkeep.sealer import Sealer

PINNED = "8b283988bd2aefb7"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-experts", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-experts") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment, with experts beside the row, in it, and without."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-experts")]
    done = {e.record.turn_id: e.record.routed_experts for e in events if isinstance(e.record, TurnCompleted)}
    assert {name: stored.get("bits") for name, stored in done.items()} == {
        "u1": 7,
        "u2": 3,
        "u3": None,
        "u4": 7,
    }
    first = unpack(done["u1"])
    assert first.shape == (102, 3, 2)
    assert np.array_equal(first.reshape(-1), np.arange(612) % 128)
    assert (unpack(done["u2"]).reshape(-1) == np.arange(24) % 8).all()
    assert (done["u4"]["start"], unpack(done["u4"]).reshape(-1).tolist()) == (
        102,
        [(102 + i) % 512 for i in range(24)],
    )
    assert done["u3"] == {}


def test_a_trajectory_has_them(golden: Store) -> None:
    """A single trajectory's turns, wherever they are, before and after all of it is sealed."""
    for _ in range(2):
        t1 = golden.trajectory("t1")
        assert t1 is not None
        done = t1.turns["u1"].completed
        assert done is not None
        assert unpack(done.routed_experts).shape == (102, 3, 2)
        Sealer(golden).run_once()


def test_a_turn_of_version_2() -> None:
    """Before version 3 no engine was asked."""
    assert upcast("turn.completed", 2, {"upstream": {"id": 1}}) == {
        "upstream": {"id": 1},
        "routed_experts": {},
    }


EXPERTS = pack(np.arange(600, dtype=np.int32).reshape(100, 3, 2) % 100, 0)


def _completed(turn_id: str, routed: Any) -> Event:
    ids = token_ids([1])
    record = turn_completed(
        "t",
        turn_id,
        policy=None,
        prompt_ids=ids,
        completion_ids=ids,
        prompt_length=1,
        prompt_sha256="sha",
        reply={"$body": "mine"},
        routed_experts=routed,
    )
    return Event(record, "run")


def test_large_experts_stand_apart_from_the_row(store: Store, plain: Any) -> None:
    """As a body earlier in the segment, so that SQL over the turns need not read them; small ones do not."""
    events = [
        _completed("u1", EXPERTS),
        _completed("u2", pack(np.ones((1, 1, 1), np.int32), 5)),
        _completed("u3", {}),
    ]
    with store.writer("a", AppendSettings(body_bytes=256)) as writer:
        writer.append(events).result(30)
    read = list(store.events())
    assert [e.kind for e in read] == ["body.stored", *["turn.completed"] * 3]
    assert isinstance(read[0].record, BodyStored)
    assert read[0].record.body == EXPERTS["data"]
    assert [plain(e, place=False) for e in read[1:]] == [plain(e, place=False) for e in events]
    rows = rb.connect(store.path).execute(
        "select extra->'routed_experts', extra->'reply' from events "
        "where kind = 'turn.completed' order by seq"
    )
    pairs = [(json.loads(routed), json.loads(reply)) for routed, reply in rows.fetchall()]
    assert pairs[0][0] == EXPERTS | {"data": {"$body": read[0].record.digest}}
    assert pairs[1][0]["data"] == "gA=="
    assert [reply for _, reply in pairs] == [{"$body": "mine"}] * 3  # what a model said is no reference


def test_batches_for_readers_elsewhere_are_whole(store: Store) -> None:
    """A batch that goes over HTTP holds the experts themselves."""
    with store.writer("a", AppendSettings(body_bytes=256)) as writer:
        writer.append([_completed("u1", EXPERTS)]).result(30)
    table = rb.connect(store.path).sql("select * exclude (lane) from events order by seq").to_arrow_table()
    batch = table.combine_chunks().to_batches()[0]
    assert isinstance(batch, pa.RecordBatch)
    whole = inline_bodies(batch.slice(1), lambda digest: EXPERTS["data"])
    [event] = decode(whole, "a")
    assert isinstance(event.record, TurnCompleted)
    assert event.record.routed_experts == EXPERTS
