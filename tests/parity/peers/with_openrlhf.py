"""OpenRLHF's losses and advantages on a case."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import torch
from parity.cases import Case
from parity.peers.stubs import bare, empty

for _name in ("deepspeed", "flash_attn"):
    empty(_name)
bare("openrlhf", "", "models", "trainer", "trainer.ppo_utils", "trainer.ray", "utils")
# A class of Ray actors that hold models on GPUs: the experience maker only names it.
empty("openrlhf.trainer.ray.launcher").RayActorGroup = object  # type: ignore[attr-defined]
losses = importlib.import_module("openrlhf.models.loss")
penalties = importlib.import_module("openrlhf.trainer.ppo_utils.length_penalty")
functions = importlib.import_module("openrlhf.models.utils")
controllers = importlib.import_module("openrlhf.trainer.ppo_utils.kl_controller")
makers = importlib.import_module("openrlhf.trainer.ppo_utils.experience_maker")


def loss(case: Case, **keys: Any) -> torch.Tensor:
    """A policy loss."""
    function = losses.PolicyLoss(**keys)
    return function(case.logprobs, case.old, case.advantages, case.floats, case.rollout)[0]


def value_loss(case: Case, clip: float) -> torch.Tensor:
    """The clipped value loss."""
    return losses.ValueLoss(clip)(case.values, case.old_values, case.returns, case.floats)


def kl(case: Case, estimator: str) -> torch.Tensor:
    """The mean of an estimate, clamped to +-10."""
    estimate = functions.compute_approx_kl(case.logprobs, case.reference, kl_estimator=estimator)
    return estimate[case.mask].mean()


def estimated(
    case: Case,
    estimator: str,
    name: str = "advantages",
    *,
    gamma: float = 1.0,
    lam: float = 1.0,
    kl: float = 0.0,
    clip: tuple[float, float] | None = None,
) -> torch.Tensor:
    """`advantages` or `returns` of an estimator, 0 outside the mask; rewards are clipped to `clip`."""
    advantage = SimpleNamespace(estimator=estimator, gamma=gamma, lambd=lam, no_std_norm=False)
    args = SimpleNamespace(
        algo=SimpleNamespace(advantage=advantage),
        rollout=SimpleNamespace(n_samples_per_prompt=case.group_size),
        reward=SimpleNamespace(clip_range=clip, overlong_buffer_len=None, stop_properly_penalty_coef=None),
    )
    maker = makers.RemoteExperienceMaker.__new__(makers.RemoteExperienceMaker)
    maker.strategy, maker.args = SimpleNamespace(args=args), args
    maker.advantage_estimator, maker.kl_ctl = estimator, SimpleNamespace(value=kl)
    experience = makers.Experience(
        action_mask=case.floats,
        values=case.old_values,
        kl=functions.compute_approx_kl(case.old, case.reference),
        rewards=case.rewards.clone(),
        index=list(range(len(case.mask))),
        info={},
    )
    maker.compute_advantages_and_returns([experience])
    return torch.where(case.mask, getattr(experience, name), 0.0)


def adapted(case: Case, coefficient: float, target: float, horizon: int) -> torch.Tensor:
    """The adaptive KL coefficient after a step."""
    it = controllers.AdaptiveKLController(coefficient, target, horizon)
    it.update(float(case.old_values[0, 0].abs()), len(case.mask))
    return torch.tensor(it.value, dtype=case.old.dtype)


def overlong(case: Case, *, longest: int, buffer: int, factor: float = 1.0) -> torch.Tensor:
    """Rewards less the overlong penalty, the same for all trained tokens, 0 outside the mask."""
    experience = makers.Experience(rewards=case.rewards.clone(), response_length=case.mask.sum(-1))
    penalties.apply_overlong_penalty([experience], longest, buffer, factor)
    return torch.where(case.mask, experience.rewards[:, None], 0.0)


def stopped_properly(case: Case, coefficient: float) -> torch.Tensor:
    """Rewards after the stop-properly penalty, the same for all trained tokens, 0 outside the mask."""
    experience = makers.Experience(rewards=case.rewards.clone(), truncated=case.truncated)
    penalties.apply_stop_properly_penalty([experience], coefficient)
    return torch.where(case.mask, experience.rewards[:, None], 0.0)


def _halves(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    n = len(values) // 2
    return values[:n], values[n : 2 * n]


def dpo(case: Case, *, ipo: bool = False, beta: float = 0.1, smoothing: float = 0.0) -> torch.Tensor:
    """DPO's or IPO's loss of pairs: each sample of the first half against one of the second."""
    sums = [(logprobs * case.floats).sum(-1) for logprobs in (case.logprobs, case.reference)]
    return losses.DPOLoss(beta, smoothing, ipo)(*_halves(sums[0]), *_halves(sums[1]))[0]


def bradley_terry(case: Case, *, margin: bool = False) -> torch.Tensor:
    """A reward model's loss of pairs, whose rewards are the first values and margins the first returns."""
    margins = _halves(case.returns[:, 0].abs())[0] if margin else None
    return losses.PairWiseLoss()(*_halves(case.values[:, 0]), margins)


def log_exp(case: Case) -> torch.Tensor:
    """The same without a margin, written as a logarithm."""
    return losses.LogExpLoss()(*_halves(case.values[:, 0]))
