"""Writes tests/data/format-1, a store that every later release must read: `python tests/data/make_golden.py`.

Once a release has been made, it is never written again; a later format gets a folder of its own. Of each
event that is in the store, `format-1.jsonl` holds what it says.

    old       its first segment sealed and then dropped, its second live
    private   sealed; the trajectory's text was erased from it
    serve     segments 1-4 merged into one unit, segment 5 sealed and its WAL kept, segment 6 live
    train     never sealed; its middle segment is empty
    upkeep    what dropping and erasing said of itself
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from rollbook.store import events as kinds
from rollbook.store.events import Event
from rollbook.store.events.event_json import as_json
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.sealed.seal import remove_sealed_wal, seal_closed
from rollbook.store.sealed.unit import current_units
from rollbook.store.settings import AppendSettings, SealSettings
from rollbook.store.upkeep.compact import merge, remove_superseded
from rollbook.store.upkeep.erase import erase_trajectory
from rollbook.store.upkeep.retain import retain
from rollbook.store.wal import framer

FOLDER = Path(__file__).parent / "format-1"
STORE_ID = "01900000-0000-7000-8000-000000000001"
LATER = {"engine.controlled", "step.abandoned"}
"""Kinds that this log is older than."""
SMALL = AppendSettings(body_bytes=256)
SEAL = SealSettings(row_group=4)
SYSTEM = "You are terse. é✓ " + "Never guess; look it up. " * 12
TOOL = {"type": "function", "function": {"name": "look_up", "enum": [f"topic-{i}" for i in range(40)]}}


def ids(*values: int) -> Any:
    """Token ids."""
    return np.array(values, np.int32)


def turn(trajectory: str, name: str, parent: str | None, whole: Any, delta: Any, done: Any) -> list[Any]:
    """A turn whose request has a long system prompt, a large tool and a value that looks like a reference."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": f"{name}?"}]
    request = {"tools": [TOOL], "metadata": {"$body": "mine"}, "temperature": 1.0}
    place = (parent, None, parent, 2) if parent else (None, "first_turn", None, 0)
    sent = [{"role": "user", "content": "more"}] if parent else messages
    logprobs = np.linspace(-0.5, -12.25, len(done), dtype=np.float32)
    spans = (kinds.VersionSpan("actor", 3, 0, 1), kinds.VersionSpan("actor", 4, 1, len(done)))
    rest = ("stop", {"role": "assistant", "content": name}, {"temperature": 1.0}, ["odd"], {"engine_us": 900})
    return [
        kinds.TurnRequested(
            *(trajectory, name, f"r-{name}", *place, sent, request),
            *("gpt-x", {"temperature": 1.0, "seed": 7}, {"seed": False}, "key"),
        ),
        kinds.TurnCompleted(
            *(trajectory, name, "actor", 4, delta, done, logprobs, spans),
            *(len(whole), prompt_sha256(whole), *rest),
        ),
    ]


def serve_records() -> list[list[Any]]:
    """What each segment of lane serve holds."""
    odd = kinds.TurnCompleted(
        *("t1", "u2", "actor", None, ids(2**31 - 1, -1, 0), ids(7, 8, 9)),
        np.array([0xBF000000, 0x7FC00001, 0xFF800000], np.uint32).view(np.float32),
        *((), 3, prompt_sha256(ids(2**31 - 1, -1, 0)), "length", {"content": None}, {}, [], {}),
    )
    teacher = kinds.TurnCompleted(
        *("t2", "u4", None, None, ids(), ids(), None, (), 0, prompt_sha256(ids()), "stop", {}, {}, [], {})
    )
    first = [
        kinds.RunOpened("serve", {"port": 8000}, "model", "tok", "tpl", {"python": "3.11"}),
        kinds.PolicyActivated("actor", 3, "embedded", "w3", None),
        kinds.TrajectoryOpened("t1", "alpha", "group", "2+2", "train", {"k": [1, 2.5, None]}),
        *turn("t1", "u1", None, ids(1, 2, 3), ids(1, 2, 3), ids(10, 11)),
        kinds.TurnDelivered("t1", "u1", "sent"),
        turn("t1", "u2", None, ids(), ids(), ids())[0],
        odd,
        turn("t1", "u3", None, ids(), ids(), ids())[0],
        kinds.TurnFailed("t1", "u3", "the engine is gone"),
        kinds.RewardAssigned("t1", "u1", 0.25),
        kinds.RewardAssigned("t1", None, -0.1, "judge", "e-serve-10"),
    ]
    second = turn("t1", "u5", "u1", ids(1, 2, 3, 10, 11, 4), ids(4), ids(12, 13, 14))
    third = [kinds.TrajectoryOpened("t2", "beta", None, None, "teacher"), teacher]
    fourth = [kinds.RewardAssigned("t2", None, float("-inf")), kinds.TrajectoryFinished("t2", "failed", None)]
    fifth = [
        kinds.TrajectoryFinished("t1", "completed", True),
        *turn("t3", "u6", None, ids(5), ids(5), ids(6, 7)),
    ]
    sixth = [
        *turn("t3", "u7", "u6", ids(5, 6, 7, 8), ids(8), ids(9, 9)),
        kinds.LabelAdded("t3", "u7", "quality", {"stars": 4}, "a person"),
        *(kinds.RewardAssigned("t3", "u7", i / 3) for i in range(12)),
    ]
    return [first, second, third, fourth, fifth, sixth]


def train_records() -> list[list[Any]]:
    """What each segment of lane train holds."""
    samples = [{"trajectory_id": "t1", "turn_id": "u5"}]
    plan = ([[[0]]], {"name": "grpo"}, {"name": "adam"}, 0.001, 7, {"weights": "w3"}, {"torch": "2.13"})
    first = [
        kinds.CheckpointWritten("actor", 3, "checkpoints/golden/actor/v00000003", "w3", "o3", "main", 4096),
        kinds.PolicyPublished("actor", 3, None, "checkpoints/golden/actor/v00000003", "w3"),
        kinds.SampleDropped("t2", "u4", "split", "rd", 0, {"split": "teacher"}, 1),
        kinds.StepPlanned(
            0, 1, "actor", 3, "main", "serve=20", {"mask": "all"}, "rd", [], *plan[:5], {}, plan[6]
        ),
        kinds.StepFailed(0, 1, "actor", "out of memory"),
        kinds.StepPlanned(
            0, 2, "actor", 3, "main", "serve=20,train=5", {"mask": "all"}, "rd", samples, *plan
        ),
        kinds.StepCommitted(0, 2, "actor", 4, {"weights": "w4"}, {"loss": 0.125, "trained_tokens": 3}),
        kinds.PolicyPublished("actor", 4, 3, "checkpoints/golden/actor/v00000004", "w4"),
    ]
    third = [
        kinds.SyncStarted("actor", 4, "s1", "embedded", "disk"),
        kinds.SyncFinished("actor", 4, "s1", "embedded", 4096, 0.5),
        kinds.SyncFailed("actor", 5, "s2", "embedded", "timeout"),
        kinds.StepRetired(0, "actor", "no longer needed"),
        kinds.CursorMoved("dashboard", "serve=3,train=1"),
        kinds.TrajectoryAdopted("t3", "serve", "e-serve-20"),
    ]
    return [first, [], third]


def text_records(trajectory: str) -> list[Any]:
    """A short trajectory."""
    return [
        kinds.TrajectoryOpened(trajectory, f"name of {trajectory}", None, "a task", "train", {"who": "me"}),
        *turn(trajectory, f"{trajectory}-1", None, ids(1, 2), ids(1, 2), ids(3, 4)),
        kinds.TrajectoryFinished(trajectory, "completed", False),
    ]


class _Golden:
    """The store being made."""

    def __init__(self, log: Store) -> None:
        self.log = log
        self.given: list[Event] = []

    def write(self, lane: str, segments: list[list[Any]]) -> None:
        """Each list of records as a segment, in appends of at most ten events; ids and times follow."""
        for records in segments:
            with self.log.writer(lane, SMALL) as writer:
                for part in (records[i : i + 10] for i in range(0, len(records), 10)):
                    n = sum(e.event_id.startswith(f"e-{lane}-") for e in self.given)
                    events = [
                        Event(record, "golden", f"e-{lane}-{n + i:02}", 1_700_000_000_000_000 + n + i)
                        for i, record in enumerate(part)
                    ]
                    writer.append(events).result()
                    self.given += events

    def seal(self, lane: str, *, through: int | None = None, keep_wal: int = 0) -> None:
        """Seal the lane's closed segments; merge those up to `through`; keep so many bytes of WAL."""
        list(seal_closed(self.log.path, lane, SEAL, all_of_it=True))
        units = current_units(self.log.path, lane)
        if through is not None:
            merge(self.log.path, [unit for unit in units if unit.last <= through], SEAL)
            remove_superseded(self.log.path, lane)
        remove_sealed_wal(self.log.path, lane, current_units(self.log.path, lane), keep_wal)


def main() -> None:
    """Write the store anew."""
    # The release that wrote it took rewards that are no number; a log that has one is read all the same.
    with mock.patch.object(framer, "_check_rewards"):
        _write()


def _write() -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    open_store(FOLDER, create=True)
    (FOLDER / "STORE.json").write_text(f'{{"format":1,"id":"{STORE_ID}","created_us":0}}\n')
    golden = _Golden(open_store(FOLDER))
    golden.write("old", [text_records("o1")])
    golden.seal("old")
    report = retain(golden.log, "1s")
    assert [unit.dropped for unit in report.units] == [True]
    golden.write("old", [text_records("o2")])
    golden.write("private", [text_records("p1")])
    golden.seal("private")
    assert erase_trajectory(golden.log, "p1", "a leaked key", keep_tokens=True).bodies
    serve = serve_records()
    for i, records in enumerate(serve[:4], 1):
        golden.write("serve", [records])
        golden.seal("serve", through=4 if i == 4 else None)
    golden.write("serve", [serve[4]])
    golden.seal("serve", keep_wal=1 << 20)
    golden.write("serve", [serve[5]])
    golden.write("train", train_records())
    told = list(golden.log.events())
    assert {event.kind for event in told} == set(kinds.RECORDS) - LATER
    _check(golden.given, told)
    lines = [json.dumps(as_json(event), ensure_ascii=False) for event in told]
    FOLDER.with_suffix(".jsonl").write_text("\n".join(lines) + "\n")
    for path in [*FOLDER.glob("catalog.db*"), *FOLDER.glob("lanes/*/LOCK")]:
        path.unlink()
    for name in ("claims", "leases", "derived"):
        shutil.rmtree(FOLDER / name, ignore_errors=True)


def _check(given: list[Event], told: list[Event]) -> None:
    """What is read is what was appended, but for what was dropped or erased."""
    back = {event.event_id: as_json(event) for event in told}
    for event in given:
        if event.event_id in ("e-old-00", "e-old-01", "e-old-02", "e-old-03"):
            assert event.event_id not in back
        elif not event.event_id.startswith("e-private"):
            place = {name: back[event.event_id][name] for name in ("lane", "seq")}
            assert as_json(event) | place == back[event.event_id], event.event_id


if __name__ == "__main__":
    main()
