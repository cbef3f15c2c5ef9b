"""Muon beside Adam: whose parameters are whose, what a step is, and that a training with it is repeatable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.fakes.stories import fabric

from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import StepCommitted
from rollbook.train.batches.batch import MicroBatch, collate_tokens
from rollbook.train.batches.experience import trained_masks
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.select.samples import all_samples
from rollbook.train.step.predictions import token_logprobs

Stores = Callable[..., Store]
LR, DECAY = 0.02, 0.1
MATRICES = {"self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2"}


def _committed(log: Store) -> list[Any]:
    return [event.record for event in log.events() if isinstance(event.record, StepCommitted)]


def _policy(**keys: Any) -> TrainablePolicy:
    wanted = OptimizerConfig.model_validate({"lr": LR, "clip_grad": 0.0, "weight_decay": DECAY} | keys)
    shape = read_shape(fabric.model_folder())
    return TrainablePolicy(shape, wanted, Build(10, torch.device("cpu"), 0, 1))


def _own(policy: TrainablePolicy) -> dict[str, torch.Tensor]:
    """The weights under Megatron's names."""
    return dict(policy._parts.module.named_parameters())


def _micro(log: Store) -> MicroBatch:
    samples = [s for s in all_samples(log.trajectories().values()) if s.split == "teacher"][:4]
    return collate_tokens(samples, trained_masks(samples))


def _loss(logits: torch.Tensor, micro: MicroBatch) -> tuple[torch.Tensor, None]:
    tokens, temperatures = torch.from_numpy(micro.tokens), torch.from_numpy(micro.temperatures)
    loss = -token_logprobs(logits, tokens, temperatures)
    return loss[torch.from_numpy(micro.loss_mask[:, 1:])].mean(), None


def test_a_step(recorded: Stores) -> None:
    """A matrix of a layer moves by the orthogonal factor of its gradient, scaled to Adam's size, after its
    decay; singular values of five iterations lie around 1. All else moves as with Adam alone."""
    log = recorded()
    policies = [_policy(name=name) for name in ("muon", "adamw")]
    before = {name: weight.detach().clone() for name, weight in _own(policies[0]).items()}
    assert all(torch.equal(weight, before[name]) for name, weight in _own(policies[1]).items())
    for policy in policies:
        policy.forward_backward((_micro(log),), _loss)
        policy.optimizer_step(LR)
    muon, adam = ({name: weight.detach() for name, weight in _own(p).items()} for p in policies)
    gradients = policies[0].gradients()
    orthogonal = {name for name in muon if any(part in name for part in MATRICES) and muon[name].dim() == 2}
    assert len(orthogonal) == 8
    for name in muon:
        if name not in orthogonal:
            assert torch.equal(muon[name], adam[name]), name
            continue
        start, gradient = before[name].double(), gradients[name].double()
        moved = (start * (1 - LR * DECAY) - muon[name].double()) / LR
        left, sizes, right = torch.linalg.svd(gradient, full_matrices=False)
        rotated = left.T @ moved @ right.T / (0.2 * max(gradient.shape) ** 0.5)
        large = int((sizes > 0.05 * sizes[0]).sum())  # smaller ones take more than five iterations
        assert large > 4, name
        rotated = rotated[:large, :large]
        assert 0.6 < float(rotated.diagonal().min()) <= float(rotated.diagonal().max()) < 1.3, name
        assert float((rotated - rotated.diagonal().diag()).abs().max()) < 0.1, name


def test_it_learns_and_replays(recorded: Stores) -> None:
    """The loss falls; steps from a checkpoint with its momentum replay."""
    whole = recorded()
    optimizer = fabric.SFT["optimizer"] | {"name": "muon"}
    fabric.train(whole, fabric.config(fabric.SFT, optimizer=optimizer))
    losses = [step.metrics["loss"] for step in _committed(whole)]
    assert losses[-1] < 0.75 * losses[0]
    assert [replay_step(whole, step).differs_in for step in (0, 5, 8)] == [None] * 3


@pytest.mark.more
def test_a_restart_has_its_momentum(recorded: Stores) -> None:
    """Of a training without a schedule: interrupted after each step, the same bits."""
    whole, broken = recorded("whole"), recorded("broken")
    changes: dict[str, Any] = {"optimizer": {"name": "muon", "lr": 0.01}, "checkpoint_every": 2}
    fabric.train(whole, fabric.config(fabric.SFT, steps=5, **changes))
    for steps in range(1, 6):
        fabric.train(broken, fabric.config(fabric.SFT, steps=steps, **changes))
    assert [s.digests for s in _committed(whole)] == [s.digests for s in _committed(broken)]


def test_a_critic_may_have_it(recorded: Stores) -> None:
    """Its score head stays with Adam."""
    log = recorded()
    algorithm = {"name": "ppo", "groups": 8}
    critic = {"name": "muon", "lr": 0.01}
    fabric.train(log, fabric.config(fabric.GRPO, steps=2, algorithm=algorithm, critic=critic))
    assert len({step.digests["critic_weights"] for step in _committed(log)}) == 2
    assert replay_step(log, 1).bit_for_bit


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"distributed_optimizer": True}])
def test_it_takes_whole_matrices(parallel: dict[str, Any]) -> None:
    """Layouts in which a rank has some of one are refused."""
    with pytest.raises(ConfigError, match=f"leave parallel.{next(iter(parallel))}"):
        fabric.config(fabric.SFT, optimizer={"name": "muon"}, parallel=parallel)


def test_its_keys_belong_to_it() -> None:
    """They are refused beside Adam."""
    with pytest.raises(ConfigError, match='go with name = "muon"'):
        fabric.config(fabric.SFT, optimizer={"muon_momentum": 0.9})
