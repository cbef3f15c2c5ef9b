"""The other side of a what-if: recorded steps taken by another recipe, algorithm or optimizer, one
after another, on a policy of its own.

Nothing of it is recorded. Each of its steps is the recorded one with a manifest of its own, run by
the same code.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from pydantic import ValidationError, model_validator

from rollbook.engines.weights.digests import Look
from rollbook.replay.claims.selection import Selections
from rollbook.store.config import Table, override
from rollbook.store.digest import digest_json
from rollbook.store.errors import ConfigError, ReplayError
from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import CommittedStep
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import ALGORITHMS, AnyAlgorithm, recorded_algorithm
from rollbook.train.batches.batch import Batch, Partition, mini_batches
from rollbook.train.batches.manifest_batch import begins
from rollbook.train.config.config import OptimizerConfig, check_recipe, describe_errors
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.config.recipe import RecipeConfig, recorded_recipe
from rollbook.train.ranks.policy import Policy
from rollbook.train.resume.schedule import divide_samples, settings_of
from rollbook.train.select.drops import dropped_members
from rollbook.train.select.recipe import Drop
from rollbook.train.select.samples import Sample
from rollbook.train.step.experiences import Experiences
from rollbook.train.step.step import run_step, step_seed


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
        parts: the positions of each step's samples; empty for steps that none are left for.
    """

    samples: Sequence[Sample]
    dropped: Sequence[Drop]
    parts: Sequence[Sequence[int]]


@dataclass(slots=True, eq=False)
class Counterfactual:
    """Takes the steps of a training by another rule, in order, from the state that it is given.

    Attributes:
        policy: its own; experiences: that policy's.
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
            look: is given each gradient of the policy.

        Raises:
            ConfigError, ReplayError: the changes make no rule for it, or it lacks what they need.
            TrainError: there is no checkpoint of the reference.
            NotFiniteError, AllRejectedError: the step ends so by this rule.
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
        critic = self.experiences.critic
        result = run_step(self.policy, settings_of(manifest), batch, critic=critic, look=look)
        if rule.algorithm.adapts:
            self._adapted = rule.algorithm.after(result.metrics)
        return OtherStep(chosen, held.dropped, batch, result.metrics)

    def _rule(self, plan: StepPlanned) -> Rule:
        """The rule of the step; keys that adapt are as its own earlier steps have left them."""
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
        manifest = replace(
            changed(plan, rule),
            samples=[sample.reference for sample in samples],
            partition=self._divided(plan, rule, samples),
            others=(dropped_members(held.samples, held.dropped) or None) if compares else None,
            rollout_batch=self._described(plan, rule),
        )
        if not rule.trains_otherwise:
            return manifest
        schedule = _schedule(plan)
        return replace(
            manifest, learning_rate=self.policy.learning_rate(schedule["number"], schedule["steps"])
        )

    def _described(self, plan: StepPlanned, rule: Rule) -> Json | None:
        """What the manifest says of the rollout batch."""
        held, batch = self._held, plan.rollout_batch
        assert held is not None
        if batch is None or len(held.parts) == 1:
            return None
        description = {key: batch[key] for key in ("first_step", "number")} | {"steps": len(held.parts)}
        if not begins(plan):
            return description
        refs = [sample.reference for sample in held.samples]
        return description | {"samples": refs, "partition": self._divided(plan, rule, held.samples)}

    def _divided(self, plan: StepPlanned, rule: Rule, samples: Sequence[Sample]) -> Partition:
        """Micro-batches of samples, by rank, as the training divided its own."""
        parallel, ranks = recorded_parallel(plan.environment.get("parallel") or {})
        work = self.policy.shape.work
        return divide_samples(samples, rule.algorithm, _schedule(plan), parallel.copies(ranks), work)


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
    """The settings that the step's micro-batches and learning rate follow from.

    Raises:
        ReplayError: they were not recorded.
    """
    if plan.schedule is None:
        raise ReplayError(
            f"step {plan.step}: the release that took it did not record how its samples were divided, so no "
            "other step can be made of them; it can be replayed as it is"
        )
    return plan.schedule


TABLES = ("algorithm", "recipe", "optimizer")
"""Whose keys `--set` changes."""


class _Tables(Table):
    """The tables of a CONFIG that decide what a step makes of its samples."""

    algorithm: AnyAlgorithm
    recipe: RecipeConfig
    optimizer: OptimizerConfig

    @model_validator(mode="after")
    def _recipe_fits(self) -> _Tables:
        check_recipe(self.recipe, self.algorithm)
        return self


@dataclass(frozen=True, slots=True)
class Rule:
    """The settings that a step is taken by.

    Attributes:
        trains_otherwise: whether the optimizer is another than the recorded one.
    """

    algorithm: Algorithm
    recipe: RecipeConfig
    optimizer: OptimizerConfig
    trains_otherwise: bool


@dataclass(frozen=True, slots=True)
class Changes:
    """What differs from what was recorded.

    Attributes:
        recipe: in place of the recorded one; None: the recorded one.
        overrides: `table.key=value` each, applied last.
        source: of rewards, in place of the recipe's; None: the recipe's.
    """

    recipe: RecipeConfig | None = None
    overrides: Sequence[str] = ()
    source: str | None = None

    def rule(self, plan: StepPlanned) -> Rule:
        """The rule by which a recorded step would have been taken with these changes.

        Raises:
            ConfigError: a key is unknown or ill-typed, or the keys do not go together; all are named.
            TrainError: the recorded algorithm is unknown to this release, or has parts that were not
                loaded.
            ReplayError: the step recorded nothing that the algorithm could be run with.
        """
        values: Json = {
            "algorithm": plan.algorithm,
            "recipe": recorded_recipe(plan.recipe).model_dump(mode="json")
            if self.recipe is None
            else self.recipe.model_dump(mode="json"),
            "optimizer": plan.optimizer,
        }
        overrides: Json = {}
        for text in self.overrides:
            _check_table(text)
            override(overrides, text)
        recorded = recorded_algorithm(plan.algorithm)
        if (name := overrides.get("algorithm", {}).get("name", plan.algorithm["name"])) != plan.algorithm[
            "name"
        ]:
            values["algorithm"] = _carried(recorded, str(name))
        for table, keys in overrides.items():
            values[table] = values[table] | keys
        if self.source is not None:
            values["recipe"] = values["recipe"] | {"reward_source": self.source}
        try:
            merged = _Tables.model_validate_json(json.dumps(values, default=str))
        except ValidationError as error:
            raise ConfigError(describe_errors("what is changed", error, values)) from error
        _check_runnable(plan, recorded, merged.algorithm)
        optimizer = OptimizerConfig.model_validate_json(json.dumps(plan.optimizer))
        return Rule(merged.algorithm, merged.recipe, merged.optimizer, merged.optimizer != optimizer)


def _check_table(text: str) -> None:
    key, sep, _ = text.partition("=")
    table, dot, rest = key.strip().partition(".")
    if sep and (table not in TABLES or not dot or not rest):
        raise ConfigError(
            f"--set {text!r}: what may differ are keys of {', '.join(TABLES)}: write algorithm.KEY=VALUE"
        )


def _carried(recorded: Algorithm, name: str) -> Json:
    """The keys that another algorithm takes over: those that were set, as far as it has them."""
    fields = ALGORITHMS[name].model_fields if name in ALGORITHMS else {}
    values = recorded.model_dump(mode="json", exclude_defaults=True)
    return {key: value for key, value in values.items() if key in fields and key != "name"}


def _check_runnable(plan: StepPlanned, recorded: Algorithm, other: Algorithm) -> None:
    """Check that what an algorithm needs beside samples is there.

    Raises:
        ReplayError: it is not.
    """
    name, where = other.algorithm_name, f"step {plan.step}"
    if other.head_width != recorded.head_width:
        raise ReplayError(
            f"{where}: {name} gives each token {other.head_width or 'a vocabulary of'} values, and the model "
            f"of the step {recorded.head_width or 'a vocabulary of them'}: it has another head"
        )
    if "values" in other.needs and plan.critic is None:
        raise ReplayError(
            f"{where}: {name} needs the values of a critic, and the step's training had none: nothing in the "
            "store stands in for it; take an algorithm without a critic, such as grpo or rloo"
        )
    if {"pairs", "groups"} & other.needs == {"pairs"} and "pairs" not in recorded.needs:
        raise ReplayError(
            f"{where}: {name} goes by recorded preferences, and the step took none: "
            'algorithm.pairs="rewards" makes pairs of the best and the worst of each group'
        )
    if other.demand.steps != recorded.demand.steps:
        raise ReplayError(
            f"{where}: {recorded.demand.steps} steps were taken on a rollout batch, and with these keys it "
            f"would be {other.demand.steps} (algorithm.epochs times algorithm.mini_batches): sides are "
            "compared step by step, so leave both keys as they are"
        )
