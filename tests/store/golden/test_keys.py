"""Events that say whose key did it, as the release that brought them wrote them, are read for ever."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import EngineControlled, RewardAssigned
from rollbook.store.events.erased import erase_row
from rollbook.store.events.upcast import upcast
from rollbook.store.sealed.derived import REWARDS, build_derived
from rollbook.store.sealed.unit import current_units, derived_folder

PINNED = "900693127b550d5a"
"""The beginning of the sha256 of the golden store's files: they are never changed."""
NAMED = ("trajectory.opened", "trajectory.finished", "reward.assigned", "label.added", "cursor.moved")


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-keys", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-keys") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-keys")]
    assert [getattr(e.record, "by", "-") for e in events] == [
        *("trajectory", "-", "-", "trajectory", "trajectory", "nightly-judge", "nightly-judge"),
        *("-", "ops", "ops", None, None),
    ]
    assert events[9].record == EngineControlled(
        "embedded", "pause_generation", {"mode": "retract"}, None, "ops"
    )
    assert events[10].record == EngineControlled(
        "embedded", "update_weight_version", {"new_version": "3"}, "not whole", None
    )


@pytest.mark.parametrize("kind", NAMED)
def test_before_version_2_nobody_is_named(kind: str) -> None:
    """Whose key did it was not written down."""
    later = {"origin": None} if kind == "trajectory.opened" else {}
    assert upcast(kind, 1, {"trajectory_id": "t"}) == {"trajectory_id": "t", "by": None} | later


def _rewards(log: Store) -> list[Any]:
    with rb.connect(log.path) as connection:
        return connection.execute("select reward, source, key from rewards order by seq").fetchall()


ALL = [(0.5, "agent", "trajectory"), (0.25, "judge", "nightly-judge"), (1.0, "agent", None)]


def test_sql_says_who(golden: Store) -> None:
    """Of rewards and turns, sealed with and without derived files, and live."""
    assert _rewards(golden) == ALL
    [unit] = current_units(golden.path, "serve")
    assert REWARDS in build_derived(golden.path, unit)
    assert _rewards(golden) == ALL
    with rb.connect(golden.path) as connection:
        turns = connection.execute("select turn_id, key from turns order by turn_id").fetchall()
    assert turns == [("u1", "trajectory"), ("u2", None)]


def test_what_an_older_release_derived_is_read(golden: Store) -> None:
    """Its file of rewards has no such column: nobody knows then, and nothing is refused."""
    [unit] = current_units(golden.path, "serve")
    build_derived(golden.path, unit)
    file = derived_folder(golden.path, unit) / REWARDS
    pq.write_table(pq.read_table(file).drop_columns(["key"]), file)
    assert _rewards(golden) == [(r, source, by if r == 1.0 else None) for r, source, by in ALL]


def test_erasure_leaves_whose_key_it_was(golden: Store) -> None:
    """A key's name is no text of the trajectory."""
    table = golden.table(golden.head())
    rows = [
        dict(zip(table.column_names, row, strict=True))
        for row in zip(*table.to_pydict().values(), strict=True)
    ]
    erased = [json.loads(str(erase_row(row["kind"], row, keep_tokens=False)["extra"])) for row in rows]
    assert [e.get("by", "-") for e in erased] == [getattr(e.record, "by", "-") for e in golden.events()]
    assert erased[1]["wire"] == {"erased": True, "key": "trajectory"}
    assert erased[7]["wire"] == {"erased": True}


def test_a_reward_says_what_it_is_called_and_who_assigned_it() -> None:
    """The two are told apart."""
    assert RewardAssigned("t", None, 1.0, by="ops") == RewardAssigned("t", None, 1.0, "agent", None, "ops")
