"""The other side of a what-if: recorded steps by another rule, one after the other, on a policy of its own.

Nothing of it is recorded. A step of it is the recorded one with a manifest of its own, run by the same code.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from rollbook.ingest.engines.weights.digests import Look
from rollbook.replay.changes import Changes, Rule
from rollbook.replay.selection import Selections
from rollbook.store.digest import digest_json
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import CommittedStep
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.data.batch import Batch, Partition
from rollbook.train.data.mini_batches import mini_batches
from rollbook.train.data.others import dropped_members
from rollbook.train.data.recipe import Drop
from rollbook.train.data.samples import Sample
from rollbook.train.loop.experiences import Experiences, begins
from rollbook.train.loop.schedule import divided
from rollbook.train.loop.step import run_step, step_seed
from rollbook.train.megatron.policy import Policy


@dataclass(frozen=True, slots=True, eq=False)
class OtherStep:
    """A step as it is taken by another rule.

    Attributes:
        chosen: leaf turns of the samples of the whole rollout batch.
        dropped: what the recipe drops of those that the recorded step took or let go.
        batch, metrics: None where no sample is left for the step, which is then not taken.
    """

    chosen: frozenset[str]
    dropped: Sequence[Drop]
    batch: Batch | None = None
    metrics: Json | None = None


@dataclass(frozen=True, slots=True, eq=False)
class _RolloutBatch:
    """A rollout batch in hand.

    Attributes:
        parts: the positions of each step's samples; steps for which none are left have none.
    """

    samples: Sequence[Sample]
    dropped: Sequence[Drop]
    parts: Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class OtherSide:
    """Takes the steps of a training by another rule, in order, from the state that it is given.

    Attributes:
        policy: its own; experiences: of it.
    """

    changes: Changes
    selections: Selections
    policy: Policy
    experiences: Experiences
    _held: _RolloutBatch | None = field(default=None)
    _adapted: Algorithm | None = field(default=None)
    """The algorithm of the next step, where its keys change from step to step."""

    def run(self, step: CommittedStep, look: Look) -> OtherStep:
        """Take the next step.

        Args:
            look: what is to look at each gradient of the policy.

        Raises:
            ConfigError, ReplayError: the changes make no rule for it, or it lacks what they need.
            TrainError: there is no checkpoint of the reference.
            NotFiniteError, AllRejectedError: so it ends with this rule.
        """
        plan, rule = step.planned, self._rule(step.planned)
        if begins(plan) or self._held is None:
            self._held = self._begun(step, rule)
        held = self._held
        chosen = frozenset(sample.leaf_turn_id for sample in held.samples)
        number = 0 if plan.rollout_batch is None else plan.rollout_batch["number"]
        at = held.parts[number] if number < len(held.parts) else []
        if not at:
            return OtherStep(chosen, held.dropped)
        manifest = self._manifest(plan, rule, at)
        self.policy.seed_step(plan.seed)
        batch = self.experiences.batch(manifest, {s.leaf_turn_id: s for s in held.samples})
        result = run_step(self.policy, manifest, batch, critic=self.experiences.critic, look=look)
        if rule.algorithm.adapts:
            self._adapted = rule.algorithm.after(result.metrics)
        return OtherStep(chosen, held.dropped, batch, result.metrics)

    def _rule(self, plan: StepPlanned) -> Rule:
        """The rule of the step: of keys that adapt, as its own steps before have left them."""
        rule = self.changes.rule(plan)
        if self._adapted is None:
            return rule
        renewed = {"reference_version": rule.algorithm.reference} if rule.algorithm.reference_interval else {}
        return replace(rule, algorithm=self._adapted.model_copy(update=renewed))

    def _begun(self, step: CommittedStep, rule: Rule) -> _RolloutBatch:
        """The rollout batch that the rule makes of what the recorded one was made of."""
        kept, dropped = self.selections.anew(step, rule.recipe, rule.algorithm)
        batch = step.planned.rollout_batch
        if not kept:
            return _RolloutBatch(kept, dropped, [])
        begun = step.planned.step if batch is None else batch["first_step"]
        seed = step_seed(_schedule(step.planned)["seed"], begun)
        return _RolloutBatch(kept, dropped, mini_batches(len(kept), rule.algorithm.demand, seed))

    def _manifest(self, plan: StepPlanned, rule: Rule, at: Sequence[int]) -> StepPlanned:
        """The manifest of a step on some of the samples in hand."""
        held = self._held
        assert held is not None
        samples = [held.samples[i] for i in at]
        compares = rule.recipe.group_statistics == "all"
        made = replace(
            changed(plan, rule),
            samples=[sample.reference for sample in samples],
            partition=self._divided(plan, rule, samples),
            others=(dropped_members(held.samples, held.dropped) or None) if compares else None,
            rollout_batch=self._described(plan, rule),
        )
        if not rule.trains_otherwise:
            return made
        schedule = _schedule(plan)
        return replace(made, learning_rate=self.policy.learning_rate(schedule["number"], schedule["steps"]))

    def _described(self, plan: StepPlanned, rule: Rule) -> Json | None:
        """What the manifest says of the rollout batch."""
        held, batch = self._held, plan.rollout_batch
        assert held is not None
        if batch is None or len(held.parts) == 1:
            return None
        said = {key: batch[key] for key in ("first_step", "number")} | {"steps": len(held.parts)}
        if not begins(plan):
            return said
        refs = [sample.reference for sample in held.samples]
        return said | {"samples": refs, "partition": self._divided(plan, rule, held.samples)}

    def _divided(self, plan: StepPlanned, rule: Rule, samples: Sequence[Sample]) -> Partition:
        """Micro-batches of samples, by rank, as the training divided its own."""
        parallel, ranks = recorded_parallel(plan.environment.get("parallel") or {})
        work = self.policy.shape.work
        return divided(samples, rule.algorithm, _schedule(plan), parallel.copies(ranks), work)


def changed(plan: StepPlanned, rule: Rule) -> StepPlanned:
    """A recorded manifest with another rule; its samples are still the recorded ones."""
    recipe = rule.recipe.model_dump(mode="json")
    return replace(
        plan,
        recipe=recipe,
        recipe_digest=digest_json(recipe),
        algorithm=rule.algorithm.model_dump(mode="json"),
        optimizer=rule.optimizer.model_dump(mode="json"),
        critic=plan.critic if "values" in rule.algorithm.needs else None,
    )


def _schedule(plan: StepPlanned) -> Json:
    """What the step's micro-batches and learning rate follow from.

    Raises:
        ReplayError: it was not recorded.
    """
    if plan.schedule is None:
        raise ReplayError(
            f"step {plan.step}: the release that took it did not record how its samples were divided, so no "
            "other step can be made of them; it can be replayed as it is"
        )
    return plan.schedule
