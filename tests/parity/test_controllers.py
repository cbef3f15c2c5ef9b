"""The adaptive KL coefficient, over a course of divergences, against those of verl and OpenRLHF."""

from __future__ import annotations

from importlib import import_module

import numpy as np
import pytest
from parity import ours
from parity.peers import with_openrlhf, with_verl

PEERS = {with_verl: "verl.trainer.ppo.core_algos", with_openrlhf: "openrlhf.trainer.ppo_utils.kl_controller"}


@pytest.mark.parametrize("module", PEERS.values())
def test_the_coefficient_follows_as_theirs(module: str) -> None:
    """To the bit, step after step."""
    theirs = import_module(module).AdaptiveKLController(0.2, 3.0, 1_000)
    algorithm = ours.algorithm(kl=0.2, kl_target=3.0, kl_horizon=1_000)
    for divergence in np.random.default_rng(0).exponential(3.0, 200).tolist():
        theirs.update(divergence, 64)
        algorithm = algorithm.after({"kl": divergence, "samples": 64})
        assert algorithm.kl == theirs.value
    assert algorithm.kl != 0.2
