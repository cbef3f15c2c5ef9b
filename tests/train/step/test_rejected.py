"""A batch in which every token was rejected takes no step: its samples are dropped by a rule of their own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import AllRejectedError, TrainError
from rollbook.store.events import SampleDropped, StepCommitted, StepFailed, StepPlanned
from rollbook.train.algorithms import parts
from rollbook.train.loop import trainer

Stores = Callable[..., Store]
NONE_KEPT = {
    "name": "policy_gradient",
    "groups": 2,
    "group_size": 4,
    "old": "trainer",
    "correction": "icepop",
    "correction_low": 1e6,
    "correction_high": 1e7,
    "count_rejected": False,
}


def _leaves(plan: StepPlanned) -> list[str]:
    return [ref["turn_id"] for ref in plan.samples]


@pytest.fixture
def first_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A correction of one's own that rejects all of the first batch of a training, and none after it."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(parts, "_loaded", {})
    text = """
        import numpy as np

        CALLS = []


        def first_rejected(log_ratios, lengths, bounds):
            CALLS.append(len(log_ratios))
            return np.full(len(log_ratios), float(sum(n > 20 for n in CALLS) > 1))
    """
    import textwrap

    (tmp_path / "picky.py").write_text(textwrap.dedent(text))
    return "picky:first_rejected"


def test_its_samples_are_dropped_and_the_next_batch_is_taken(recorded: Stores, first_rejected: str) -> None:
    """No weight moves, weight decay or not: the second attempt starts from the very weights and state."""
    log, whole = recorded(), recorded("whole")
    keys = NONE_KEPT | {"correction": first_rejected, "correction_low": 0.0}
    fabric.train(whole, fabric.config(fabric.GRPO, steps=2, algorithm=NONE_KEPT | {"correction": "tis"}))
    batches = [_leaves(plan) for plan in records_of(whole, StepPlanned)]
    fabric.train(log, fabric.config(fabric.GRPO, steps=1, algorithm=keys))
    first, second = records_of(log, StepPlanned)
    assert (first.attempt, second.attempt) == (1, 2)
    assert [_leaves(first), _leaves(second)] == batches
    assert first.input_digests == second.input_digests
    [failed], [done] = records_of(log, StepFailed), records_of(log, StepCommitted)
    assert (failed.attempt, done.attempt) == (1, 2)
    assert "AllRejectedError" in failed.error
    drops = records_of(log, SampleDropped)
    assert {(d.rule, d.step, d.attempt) for d in drops} == {("all_rejected", 0, 2)}
    assert sorted(d.turn_id for d in drops) == sorted(batches[0])
    assert drops[0].detail["error"].startswith(f"all tokens of the step's {len(batches[0])} samples")
    assert not fabric.steps_of(log).consumed() & fabric.steps_of(log).dropped
    assert replay_step(log, 0, trust_parts=True).bit_for_bit


def test_a_training_without_a_token_that_is_kept(recorded: Stores) -> None:
    """It ends with an error, and its model is the one that it began with."""
    log = recorded()
    settings = fabric.config(fabric.GRPO, steps=1, algorithm=NONE_KEPT)
    with pytest.raises(TrainError, match="the last 3 batches were skipped"):
        fabric.train(log, settings)
    assert len(records_of(log, StepFailed)) == 3, "the log fills three batches"
    assert not records_of(log, StepCommitted)
    weights = {plan.input_digests["input_weights"] for plan in records_of(log, StepPlanned)}
    assert len(weights) == 1


def test_one_batch_after_the_other_is_an_error(recorded: Stores, monkeypatch: pytest.MonkeyPatch) -> None:
    """That says what to do, and not a training that throws away all there is."""
    log = recorded()
    monkeypatch.setattr(trainer, "SKIPS_IN_A_ROW", 1)
    with pytest.raises(AllRejectedError, match="widen algorithm"):
        fabric.train(log, fabric.config(fabric.GRPO, steps=1, algorithm=NONE_KEPT))
    assert len(records_of(log, StepFailed)) == 2
