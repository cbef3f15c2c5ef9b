"""examples/cliff: an environment of gymnasium, its rewards by turn, a step on what follows each turn."""

from __future__ import annotations

import numpy as np
import pytest
from tests.examples.played import Played, play

from rollbook.store.fold.trajectory import fold
from rollbook.train.select.samples import samples_of


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> Played:
    """The rollouts, and a step."""
    sayings = ("up", "I go right.", "down", "Left!")
    return play(tmp_path_factory.mktemp("cliff"), "cliff", ["rollouts"], sayings)


def test_each_turn_has_its_reward(played: Played) -> None:
    """-1, or -100 over the cliff, and the trajectory none beside them."""
    assert played.said["rollouts"]["done"] == 8
    rows = played.asked("SELECT DISTINCT reward FROM turns ORDER BY 1 DESC")
    assert {-1.0} <= {reward for (reward,) in rows} <= {-1.0, -100.0}
    assert played.asked(
        'SELECT "group", count(*), max(abs(reward)) FROM trajectories GROUP BY 1 ORDER BY 1'
    ) == [(f"cliff.0.{seed}", 4, 0.0) for seed in (0, 1)]


def test_they_reach_the_training(played: Played) -> None:
    """One path for each trajectory, with a reward at each of its turns; the step replays."""
    samples = [item for t in fold(played.log.events()).values() for item in samples_of(t)]
    assert len(samples) == 8
    for sample in samples:
        assert set(sample.rewards.values()) <= {-1.0, -100.0}
        assert len(sample.rewards) == np.count_nonzero(np.diff(sample.loss_mask.astype(int)) == 1)
    assert "step 0: bit for bit" in played.replayed
    assert len(played.taken()) == 8
