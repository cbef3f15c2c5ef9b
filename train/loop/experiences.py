"""The experience of the rollout batch in hand: made at its first step, and kept for the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import all_samples
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.clock import timed
from rollbook.train.data.batch import Batch, build_batch
from rollbook.train.data.experience import Experience, age_weights, experience_of, trained_masks
from rollbook.train.data.others import others_of
from rollbook.train.data.samples import Sample
from rollbook.train.loop.critic import critic_inputs
from rollbook.train.loop.scoring import References, score
from rollbook.train.loop.step import input_digests
from rollbook.train.megatron.policy import Policy


class Experiences:
    """Makes the batches of a policy's steps, which are run in order."""

    def __init__(self, policy: Policy, references: References, critic: Policy | None = None) -> None:
        self._policy, self._references, self.critic = policy, references, critic
        self._held: Experience | None = None
        self._places: dict[str, list[int]] = {}
        """Leaf turn -> the places of its sample in the rollout batch."""

    def input_digests(self, algorithm: Algorithm, seed: int) -> Json:
        """Seed the generators and digest what a step starts from.

        Raises:
            TrainError: there is no checkpoint of the reference policy.
        """
        found = input_digests(self._policy, seed)
        if algorithm.reference is not None:
            found["reference_weights"] = self._references.digest(algorithm.reference)
        return found if self.critic is None else found | critic_inputs(self.critic)

    def batch(self, plan: StepPlanned, samples: Mapping[str, Sample]) -> Batch:
        """The batch that a manifest describes.

        Args:
            samples: by leaf turn, those of the whole rollout batch, if the step begins one; else not looked
                at.

        Raises:
            TrainError, ModelError: there is no checkpoint of the reference policy, or it is damaged.
        """
        if begins(plan):
            self._make(plan, samples)
        assert self._held is not None
        if plan.rollout_batch is None:
            return build_batch(self._held, plan.partition, packed=plan.packed)
        places = {turn_id: iter(at) for turn_id, at in self._places.items()}
        part = self._held.part([next(places[ref["turn_id"]]) for ref in plan.samples])
        return build_batch(part, plan.partition, packed=plan.packed)

    def _make(self, plan: StepPlanned, samples: Mapping[str, Sample]) -> None:
        algorithm = recorded_algorithm(plan.algorithm)
        # The same sample may be in several pairs: the manifest says by how much it is better in each.
        ordered = [replace(samples[ref["turn_id"]], margin=ref.get("margin")) for ref in all_samples(plan)]
        parts = plan.partition if plan.rollout_batch is None else plan.rollout_batch["partition"]
        masks = trained_masks(ordered, _oldest(plan))
        with timed("scoring"):
            scores = score(
                self._policy,
                algorithm,
                ordered,
                masks,
                parts,
                self._references,
                self.critic,
                packed=plan.packed,
            )
        aged = age_weights(ordered, masks, plan.policy_version, float(plan.recipe.get("age_decay", 1.0)))
        others = others_of(ordered, plan.others)
        self._held = experience_of(ordered, algorithm, scores, masks, aged, others)
        self._places = {}
        for place, ref in enumerate(all_samples(plan)):
            self._places.setdefault(ref["turn_id"], []).append(place)


def _oldest(plan: StepPlanned) -> int | None:
    """The version before which tokens are masked by the recipe; None where it masks none."""
    if plan.recipe.get("stale_tokens") != "mask" or plan.recipe["max_staleness"] is None:
        return None
    return plan.policy_version - int(plan.recipe["max_staleness"])


def begins(plan: StepPlanned) -> bool:
    """Whether the step needs the samples of its whole rollout batch."""
    return plan.rollout_batch is None or "samples" in plan.rollout_batch
