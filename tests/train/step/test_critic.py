"""A critic: trained beside the policy, restored with it, and replayed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.fakes.stories import fabric
from tests.fakes.stories.records import records_of

from rollbook import store as rb
from rollbook.engines.weights.digests import read_weights
from rollbook.replay.step.step import replay_step
from rollbook.store import Store
from rollbook.store.errors import ConfigError
from rollbook.store.events import StepCommitted, StepPlanned
from rollbook.train.batches.batch import collate_tokens
from rollbook.train.batches.experience import trained_masks
from rollbook.train.checkpoints.checkpoint import read_checkpoint
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.model.model import Build
from rollbook.train.model.score_head import critic_shape, with_head
from rollbook.train.model.shape import read_shape
from rollbook.train.ranks.backend import TrainablePolicy
from rollbook.train.select.samples import all_samples
from rollbook.train.step.critic import token_scores

Stores = Callable[..., Store]
PPO = {"name": "ppo", "groups": 8, "mini_batches": 2, "discount": 0.9, "gae_decay": 0.8}
CRITIC = {"lr": 0.01, "alone_steps": 2}


class Killed(Exception):
    """The process ends here."""


@pytest.fixture(scope="module")
def settings() -> Any:
    """Three rollout batches of eight samples, two steps on each."""
    return fabric.config(fabric.GRPO, steps=6, algorithm=PPO, critic=CRITIC)


@pytest.fixture(scope="module")
def whole(recorded_path: Path, settings: Any, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A training by these settings that nothing broke. Read it, or copy it; never write."""
    log = rb.open(shutil.copytree(recorded_path, tmp_path_factory.mktemp("whole") / "store"))
    fabric.train(log, settings)
    return log


def test_it_learns_and_the_policy_waits(whole: Store) -> None:
    """Values are 0 at first; the policy's weights change only after the steps in which the critic learns
    alone."""
    plans, steps = records_of(whole, StepPlanned), records_of(whole, StepCommitted)
    assert [plan.critic["alone"] for plan in plans] == [True, True, False, False, False, False]
    weights = [plans[0].input_digests["input_weights"], *(step.digests["weights"] for step in steps)]
    assert weights[0] == weights[1] == weights[2]
    assert len(set(weights)) == 5
    assert len({step.digests["critic_weights"] for step in steps}) == 6
    metrics = [step.metrics for step in steps]
    assert metrics[0]["value_mean"] == 0.0
    assert metrics[0]["explained_variance"] == pytest.approx(0)
    assert metrics[2]["value_mean"] != 0
    assert all(row["value_loss"] > 0 and row["critic_gradient_norm"] > 0 for row in metrics)
    assert all(row["gradient_norm"] > 0 for row in metrics)


@pytest.mark.more_but("3")
@pytest.mark.parametrize("step", [1, 3, 5])
def test_steps_replay(whole: Store, step: int) -> None:
    """Bit for bit, the critic's stages too, from checkpoints with the critic in them."""
    result = replay_step(whole, step)
    assert result.bit_for_bit, result.differs_in
    assert result.from_version == step // 2 * 2
    assert {"values", "returns", "value_losses", "critic_gradients", "critic_weights"} <= result.stages.keys()


@pytest.mark.more
def test_a_kill_changes_nothing(recorded: Stores, whole: Store, settings: Any) -> None:
    """The critic goes on from the checkpoint with its optimizer's state."""
    broken = recorded()
    for step in (3, 4):
        with fabric.killed_at(step, Killed):
            fabric.train(broken, settings)
    fabric.train(broken, settings)
    assert [s.digests for s in records_of(broken, StepCommitted)] == [
        s.digests for s in records_of(whole, StepCommitted)
    ]


def test_abandoned_steps_give_the_critic_back(whole: Store, settings: Any, tmp_path: Path) -> None:
    """Gone back to version 4, the next step starts from the critic of then, and replays."""
    log = rb.open(shutil.copytree(whole.path, tmp_path / "store"))
    fabric.train(log, settings, abandon_after=4)
    steps = records_of(log, StepCommitted)
    assert [step.policy_version for step in steps] == [1, 2, 3, 4, 5, 6, 8, 9]
    plans = records_of(log, StepPlanned)
    for stage in ("critic_input_weights", "critic_input_optimizer"):
        assert plans[6].input_digests[stage] == plans[4].input_digests[stage]
    assert replay_step(log, 7).bit_for_bit


@pytest.mark.more
def test_a_damaged_critic_is_not_gone_on_from(recorded: Stores, settings: Any) -> None:
    """A checkpoint with one flipped bit in its critic is passed over."""
    log = recorded()
    fabric.train(log, settings.model_copy(update={"steps": 4}))
    file = log.path / "checkpoints/demo/actor/v00000004/critic.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(Exception, match="critic damaged: "):
        read_checkpoint(log.path / "checkpoints/demo/actor/v00000004")
    fabric.train(log, settings)
    replayed = replay_step(log, 3)
    assert replayed.differs_in == "checkpoint"
    assert "critic damaged" in replayed.stages["checkpoint"].why


def test_values_are_those_of_transformers(recorded: Stores) -> None:
    """A random head on the tiny model: Megatron's scores are those of the sequence classifier in
    transformers."""
    from transformers import AutoModelForSequenceClassification

    folder = fabric.model_folder()
    shape = critic_shape(read_shape(folder))
    head = torch.randn(1, shape.hidden, generator=torch.Generator().manual_seed(1))
    weights = with_head(read_weights(folder), shape) | {"score.weight": head}
    critic = TrainablePolicy(shape, OptimizerConfig(), Build(1, torch.device("cpu"), 0, 1))
    critic.load_weights(weights)
    assert set(critic.weights()) == set(weights)
    samples = all_samples(recorded().trajectories().values())[:3]
    micro = collate_tokens(samples, trained_masks(samples))
    [values] = critic.forward((micro,), token_scores)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.load_state_dict(weights, strict=False)
    for row, sample in zip(values, samples, strict=True):
        tokens = torch.from_numpy(sample.tokens.astype(np.int64))[None]
        with torch.no_grad():
            states = model.model(tokens).last_hidden_state[0, :-1]
        expected = (states @ head.T)[:, 0]
        assert torch.allclose(row[: len(expected)], expected, atol=1e-4)


def test_a_critic_needs_an_algorithm_that_has_one() -> None:
    """GRPO has none; and steps must fill rollout batches."""
    with pytest.raises(ConfigError, match=r'\[critic\]: algorithm "grpo" has no critic'):
        fabric.config(fabric.GRPO, critic={})
    with pytest.raises(ConfigError, match="steps 5 is no multiple of the 2 steps"):
        fabric.config(fabric.GRPO, steps=5, algorithm=PPO)
