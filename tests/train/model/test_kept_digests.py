"""Digests are kept only for as long as what they are of stays as it is."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from rollbook.engines.weights.digests import digest_tensors, read_weights
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.ranks.kept_digests import KeptDigests


def test_a_stream_is_asked_once() -> None:
    """Until it is said to be another one, or somebody is to look at it."""
    digests, tensors, calls = KeptDigests(), {"a": torch.zeros(3)}, []

    def stream() -> object:
        calls.append(1)
        return iter(tensors.items())

    first = digests.of("weights", stream)
    assert (first.digest, len(calls)) == (digest_tensors(tensors), 1)
    assert (digests.of("weights", stream), len(calls)) == (first, 1)
    digests.changed("state")
    assert (digests.of("weights", stream), len(calls)) == (first, 1)
    tensors["a"] = torch.ones(3)
    seen: list[str] = []
    assert digests.of("weights", stream, lambda name, tensor: seen.append(name)) != first
    assert (seen, len(calls)) == (["a"], 2)
    digests.changed("weights")
    assert (digests.of("weights", stream).digest, len(calls)) == (digest_tensors(tensors), 3)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_way_to_change_a_policy_is_noticed(model_folders: Path, dtype: str) -> None:
    """After each the digests are of what is there: steps, other weights in place, states put in place."""
    folder = model_folders / "qwen2"
    how = Build(9, torch.device("cpu"), 0, 1, dtype)
    policy, weights = TrainablePolicy(read_shape(folder), OptimizerConfig(), how), read_weights(folder)
    doubled = {name: 2 * tensor for name, tensor in weights.items()}

    def right() -> None:
        for tree in (True, False):
            assert policy.weights_digest(tree=tree).digest == digest_tensors(policy.weights(), tree=tree)
            state = policy.optimizer_digest(tree=tree).digest
            assert state == digest_tensors(policy.optimizer_state(), tree=tree)

    policy.load_weights(weights)
    right()
    for _ in range(2):
        for gradient in policy.gradients().values():
            gradient.fill_(0.1)
        policy.optimizer_step(0.01)
        right()
    with policy.using(doubled):
        right()
    right()
    state = {name: tensor.clone() for name, tensor in policy.optimizer_state().items()}
    policy.load_optimizer_state({})
    right()
    policy.load_optimizer_state({name: tensor + 1 for name, tensor in state.items()})
    right()
    policy.put(next(iter(policy.own_weights())), torch.zeros(()))
    right()
