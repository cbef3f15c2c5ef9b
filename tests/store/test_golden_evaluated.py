"""Agents evaluated at a version, as the release that brought it wrote it, are read for ever."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events import EvalSampled, EvalStarted
from rollbook.store.events.event_json import from_json

PINNED = "eddd22a06d279175"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-evaluated", tmp_path / "golden"))


def test_golden_files_are_unchanged(root: Path) -> None:
    """The files in the repository are the ones that were pinned."""
    data = root / "tests" / "data"
    files = sorted(p for p in (data / "format-1-evaluated").rglob("*") if p.is_file())
    listed = "".join(f"{p.relative_to(data)} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in files)
    told = (data / "format-1-evaluated.jsonl").read_bytes()
    assert hashlib.sha256(listed.encode() + told).hexdigest()[:16] == PINNED


def test_every_event_is_what_was_written(golden: Store, root: Path, plain: Any) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    lines = (root / "tests" / "data" / "format-1-evaluated.jsonl").read_text().splitlines()
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(from_json(json.loads(line))) for line in lines]


def test_what_they_say(golden: Store) -> None:
    """Which version, whose launches, how many: written out, so that no field can change unseen."""
    started = [event.record for event in golden.events_of({EvalStarted.KIND})]
    assert started == [EvalStarted("actor", 0, "p"), EvalStarted("actor", 50, "p#2")]
    told, again = (event.record for event in golden.events_of({EvalSampled.KIND}))
    assert told == EvalSampled(
        policy="actor",
        policy_version=50,
        rollout="rollouts.eval.50",
        trajectories=64,
        by="launching",
    )
    assert again.by is None
