"""Whether the recipe, applied to the log at a step's cut, keeps and drops what its manifest says.

Where samples are used once, the choice is made again (`replay.claims.choices`); where an algorithm
goes over its samples in epochs, all samples of the cut are gone over. Where neither is possible, as
in an excerpt, what the manifest names is decided again: whether it may be trained on, which samples
of it the recipe keeps, and which rule drops the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import pyarrow as pa

from rollbook.replay.attempts import GIVEN, DueDrop, details_of, drops_of, in_arrival_order
from rollbook.replay.claim import Claim
from rollbook.replay.claims.choices import Choice, Choices
from rollbook.store import Store, parse_cut
from rollbook.store.digest import digest_json
from rollbook.store.events import Json, RunOpened, SampleDropped, StepPlanned
from rollbook.store.fold.history import CommittedStep, History, all_samples, family_of
from rollbook.store.fold.trajectory import Trajectory
from rollbook.store.interchange.excerpt import is_excerpt
from rollbook.store.sql.query import connect_at
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.config.recipe import RecipeConfig, recorded_recipe
from rollbook.train.select.conditions import conditions_of
from rollbook.train.select.drops import dropped_members
from rollbook.train.select.recipe import Candidate, Drop, ModelLimits, mixture_in
from rollbook.train.select.routing import FitCheck
from rollbook.train.select.samples import Sample
from rollbook.train.select.sorting import candidates_in, select
from rollbook.train.sources.source import EpochUnits

AHEAD = 64
"""Steps whose drops are read at once: steps are replayed in order, and a query costs more than they do."""
_OF_ANOTHER_RUN: Json = {"max_staleness": None, "other_policies": None}
"""Of a recipe, for samples of another run: its policies and versions say nothing of those in training."""


@dataclass(eq=False)
class Selections:
    """Checks that a run's steps took what their recipes choose.

    Attributes:
        limits: of the model.
        openings: the configurations that the run's trainings of this policy were opened with.
        excerpt: whether the log leaves out events on which a choice may depend.
        rewarded: gives a trajectory other rewards than the log's.
    """

    log: Store
    history: History
    limits: ModelLimits
    openings: Sequence[Json] = ()
    rewarded: Callable[[Trajectory], Trajectory] | None = None
    excerpt: bool = field(init=False)
    _units: tuple[str, EpochUnits] | None = field(default=None)
    """The last cut's, under what it is made of."""
    _drops: dict[tuple[int, int], list[SampleDropped]] = field(default_factory=dict)
    """Of steps and attempts."""
    _drops_of: range = field(default=range(0))
    """The steps that these are of."""

    def __post_init__(self) -> None:
        self.excerpt = is_excerpt(self.log)

    @cached_property
    def _first_used(self) -> tuple[dict[str, int], dict[str, int]]:
        """Turns and trajectories that the run consumed -> the first step that consumed each."""
        turns: dict[str, int] = {}
        trajectories: dict[str, int] = {}
        for number in sorted(self.history.steps):
            for ref in self.history.steps[number].planned.samples:
                turns.setdefault(ref["turn_id"], number)
                trajectories.setdefault(ref["trajectory_id"], number)
        return turns, trajectories

    def claim(self, step: CommittedStep) -> Claim | str:
        """The claim of a step's manifest; or why it cannot be proven.

        Raises:
            CorruptionError: the log is damaged.
        """
        plan, batch = step.planned, step.planned.rollout_batch
        if batch is not None and "samples" not in batch:
            return "its rollout batch was chosen for an earlier step"
        try:
            recipe = recorded_recipe(plan.recipe)
        except ValueError as error:
            return Claim({"recipe": plan.recipe}, {"recipe": f"none that can be: {error}"})
        if self.excerpt and (why := _beyond_excerpts(plan, recipe)) is not None:
            return why
        digest = digest_json(plan.recipe)
        recorded: Json = {"recipe_digest": plan.recipe_digest, "recipe": digest}
        due: Json = {"recipe_digest": digest, "recipe": digest}
        opened = [digest_json(config["recipe"]) for config in self.openings]
        if opened and digest not in opened:
            due["recipe"] = opened[-1]
        drops = self.dropped_with(plan)
        inherited = self._given(plan, drops)
        recorded |= {
            "samples": [_named(ref) for ref in all_samples(plan)],
            "drops": sorted([d.turn_id, d.rule] for d in drops),
            "others": _by_name(plan.others),
        }
        if (choice := self._choice(plan)) is None:
            kept, dropped = self._due(step, recipe, drops)
            gone = {turn_id for turn_id, _ in inherited} - {ref["turn_id"] for ref in all_samples(plan)}
            samples = [_named(sample.reference) for sample in kept if sample.leaf_turn_id not in gone]
            ruled, others, hung = [DueDrop.of(d) for d in dropped], dropped_members(kept, dropped), ""
        else:
            context = self.limits.context if recipe.too_long == "cut" else None
            samples = [_named(_reference(sample, context)) for sample in choice.samples]
            ruled, others, hung = choice.drops, choice.others, choice.open
            recorded["groups"], due["groups"] = reversed(choice.groups)
        due |= {
            "samples": samples,
            "drops": sorted([*inherited, *([d.leaf_turn_id, d.rule] for d in ruled)]),
            "others": _by_name(others if recipe.group_statistics == "all" else plan.others),
        }
        details = details_of(plan, drops, ruled)
        return Claim(recorded | {"details": details.recorded}, due | {"details": details.due}, hung)

    def _given(self, plan: StepPlanned, drops: Sequence[SampleDropped]) -> list[list[str]]:
        """What the step has to drop because earlier attempts at it were skipped."""
        if self.excerpt or self._choices.attempt(plan) is None:
            return [[d.turn_id, d.rule] for d in drops if d.rule in GIVEN]
        return [list(pair) for pair in self._choices.given(plan)]

    def _choice(self, plan: StepPlanned) -> Choice | None:
        """The step's choice made anew, where samples are used once; None where that cannot be."""
        schedule = plan.schedule
        # Of older steps nobody recorded whether they went over their samples in epochs.
        if self.excerpt or schedule is None or schedule["slice"] is not None:
            return None
        self._choices.limits = self.limits
        return self._choices.of(plan)

    @cached_property
    def _choices(self) -> Choices:
        return Choices(self.log, self.history, self.limits)

    def dropped_with(self, plan: StepPlanned) -> list[SampleDropped]:
        """The drops that were recorded with the attempt at a step."""
        if not self.excerpt and (attempt := self._choices.attempt(plan)) is not None:
            return list(attempt.drops)
        if plan.step not in self._drops_of:
            self._drops_of = range(plan.step, plan.step + AHEAD)
            self._drops = drops_of(self.log, self.history.run, self.history.policy, self._drops_of)
        return self._drops.get((plan.step, plan.attempt), [])

    def anew(
        self, step: CommittedStep, recipe: RecipeConfig, algorithm: Algorithm
    ) -> tuple[list[Sample], list[Drop]]:
        """What another recipe keeps and drops, for an algorithm, of the samples that a step took or let go.

        Where the step's algorithm goes over its samples in epochs, they are those that the step took, one
        by one: rules that compare the samples of a group do not apply to a slice of them.

        Raises:
            CorruptionError: the log is damaged.
        """
        plan = step.planned
        recorded = recorded_algorithm(plan.algorithm)
        if recorded.cycles:
            selected = self._one_by_one(plan, recipe, algorithm, pairs="pairs" in recorded.needs)
        else:
            drops = self.dropped_with(plan)
            selected = self._chosen(plan, recipe, drops, algorithm)
        return self._cut(selected, recipe)

    def _one_by_one(
        self, plan: StepPlanned, recipe: RecipeConfig, algorithm: Algorithm, *, pairs: bool
    ) -> tuple[list[Sample], list[Drop]]:
        """What is kept and dropped of the samples that a step took, some perhaps twice; a pair goes whole."""
        refs = all_samples(plan)
        named = [(ref["trajectory_id"], ref["turn_id"]) for ref in refs]
        each = self._candidates(recipe, plan.cut, list(dict.fromkeys(named)), 0)
        wanted = {turn for _, turn in named}
        there = [s for samples in each.values() for s in samples if s.leaf_turn_id in wanted]
        left, dropped = select(there, recipe, algorithm, plan.policy_version, self.limits, whole_groups=False)
        by_leaf = {sample.leaf_turn_id: sample for sample in left}
        kept: list[Sample] = []
        broken: dict[str, Sample] = {}
        size = 2 if pairs else 1
        for start in range(0, len(refs), size):
            unit = [ref for ref in refs[start : start + size] if ref["turn_id"] in by_leaf]
            members = [replace(by_leaf[ref["turn_id"]], margin=ref.get("margin")) for ref in unit]
            if len(members) == size:
                kept += members
            else:
                broken |= {sample.leaf_turn_id: sample for sample in members}
        still = {sample.leaf_turn_id for sample in kept}
        alone = [Drop(sample, "pair_broken", {}) for leaf, sample in broken.items() if leaf not in still]
        return kept, dropped + alone

    def _due(
        self, step: CommittedStep, recipe: RecipeConfig, drops: Sequence[SampleDropped]
    ) -> tuple[list[Sample], list[Drop]]:
        """What the recipe keeps, in the manifest's order of groups and trajectories, and what it drops."""
        plan = step.planned
        number = None if plan.schedule is None else plan.schedule["slice"]
        if number is None:
            selected = self._chosen(plan, recipe, drops, recorded_algorithm(plan.algorithm))
        else:
            selected = self._of_epochs(plan, recipe, number)
        return self._cut(selected, recipe)

    def _cut(
        self, selected: tuple[list[Sample], list[Drop]], recipe: RecipeConfig
    ) -> tuple[list[Sample], list[Drop]]:
        """The samples, cut at the model's context where the recipe says so."""
        if recipe.too_long == "cut":
            return [sample.within(self.limits.context) for sample in selected[0]], selected[1]
        return selected

    def _chosen(
        self,
        plan: StepPlanned,
        recipe: RecipeConfig,
        drops: Sequence[SampleDropped],
        algorithm: Algorithm,
    ) -> tuple[list[Sample], list[Drop]]:
        """What is kept and dropped of the groups and samples that the step took, or let go."""
        refs = [(ref["trajectory_id"], ref["turn_id"]) for ref in all_samples(plan)]
        decided: dict[tuple[int, str], list[tuple[str, str]]] = {(plan.policy_version, plan.cut): refs}
        for skipped, ref in self._skipped(plan, drops):
            if ref not in refs:
                decided.setdefault((skipped.policy_version, skipped.cut), []).append(ref)
        for drop in in_arrival_order([drop for drop in drops if drop.rule not in GIVEN]):
            version = plan.policy_version if drop.policy_version is None else drop.policy_version
            at = version, drop.cut or plan.cut
            decided.setdefault(at, []).append((drop.trajectory_id, drop.turn_id))
        # Of older steps nobody recorded whether they went over their samples in epochs.
        before = 0 if plan.schedule is None and algorithm.cycles else plan.step
        kept: list[Sample] = []
        dropped: list[Drop] = []
        for (version, cut), named in decided.items():
            each = self._candidates(recipe, cut, named, before)
            for unit in _units(each, named, algorithm):
                # Versions of another run say nothing of a sample's age, but that they are known.
                own = unit[0].run == self.history.run
                rules = recipe if own else recipe.model_copy(update=_OF_ANOTHER_RUN)
                left, gone = select(unit, rules, algorithm, version, self.limits)
                kept += left
                dropped += gone
        return kept, dropped

    def _skipped(
        self, plan: StepPlanned, drops: Sequence[SampleDropped]
    ) -> Iterator[tuple[StepPlanned, tuple[str, str]]]:
        """Samples that the recipe had kept for an attempt that was skipped, each with that attempt's plan."""
        by_turn = {drop.turn_id: drop for drop in drops if drop.rule in GIVEN}
        if not by_turn:
            return
        which = (self.history.run, plan.policy, plan.step)
        for event in self.log.events_of([StepPlanned.KIND]):
            planned = event.record
            if isinstance(planned, StepPlanned) and (event.run, planned.policy, planned.step) == which:
                for ref in all_samples(planned) if planned.attempt < plan.attempt else ():
                    if ref["turn_id"] in by_turn:
                        yield planned, (ref["trajectory_id"], ref["turn_id"])

    def _candidates(
        self,
        recipe: RecipeConfig,
        cut: str,
        named: Sequence[tuple[str, str]],
        before: int,
    ) -> dict[str, list[Sample]]:
        """The candidates of each trajectory that is finished at a cut, trajectories in the order given.

        Args:
            before: what steps before this one consumed counts as consumed; what later ones did does not.
        """
        turns, trajectories = self._first_used
        never = before  # what no step consumed
        ids = list(dict.fromkeys(trajectory_id for trajectory_id, _ in named))
        held, run = self.log.trajectories(parse_cut(cut), ids), self.history.run
        chosen = _chosen_by_sql(self.log, cut, recipe, ids)
        mixture = mixture_in(self.limits)
        check = None if mixture is None else FitCheck(mixture)
        candidates: dict[str, list[Sample]] = {}
        for trajectory in (held[trajectory_id] for trajectory_id in ids if trajectory_id in held):
            if trajectory.finished is None or trajectory.run not in recipe.runs(run):
                continue
            trajectory_id = trajectory.opened.trajectory_id
            trajectory = trajectory if self.rewarded is None else self.rewarded(trajectory)
            policy = self.history.policy if trajectory.run == run else None
            samples = candidates_in(trajectory, recipe, check, policy)
            # One path of a trajectory is trained, ever: another would train the turns that they share again.
            if recipe.paths != "all" and trajectories.get(trajectory_id, never) < before:
                samples = [replace(sample, preferred=False) for sample in samples]
            if chosen is not None:
                samples = [replace(sample, chosen=trajectory_id in chosen) for sample in samples]
            candidates[trajectory_id] = [s for s in samples if turns.get(s.leaf_turn_id, never) >= before]
        return candidates

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
            which = (self.history.run, recipe, recorded_algorithm(plan.algorithm), seed, version)
            units = EpochUnits(self.log, parse_cut(plan.cut), *which, self.limits, plan.policy)
            self._units = made_of, units
        units = self._units[1]
        return units.samples(number), units.drops() if first.step == plan.step else []


def openings(log: Store, run: str, policy: str) -> list[Json]:
    """The configurations that trainings of a policy in a run were opened with."""
    records = [e.record for e in log.events_of([RunOpened.KIND]) if e.run == run]
    configs = [record.config for record in records if isinstance(record, RunOpened)]
    return [config for config in configs if "algorithm" in config and config.get("policy") == policy]


def _beyond_excerpts(plan: StepPlanned, recipe: RecipeConfig) -> str | None:
    """Why an excerpt cannot prove what a recipe chooses; None where it can."""
    if plan.schedule is not None and plan.schedule["slice"] is not None:
        return "the excerpt lacks samples of the cut, and its epochs go over all of them"
    if recipe.asks_sql:
        return "labels, models or SQL choose its samples, and the excerpt may lack what they ask"
    return None


def _reference(sample: Candidate, context: int | None) -> Json:
    """How a manifest names a sample; with the model's context as its length where the recipe cuts it."""
    named: Json = {"trajectory_id": sample.trajectory_id, "turn_id": sample.leaf_turn_id}
    return named if context is None or sample.length <= context else named | {"tokens": context}


def _named(ref: Json) -> list[object]:
    return [ref["trajectory_id"], ref["turn_id"], ref.get("tokens"), ref.get("margin")]


def _chosen_by_sql(log: Store, cut: str, recipe: RecipeConfig, ids: Sequence[str]) -> set[str] | None:
    """Those of some trajectories for which a recipe's conditions hold; None where none of these is SQL."""
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
    """The samples that are decided on together: those of a group, or each alone where there are no groups."""
    if "groups" not in algorithm.needs:
        by_leaf = {sample.leaf_turn_id: sample for samples in each.values() for sample in samples}
        return [[by_leaf[turn]] for _, turn in named if turn in by_leaf]
    groups: dict[tuple[str, str], list[Sample]] = {}
    for trajectory_id, samples in each.items():
        for sample in samples:
            groups.setdefault((sample.run, sample.group or trajectory_id), []).append(sample)
    return groups.values()


def _by_name(others: Sequence[Json] | None) -> list[Json]:
    """Members of groups that a step only compares with, in an order of their own."""
    return sorted(others or (), key=lambda member: (member["run"], member["trajectory_id"]))
