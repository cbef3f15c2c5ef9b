"""Steps that trained on what was erased: refused with the reason, never replayed into something else."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tests.fakes.stories import fabric

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ReplayError
from rollbook.store.upkeep.erase import erase_trajectory

SFT_STEP, GRPO_STEP = 5, 10


def _trained_on(log: Store, step: int) -> str:
    """A trajectory that a step consumed a sample of."""
    trajectory_id: str = fabric.steps_of(log).steps[step].planned.samples[0]["trajectory_id"]
    return trajectory_id


def test_a_step_whose_sample_was_erased(
    trained: Callable[..., Store], cli: Callable[..., tuple[int, str, str]]
) -> None:
    """The replay names step, trajectory and reason, and exits with 2; steps that did not use it replay."""
    log = trained()
    erased = _trained_on(log, GRPO_STEP)
    erase_trajectory(log, erased, "a customer asked")
    with pytest.raises(ReplayError, match=rf"trajectory {erased}, which .* erased \(a customer asked\)"):
        replay_step(log, GRPO_STEP)
    code, _, err = cli("replay", "step", GRPO_STEP, "--store", log.path)
    assert (code, "a customer asked" in err) == (2, True)
    assert replay_step(log, SFT_STEP).bit_for_bit


@pytest.mark.more
def test_a_step_whose_sample_kept_its_tokens(trained: Callable[..., Store]) -> None:
    """With the tokens kept only text is gone, which no step reads: every stage is the same."""
    log = trained()
    erase_trajectory(log, _trained_on(log, GRPO_STEP), "a name", keep_tokens=True)
    assert replay_step(log, GRPO_STEP).bit_for_bit
