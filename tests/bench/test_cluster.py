"""The benchmark of several hosts: its checks find what is wrong, and a short run has all figures."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.fakes.stories.records import turn_completed

from rollbook.bench import cluster
from rollbook.bench.cluster_checks import Seen, account
from rollbook.bench.cluster_outcome import Measured, Rounds
from rollbook.store.events import Event, EventOrphaned, TrajectoryFinished, TrajectoryOpened
from rollbook.store.events.event_json import as_json

OPENED = Event(TrajectoryOpened("t", "name"), "r", "e0", 0, "serve", 0)
TURN = Event(turn_completed("t", "u", reply={"role": "assistant", "content": "hi"}), "r", "e1", 0, "serve", 1)
END = Event(TrajectoryFinished("t"), "r", "e2", 0, "serve", 2)
SEEN = Seen([("name", "u", "hi", 1.0)], [("name", 2.0)])


def _orphan(event: Event, seq: int) -> Event:
    return Event(
        EventOrphaned("t", "serve", event.seq, as_json(event)), "r", event.event_id, 0, "orphans", seq
    )


def test_what_is_there_is_accounted_for() -> None:
    """In its lane, or as an orphan."""
    whole = account([OPENED, TURN, END], SEEN)
    assert (whole.lost, whole.doubled, whole.changed, whole.orphaned) == ([], [], [], 0)
    orphaned = account([OPENED, _orphan(TURN, 0), _orphan(END, 1)], SEEN)
    assert (orphaned.lost, orphaned.orphaned) == ([], 2)
    assert account([_orphan(OPENED, 0), _orphan(END, 1)], Seen([], SEEN.finished)).lost == []


def test_what_is_lost_doubled_or_changed_is_found() -> None:
    """Each by name."""
    assert account([OPENED], SEEN).lost == [("the reply of turn u of name", 1.0), ("the finish of name", 2.0)]
    assert account([OPENED, TURN, TURN, END], SEEN).doubled == [
        "event e1 is there 2 times",
        "completed turn u is there 2 times",
    ]
    other = Seen([("name", "u", "ho", 1.0)], [])
    assert account([OPENED, TURN, END], other).changed == ["name, turn u: told 'ho', logged ('name', 'hi')"]


def test_figures_say_what_went_wrong() -> None:
    """With the seed of the rounds."""
    bad = Rounds("nats", "local", 5, 70, True, 1, 0, 0, 2, 0.3, 4, ["seed 7: a reply is lost"])
    figures = {f.figure: f for f in cluster.outcome(Measured("", rounds=[bad])).figures}
    assert (figures["cluster.lost"].value, figures["cluster.lost"].runs) == (1.0, 5)
    assert "4 orphaned" in (figures["cluster.lost"].against or "")
    assert "seed 7" in (figures["cluster.wrong"].against or "")


def test_a_short_run_has_all_figures(tmp_path: Path) -> None:
    """Each side does something, and no round of faults loses anything."""
    pytest.importorskip("moto", reason="object storage is moto's: install the [dev] extra")
    few = {"runs": 1, "laps": 1, "trajectories": 4, "turns": 2, "concurrency": 4, "appends": 10}
    small = {"seconds": 1.0, "megabytes": 2, "adoptions": 1, "open_trajectories": 1, "faults": 0}
    plan = cluster.Plan(**few, **small, parts=())  # type: ignore[arg-type]
    seen: list[None] = []
    figures = {
        f.figure: f.value
        for f in cluster.outcome(cluster.measure(tmp_path, plan, lambda: seen.append(None))).figures
    }
    assert set(figures) == {
        *("cluster.vs_local", "cluster.cpu", "cluster.ack_p99_ms", "cluster.adopted_s"),
        *(
            f"cluster.{name}.{medium}"
            for name in ("visible_p99_ms", "catchup_mb_s")
            for medium in ("objects", "nats")
        ),
    }
    assert all(value > 0 for value in figures.values())
    assert len(seen) == plan.steps
