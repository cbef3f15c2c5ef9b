"""The training history folded from events: steps, attempts, and where a state starts from."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.fakes.stories import fabric

from rollbook.store.errors import TrainError
from rollbook.store.events import SampleDropped, StepFailed
from rollbook.store.fold.history import History, fold_history


def _base_for(history: Any, step: int, phase: str) -> Any:
    """The nearest checkpoint before a step, and the steps to take from there."""
    base = history.bases_for(step, phase)[0]
    return base, history.between(base, step)


def _history(*made: Any, run: str = "demo") -> History:
    return fold_history(fabric.events(made, run), fabric.RUN, "actor")


def _steps(count: int, phase: str = "p", first: int = 0) -> list[Any]:
    """Committed steps of a phase; each makes the version after it."""
    return [
        record
        for step in range(first, first + count)
        for record in (
            fabric.planned(step, step, phase, turns=[f"t{step}.0"]),
            fabric.committed(step, step + 1),
        )
    ]


@pytest.mark.parametrize(
    ("step", "base", "between"),
    [(0, 0, []), (1, 0, [0]), (2, 2, []), (3, 2, [2]), (4, 4, []), (5, 4, [4]), (6, 4, [4, 5])],
)
def test_base_within_a_phase(step: int, base: int, between: list[int]) -> None:
    """The nearest checkpoint at or before the step's input version, and the steps from there."""
    history = _history(
        fabric.checkpoint(0, None, None),
        *_steps(6),
        fabric.checkpoint(2),
        fabric.checkpoint(4),
    )
    checkpoint, steps = _base_for(history, step, "p")
    assert checkpoint.policy_version == base
    assert [s.planned.step for s in steps] == between


def test_weights_alone_serve_only_at_a_phases_start() -> None:
    """A checkpoint without an optimizer in mid-phase is passed over for one that restores it."""
    history = _history(
        fabric.checkpoint(0, None, None),
        *_steps(4),
        fabric.checkpoint(2),
        fabric.checkpoint(3, "p", None),
        fabric.checkpoint(4, "p", None),
    )
    checkpoint, steps = _base_for(history, 4, "p")
    assert checkpoint.policy_version == 2
    assert [s.planned.step for s in steps] == [2, 3]


def test_a_phase_starts_from_the_weights_of_the_one_before() -> None:
    """A phase starts from the weights where the other ended, and later from its own checkpoints."""
    first = [fabric.checkpoint(0, None, None), *_steps(3, "sft"), fabric.checkpoint(2, "sft")]
    first.append(fabric.checkpoint(3, "sft"))
    history = _history(*first)
    checkpoint, steps = _base_for(history, 3, "grpo")
    assert (checkpoint.policy_version, checkpoint.phase, steps) == (3, "sft", [])
    history = _history(*first, *_steps(3, "grpo", 3), fabric.checkpoint(5, "grpo"))
    chosen = {}
    for step, phase in ((2, "sft"), (3, "grpo"), (4, "grpo"), (5, "grpo"), (6, "grpo")):
        checkpoint, steps = _base_for(history, step, phase)
        chosen[step] = (checkpoint.policy_version, checkpoint.phase, [s.planned.step for s in steps])
    assert chosen == {
        2: (2, "sft", []),
        3: (3, "sft", []),
        4: (3, "sft", [3]),
        5: (5, "grpo", []),
        6: (5, "grpo", [5]),
    }
    assert [s.planned.step for s in history.of_phase("grpo")] == [3, 4, 5]


def test_no_checkpoint_to_start_from() -> None:
    """A new phase needs the weights where the other ended; without them the error names the version."""
    history = _history(fabric.checkpoint(0, None, None), *_steps(3, "sft"))
    with pytest.raises(TrainError, match="no checkpoint of version 3"):
        _base_for(history, 3, "grpo")
    assert _base_for(history, 3, "sft")[0].policy_version == 0
    with pytest.raises(TrainError, match="no checkpoint"):
        _base_for(_history(), 0, "sft")


def test_only_committed_steps_consume() -> None:
    """What a planned step names, or drops, is not used up until that attempt commits."""
    drop = SampleDropped("t8", "t8.0", "staleness", "r", 0, {})
    lost = [drop, fabric.planned(0, 0, turns=["t0.0", "t1.0"])]
    history = _history(*lost)
    assert (history.consumed(), history.dropped, history.next_step) == (set(), set(), 0)
    again = fabric.planned(0, 0, attempt=2, turns=["t1.0", "t2.0"])
    history = _history(*lost, StepFailed(0, 1, "actor", "x"), again, fabric.committed(0, 1, attempt=2))
    assert history.consumed() == {"t1.0", "t2.0"}
    assert history.dropped == set(), "the first attempt's drop was never committed"
    history = _history(*lost, fabric.committed(0, 1))
    assert (history.consumed(), history.dropped) == ({"t0.0", "t1.0"}, {"t8.0"})


@pytest.mark.parametrize("lanes", [("a", "b"), ("b", "a")])
def test_drops_are_of_a_plan_of_their_lane(lanes: tuple[str, str]) -> None:
    """A training that noted drops and ended, with its host: no step of another lane has dropped them."""
    drop = SampleDropped("t8", "t8.0", "no_version", "r", 1, {})
    steps = [fabric.planned(0, 0, turns=["t0.0"]), fabric.committed(0, 1), drop]
    after = [fabric.planned(1, 1, turns=["t1.0"]), fabric.committed(1, 2)]
    ended, going_on = (
        [replace(event, lane=lane) for event in fabric.events(made)]
        for lane, made in zip(lanes, (steps, after), strict=True)
    )
    for events in (ended + going_on, going_on + ended):
        history = fold_history(events, fabric.RUN, "actor")
        assert (history.consumed(), history.dropped, history.next_step) == ({"t0.0", "t1.0"}, set(), 2)


def test_attempts_are_counted() -> None:
    """The highest attempt of each step is known, committed or not; the committed manifest is its own."""
    plans = [fabric.planned(0, 0, attempt=a, turns=[f"a{a}.0"]) for a in (1, 2, 3)]
    history = _history(*plans[:2], fabric.committed(0, 1, attempt=2), fabric.planned(1, 1))
    assert history.attempts == {0: 2, 1: 1}
    assert history.steps[0].planned.samples[0]["turn_id"] == "a2.0"
    assert history.next_step == 1


def test_other_runs_and_policies_are_apart() -> None:
    """A run's history holds nothing of another run, or of another policy of the same run."""
    events = fabric.events([fabric.checkpoint(0, None, None), *_steps(2)])
    other = fabric.events([fabric.checkpoint(0, None, None), *_steps(5)], "other")
    history = fold_history([*other, *events], fabric.RUN, "actor")
    assert sorted(history.steps) == [0, 1]
    assert len(history.checkpoints) == 1
    assert fold_history(events, fabric.RUN, "critic").steps == {}
    assert sorted(fold_history([*other, *events], "other", "actor").steps) == [0, 1, 2, 3, 4]


def test_a_configuration_that_returns_begins_a_new_phase() -> None:
    """Trained A, then B: A goes on as a phase of its own, from the newest weights, its steps counted on."""
    after_a = [fabric.checkpoint(0, None, None), *_steps(2, "a")]
    history = _history(*after_a)
    assert history.phase_to_train("a") == "a"
    assert history.phase_to_train("b") == "b"
    after_b = [*after_a, fabric.checkpoint(2, "a", "o"), *_steps(2, "b", first=2)]
    history = _history(*after_b, fabric.checkpoint(4, "b", "o"))
    assert history.phase_to_train("a") == "a#2"
    assert [s.planned.step for s in history.of_family("a")] == [0, 1]
    base, between = _base_for(history, 4, "a#2")
    assert (base.policy_version, base.phase, between) == (4, "b", [])
