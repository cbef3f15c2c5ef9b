"""A store written by an earlier release is read to exactly the events it was given.

Format 0 is the format before the first release: it may still be replaced, and this store with it
(`tests/data/make_golden.py`). From the first release on, golden stores are only added.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import RewardAssigned, TrajectoryOpened, TurnCompleted, TurnFailed, VersionSpan


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store of format 0."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-0", tmp_path / "golden"))


def test_golden_events(golden: Store) -> None:
    """Every field of every golden event is what was written, bit for bit."""
    events = list(golden.events())
    assert golden.store_id == "01900000-0000-7000-8000-000000000000"
    assert [(e.lane, e.seq, e.event_id, e.run, e.time_us) for e in events] == [
        ("a", i, f"e{i}", "golden", 1_700_000_000_000_000 + i) for i in range(5)
    ]
    opened, full, bare, failed, reward = (e.record for e in events)
    assert opened == TrajectoryOpened("t", "golden", "g", None, "eval", {"k": [1, 2.5]})
    assert failed == TurnFailed("t", "u2", "the engine is gone")
    assert reward == RewardAssigned("t", None, -0.1, "agent", "e0")
    assert isinstance(full, TurnCompleted)
    assert isinstance(bare, TurnCompleted)
    assert full.logprobs is not None
    assert (full.completion_ids.dtype, full.completion_ids.tolist()) == (np.int32, [2**31 - 1, 0, 7])
    assert full.logprobs.view(np.uint32).tolist() == [0xBF000000, 0x7FC00000, 0xFF800000]
    assert full.version_spans == (VersionSpan("actor", 3, 0, 1), VersionSpan("actor", 4, 1, 3))
    assert full.prompt_ids.tolist() == bare.prompt_ids.tolist() == [1, 2]
    assert full.reply == {"content": "é✓", "n": [1, {"x": None}]}
    assert (full.prompt_length, full.prompt_sha256, full.finish_reason) == (2, "00" * 32, "stop")
    assert (full.policy, full.policy_version, full.flags) == ("actor", 4, ["odd"])
    assert (bare.completion_ids.tolist(), bare.logprobs, bare.version_spans) == ([], None, ())


def test_golden_files_are_unchanged(root: Path) -> None:
    """The files in the repository are the ones that were pinned."""
    lane = root / "tests" / "data" / "format-0" / "lanes" / "a"
    digests = {p.name: hashlib.sha256(p.read_bytes()).hexdigest()[:16] for p in sorted(lane.iterdir())}
    assert digests == {
        "00000001.wal": "e71011edd36db299",
        "00000002.wal": "1f7a1e7c4f53c9d5",
        "WATERMARK": "772e0de3e9e09eae",
    }


def test_a_golden_lane_can_be_written_on(golden: Store, notes: Any) -> None:
    """This release recovers the lane and appends to it."""
    with golden.writer("a") as writer:
        assert [(s.number, s.first_seq, s.events) for s in writer.recovered.segments] == [
            (1, 0, 3),
            (2, 3, 2),
        ]
        assert writer.append(notes(1)).result(30) == 5
    assert golden.head() == {"a": 6}
