"""The view of launches: live, sealed, at a cut, erased and after retention, and what a query of it reads."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta
from typing import Any

import pytest
from tests.fakes.stories.records import turn_requested
from tests.fakes.stories.scattered import scatter, seal_in_units

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.sealed.derived import build_derived
from rollbook.store.sealed.seal import remove_sealed_wal
from rollbook.store.sealed.unit import current_units
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.retain import retain
from rollbook.store.upkeep.sealer import Sealer

EPOCH = datetime(2023, 11, 14, 22, 13, 20)
SECRET = "XQ9-said-by-an-agent"
CLOCKS = {"start": 60, "idle": None, "total": 600.5, "scoring": None}
OUTPUT = {"stderr": {"path": "out/a.log", "bytes": 90, "kept": 64}}
LEFT = [{"pid": 7, "command": f"sh -c {SECRET}"}, {"pid": 8, "command": "sleep 9"}]


def _launched(name: str, launch_id: str, attempt: int = 1, sample: int = 0) -> kinds.LaunchStarted:
    place = {"epoch": 2, "task": f"the task {SECRET}", "sample": sample}
    fields = (
        name,
        launch_id,
        "nightly",
        place,
        attempt,
        "subprocess",
        {"level": "session"},
        "host-17",
        CLOCKS,
    )
    return kinds.LaunchStarted(*fields, "launching")


def _records() -> list[Any]:
    """Three launches of two trajectories: one failed and left something, one goes on, one ended after all."""
    return [
        kinds.TrajectoryOpened("a", "name-a", "pair"),
        _launched("a", "one"),
        kinds.TrajectoryOpened("b", "name-b"),
        _launched("b", "one", sample=3),
        kinds.LaunchLeaked("a", "one", LEFT, "running"),
        kinds.LaunchEnded(
            *("a", "one", "agent_error", f"it said {SECRET}", 3, None, 12.5, 1.25, 96.0, OUTPUT),
            {"exact": 0.5, "flag": True, "none": None, "judged": {"error": SECRET}},
        ),
        kinds.LaunchLeaked("a", "one", LEFT[:1], "end"),
        _launched("a", "two", attempt=2),
        kinds.TrajectoryFinished("a", "failed"),
        kinds.LaunchEnded("a", "two", "timeout", signal=9, seconds=600.5),
    ]


COLUMNS = (
    "run, trajectory, trajectory_id, launch_id, rollout, group, epoch, task, sample, attempt, launcher, "
    "isolation, owner, status, why, exit_code, signal, started, ended, seconds, cpu_s, peak_rss_mb, output, "
    "scoring, leaked, lane, seq"
)
SAID: Any = ("subprocess", '{"level":"session"}', "host-17")
TASK = f"the task {SECRET}"


def _at(second: int) -> datetime:
    return EPOCH + timedelta(seconds=second)


OF_A = (
    *("demo", "name-a", "a", "one", "nightly", "pair", 2, TASK, 0, 1, *SAID, "agent_error"),
    *(f"it said {SECRET}", 3, None, _at(1), _at(5), 12.5, 1.25, 96.0),
    '{"stderr":{"path":"out/a.log","bytes":90,"kept":64}}',
    f'{{"exact":0.5,"flag":true,"none":null,"judged":{{"error":"{SECRET}"}}}}',
    *(3, "serve", 1),
)
AGAIN = (
    *("demo", "name-a", "a", "two", "nightly", "pair", 2, TASK, 0, 2, *SAID, "timeout", None, None, 9),
    *(_at(7), _at(9), 600.5, None, None, "{}", "{}", 0, "serve", 7),
)
OF_B = (
    *("demo", "name-b", "b", "one", "nightly", None, 2, TASK, 3, 1, *SAID, "running", None, None, None),
    *(_at(3), None, None, None, None, None, None, 0, "serve", 3),
)


@pytest.fixture
def launched(store: Store) -> Store:
    """The launches, an event a segment."""
    first_us = 1_700_000_000_000_000
    events = [
        Event(record, "demo", f"e-{i:02}", first_us + i * 1_000_000) for i, record in enumerate(_records())
    ]
    return scatter(store, {"serve": events})


def _rows(log: Store, columns: str = COLUMNS, **options: Any) -> list[tuple[Any, ...]]:
    columns = columns.replace(" group,", ' "group",')
    with rb.connect(log.path, **options) as connection:
        query = f"select {columns} from launches order by trajectory_id, launch_id"
        return connection.execute(query).fetchall()


def test_each_launch_is_a_row(launched: Store) -> None:
    """All columns; the same id in two trajectories is two launches."""
    assert len(COLUMNS.split(", ")) == len(OF_A)
    assert _rows(launched) == [OF_A, AGAIN, OF_B]


@pytest.mark.more_but("3")
@pytest.mark.parametrize("at_once", [1, 3, 100])
def test_sealing_changes_nothing(launched: Store, at_once: int) -> None:
    """Start, end and leaks may lie in several units, and some of them in none."""
    seal_in_units(launched, "serve", at_once)
    assert _rows(launched) == [OF_A, AGAIN, OF_B]
    units = current_units(launched.path, "serve")
    for unit in units:
        build_derived(launched.path, unit)
    remove_sealed_wal(launched.path, "serve", units, 0)
    assert _rows(launched) == [OF_A, AGAIN, OF_B]
    columns = "launch_id, status, leaked"
    assert _rows(launched, columns, as_of="serve=5") == [("one", "running", 2), ("one", "running", 0)]


def test_of_two_ends_the_first_counts(store: Store) -> None:
    """Two proxies may have been told at the same time; and of an end alone there is no launch."""
    records: Sequence[Any] = [
        _launched("a", "one"),
        kinds.LaunchEnded("a", "one", "done"),
        kinds.LaunchEnded("a", "lost", "done"),
    ]
    with store.writer("one") as writer:
        writer.append([Event(r, "demo", f"e-2{i}") for i, r in enumerate(records)]).result(30)
    with store.writer("other") as writer:
        twice = [_launched("a", "one", attempt=9), kinds.LaunchEnded("a", "one", "cancelled")]
        writer.append([Event(r, "demo", f"e-1{i}") for i, r in enumerate(twice)]).result(30)
    columns = "launch_id, trajectory, attempt, status, lane, seq"
    assert _rows(store, columns) == [("one", None, 9, "cancelled", "other", 0)]


@pytest.mark.parametrize("keep_tokens", [False, True])
def test_erasure_leaves_numbers_and_no_text(launched: Store, keep_tokens: bool) -> None:
    """Neither task nor reason, no scorer's name or words, no process; of the other trajectory all."""
    erase_trajectory(launched, "a", "asked", keep_tokens=keep_tokens)
    columns = "sample, task, status, why, exit_code, seconds, output, scoring, leaked"
    output = '{"0":{"bytes":90,"kept":64}}'
    scoring = '{"0":0.5,"1":true,"2":null,"3":{"erased":true}}'
    assert _rows(launched, columns) == [
        (0, None, "agent_error", "erased", 3, 12.5, output, scoring, 3),
        (0, None, "timeout", None, None, 600.5, "{}", "{}", 0),
        (3, TASK, "running", None, None, None, None, None, 0),
    ]
    extras = [row["extra"] for row in launched.table().to_pylist() if row["trajectory_id"] == "a"]
    assert len(extras) == 9  # and that it was erased
    assert SECRET not in "".join(extras)


def test_retention_drops_them_with_their_trajectory(store: Store) -> None:
    """They go when it goes, and while it is open they stay."""
    gone, stays = [[kinds.TrajectoryOpened(n, n), _launched(n, "one")] for n in ("a", "b")]
    gone += [kinds.TrajectoryFinished("a"), kinds.LaunchEnded("a", "one", "done")]
    for records in (gone, stays):
        with store.writer("serve") as writer:
            writer.append([Event(r, "demo", time_us=1) for r in records]).result(30)
    with store.writer("serve"):
        seal_in_units(store, "serve", 1)
    assert _rows(store, "trajectory") == [("a",), ("b",)]
    report = retain(store, "0s")
    assert [unit.dropped for unit in report.units if unit.lane == "serve"] == [True, False]
    assert _rows(store, "trajectory, status") == [("b", "running")]


def test_a_query_reads_what_it_needs(launched: Store) -> None:
    """No turns, names only where they are asked for, and no file of what holds no launches."""
    requested = turn_requested("b", "b.0", root_reason="first_turn")
    with launched.writer("serve") as writer:
        writer.append([Event(requested, "demo")]).result(30)
    with launched.writer("train") as writer:
        writer.append([Event(kinds.StepFailed(0, 1, "actor", "x"), "demo")]).result(30)
    Sealer(launched).run_once()
    with rb.connect(launched.path) as connection:

        def plan(query: str) -> str:
            return str(connection.execute(f"explain {query}").fetchall()[0][1])

        alone, named = plan("select status, count(*) from launches group by 1"), plan("from launches")
        trained = plan("from steps")
    assert "Join" not in alone
    assert "Join" in named
    assert (alone.count("Read Parquet"), alone.count("Empty Result")) == (1, 1)
    assert "prompt_ids" not in alone
    assert trained.count("Empty Result") >= 1
