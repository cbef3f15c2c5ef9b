"""AReaL's losses and advantages on a case."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from areal.api.cli_args import NormConfig, RejectionSamplingConfig
from areal.utils.data import KLEstimator, Normalization
from areal.utils.functional import functional
from parity.cases import Case
from parity.peers.stubs import bare

bare("areal", "trainer", "trainer.ppo")
actor = importlib.import_module("areal.trainer.ppo.actor")


def loss(
    case: Case, *, rejection: dict[str, Any] | None = None, low: float = 0.2, **keys: Any
) -> torch.Tensor:
    """The actor's loss: decoupled where tokens are rejected or weighted by `rejection`."""
    config = None if rejection is None else RejectionSamplingConfig(**rejection)
    arguments = case.logprobs, case.old, case.rollout, case.advantages.clone(), low, case.mask
    return functional.ppo_actor_loss_fn(*arguments, rejection_sampling=config, **keys)[0]


def weights(case: Case, **rejection: Any) -> torch.Tensor:
    """Weights of tokens by rejection sampling."""
    arguments = case.old, case.rollout, case.mask, None, RejectionSamplingConfig(**rejection)
    return functional.apply_rejection_sampling(*arguments).behave_imp_weight


def normalized(case: Case, **keys: Any) -> torch.Tensor:
    """Advantages of rewards, normalized by group."""
    normalize = Normalization(NormConfig(**{"group_size": case.group_size, "eps": 1e-6} | keys))
    return torch.where(case.mask, normalize(case.rewards)[:, None], 0.0)


def rewards_normalized(case: Case) -> torch.Tensor:
    """Rewards by the mean and the deviation of the batch, the same for all trained tokens."""
    config = NormConfig(mean_level="batch", std_level="batch", std_unbiased=False, eps=1e-8)
    return torch.where(case.mask, Normalization(config)(case.rewards)[:, None], 0.0)


def whitened(case: Case, *, unbiased: bool, level: str | None = "batch") -> torch.Tensor:
    """Old values of the batch's tokens, whitened; by the mean alone where the deviation has no `level`."""
    config = NormConfig(mean_level="batch", std_level=level, std_unbiased=unbiased, eps=1e-8)
    return Normalization(config)(case.old_values, case.floats)


def estimated(
    case: Case,
    name: str,
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl: float = 0.0,
    critic: bool = True,
    clip: float = 1e9,
) -> torch.Tensor:
    """`advantages` or `returns` by GAE, not whitened; rewards are within +-`clip`.

    Tensors are about the next token there, and a row that is full has no end: two columns come after.
    """
    config = SimpleNamespace(
        overlong_reward_penalty=False, use_decoupled_loss=True, recompute_logprob=True, reward_bias=0.0
    )
    it = actor.PPOActor.__new__(actor.PPOActor)
    it.config, it.reward_bias, it.reward_scaling, it.reward_clip = config, 0.0, 1.0, clip
    it.reward_norm = it.adv_norm = None
    it.kl_ctl, it.kl_estimator, it.discount, it.gae_lambda = kl, KLEstimator("k1"), gamma, lam
    it.mask_no_eos_with_zero = False
    rows, columns = case.mask.shape
    after = torch.zeros(rows, 2)
    padded = {
        "input_ids": torch.zeros(rows, columns + 2, dtype=torch.int64),
        "attention_mask": torch.arange(columns + 2) < (case.last + 2)[:, None],
        "loss_mask": torch.cat([after[:, :1], case.floats, after[:, :1]], 1),
        "logprobs": torch.cat([after[:, :1], case.old, after[:, :1]], 1),
        "ref_logp": torch.cat([case.reference, after], 1),
        "rewards": case.rewards.clone(),
    }
    if critic:
        padded["values"] = torch.cat([case.old_values, after], 1)
    result = it._compute_advantages(padded)[name][:, :columns]
    return torch.where(case.mask, result, 0.0)


def overlong(case: Case, *, longest: int, buffer: int, factor: float = 1.0) -> torch.Tensor:
    """Rewards less the overlong penalty, the same for all trained tokens, 0 outside the mask."""
    data = {"rewards": case.rewards.clone(), "input_ids": case.mask, "loss_mask": case.mask}
    functional.reward_overlong_penalty(data, buffer, factor, longest)
    return torch.where(case.mask, data["rewards"][:, None], 0.0)


def value_loss(case: Case, clip: float) -> torch.Tensor:
    """The critic's loss: half of the squared error."""
    arguments = case.values, case.old_values, case.returns, clip, case.mask, "mse"
    return functional.ppo_critic_loss_fn(*arguments)[0]


def kl(case: Case, estimator: str) -> torch.Tensor:
    """The mean of an estimate, clamped to +-10."""
    return KLEstimator(estimator)(case.logprobs, case.reference)[case.mask].mean()


def dpo(case: Case, *, ipo: bool = False, beta: float = 0.1) -> torch.Tensor:
    """DPO's or IPO's loss of pairs: each sample of the first half against one of the second."""
    n = len(case.mask) // 2
    differences = ((case.logprobs - case.reference) * case.floats).sum(-1)
    if ipo:
        differences = differences / case.mask.sum(-1)
    logits = differences[:n] - differences[n : 2 * n]
    return functional.dpo_preference_loss(logits, beta=beta, loss_type="ipo" if ipo else "sigmoid").mean()
