"""verl's functions on a case."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import verl.utils.torch_functional as functional
from parity.cases import Case
from verl.trainer.ppo import core_algos, rollout_corr_helper
from verl.workers.config import ActorConfig


def _config(**keys: Any) -> ActorConfig:
    wanted = {"clip_ratio": 0.2, "clip_ratio_low": 0.2, "clip_ratio_high": 0.2, "clip_ratio_c": 1e30} | keys
    return ActorConfig(strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **wanted)


def loss(
    case: Case, name: str = "vanilla", mode: str = "token-mean", length: int | None = None, **keys: Any
) -> torch.Tensor:
    """A policy loss, aggregated; `length` is the constant of `seq-mean-token-sum-norm`."""
    config = _config(**keys)
    if length is not None:
        config.global_batch_info["loss_scale_factor"] = length
    arguments = case.old, case.logprobs, case.advantages, case.floats
    return core_algos.get_policy_loss_fn(name)(*arguments, loss_agg_mode=mode, config=config)[0]


def weighted_loss(
    case: Case, level: str, threshold: str | float, name: str = "vanilla", mode: str = "token-mean"
) -> torch.Tensor:
    """A policy loss with its weights of an engine's mismatch."""
    arguments = case.old, case.logprobs, case.advantages, case.floats
    return core_algos.get_policy_loss_fn(name)(
        *arguments, loss_agg_mode=mode, config=_config(), rollout_is_weights=weights(case, level, threshold)
    )[0]


def rejected_loss(case: Case, option: str, threshold: str, mode: str = "token-mean") -> torch.Tensor:
    """PPO's loss of the tokens that `rollout_rs` keeps, weighted by ratios that nothing bounds."""
    mask = kept(case, option, threshold)
    arguments = case.old, case.logprobs, case.advantages, mask
    return core_algos.compute_policy_loss_vanilla(
        *arguments, loss_agg_mode=mode, config=_config(), rollout_is_weights=weights(case, "token", 1e30)
    )[0]


def kept(case: Case, option: str, threshold: str) -> torch.Tensor:
    """1 for tokens that `rollout_rs` keeps, else 0."""
    arguments = torch.where(case.mask, case.old - case.rollout, 0.0), case.floats
    return rollout_corr_helper.compute_rollout_rejection_mask(*arguments, option, threshold)[0]


def dro(case: Case, beta: float) -> torch.Tensor:
    """DRO, with a configuration of which only two keys are read."""
    config = SimpleNamespace(policy_loss=SimpleNamespace(dro_beta=beta), global_batch_info={})
    arguments = case.old, case.logprobs, case.advantages, case.floats
    return core_algos.compute_policy_loss_dro(*arguments, config=config)[0]


def _at_last(case: Case) -> torch.Tensor:
    """Rewards at the last trained token of each sample."""
    rewards = torch.zeros_like(case.old)
    rewards[torch.arange(len(case.mask)), case.last] = case.rewards
    return rewards


def advantages(case: Case, name: str, *, kl: float = 0.0, turns: bool = False, **keys: Any) -> torch.Tensor:
    """Advantages of an estimator, 0 outside the mask; `turns` have rewards beside the trajectory's."""
    rewards = (
        _at_last(case)
        + case.turn_rewards * turns
        - kl * torch.where(case.mask, case.old - case.reference, 0.0)
    )
    if name != "reinforce_plus_plus":
        keys["index"] = case.groups.numpy()
    if name.startswith("reinforce_plus_plus"):
        keys = {"config": SimpleNamespace(gamma=keys.pop("gamma", 1.0)), **keys}
    arguments = {"token_level_rewards": rewards, "response_mask": case.floats}
    result, _ = core_algos.get_adv_estimator_fn(name)(**arguments, **keys)
    return torch.where(case.mask, result, 0.0)


def gae(case: Case, name: str, *, gamma: float = 1.0, lam: float = 1.0) -> torch.Tensor:
    """GAE: whitened `advantages` or `returns`."""
    arguments = _at_last(case), case.old_values * case.mask, case.floats, gamma, lam
    result = dict(
        zip(("advantages", "returns"), core_algos.compute_gae_advantage_return(*arguments), strict=True)
    )
    return torch.where(case.mask, result[name], 0.0)


def whitened(case: Case) -> torch.Tensor:
    """Old values of the batch's tokens, whitened with the unbiased variance."""
    result = functional.masked_whiten(case.old_values, case.floats)
    return torch.where(case.mask, result, 0.0)


def value_loss(case: Case, clip: float, mode: str = "token-mean") -> torch.Tensor:
    """The clipped value loss."""
    arguments = case.values, case.returns, case.old_values, case.floats, clip
    return core_algos.compute_value_loss(*arguments, loss_agg_mode=mode)[0]


def kl(case: Case, estimator: str) -> torch.Tensor:
    """The mean of an estimate."""
    return core_algos.kl_penalty(case.logprobs, case.reference, estimator)[case.mask].mean()


def weights(case: Case, level: str, threshold: str | float) -> torch.Tensor:
    """Weights of TIS, or with two bounds of IcePop."""
    return rollout_corr_helper.compute_rollout_correction_weights(
        torch.where(case.mask, case.old - case.rollout, 0.0), case.floats, level, threshold
    )[0]


def with_entropy(case: Case, weight: float) -> torch.Tensor:
    """PPO's loss less so many times the mean entropy of the tokens' distributions."""
    entropies = functional.entropy_from_logits(case.logits)
    return loss(case) - weight * core_algos.agg_loss(entropies, case.floats, "token-mean")


def adapted(case: Case, coefficient: float, target: float, horizon: int) -> torch.Tensor:
    """The adaptive KL coefficient after a step."""
    it = core_algos.AdaptiveKLController(coefficient, target, horizon)
    it.update(float(case.old_values[0, 0].abs()), len(case.mask))
    return torch.tensor(it.value, dtype=case.old.dtype)
