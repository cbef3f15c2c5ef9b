"""Which samples a recipe trains on, and which of its rules drops each other one. Pure.

Samples of another split, or without a trainable token, are not candidates: the ledger counts them as
kept out. A candidate is kept, or dropped by exactly one named rule; one whose tokens were erased always is,
and so is one that the model cannot be given. A group of which members are dropped is compared as it is left.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rollbook.store.events import Json
from rollbook.train.config.config import GrpoConfig, RecipeConfig, SftConfig
from rollbook.train.data.samples import Sample


@dataclass(frozen=True, slots=True, eq=False)
class Drop:
    """A candidate kept out of training, by which rule, and what it was held against."""

    sample: Sample
    rule: str
    detail: Json


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """What a model can be given: token ids below `vocabulary`, and at most `context` tokens at once."""

    vocabulary: int
    context: int


def is_candidate(sample: Sample, recipe: RecipeConfig) -> bool:
    """Whether the recipe speaks of this sample at all."""
    return sample.split in recipe.splits and (sample.erased or bool(sample.loss_mask.any()))


def select(
    candidates: Sequence[Sample],
    recipe: RecipeConfig,
    algorithm: SftConfig | GrpoConfig,
    version: int,
    limits: ModelLimits | None = None,
) -> tuple[list[Sample], list[Drop]]:
    """Candidates to train on, in order, and the dropped ones.

    Args:
        version: the trainer's input policy version.
        limits: of the model; None where they are not known, and so not held against anything.
    """
    kept: list[Sample] = []
    drops: list[Drop] = []
    for sample in candidates:
        drop = _impossible(sample, limits) or _unfit(sample, recipe, algorithm, version)
        if drop is None:
            kept.append(sample)
        else:
            drops.append(drop)
    if isinstance(algorithm, GrpoConfig) and recipe.drop_zero_variance:
        flat = _flat_groups(kept)
        drops += [Drop(s, "zero_variance", {"reward": s.reward}) for s in kept if s.group in flat]
        kept = [s for s in kept if s.group not in flat]
    return kept, drops


def _impossible(sample: Sample, limits: ModelLimits | None) -> Drop | None:
    """What no recipe could have: the model cannot compute it, or nothing would be learned from it."""
    if sample.erased:
        return Drop(sample, "erased", {})
    if not sample.loss_mask[1:].any():  # nothing precedes the first token
        return Drop(sample, "nothing_trainable", {"tokens": len(sample)})
    if limits is None:
        return None
    outside = np.flatnonzero((sample.tokens < 0) | (sample.tokens >= limits.vocabulary))
    if len(outside):
        detail = {"token": int(sample.tokens[outside[0]]), "at": int(outside[0])}
        return Drop(sample, "outside_vocabulary", detail | {"vocabulary": limits.vocabulary})
    if len(sample) > limits.context:
        return Drop(sample, "too_long", {"tokens": len(sample), "context": limits.context})
    return None


def _unfit(
    sample: Sample, recipe: RecipeConfig, algorithm: SftConfig | GrpoConfig, version: int
) -> Drop | None:
    oldest = sample.oldest_version
    limit = recipe.max_staleness
    if limit is not None and oldest is not None and version - oldest > limit:
        detail = {"staleness": version - oldest, "max_staleness": limit, "oldest_version": oldest}
        return Drop(sample, "staleness", detail)
    if isinstance(algorithm, GrpoConfig):
        # A token is weighed by how likely the policy that sampled it made it: where the weights are unknown,
        # no policy is. To SFT a sample is a text, whoever wrote it.
        unknown = int((sample.versions[sample.loss_mask] < 0).sum())
        if unknown:
            return Drop(sample, "no_version", {"tokens": unknown})
        if sample.reward is None:
            return Drop(sample, "no_reward", {"source": recipe.reward_source})
        if not np.isfinite(sample.reward):
            return Drop(sample, "reward_not_finite", {"reward": str(sample.reward)})
        if np.isnan(sample.logprobs).any():
            return Drop(sample, "no_logprobs", {})
    return None


def _flat_groups(samples: Sequence[Sample]) -> set[str | None]:
    """Groups whose rewards are all equal."""
    rewards: dict[str | None, set[float | None]] = {}
    for sample in samples:
        rewards.setdefault(sample.group, set()).add(sample.reward)
    return {group for group, values in rewards.items() if len(values) == 1}
