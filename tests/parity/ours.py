"""Our parts, called as the trainer calls them, on a case. Nothing else here knows our own functions.

Weights and estimators compute in float64 and give float32 to the trainer; here they give the case's dtype.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from parity.cases import Case

from rollbook.train.algorithms import reward_models
from rollbook.train.algorithms.advantages import BASELINES, deviations
from rollbook.train.algorithms.algorithm import LossInputs, ScoreInputs
from rollbook.train.algorithms.corrections import CORRECTIONS
from rollbook.train.algorithms.normalizers import NORMALIZERS, Totals
from rollbook.train.algorithms.parts import load_part, named_parts
from rollbook.train.algorithms.policy_gradient import GroupPolicyGradient
from rollbook.train.algorithms.preferences import PREFERENCE_LOSSES, Dpo
from rollbook.train.algorithms.registry import ALGORITHMS, recorded_algorithm
from rollbook.train.algorithms.rollouts import Advantages, Rollouts
from rollbook.train.algorithms.surrogates import KL_ESTIMATORS, SURROGATES, KlBound, estimate
from rollbook.train.batches.experience import age_weights
from rollbook.train.config.config import RecipeConfig
from rollbook.train.step.predictions import entropies


def algorithm(name: str = "policy_gradient", **keys: Any) -> GroupPolicyGradient:
    """An algorithm with these keys, of which some may name parts of one's own."""
    values = {"name": name} | keys
    for own in named_parts(values):
        load_part(own)
    built = recorded_algorithm(values)
    assert isinstance(built, GroupPolicyGradient)
    return built


def loss(case: Case, **keys: Any) -> torch.Tensor:
    """The loss of the whole batch, as `run_step` makes it."""
    algo, mask = algorithm(**keys), case.mask
    weights = token_weights(case, algo)
    if weights is not None and not algo.counts_rejected:
        mask = mask & (weights > 0)
    inputs = LossInputs.whole(
        case.logprobs,
        case.old,
        case.advantages,
        mask,
        behaviour=case.rollout,
        weights=weights,
        reference_logprobs=case.reference,
        entropy=entropies(case.logits.log_softmax(-1)) if "entropy" in algo.needs else None,
    )
    total = algo.add(torch.where(mask, algo.loss(inputs), 0.0), mask)
    return total / max(algo.divisor(inputs.totals), 1)


def token_weights(case: Case, algo: GroupPolicyGradient) -> torch.Tensor | None:
    """The correction's weights [B, T], 0 outside the mask."""
    log_ratios = case.old[case.mask].double().numpy() - case.rollout[case.mask].double().numpy()
    values = algo.weights(log_ratios, case.mask.sum(-1).numpy())
    if values is None:
        return None
    weights = torch.zeros_like(case.old)
    weights[case.mask] = torch.from_numpy(values).to(weights.dtype)
    return weights


def weights(case: Case, **keys: Any) -> torch.Tensor:
    """The weights of a correction."""
    result = token_weights(case, algorithm(old="trainer", **keys))
    assert result is not None
    return result


def estimated(case: Case, **keys: Any) -> Advantages:
    """What an estimator makes of the case's rewards, each token's own among them."""
    lengths = case.mask.sum(-1).numpy()
    return algorithm(**keys).advantages(
        Rollouts(
            rewards=case.rewards.double().numpy(),
            groups=case.groups.numpy(),
            trajectories=np.arange(len(case.mask)),
            lengths=lengths,
            truncated=case.truncated.numpy(),
            old_logprobs=case.old[case.mask].numpy(),
            reference_logprobs=case.reference[case.mask].numpy(),
            values=case.old_values[case.mask].numpy(),
            turn_rewards=case.turn_rewards[case.mask].double().numpy(),
            number_turns=lambda: case.turns[case.mask].numpy(),
        )
    )


def advantages(case: Case, **keys: Any) -> torch.Tensor:
    """Advantages [B, T], 0 outside the mask."""
    result = estimated(case, **keys)
    values = result.values if result.per_token else np.repeat(result.values, case.mask.sum(-1).numpy())
    return _placed(case, values)


def shaped(case: Case, **keys: Any) -> torch.Tensor:
    """Rewards of trajectories [B, T], the same for all trained tokens."""
    return advantages(case, **{"baseline": "none", "deviation": "none"} | keys)


def whitened(case: Case, how: str) -> torch.Tensor:
    """Old values of the batch's tokens, whitened, [B, T]."""
    values = case.old_values[case.mask].double().numpy()
    return _placed(case, algorithm(whitening=how).whitened(values))


def returns(case: Case, **keys: Any) -> torch.Tensor:
    """The critic's targets [B, T]."""
    targets = estimated(case, **keys).returns
    assert targets is not None
    return _placed(case, targets)


def _placed(case: Case, values: Any) -> torch.Tensor:
    placed = torch.zeros_like(case.old)
    placed[case.mask] = torch.from_numpy(values).to(placed.dtype)
    return placed


def value_loss(case: Case, clip: float) -> torch.Tensor:
    """The critic's loss of the whole batch."""
    losses = algorithm("ppo", value_clip=clip).value_loss(case.values, case.old_values, case.returns)
    return torch.where(case.mask, losses, 0.0).sum() / case.mask.sum()


def kl(case: Case, estimator: str, bound: KlBound = "k3") -> torch.Tensor:
    """The mean of an estimate of the KL divergence to the reference policy."""
    return estimate(estimator, bound, case.logprobs - case.reference)[case.mask].mean()


def adapted(case: Case, **keys: Any) -> torch.Tensor:
    """The KL coefficient after a step, whose divergence is the first sample's absolute value."""
    divergence = float(case.old_values[0, 0].abs())
    then = algorithm(**keys).after({"kl": divergence, "samples": len(case.mask)})
    return torch.tensor(then.kl, dtype=case.old.dtype)


def temperature(case: Case) -> torch.Tensor:
    """The temperature that calibrates the case's gaps, rewards less their mean among them; 0: none does."""
    result = reward_models.calibration_temperature(case.gaps.double().numpy())
    return torch.tensor(result or 0.0, dtype=case.old.dtype)


def aged(case: Case, decay: float) -> torch.Tensor:
    """Weights of tokens whose age in versions is their column, of unknown versions in every fourth row."""
    samples = [SimpleNamespace(versions=row.numpy()) for row in case.versions]
    newest, masks = case.mask.shape[1], [row.numpy() for row in case.mask]
    values = age_weights(samples, masks, newest, decay)  # type: ignore[arg-type]
    return _placed(case, values)


def pair_loss(case: Case, name: str = "dpo", **keys: Any) -> torch.Tensor:
    """A loss of pairs of the batch, as `run_step` makes it; a pair is a sample of the first half and one of
    the second."""
    algo, n = recorded_algorithm({"name": name} | keys), len(case.mask) // 2
    order = torch.arange(2 * n).reshape(2, n).T.ravel()
    tensors = (case.logprobs, case.old, case.advantages, case.mask)
    logprobs, old, advantages, mask = (tensor[order] for tensor in tensors)
    inputs = LossInputs.whole(logprobs, old, advantages, mask, reference_logprobs=case.reference[order])
    total = algo.add(torch.where(mask, algo.loss(inputs), 0.0), mask)
    return total / max(algo.divisor(Totals(int(mask.sum()), 2 * n)), 1)


def reward_loss(case: Case, *, margin: bool = False, **keys: Any) -> torch.Tensor:
    """A reward model's loss of the batch, as `run_step` makes it. Scores are the samples' first values, and
    of a head with a deviation the last ones its logarithm; margins the absolute values of the first returns.
    """
    named = {"name": "reward_model", "margin": "recorded" if margin else "none"}
    algo, n = recorded_algorithm(named | keys), len(case.mask) // 2
    order = torch.arange(2 * n).reshape(2, n).T.ravel()
    scores = case.values[:, [0, -1]][order, : algo.head_width]
    margins = torch.zeros_like(scores[:, 0])
    margins[0::2] = case.returns[:n, 0].abs()
    mean = float(scores[:, 0].double().mean()) if "batch_score" in algo.needs else None
    losses = algo.score_loss(ScoreInputs(scores, margins, torch.zeros_like(margins), mean))
    return losses.sum() / max(algo.divisor(Totals(0, 2 * n)), 1)


@dataclass(frozen=True, slots=True)
class Part:
    """A part of ours, for the page.

    Attributes:
        name: as a CONFIG has it.
        says: its docstring's first sentence, without shapes; sources: the arXiv numbers in the docstring.
        default: of which algorithms it is the default, or the default of a key.
    """

    name: str
    says: str
    sources: str
    default: str


def parts() -> list[Part]:
    """All parts that have a name, in the order in which they are applied; then keys that peers have too."""
    listed = [
        _part(name, function, key)
        for key, functions in _FAMILIES.items()
        for name, function in functions.items()
        if name != "none" or key == "baseline"
    ]
    keys = (Part(key, "", "", _default_of(key)) for key in _KEYS)
    usual = Dpo.model_fields["preference_loss"].default
    of_pairs = [
        _told(name, function, "`dpo`" if name == usual else "–")
        for name, function in PREFERENCE_LOSSES.items()
    ]
    of_dpo = [Part(key, "", "", str(Dpo.model_fields[key].default)) for key in _DPO_KEYS]
    of_dpo += [Part(name, "", "", "itself") for name in ("simpo", "orpo")]
    of_ppo = [Part("gae", "", "", "`ppo`"), Part("decoupled_ppo", "", "", "itself")]
    of_recipe = [Part("age_decay", "", "", str(RecipeConfig.model_fields["age_decay"].default))]
    of_rewards = [_told(name, function, default) for name, (function, default) in _REWARD_MODELS.items()]
    return [*listed, *keys, *of_ppo, *of_recipe, *of_pairs, *of_dpo, *of_rewards]


_FAMILIES: dict[str, Mapping[str, Any]] = {
    "baseline": BASELINES,
    "deviation": dict.fromkeys(("unbiased", "biased"), deviations),
    "surrogate": SURROGATES,
    "correction": CORRECTIONS,
    "kl_estimator": KL_ESTIMATORS,
    "normalizer": NORMALIZERS,
}
_KEYS = (
    "group_of_one",
    "log_ratio_bound",
    "sequence_log_ratio_bound",
    "dual_clip",
    "count_rejected",
    "kl_bound",
    "kl_target",
    "entropy",
    "discount",
    "discount_unit",
    "turn_rewards",
    "reward_kl",
    "reward_kl_order",
    "whitening",
    "reward_normalization",
    "reward_clip",
    "overlong_length",
    "truncated_reward",
    "value_clip",
)


_REWARD_MODELS = {
    "bradley_terry": (reward_models.bradley_terry, "`reward_model`"),
    "margin": (None, "none"),
    "mean_deviation": (reward_models.uncertain, "–"),
    "centring": (reward_models.centring, "0.0"),
    "batch_sum_to_zero": (reward_models.sum_to_zero, "0.0"),
    "calibration_temperature": (reward_models.calibration_temperature, "a metric of evaluations"),
}
_DPO_KEYS = ("length_normalized", "label_smoothing", "sft_weight")


def _part(name: str, function: Any, key: str) -> Part:
    return _told(name, function, _users(name, key))


def _told(name: str, function: Any, default: str) -> Part:
    doc = function.__doc__ if isinstance(function, FunctionType) and function.__doc__ else ""
    first = re.split(r"[;.]\s|, \[", doc)[0].strip().rstrip(".")
    sources = ", ".join(dict.fromkeys(re.findall(r"arXiv:\d+\.\d+", doc)))
    return Part(name, first, sources, default)


def _users(value: str, key: str) -> str:
    """The algorithms whose default for a key is this value."""
    defaults = {name: fields[key].default for name, fields in _keys_of_all().items()}
    users = [f"`{name}`" for name, default in defaults.items() if default == value]
    others = [f"`{name}`" for name, default in defaults.items() if default != value]
    if not others:
        return "all"
    return ", ".join(users) or "–" if len(users) <= len(others) else f"all but {', '.join(others)}"


def _default_of(key: str) -> str:
    """A key's default, and those of algorithms that have another."""
    defaults = {name: fields[key].default for name, fields in _keys_of_all().items() if key in fields}
    written = {name: "none" if value is None else f"{value}" for name, value in defaults.items()}
    usual = max(written.values(), key=list(written.values()).count)
    others = [f"{value} in `{name}`" for name, value in written.items() if value != usual]
    return "; ".join([usual, *others])


def _keys_of_all() -> dict[str, Any]:
    return {
        name: kind.model_fields for name, kind in ALGORITHMS.items() if issubclass(kind, GroupPolicyGradient)
    }
