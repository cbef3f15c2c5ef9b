"""Export as Parquet tables: what the SQL views say, and whole prompts and messages of every turn."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow.parquet as pq
import pytest

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import RunOpened, TurnFailed
from rollbook.store.interchange import export as rows
from rollbook.store.interchange.export import TURNS, export_store

NAMES = ["events", "rewards", "trajectories", "turns"]


@pytest.fixture
def tables(tmp_path: Path) -> Callable[..., dict[str, list[dict[str, Any]]]]:
    """Export a store and read every file: name -> list of rows."""
    count = 0

    def export(store: Store, **options: Any) -> dict[str, list[dict[str, Any]]]:
        nonlocal count
        count += 1
        out = tmp_path / f"tables-{count}"
        done = export_store(store.path, out, "parquet", **options)
        contents = {path.stem: pq.read_table(path).to_pylist() for path in sorted(out.iterdir())}
        assert sorted(contents) == NAMES
        assert done["rows"] == {name: len(contents[name]) for name in NAMES}
        return contents

    return export


def test_a_turn_has_all_of_its_prompt(
    story_store: Store, tables: Callable[..., dict[str, list[dict[str, Any]]]]
) -> None:
    """Whole prompt and delta, spans, messages and reply; what did not complete has nothing of an answer."""
    first, second, failed, running = tables(story_store)["turns"]
    assert first["prompt_ids"] == first["prompt_delta"] == [1, 2, 3]
    assert (second["prompt_ids"], second["prompt_delta"]) == ([1, 2, 3, 10, 11, 4, 5], [4, 5])
    assert second["completion_ids"] == [12, 13, 14]
    assert second["logprobs"] == [-1.0, -2.0, -4.0]
    assert second["version_spans"] == [
        {"policy": "actor", "version": 0, "start": 0, "end": 1},
        {"policy": "actor", "version": 1, "start": 1, "end": 3},
    ]
    assert [m["content"] for m in orjson.loads(second["messages"])] == ["be brief", "2+2?", "4", "sure? é✓"]
    assert orjson.loads(second["reply"]) == {"role": "assistant", "content": "yes"}
    assert (second["parent_turn_id"], second["delivered"], second["finish_reason"]) == (
        "u1",
        "echoed",
        "length",
    )
    assert (first["reward"], second["reward"]) == (0.25, None)
    assert orjson.loads(first["request"]) == {"temperature": 1.0}
    assert (failed["status"], failed["error"]) == ("failed", "the engine is gone")
    assert (running["status"], running["trajectory"], running["split"]) == ("running", "beta", "eval")
    for name in ("prompt_ids", "completion_ids", "logprobs", "reply", "flags", "policy_version"):
        assert failed[name] is running[name] is None
    assert orjson.loads(running["messages"]) == [{"role": "user", "content": "hi"}]


def test_types_and_bits(
    woods: Store, tables: Callable[..., dict[str, list[dict[str, Any]]]], tmp_path: Path
) -> None:
    """Ids are int32 and logprobs float32, with the log's own bits."""
    tables(woods)
    table = pq.read_table(tmp_path / "tables-1" / "turns.parquet")
    assert table.schema.equals(TURNS)
    row = table.column("turn_id").to_pylist().index("f1")
    stored = woods.trajectories(ids=["fork"])["fork"].turns["f1"].completed
    assert stored is not None
    assert stored.logprobs is not None
    read = table.column("logprobs")[row].values.to_numpy(zero_copy_only=False)
    assert (read.dtype, read.tobytes()) == (np.float32, stored.logprobs.tobytes())


@pytest.mark.more_but("rewards")
@pytest.mark.parametrize("view", ["trajectories", "rewards", "events"])
def test_the_other_files_are_the_views(
    woods: Store, tables: Callable[..., dict[str, list[dict[str, Any]]]], view: str
) -> None:
    """Every row and column of the view; a superseded reward is there and marked."""
    exported = tables(woods)[view]
    connection = rb.connect(woods.path)
    names = [row[0] for row in connection.execute(f"DESCRIBE {view}").fetchall()]
    expected = [dict(zip(names, row, strict=True)) for row in connection.execute(f"FROM {view}").fetchall()]
    key = {"trajectories": "trajectory_id"}.get(view, "event_id")
    assert sorted(exported, key=lambda r: r[key]) == sorted(expected, key=lambda r: r[key])
    if view == "rewards":
        assert {r["reward"]: r["superseded"] for r in exported if r["run"] == "woods"} == {
            0.125: False,
            0.5: True,
            -2.5: False,
        }


def test_a_cut_a_run_a_split(woods: Store, tables: Callable[..., dict[str, list[dict[str, Any]]]]) -> None:
    """Each file keeps to what was asked for; events of no trajectory stay unless a split is named."""
    demo = tables(woods, run="demo", as_of="serve=5,train=2,woods=3")
    assert [t["turn_id"] for t in demo["turns"]] == ["u1"]
    assert {e["run"] for e in demo["events"]} == {"demo"}
    assert [e["kind"] for e in demo["events"] if e["trajectory_id"] is None] == [
        "run.opened",
        "policy.published",
        "checkpoint.written",
    ]
    teacher = tables(woods, split="teacher")
    assert {e["trajectory_id"] for e in teacher["events"]} == {"taught"}
    assert [t["trajectory"] for t in teacher["trajectories"]] == ["taught"]
    assert (len(teacher["turns"]), teacher["rewards"]) == (2, [])
    both = tables(woods, run="woods", split="train")
    assert {r["reward"] for r in both["rewards"]} == {0.125, 0.5, -2.5}
    assert len(both["events"]) == 14


def test_an_empty_store(empty: Store, tables: Callable[..., dict[str, list[dict[str, Any]]]]) -> None:
    """Four files without rows, with their columns."""
    assert tables(empty) == {name: [] for name in NAMES}


def test_events_of_no_known_trajectory(
    store: Store, tables: Callable[..., dict[str, list[dict[str, Any]]]]
) -> None:
    """The whole log is exported when nothing is left out, also what names a trajectory never opened."""
    with store.writer("odd") as writer:
        records = [RunOpened("serve", {}), TurnFailed("nobody", "u", "text")]
        writer.append([Event(r, "run") for r in records]).result(30)
    assert [e["trajectory_id"] for e in tables(store)["events"]] == [None, "nobody"]


def test_rows_are_written_in_groups(
    story_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more than a group of rows waits in memory, by number and by weight."""
    for name, value, groups in (("GROUP_ROWS", 3, 2), ("GROUP_WEIGHT", 1, 4)):
        with monkeypatch.context() as patch:
            patch.setattr(rows, name, value)
            export_store(story_store.path, tmp_path / name, "parquet")
        file = pq.ParquetFile(tmp_path / name / "turns.parquet")
        assert (file.num_row_groups, file.metadata.num_rows) == (groups, 4)
    assert rows.weight({"a": [1, 2], "b": np.zeros(5), "c": "four", "d": None}) == 12
