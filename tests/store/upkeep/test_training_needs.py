"""What the store keeps for replay is what a replay reads: held against the trainer's own decision."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import Event
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, StepCommitted, StepPlanned
from rollbook.store.upkeep.training_needs import Checkpoint, Plan, Training
from rollbook.train.history import History, fold_history

# Of each step: does a new phase begin with it, is a checkpoint written after it, with the optimizer's state
STEP = st.tuples(st.booleans(), st.booleans(), st.booleans())


def _told(steps: list[tuple[bool, bool, bool]]) -> tuple[Training, History]:
    """One training, as retention sees it and as the trainer does. Step n trains trajectory tn."""
    training = Training(checkpoints=[Checkpoint(0, None, False)])
    records: list[Any] = [CheckpointWritten("actor", 0, "c", "w", None, None, 1)]
    phase = 0
    for step, (new_phase, checkpoint, optimizer) in enumerate(steps):
        phase += new_phase
        name, refs = f"p{phase}", [{"trajectory_id": f"t{step}", "turn_id": f"t{step}.0"}]
        training.plans[step, 1] = Plan(step, name, frozenset([f"t{step}"]))
        training.committed[step] = 1
        plan: Any = (step, 1, "actor", step, name, "empty", {}, "r", refs, [], {}, {}, 0.1, 7, {}, {})
        records += [StepPlanned(*plan), StepCommitted(step, 1, "actor", step + 1, {}, {})]
        if checkpoint:
            training.checkpoints.append(Checkpoint(step + 1, name, optimizer))
            digest = "o" if optimizer else None
            records.append(CheckpointWritten("actor", step + 1, "c", "w", digest, name, 1))
    return training, fold_history([Event(record, "r") for record in records], "r", "actor")


def _read(history: History, step: int, phase: str) -> set[str]:
    """Trajectories that a replay of the step reads; only its own where it cannot be replayed."""
    own = [history.steps[step]] if step in history.steps else []
    try:
        between = history.base_for(step, phase)[1]
    except TrainError:
        between = []
    return {ref["trajectory_id"] for s in [*between, *own] for ref in s.planned.samples}


@given(st.lists(STEP, min_size=1, max_size=8), st.sets(st.integers(0, 7)))
@settings(max_examples=300, deadline=None)
def test_needs_are_what_a_replay_reads(steps: Any, retired: set[int]) -> None:
    """For any phases, checkpoints and retired steps: the needs are the union of what each replay reads."""
    training, history = _told(steps)
    training.retired = retired
    wanted: set[str] = set()
    for step, committed in history.steps.items():
        if step not in retired:
            wanted |= _read(history, step, committed.planned.phase)
    last = max(history.steps)
    if last not in retired:
        wanted |= _read(history, last + 1, history.steps[last].planned.phase)
    assert {t for t, _ in training.needs("r", "actor")} == wanted


def test_over() -> None:
    """A training is over when each of its steps is retired; one without steps has only begun."""
    training, _ = _told([(False, True, True), (False, True, True)])
    assert not Training().over
    training.retired = {0}
    assert not training.over
    training.retired = {0, 1}
    assert training.over
    assert list(training.needs("r", "actor")) == []


@pytest.mark.parametrize("failed", [False, True])
def test_a_step_without_an_end(failed: bool) -> None:
    """A planned attempt needs its samples while it may still commit."""
    training = Training(plans={(0, 1): Plan(0, "p", frozenset("t"))}, failed={(0, 1)} if failed else set())
    found = [] if failed else [("t", "planned step 0 of policy 'actor' in run 'r'")]
    assert list(training.needs("r", "actor")) == found
