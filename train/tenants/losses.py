"""The losses of the service: sums over tokens, by the same surrogates as trainings from the log.

p is the logprob of a target token by the model in training, q the one that was sent with it ("logprobs"), A
its advantage, w its weight, r = exp(p - q). Source: the losses of the Tinker API.

| loss | its value |
|---|---|
| cross_entropy | -sum w p |
| importance_sampling | -sum r A |
| ppo | -sum min(r A, clip(r, lo, hi) A) |
| cispo | -sum clip(r, lo, hi) p A, the clipped r without gradient |
| dro | -sum (p A - beta / 2 (p - q)^2) |
| gspo | -sum min(s A, clip(s, lo, hi) A), s = exp(mean(p - q) + p - p'), p' the p without gradient |

The mean is over the tokens whose "sequence_ratio_mask" is not 0, without gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rollbook.store.errors import RequestError
from rollbook.train.algorithms.algorithm import LossInputs
from rollbook.train.algorithms.normalizers import Totals
from rollbook.train.algorithms.surrogates import SURROGATES, Clips


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss by its surrogate.

    Attributes:
        needs: inputs of each datum, beside its targets.
        defaults: its keys, and what they are where a client does not say.
    """

    surrogate: str
    needs: tuple[str, ...]
    defaults: Mapping[str, float]

    def clips(self, keys: Mapping[str, float]) -> Clips:
        """The surrogate's clips, for the resolved keys. Nothing else is clipped."""
        low = 1 - keys.get("clip_low_threshold", -math.inf)
        high = keys.get("clip_high_threshold", math.inf) - 1
        return Clips(low, high, beta=keys.get("beta", 0.0), log_ratio=None, sequence_log_ratio=None)


RATIO_MASK = "sequence_ratio_mask"
_CLIPS = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2}
_SAMPLED = ("logprobs", "advantages")
LOSSES: Mapping[str, Loss] = {
    "cross_entropy": Loss("reinforce", (), {}),
    "importance_sampling": Loss("ppo_clip", _SAMPLED, {}),
    "ppo": Loss("ppo_clip", _SAMPLED, _CLIPS),
    "cispo": Loss("cispo", _SAMPLED, _CLIPS),
    "dro": Loss("dro", _SAMPLED, {"beta": 0.05}),
    "gspo": Loss("gspo", (*_SAMPLED, RATIO_MASK), _CLIPS),
}


def resolved_keys(loss: str, config: Mapping[str, float | str]) -> dict[str, float]:
    """Every key of a loss.

    Raises:
        RequestError: 400, there is no such loss, or it has no such key, or a value is no number.
    """
    if loss not in LOSSES:
        raise RequestError(400, "unknown_loss", f"loss {loss[:60]!r} is not served: use {', '.join(LOSSES)}")
    defaults = LOSSES[loss].defaults
    if odd := sorted(name for name in config if name not in defaults):
        known = ", ".join(defaults) or "it has none"
        raise RequestError(400, "unknown_key", f"loss {loss} has no key {odd[0][:60]!r}: {known}")
    for name, value in config.items():
        if isinstance(value, str) or not math.isfinite(value):
            raise RequestError(400, "bad_key", f"key {name} of loss {loss} is {value!r}: give a number")
    return {name: float(config.get(name, value)) for name, value in defaults.items()}


def token_losses(
    loss: str, keys: Mapping[str, float], logprobs: torch.Tensor, inputs: Mapping[str, torch.Tensor]
) -> torch.Tensor:
    """The loss of each target token, float32, of the shape of its logprobs.

    Args:
        inputs: what the loss needs, each of that shape; `weights`, where there are none, are 1.
    """
    spec = LOSSES[loss]
    weights = inputs.get("weights", torch.ones_like(logprobs))
    old = inputs.get("logprobs", logprobs.detach())
    advantages = inputs["advantages"] if spec.needs else weights
    mask = inputs.get(RATIO_MASK, torch.ones_like(logprobs)) != 0
    values = LossInputs(logprobs, old, advantages, mask, old, Totals(mask.numel(), len(mask)))
    return SURROGATES[spec.surrogate](values, spec.clips(keys))
