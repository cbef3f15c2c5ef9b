"""The adaptive KL coefficient, over a course of divergences, against those of verl and OpenRLHF."""

from __future__ import annotations

import numpy as np
import pytest
from openrlhf.trainer.ppo_utils import kl_controller
from parity import ours
from verl.trainer.ppo import core_algos


@pytest.mark.parametrize("peer", [core_algos, kl_controller], ids=["verl", "OpenRLHF"])
def test_the_coefficient_follows_as_theirs(peer: object) -> None:
    """To the bit, step after step."""
    theirs = peer.AdaptiveKLController(0.2, 3.0, 1_000)  # type: ignore[attr-defined]
    algorithm = ours.algorithm(kl=0.2, kl_target=3.0, kl_horizon=1_000)
    for divergence in np.random.default_rng(0).exponential(3.0, 200).tolist():
        theirs.update(divergence, 64)
        algorithm = algorithm.after({"kl": divergence, "samples": 64})
        assert algorithm.kl == theirs.value
    assert algorithm.kl != 0.2
