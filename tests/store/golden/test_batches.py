"""Steps on one rollout batch, as the release that brought them wrote them, are read for ever."""

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

PINNED = "f3cc2066039fdaab"
"""The beginning of the sha256 of the golden store's files: they are never changed."""


@pytest.fixture
def golden(root: Path, tmp_path: Path) -> Store:
    """A copy of the golden store."""
    return rb.open(shutil.copytree(root / "tests" / "data" / "format-1-batches", tmp_path / "golden"))


def test_golden_files_are_unchanged() -> None:
    """The files in the repository are the ones that were pinned."""
    assert digest_of("format-1-batches") == PINNED


def test_every_event_is_what_was_written(golden: Store, plain: Callable[[Event], dict[str, Any]]) -> None:
    """Out of a sealed unit and a segment: each field in its place."""
    events = list(golden.events())
    assert [plain(e) for e in events] == [plain(e) for e in written_in("format-1-batches")]


def test_the_history_knows_the_batch(golden: Store) -> None:
    """All of its steps were taken, so none is in hand; its samples were consumed; the critic learnt alone at
    first."""
    history = fold_history(golden.events(), "golden", "actor")
    assert (list(history.steps), history.in_hand(), history.consumed()) == ([0, 1, 2], [], {"u0", "u1"})
    plans = [step.planned for step in history.steps.values()]
    assert [plan.critic["alone"] for plan in plans] == [True, False, False]
    assert [plan.rollout_batch["number"] for plan in plans] == [0, 1, 2]
    assert "samples" in plans[0].rollout_batch
    sealed = fold_history((e for e in golden.events() if e.seq < 4), "golden", "actor")
    assert ([s.planned.step for s in sealed.in_hand()], sealed.consumed()) == ([0, 1], {"u0", "u1"})


def test_before_version_2_each_step_was_a_batch() -> None:
    """And there were no critics."""
    fields = upcast("step.planned", 1, {"step": 3})
    assert fields == {
        "step": 3,
        "rollout_batch": None,
        "critic": None,
        "packed": False,
        "others": None,
        "lora": None,
        "routing_replay": False,
        "schedule": None,
        "operations": None,
    }
