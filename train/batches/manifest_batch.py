"""The rollout batch that a manifest names: its samples, materialized from the log, their experience, and what
the step recorded of their tokens.

Without torch: what a step trained on can be looked at where nothing is trained.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rollbook.store import Store, parse_cut
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, StepPlanned, StepVectors, TrajectoryErased
from rollbook.store.fold.history import all_samples
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.algorithms.rollouts import Singles
from rollbook.train.batches.experience import (
    Bools,
    Experience,
    Scores,
    age_weights,
    experience_of,
    trained_masks,
)
from rollbook.train.select.drops import peers_of
from rollbook.train.select.samples import Sample, of_another_run, samples_of


def samples_at_cut(log: Store, plan: StepPlanned, run: str) -> dict[str, Sample]:
    """The samples that a manifest names, by leaf turn, materialized from the log at the manifest's
    cut; if the step begins a rollout batch, all of its samples.

    Args:
        run: that the step is of.

    Raises:
        ReplayError: the log does not hold one of them, or its tokens were erased.
    """
    named = all_samples(plan) if begins(plan) else plan.samples
    wanted = {ref["trajectory_id"] for ref in named}
    source, paths = plan.recipe["reward_source"], plan.recipe.get("paths", "all")
    trajectories = log.trajectories(parse_cut(plan.cut), wanted)
    own = None if plan.recipe.get("other_policies") is None else plan.policy
    materialized = (s for t in trajectories.values() for s in samples_of(t, source, paths, policy=own))
    samples = {sample.leaf_turn_id: sample for sample in materialized}
    samples |= {leaf: of_another_run(s) for leaf, s in samples.items() if s.run != run}
    missing = [ref for ref in named if ref["turn_id"] not in samples]
    if missing:
        raise ReplayError(f"step {plan.step}: the log no longer holds its sample {missing[0]}")
    samples |= {r["turn_id"]: samples[r["turn_id"]].within(r["tokens"]) for r in named if "tokens" in r}
    for ref in named:
        if samples[ref["turn_id"]].erased:
            raise ReplayError(
                f"step {plan.step}: the tokens of trajectory {ref['trajectory_id']}, which it trained on, "
                f"were erased ({_why_erased(log, ref['trajectory_id'])}); no step that needs them can be "
                "replayed"
            )
    return samples


def _why_erased(log: Store, trajectory_id: str) -> str:
    """The recorded reason of an erasure."""
    records = [
        e.record for e in log.events_of([TrajectoryErased.KIND]) if isinstance(e.record, TrajectoryErased)
    ]
    reasons = [r.reason for r in records if r.trajectory_id == trajectory_id and not r.tokens_kept]
    return reasons[-1] if reasons else "not recorded yet: the erasure was cut short, run it again"


def oldest_of(recipe: Json, version: int) -> int | None:
    """The version before which a recipe masks tokens; None if it masks none."""
    if recipe.get("stale_tokens") != "mask" or recipe["max_staleness"] is None:
        return None
    return version - int(recipe["max_staleness"])


def experience_at(
    plan: StepPlanned,
    samples: Mapping[str, Sample],
    scores_of: Callable[[Sequence[Sample], Sequence[Bools]], Scores],
) -> Experience:
    """The experience of the rollout batch that begins with a manifest.

    Args:
        samples: of the batch, by leaf turn.
        scores_of: gives the scores of ordered samples, for their trained tokens.

    Raises:
        TrainError: a part of the algorithm gives another shape than is asked of it.
    """
    # The same sample may be in several pairs: the manifest says by how much it is better in each.
    ordered = [replace(samples[ref["turn_id"]], margin=ref.get("margin")) for ref in all_samples(plan)]
    masks = trained_masks(ordered, oldest_of(plan.recipe, plan.policy_version))
    scores = scores_of(ordered, masks)
    aged = age_weights(ordered, masks, plan.policy_version, float(plan.recipe.get("age_decay", 1.0)))
    others = peers_of(ordered, plan.others)
    return experience_of(ordered, recorded_algorithm(plan.algorithm), scores, masks, aged, others)


def begins(plan: StepPlanned) -> bool:
    """Whether the step needs the samples of its whole rollout batch."""
    return plan.rollout_batch is None or "samples" in plan.rollout_batch


def recorded_values(vectors: StepVectors) -> Singles:
    """The values of each trained token that a step recorded, float32 [P].

    Raises:
        ReplayError: they cannot be read.
    """
    try:
        return np.frombuffer(base64.b64decode(vectors.values, validate=True), "<f4").astype(np.float32)
    except ValueError as error:
        raise ReplayError(
            f"step {vectors.step}: its vectors of {vectors.stage} cannot be read: {error}"
        ) from error
