"""Puts a policy in place, with its critic if it has one, as a manifest says; and says what state it is in."""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson
import torch

from rollbook.ingest.engines.weights.digests import Tensors
from rollbook.store.events import Json, StepPlanned
from rollbook.train.checkpoints.checkpoint import Adapter, Checkpoint
from rollbook.train.config.config import OptimizerConfig
from rollbook.train.config.lora import recorded_lora
from rollbook.train.loop.base import put_in_place
from rollbook.train.loop.critic import recorded_critic, restored_critic
from rollbook.train.loop.experiences import Experiences
from rollbook.train.loop.scoring import References
from rollbook.train.megatron.model import Build, choose_device
from rollbook.train.megatron.policy import Policy
from rollbook.train.megatron.ranks import Ranks
from rollbook.train.megatron.shape import ModelShape


@dataclass(frozen=True, slots=True, eq=False)
class Placing:
    """Where policies are put.

    Attributes:
        shape: of the model; references: weights of its earlier versions.
        policy, critic: names that the ranks know the two by.
    """

    ranks: Ranks
    shape: ModelShape
    references: References
    policy: str = "actor"
    critic: str = "critic"

    def policies(
        self, plan: StepPlanned, made_for: Json, held: Checkpoint, *, goes_on: bool
    ) -> tuple[Policy, Experiences]:
        """The policy of a manifest, and what makes its batches, which has the critic if there is one.

        Args:
            made_for: says device and dtype.
            held: the state that they are put in.
            goes_on: whether that is one of the same training; else it begins there.

        Raises:
            TrainError: there is no checkpoint of the weights that low-rank factors are beside.
            ModelError: it is damaged, or the model cannot be built.
            RankError: a rank does not come.
        """
        threads = int(plan.environment["threads"])
        how = Build(1, device_of(made_for["device"]), plan.seed, threads, made_for["dtype"])
        optimizer = OptimizerConfig.model_validate_json(orjson.dumps(plan.optimizer))
        lora = None if plan.lora is None else recorded_lora(plan.lora)
        own = replace(how, lora=None if lora is None else lora.config)
        policy = self.ranks.policy(self.policy, self.shape, optimizer, own)
        put_in_place(policy, held, lora, self.references, goes_on=goes_on)
        critic = None
        if plan.critic is not None:
            given = (self.ranks, self.shape, recorded_critic(plan), held, how)
            critic = restored_critic(*given, goes_on=goes_on, name=self.critic)
        return policy, Experiences(policy, self.references, critic)


def device_of(kind: str) -> torch.device:
    """Of the kind that was recorded, if there is one here."""
    return choose_device("cpu" if kind == "cuda" and not torch.cuda.is_available() else kind)


def state_of(policy: Policy, critic: Policy | None, plan: StepPlanned) -> Checkpoint:
    """What a checkpoint of policies in place would hold, which were trained as a manifest says."""
    adapter = None
    if plan.lora is not None and (factors := policy.adapter()):
        adapter = Adapter(_copied(factors), recorded_lora(plan.lora))
    return Checkpoint(
        _copied(policy.weights()),
        _copied(policy.optimizer_state()),
        None if critic is None else _copied(critic.weights()),
        None if critic is None else _copied(critic.optimizer_state()),
        adapter,
    )


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
