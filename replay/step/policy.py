"""A policy in place for replays: built as a step's manifest says, in the state before the step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import orjson
import torch

from rollbook.engines.weights.digests import Tensors
from rollbook.store import Store
from rollbook.store.events import Json, StepPlanned
from rollbook.train.checkpoints.checkpoint import Adapter, Checkpoint
from rollbook.train.config.config import Dtype, OptimizerConfig
from rollbook.train.config.lora import recorded_lora
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.environment import fingerprint, with_files
from rollbook.train.model.model import Build, choose_device, set_deterministic
from rollbook.train.model.shape import ModelShape
from rollbook.train.ranks.policy import Policy
from rollbook.train.ranks.ranks import Ranks
from rollbook.train.resume.base import put_in_place
from rollbook.train.resume.promise import Promise, promise
from rollbook.train.step.critic import recorded_critic, restored_critic
from rollbook.train.step.experiences import Experiences
from rollbook.train.step.scoring import References


@dataclass(slots=True, eq=False)
class ReplayPolicy:
    """A policy in place, for the steps of one training in one layout.

    Attributes:
        made_for: the parts of a manifest that it is built by.
    """

    made_for: Json
    ranks: Ranks
    policy: Policy
    critic: Policy | None
    experiences: Experiences

    def state(self, plan: StepPlanned) -> Checkpoint:
        """What a checkpoint of it would hold, if trained as this manifest says."""
        policy, critic = self.policy, self.critic
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

    def tensor(self, stage: str, name: str) -> torch.Tensor | None:
        """A tensor of a stage of weights or of an optimizer, as it is now; None where it has none."""
        policy = self.critic if stage.startswith("critic") else self.policy
        if policy is None:
            return None
        if stage.endswith("weights"):
            return policy.weights().get(name)
        return policy.optimizer_state().get(name) if stage.endswith("optimizer") else None

    def promise(self, plan: StepPlanned) -> Promise:
        """Whether a step is promised to give the recorded bits here."""
        return promise(plan.environment, _fingerprint(plan, self.ranks.described))


def promised(log: Store, run: str, plan: StepPlanned, *, one_rank: bool) -> Promise:
    """Whether a step of a run is promised to give the recorded bits in this process; asked before anything
    is built. Source files that differ are named.

    Args:
        one_rank: one rank in the place of all those of the layout.
    """
    set_deterministic(int(plan.environment["threads"]))
    parallel, ranks = recorded_parallel({} if one_rank else plan.environment.get("parallel") or {})
    here = _fingerprint(plan, parallel.described(ranks))
    return promise(*with_files(log, run, plan.environment, here))


def _fingerprint(plan: StepPlanned, layout: Json) -> Json:
    """The fingerprint that a step would get here."""
    return fingerprint(device_like(plan), plan.algorithm, layout, dtype=plan.environment["dtype"])


def made_for(plan: StepPlanned, *, one_rank: bool) -> Json:
    """The parts of a manifest that a policy is built by.

    Args:
        one_rank: one rank in the place of all those of the layout.
    """
    environment = plan.environment
    return {
        "phase": plan.phase,
        "optimizer": plan.optimizer,
        "lora": plan.lora,
        "critic": None if plan.critic is None else plan.critic["optimizer"],
        "parallel": {} if one_rank else environment.get("parallel") or {},
        "dtype": environment["dtype"],
        "device": str(environment["device"]).split(":")[0],
    }


def put(
    plan: StepPlanned,
    wanted: Json,
    shape: ModelShape,
    held: Checkpoint,
    references: References,
    *,
    goes_on: bool,
) -> ReplayPolicy:
    """Build a policy, and put what a checkpoint holds in place.

    Args:
        wanted: what it is built by.
        goes_on: whether the step's training goes on from the checkpoint; else it begins there.

    Raises:
        ModelError: it cannot be built, or is of another architecture.
        RankError: it needs several ranks, and one of them does not come.
        TrainError: there is no checkpoint of the base weights of its LoRA factors.
    """
    ranks = Ranks(*recorded_parallel(wanted["parallel"]))
    try:
        policy, experiences = policies(
            ranks, plan, wanted["dtype"], shape, held, references, ("actor", "critic"), goes_on=goes_on
        )
    except BaseException:
        ranks.close()
        raise
    return ReplayPolicy(wanted, ranks, policy, experiences.critic, experiences)


def policies(
    ranks: Ranks,
    plan: StepPlanned,
    dtype: Dtype,
    shape: ModelShape,
    held: Checkpoint,
    references: References,
    names: tuple[str, str],
    *,
    goes_on: bool,
) -> tuple[Policy, Experiences]:
    """The policy of a manifest, and what makes its batches, with the critic if there is one. Arguments and
    errors as of `put`.

    Args:
        names: by which the ranks know the policy and its critic.
    """
    threads = int(plan.environment["threads"])
    how = Build(1, device_like(plan), plan.seed, threads, dtype)
    optimizer = OptimizerConfig.model_validate_json(orjson.dumps(plan.optimizer))
    lora = None if plan.lora is None else recorded_lora(plan.lora)
    own = replace(how, lora=None if lora is None else lora.config)
    policy = ranks.policy(names[0], shape, optimizer, own)
    put_in_place(policy, held, lora, references, goes_on=goes_on)
    critic = None
    if plan.critic is not None:
        settings = recorded_critic(plan)
        critic = restored_critic(ranks, shape, settings, held, how, goes_on=goes_on, name=names[1])
    return policy, Experiences(policy, references, critic)


def device_like(plan: StepPlanned) -> torch.device:
    """A device of the kind that a step was taken on, if there is one here."""
    kind = str(plan.environment["device"]).split(":")[0]
    return choose_device("cpu" if kind == "cuda" and not torch.cuda.is_available() else kind)


def _copied(tensors: Tensors) -> Tensors:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
