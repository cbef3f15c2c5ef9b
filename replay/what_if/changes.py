"""The changes of a what-if: another recipe, algorithm or optimizer in place of a recorded one. Pure."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace

from pydantic import ValidationError, model_validator

from rollbook.store.config import Table, override
from rollbook.store.digest import digest_json
from rollbook.store.errors import ConfigError, ReplayError
from rollbook.store.events import Json, StepPlanned
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import ALGORITHMS, AnyAlgorithm, recorded_algorithm
from rollbook.train.config.config import OptimizerConfig, check_recipe, describe_errors
from rollbook.train.config.recipe import RecipeConfig, recorded_recipe

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
