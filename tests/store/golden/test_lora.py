"""Steps of trainings of low-rank factors are read for ever."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.stories.golden import digest_of, written_in

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events.upcast import upcast
from rollbook.store.fold.history import fold_history
from rollbook.train.config.lora import recorded_lora

PINNED = "af18e708c985febd"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-lora", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-lora") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-lora")]
    steps = fold_history(iter(events), "golden", "actor").steps.values()
    adapters = [step.planned.lora for step in steps]
    lora = {"rank": 4, "alpha": 8.0, "targets": ["q_proj", "v_proj"], "seed": 3, "base_version": 1}
    assert adapters == [None, lora, lora]
    training = recorded_lora(lora)
    assert training.described == lora
    assert training.config.targets == ("q_proj", "v_proj")


def test_before_version_5_weights_were_trained() -> None:
    """There was no other way."""
    assert upcast("step.planned", 4, {"step": 3}) == {
        "step": 3,
        "lora": None,
        "routing_replay": False,
        "schedule": None,
        "operations": None,
    }
