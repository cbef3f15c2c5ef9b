"""What the store keeps for replay is what a replay reads."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rollbook.store import Event
from rollbook.store.errors import TrainError
from rollbook.store.events import CheckpointWritten, StepAbandoned, StepCommitted, StepFailed, StepPlanned
from rollbook.store.fold.history import History, fold_history
from rollbook.store.upkeep.retention_policy import ended_by, needed_by


# Of each step: does a new phase begin with it, is a checkpoint written after it, with the optimizer's state
def _base_for(history: Any, step: int, phase: str) -> Any:
    """The nearest checkpoint before a step, and the steps to take from there."""
    base = history.bases_for(step, phase)[0]
    return base, history.between(base, step)


STEP = st.tuples(st.booleans(), st.booleans(), st.booleans())


class _Told:
    """One training. Step n trains trajectory tn."""

    def __init__(self) -> None:
        self.records: list[Any] = []
        self.version = 0
        self.line: list[tuple[int, int]] = []
        """The steps that count, each with the version that it made."""
        self.checkpoints: list[tuple[int, str | None, bool]] = []
        """Those of versions that count."""
        self._written(None, optimizer=False)

    def _written(self, phase: str | None, *, optimizer: bool) -> None:
        self.checkpoints.append((self.version, phase, optimizer))
        digest = "o" if optimizer else None
        self.records.append(CheckpointWritten("actor", self.version, "c", "w", digest, phase, 1))

    def step(self, step: int, phase: str, *, checkpoint: bool, optimizer: bool) -> None:
        """Take a step, and write a checkpoint after it perhaps."""
        refs = [{"trajectory_id": f"t{step}", "turn_id": f"t{step}.0"}]
        plan: Any = (
            step,
            1,
            "actor",
            self.version,
            phase,
            "empty",
            {},
            "r",
            refs,
            [],
            {},
            {},
            0.1,
            7,
            {},
            {},
        )
        self.version += 1
        self.line.append((step, self.version))
        self.records += [StepPlanned(*plan), StepCommitted(step, 1, "actor", self.version, {}, {})]
        if checkpoint:
            self._written(phase, optimizer=optimizer)

    def go_back(self, which: int) -> None:
        """Give up what came after one of the checkpoints."""
        back_to, phase, optimizer = self.checkpoints[which % len(self.checkpoints)]
        gone = [(step, version) for step, version in self.line if version > back_to]
        if not gone:
            return
        highest = max(record.policy_version for record in self.records)
        self.line = [(step, version) for step, version in self.line if version <= back_to]
        self.checkpoints = [c for c in self.checkpoints if c[0] <= back_to]
        self.version = highest + 1
        for step, version in gone:
            record = StepAbandoned(step, 1, "actor", version, back_to, self.version)
            self.records.append(record)
        self._written(phase, optimizer=optimizer)

    def history(self) -> History:
        """As the trainer folds it."""
        return fold_history([Event(record, "r") for record in self.records], "r", "actor")


def _told(steps: list[tuple[bool, bool, bool]], back: dict[int, int] | None = None) -> History:
    """Steps one after the other; before step n, `back[n]` names a checkpoint to go back to."""
    story, phase = _Told(), 0
    for step, (new_phase, checkpoint, optimizer) in enumerate(steps):
        if back and step in back:
            story.go_back(back[step])
        phase += new_phase
        story.step(step, f"p{phase}", checkpoint=checkpoint, optimizer=optimizer)
    return story.history()


def _read(history: History, step: int, phase: str) -> set[str]:
    """Trajectories that a replay of the step reads; only its own where it cannot be replayed."""
    own = [history.steps[step]] if step in history.steps else []
    try:
        between = _base_for(history, step, phase)[1]
    except TrainError:
        between = []
    return {ref["trajectory_id"] for s in [*between, *own] for ref in s.planned.samples}


@given(
    st.lists(STEP, min_size=1, max_size=8),
    st.sets(st.integers(0, 7)),
    st.dictionaries(st.integers(1, 7), st.integers(0, 7), max_size=3),
)
@settings(max_examples=500)
def test_needs_are_what_a_replay_reads(steps: Any, retired: set[int], back: dict[int, int]) -> None:
    """For any phases, checkpoints, retired and abandoned steps: the union of what each replay reads."""
    history = _told(steps, back)
    history.retired = retired
    wanted: set[str] = set()
    for step, committed in history.steps.items():
        if step not in retired:
            wanted |= _read(history, step, committed.planned.phase)
    last = max(history.steps)
    if last not in retired:
        wanted |= _read(history, last + 1, history.steps[last].planned.phase)
    assert {t for t, _ in needed_by(history)} == wanted


def test_a_training_is_over_when_its_steps_are_retired() -> None:
    """A training is over when each of its steps is retired; one without steps has only begun."""
    history = _told([(False, True, True), (False, True, True)])
    assert not History("r", "actor").over
    history.retired = {0}
    assert not history.over
    history.retired = {0, 1}
    assert history.over
    assert list(needed_by(history)) == []


def test_over_of_a_training_that_went_back() -> None:
    """What was abandoned need not be retired; but of a training that has it alone somebody has to say so."""
    history = _told([(False, True, True)] * 3, {2: 1})
    assert history.abandoned.keys() == {1}
    history.retired = {0, 2}
    assert history.over
    all_gone = _told([(False, True, True)])
    all_gone.abandoned = {0: StepAbandoned(0, 1, "actor", 1, 0, 2)}
    assert not all_gone.over
    all_gone.retired = {0}
    assert all_gone.over


@pytest.mark.parametrize("failed", [False, True])
def test_a_step_without_an_end(failed: bool) -> None:
    """A planned attempt needs its samples while it may still commit."""
    story = _Told()
    story.step(0, "p", checkpoint=False, optimizer=False)
    story.records[-1] = StepFailed(0, 1, "actor", "x") if failed else story.records[0]
    needs = [] if failed else [("t0", "planned step 0 of policy 'actor' in run 'r'")]
    assert list(needed_by(story.history())) == needs


@given(
    st.lists(STEP, min_size=1, max_size=8), st.dictionaries(st.integers(1, 7), st.integers(0, 7), max_size=3)
)
@settings(max_examples=300)
def test_what_an_erasure_ends_is_what_reads_it(steps: Any, back: dict[int, int]) -> None:
    """For any phases, checkpoints and abandoned steps: the replays that read it, and going on if it does."""
    history = _told(steps, back)
    history.retired = {0}
    last = max(history.steps)
    phase = history.steps[last].planned.phase
    for erased in range(len(steps)):
        name = f"t{erased}"
        ended = ended_by(history, name)
        reads = {s for s, step in history.steps.items() if name in _read(history, s, step.planned.phase)}
        assert set(ended.steps) == reads - {0}
        going_on = last != 0 and name in _read(history, last + 1, phase)
        assert (ended.resume is not None) == going_on
        if going_on:
            assert ended.resume == _base_for(history, last + 1, phase)[0].policy_version
