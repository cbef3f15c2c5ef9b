"""Steps whose samples were compared with dropped members of their groups are read for ever."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Store
from rollbook.store.events.event_json import from_json
from rollbook.store.events.upcast import upcast
from rollbook.store.fold.history import fold_history

PINNED = "852497282860c924"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-compared", tmp_path / "golden"))


def test_golden_files_are_unchanged(root: Path) -> None:
    """The files in the repository are the ones that were pinned."""
    data = root / "tests" / "data"
    files = sorted(p for p in (data / "format-1-compared").rglob("*") if p.is_file())
    listed = "".join(f"{p.relative_to(data)} {hashlib.sha256(p.read_bytes()).hexdigest()}\n" for p in files)
    told = (data / "format-1-compared.jsonl").read_bytes()
    assert hashlib.sha256(listed.encode() + told).hexdigest()[:16] == PINNED


def test_every_event_is_what_was_written(golden: Store, root: Path, plain: Any) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    lines = (root / "tests" / "data" / "format-1-compared.jsonl").read_text().splitlines()
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(from_json(json.loads(line))) for line in lines]
    steps = fold_history(iter(events), "golden", "actor").steps.values()
    others = [step.planned.others for step in steps]
    member = {"trajectory_id": "t3", "run": "golden", "group": "g", "reward": 0.5, "tokens": 3}
    assert others == [None, [member | {"truncated": True}], [member | {"truncated": True}]]


def test_before_version_4_samples_were_compared_among_themselves() -> None:
    """There was no other way."""
    assert upcast("step.planned", 3, {"step": 3}) == {
        "step": 3,
        "others": None,
        "lora": None,
        "routing_replay": False,
        "schedule": None,
    }
