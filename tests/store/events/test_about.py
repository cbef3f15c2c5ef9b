"""What a kind of event is, stated beside its record: who handles all kinds knows a new one by that alone."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event
from rollbook.store import events as kinds
from rollbook.store.events import RECORDS, schema
from rollbook.store.events.about import About, marked
from rollbook.store.events.erased import erase_row, text_kinds
from rollbook.store.events.event import about, kinds_where
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.sealed.parquet import FAT_KINDS
from rollbook.store.sealed.unit import current_units, unit_folder
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.retain import retain
from rollbook.store.upkeep.sealer import Sealer

SECRET = "XQ8-a-critic-wrote-this"


@dataclass(frozen=True, slots=True)
class CritiqueAdded:
    """A kind that this release does not have: a text about a turn."""

    KIND: ClassVar[str] = "critique.added"
    ABOUT: ClassVar[About] = About(of="trajectory", text={"critique": marked})
    trajectory_id: str
    turn_id: str
    critique: str
    score: int


@pytest.fixture
def critique(monkeypatch: pytest.MonkeyPatch) -> type[Any]:
    """The kind, added as its own module would add it."""
    monkeypatch.setitem(RECORDS, CritiqueAdded.KIND, CritiqueAdded)  # type: ignore[arg-type]
    monkeypatch.setitem(
        schema._FIELDS, CritiqueAdded.KIND, schema._fields_of(CritiqueAdded.KIND, CritiqueAdded)
    )  # type: ignore[arg-type]
    return CritiqueAdded


@pytest.fixture
def sealed(critique: type[Any], tmp_path: Path) -> rb.Store:
    """A sealed store with two finished trajectories, each with a critique."""
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("serve") as writer:
        for name in ("a", "b"):
            ids = np.array([1, 2], np.int32)
            done = turn_completed(
                name,
                f"{name}.0",
                policy_version=0,
                prompt_ids=ids,
                completion_ids=ids,
                version_spans=(kinds.VersionSpan("actor", 0, 0, 2),),
                prompt_length=2,
                prompt_sha256=prompt_sha256(ids),
                reply={"content": "hi"},
            )
            requested = turn_requested(name, f"{name}.0", root_reason="first_turn")
            records = [
                kinds.TrajectoryOpened(name, name),
                requested,
                done,
                critique(name, f"{name}.0", f"{SECRET} of {name}", 7),
                kinds.TrajectoryFinished(name),
            ]
            writer.append([Event(record, "r") for record in records]).result(30)
    Sealer(log).run_once()
    return log


def test_every_kind_says_what_it_is() -> None:
    """Each record has an `ABOUT` of its own, whose fields are the record's."""
    for kind, record in RECORDS.items():
        assert isinstance(record.__dict__.get("ABOUT"), About), kind
        names = {field.name for field in fields(record)}
        assert {*record.ABOUT.text, *record.ABOUT.counted, *record.ABOUT.large} <= names, kind
        assert record.ABOUT.of != "trajectory" or "trajectory_id" in names, kind
        assert record.ABOUT.of != "policy" or "policy" in names, kind


def test_what_the_kinds_say() -> None:
    """The lists that erasure, retention and sealing go by."""
    assert text_kinds() == [
        *("trajectory.opened", "turn.requested", "turn.completed", "turn.failed", "reward.assigned"),
        *(
            "preference.added",
            "label.added",
            "launch.started",
            "launch.ended",
            "launch.leaked",
            "event.orphaned",
        ),
    ]
    assert FAT_KINDS == ("turn.requested", "turn.completed")
    lasting = kinds_where(lambda properties: properties.lasting)
    assert sorted(lasting) == [
        *("lane.ordered", "operation.accepted", "operation.ended", "sampler.opened", "segment.dropped"),
        *("session.ended", "session.opened", "step.retired", "trajectory.erased"),
        *("weights.changed", "weights.copied", "weights.freed"),
    ]
    of_policy = kinds_where(lambda properties: properties.of == "policy")
    assert sorted(of_policy) == [
        *(
            "checkpoint.removed",
            "checkpoint.written",
            "eval.finished",
            "eval.sampled",
            "eval.started",
            "policy.published",
        ),
        *("step.abandoned", "step.committed", "step.failed", "step.planned", "step.vectors", "stop.fired"),
    ]
    of_run = kinds_where(lambda properties: properties.of == "run")
    assert sorted(of_run) == [
        *("operation.accepted", "operation.ended", "sample.dropped", "sampler.opened"),
        *("weights.changed", "weights.copied", "weights.freed"),
    ]
    assert about("no.such.kind") == About()


def test_erasure_knows_a_new_kind(sealed: rb.Store) -> None:
    """Its text is gone from the files, its other fields stay, and another trajectory's is untouched."""
    erase_trajectory(sealed, "a", "asked", keep_tokens=False)
    critiques = {e.record.trajectory_id: e.record for e in sealed.events() if e.kind == "critique.added"}
    assert (critiques["a"].critique, critiques["a"].score) == ({"erased": True}, 7)
    assert critiques["b"].critique == f"{SECRET} of b"
    (unit,) = current_units(sealed.path, "serve")
    table = sealed.table()
    assert f"{SECRET} of a" not in "".join(table["extra"].to_pylist())
    assert unit_folder(sealed.path, unit).is_dir()


def test_erasing_a_row_of_it_leaves_what_is_no_text(critique: type[Any]) -> None:
    """Only the fields that the kind names change."""
    schema = {
        "extra": '{"critique":"x","score":7}',
        "prompt_ids": None,
        "completion_ids": None,
        "logprobs": None,
    }
    erased = erase_row("critique.added", schema, keep_tokens=True)
    assert erased["extra"] == '{"critique":{"erased":true},"score":7}'


def test_sql_knows_a_new_kind(sealed: rb.Store) -> None:
    """Its events are rows of the view `events`, with its fields in `extra`."""
    with rb.connect(sealed.path) as connection:
        rows = connection.execute(
            "SELECT trajectory_id, turn_id, CAST(extra ->> '$.score' AS INT) FROM events "
            "WHERE kind = 'critique.added' ORDER BY 1"
        ).fetchall()
    assert rows == [("a", "a.0", 7), ("b", "b.0", 7)]


def test_retention_knows_a_new_kind(critique: type[Any], tmp_path: Path) -> None:
    """A unit with nothing else of an open trajectory than such an event stays with it."""
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("serve") as writer:
        writer.append([Event(critique("open", "open.0", "text", 1), "r")]).result(30)
    Sealer(log).run_once()
    with log.writer("serve") as writer:
        writer.append([Event(kinds.TrajectoryOpened("open", "open"), "r")]).result(30)
        report = retain(log, "0s")
    assert [u.dropped_us for u in current_units(log.path, "serve")] == [None]
    assert "trajectory open" in str(report)
