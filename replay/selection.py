"""Whether the recipe, applied to the log at a step's cut, keeps and drops what the step's manifest says.

What hung on the clock is taken as recorded: which groups were complete when the step took its own, in which
order, and when a group that could never be used was let go. All else is decided again: which trajectories
may be trained on, which samples of them the recipe keeps, which rule drops each of the others, and, of
algorithms that go over their samples in epochs, which of all the log's samples come at this step.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson
import pyarrow as pa

from rollbook.replay.claims import Claim
from rollbook.store import Store, parse_cut
from rollbook.store.digest import digest_json
from rollbook.store.events import Json, RunOpened, SampleDropped, StepPlanned
from rollbook.store.fold.history import CommittedStep, History, all_samples, family_of
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.config.recipe import RecipeConfig
from rollbook.train.data.candidates import candidates_in
from rollbook.train.data.conditions import conditions_of
from rollbook.train.data.others import dropped_members
from rollbook.train.data.recipe import Drop, ModelLimits, mixture_in
from rollbook.train.data.routing import FitCheck
from rollbook.train.data.samples import Sample, of_another_run
from rollbook.train.data.sorting import select
from rollbook.train.data.source import EpochUnits

_DROPS = """
    SELECT trajectory_id, turn_id, rule, recipe, step, attempt, policy_version, cut FROM drops
    WHERE run = $run AND policy = $policy AND step BETWEEN $first AND $last"""
AHEAD = 64
"""Steps whose drops are read at once: steps are replayed in order, and a query costs more than they do."""
GIVEN = ("not_finite", "all_rejected")
"""Rules by which a step that was skipped drops its samples: no recipe decides on them."""


@dataclass(slots=True, eq=False)
class Selections:
    """The claims of a run's steps to be what their recipes choose.

    Attributes:
        limits: of the model.
        openings: the configurations that the run's trainings of this policy were opened with.
    """

    log: Store
    history: History
    limits: ModelLimits
    openings: Sequence[Json]
    _units: tuple[str, EpochUnits] | None = field(default=None)
    """The last cut's, under what it is made of."""
    _drops: dict[tuple[int, int], list[SampleDropped]] = field(default_factory=dict)
    """Of steps and attempts."""
    _drops_of: range = field(default=range(0))
    """The steps that these are of."""

    def claim(self, step: CommittedStep) -> Claim | str:
        """The claim of a step's manifest; or why it cannot be proven.

        Raises:
            CorruptionError: the log is damaged.
        """
        plan, batch = step.planned, step.planned.rollout_batch
        if batch is not None and "samples" not in batch:
            return "its rollout batch was chosen for an earlier step"
        try:
            recipe = RecipeConfig.model_validate_json(orjson.dumps(plan.recipe))
        except ValueError as error:
            return Claim({"recipe": plan.recipe}, {"recipe": f"none that can be: {error}"})
        digest = digest_json(plan.recipe)
        said: Json = {"recipe_digest": plan.recipe_digest, "recipe": digest}
        due: Json = {"recipe_digest": digest, "recipe": digest}
        opened = [digest_json(config["recipe"]) for config in self.openings]
        if opened and digest not in opened:
            due["recipe"] = opened[-1]
        drops = self._dropped_with(plan)
        kept, dropped = self._due(step, recipe, drops)
        gone = {drop.turn_id for drop in drops if drop.rule in GIVEN}
        said |= {
            "samples": [_named(ref) for ref in all_samples(plan)],
            "drops": sorted([d.turn_id, d.rule] for d in drops if d.rule not in GIVEN),
            "others": plan.others,
        }
        due |= {
            "samples": [_named(sample.reference) for sample in kept if sample.leaf_turn_id not in gone],
            "drops": sorted([d.sample.leaf_turn_id, d.rule] for d in dropped),
            "others": (dropped_members(kept, dropped) or None) if _compares(recipe) else plan.others,
        }
        return Claim(said, due)

    def _dropped_with(self, plan: StepPlanned) -> list[SampleDropped]:
        """The drops that were recorded with the attempt at a step."""
        if plan.step not in self._drops_of:
            self._drops_of = range(plan.step, plan.step + AHEAD)
            self._drops = drops_of(self.log, self.history.run, plan.policy, self._drops_of)
        return self._drops.get((plan.step, plan.attempt), [])

    def _due(
        self, step: CommittedStep, recipe: RecipeConfig, drops: Sequence[SampleDropped]
    ) -> tuple[list[Sample], list[Drop]]:
        """What the recipe keeps, in the manifest's order of groups and trajectories, and what it drops."""
        plan = step.planned
        number = None if plan.schedule is None else plan.schedule["slice"]
        found = self._chosen(plan, recipe, drops) if number is None else self._of_epochs(plan, recipe, number)
        if recipe.too_long == "cut":
            return [sample.within(self.limits.context) for sample in found[0]], found[1]
        return found

    def _chosen(
        self, plan: StepPlanned, recipe: RecipeConfig, drops: Sequence[SampleDropped]
    ) -> tuple[list[Sample], list[Drop]]:
        """Of the groups and samples that the step took, or let go."""
        algorithm = recorded_algorithm(plan.algorithm)
        refs = [(ref["trajectory_id"], ref["turn_id"]) for ref in all_samples(plan)]
        decided: dict[tuple[int, str], list[tuple[str, str]]] = {(plan.policy_version, plan.cut): refs}
        for drop in (drop for drop in drops if drop.rule not in GIVEN):
            version = plan.policy_version if drop.policy_version is None else drop.policy_version
            at = version, drop.cut or plan.cut
            decided.setdefault(at, []).append((drop.trajectory_id, drop.turn_id))
        used = self._used_before(plan.step)
        kept: list[Sample] = []
        dropped: list[Drop] = []
        for (version, cut), named in decided.items():
            each = self._candidates(recipe, cut, named, used)
            for unit in _units(each, named, algorithm):
                left, gone = select(unit, recipe, algorithm, version, self.limits)
                kept += left
                dropped += gone
        return kept, dropped

    def _used_before(self, step: int) -> set[str]:
        """Leaf turns that earlier steps consumed."""
        earlier = (s for n, s in self.history.steps.items() if n < step)
        return {ref["turn_id"] for s in earlier for ref in s.planned.samples}

    def _candidates(
        self,
        recipe: RecipeConfig,
        cut: str,
        named: Sequence[tuple[str, str]],
        used: Collection[str],
    ) -> dict[str, list[Sample]]:
        """The candidates of each trajectory that is finished at a cut, trajectories in the order given."""
        ids = list(dict.fromkeys(trajectory_id for trajectory_id, _ in named))
        held, run = self.log.trajectories(parse_cut(cut), ids), self.history.run
        chosen = _chosen_by_sql(self.log, cut, recipe, ids)
        mixture = mixture_in(self.limits)
        check = None if mixture is None else FitCheck(mixture)
        found: dict[str, list[Sample]] = {}
        for trajectory in (held[trajectory_id] for trajectory_id in ids if trajectory_id in held):
            if trajectory.finished is None or trajectory.run not in recipe.runs(run):
                continue
            trajectory_id = trajectory.opened.trajectory_id
            samples = candidates_in(trajectory, recipe, check)
            if trajectory.run != run:
                samples = [of_another_run(sample) for sample in samples]
            if chosen is not None:
                samples = [replace(sample, chosen=trajectory_id in chosen) for sample in samples]
            found[trajectory_id] = [sample for sample in samples if sample.leaf_turn_id not in used]
        return found

    def _of_epochs(
        self, plan: StepPlanned, recipe: RecipeConfig, number: int
    ) -> tuple[list[Sample], list[Drop]]:
        """A slice of the endless row of epochs over all samples of the cut, and what is dropped with the
        first step."""
        assert plan.schedule is not None
        first = self.history.of_family(family_of(plan.phase))[0].planned
        seed, version = plan.schedule["seed"], first.policy_version
        made_of = digest_json([plan.cut, plan.recipe, plan.algorithm, seed, version])
        if self._units is None or self._units[0] != made_of:
            which = (self.history.run, recipe, recorded_algorithm(plan.algorithm), seed, version, self.limits)
            self._units = made_of, EpochUnits(self.log, parse_cut(plan.cut), *which)
        units = self._units[1]
        return units.samples(number), units.drops() if first.step == plan.step else []


def openings(log: Store, run: str, policy: str) -> list[Json]:
    """The configurations that trainings of a policy in a run were opened with."""
    records = [e.record for e in log.events_of([RunOpened.KIND]) if e.run == run]
    configs = [record.config for record in records if isinstance(record, RunOpened)]
    return [config for config in configs if "algorithm" in config and config.get("policy") == policy]


def drops_of(log: Store, run: str, policy: str, steps: range) -> dict[tuple[int, int], list[SampleDropped]]:
    """The drops that were recorded with attempts at consecutive steps: (step, attempt) -> drops."""
    asked = {"run": run, "policy": policy, "first": steps[0], "last": steps[-1]}
    with connect_at(log, "head") as connection:
        rows = connection.execute(_DROPS, asked).fetchall()
    found: dict[tuple[int, int], list[SampleDropped]] = {}
    for trajectory, turn, rule, recipe, step, attempt, version, cut in rows:
        drop = SampleDropped(trajectory, turn, rule, recipe, step, {}, attempt, version, cut)
        found.setdefault((step, attempt), []).append(drop)
    return found


def _compares(recipe: RecipeConfig) -> bool:
    """Whether samples are compared with members of their groups that the recipe drops."""
    return recipe.group_statistics == "all"


def _named(ref: Json) -> list[object]:
    return [ref["trajectory_id"], ref["turn_id"], ref.get("tokens"), ref.get("margin")]


def _chosen_by_sql(log: Store, cut: str, recipe: RecipeConfig, ids: Sequence[str]) -> set[str] | None:
    """Of some trajectories those for which a recipe's conditions hold; None where none of them is SQL."""
    conditions = conditions_of(recipe)
    if conditions is None or recipe.where is None:
        return None
    with connect_at(log, cut) as connection:
        connection.register("asked", pa.table({"trajectory_id": pa.array(ids, pa.string())}))
        query = f"SELECT trajectory_id FROM ({conditions.sql}) SEMI JOIN asked USING (trajectory_id)"
        return {row[0] for row in connection.execute(query, conditions.parameters).fetchall()}


def _units(
    each: Mapping[str, list[Sample]], named: Sequence[tuple[str, str]], algorithm: Algorithm
) -> Iterable[list[Sample]]:
    """What is decided on together: the trajectories of a group, or where there are none each sample."""
    if "groups" not in algorithm.needs:
        by_leaf = {sample.leaf_turn_id: sample for samples in each.values() for sample in samples}
        return [[by_leaf[turn]] for _, turn in dict.fromkeys(named) if turn in by_leaf]
    groups: dict[str, list[Sample]] = {}
    for trajectory_id, samples in each.items():
        for sample in samples:
            groups.setdefault(sample.group or trajectory_id, []).append(sample)
    return groups.values()
