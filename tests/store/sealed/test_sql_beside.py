"""SQL while a writer appends and a sealer seals, merges and removes, each in its own process."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook import store as rb
from rollbook.store import Store, format_cut
from rollbook.store.fold.trajectory import Trajectory, fold
from rollbook.store.sealed.unit import all_units, current_units
from rollbook.store.upkeep.sealer import Sealer

SECONDS = 8.0
SETTINGS = """
[append]
segment_bytes = 20000
[seal]
keep_wal_bytes = 40_000
compact_bytes = 1_000_000
row_group = 8
"""

WRITE = """
import sys, time
import numpy as np
from rollbook import store
from rollbook.store import Event, events as kinds
from rollbook.store.fold.trajectory import prompt_sha256

log, ids = store.open(sys.argv[1]), np.arange(12, dtype=np.int32)
done = {"role": "assistant", "content": "four"}
most, pause = int(sys.argv[2]), float(sys.argv[3])
with log.writer("serve") as writer:
    i = 0
    while i < most and log.path.joinpath("go").exists():
        t, ask = f"t{i // 4:06}", ([{"role": "user", "content": "2+2?" * 40}], {}, None, {}, {}, "c")
        span = (kinds.VersionSpan("actor", i // 40, 0, 12),)
        records = [kinds.TrajectoryOpened(t, t, "g")] if i % 4 == 0 else []
        records.append(kinds.TurnRequested(t, f"u{i}", f"r{i}", None, "first", None, 0, *ask))
        writer.append([Event(r, "run") for r in records])
        completed = kinds.TurnCompleted(
            t, f"u{i}", "actor", i // 40, ids, ids + i % 7, np.full(12, -0.5 - i % 9, np.float32), span,
            12, prompt_sha256(ids), "stop", done, {}, [], {})
        writer.append([Event(completed, "run")])
        records = [kinds.TurnDelivered(t, f"u{i}", "sent")]
        if i % 4 == 3:
            records += [kinds.RewardAssigned(t, None, i / 8), kinds.TrajectoryFinished(t)]
        future = writer.append([Event(r, "run") for r in records])
        i += 1
        if pause or i % 16 == 0:
            future.result(30)
        time.sleep(pause)
print(i)
"""

SEAL = """
import sys, time
from rollbook import store
from rollbook.store.upkeep.sealer import Sealer

log = store.open(sys.argv[1])
sealer, passes = Sealer(log), 0
while log.path.joinpath("go").exists():
    sealer.run_once()
    passes += 1
    log.path.joinpath("passes").write_text(str(passes))
    time.sleep(0.05)
print(passes)
"""
PASSES, AT_MOST_S = 4, 60.0
"""The sealer makes so many, and merges, however busy the machine is, unless that takes longer than this."""


def _expected(trajectories: dict[str, Trajectory]) -> dict[str, Any]:
    """What the views must say of these trajectories."""
    turns = [t for trajectory in trajectories.values() for t in trajectory.turns.values()]
    done = [t.completed for t in turns if t.completed is not None]
    return {
        "SELECT count(*) FROM trajectories": len(trajectories),
        "SELECT count(*) FROM trajectories WHERE status = 'completed'": sum(
            trajectory.finished is not None for trajectory in trajectories.values()
        ),
        "SELECT sum(reward) FROM trajectories": sum(
            trajectory.reward() or 0 for trajectory in trajectories.values()
        )
        or None,
        "SELECT count(*) FROM turns": len(turns),
        "SELECT count(*) FROM turns WHERE delivered = 'sent'": sum(t.delivered == "sent" for t in turns),
        "SELECT sum(list_sum(completion_ids)) FROM turns": sum(int(c.completion_ids.sum()) for c in done)
        or None,
        "SELECT count(*) FROM tokens": 12 * len(done),
        "SELECT sum(policy_version) FROM tokens": sum(12 * (c.policy_version or 0) for c in done)
        if done
        else None,
        "SELECT count(*) FROM outliers": sum(
            int((c.logprobs < -8).sum()) for c in done if c.logprobs is not None
        ),
        "SELECT count(*) FROM bodies": 0,
    }


def _merged(store: Store) -> bool:
    return any(unit.generation > 1 for unit in all_units(store.path, "serve"))


@pytest.mark.more
def test_every_answer_is_the_fold_at_its_cut(
    store: Store, start_python: Callable[..., subprocess.Popen[str]]
) -> None:
    """At the head and at an earlier cut, again and again, SQL says what folding the events says."""
    (store.path / "store.toml").write_text(SETTINGS)
    go = store.path / "go"
    go.touch()
    others = [start_python(WRITE, store.path, 10**9, 0.002), start_python(SEAL, store.path)]
    rounds, begun = 0, time.monotonic()
    (store.path / "passes").write_text("0")

    def going_on() -> bool:
        few = int((store.path / "passes").read_text() or 0) < PASSES or not _merged(store)
        return time.monotonic() < begun + (AT_MOST_S if few else SECONDS)

    try:
        while going_on():
            head = store.head()
            if not head:
                time.sleep(0.05)
                continue
            for cut in (head, {"serve": head["serve"] * 2 // 3}):
                expected = _expected(fold(store.events(cut)))
                connection = rb.connect(store.path, as_of=format_cut(cut))
                for query, value in expected.items():
                    [row] = connection.execute(query).fetchall()
                    assert row[0] == value, (cut, query)
                connection.close()
                rounds += 1
    finally:
        go.unlink()
        outputs = [other.communicate(timeout=60) for other in others]
    assert [err for _, err in outputs] == ["", ""]
    assert rounds >= 4
    turns, passes = (int(out) for out, _ in outputs)
    assert turns > 100
    assert passes >= PASSES
    assert len(current_units(store.path, "serve")) >= 1
    assert _merged(store), "nothing was merged"


@pytest.fixture(scope="module")
def sealed(
    tmp_path_factory: pytest.TempPathFactory, fork_python: Callable[..., subprocess.Popen[str]]
) -> Store:
    """A store of several thousand events, sealed as far as it can be; only read it."""
    store = rb.open(tmp_path_factory.mktemp("sealed") / "store", create=True)
    (store.path / "store.toml").write_text(SETTINGS)
    (store.path / "go").touch()
    assert fork_python(WRITE, store.path, 1100, 0).communicate(timeout=60) == ("1100\n", "")
    Sealer(store).run_once()
    return store


@pytest.mark.more_but("SELECT * FROM turns*", "SELECT count*")
@pytest.mark.parametrize(
    ("query", "most"),
    [
        ("SELECT * FROM tokens WHERE trajectory_id = 't000030'", 200),
        ("SELECT * FROM turns WHERE trajectory_id = 't000030'", 400),
        ("SELECT count(*) FROM tokens WHERE policy_version = 3", 400),
    ],
)
def test_a_filter_does_not_scan_the_world(sealed: Store, tmp_path: Path, query: str, most: int) -> None:
    """A filter on a trajectory or a policy version reads the row groups that may hold it, not all rows."""
    connection = rb.connect(sealed.path, allow_files=True)
    profile = tmp_path / "profile.json"
    connection.execute(f"PRAGMA enable_profiling = 'json'; PRAGMA profiling_output = '{profile}'")
    assert connection.execute(query).fetchall()
    profiled = orjson.loads(profile.read_bytes())["query"]
    assert sealed.head()["serve"] >= 4000
    assert profiled["total_rows_scanned"] < most, profiled
