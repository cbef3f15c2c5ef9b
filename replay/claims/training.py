"""Whether a step's records fit its training: what its `run.opened` says, and the records before.

Settings are compared as they are read today, so a key that the release of that time did not have
counts as its default. What a training was opened with is proven in turn by the name of its steps'
phase, a digest of all that decides what is trained.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

import orjson
from pydantic import ValidationError

from rollbook.replay.claim import Claim, judge_claim
from rollbook.replay.verdict import StageReplay, Verdict
from rollbook.store import Store
from rollbook.store.config import Table
from rollbook.store.digest import digest_json
from rollbook.store.errors import ConfigError, TrainError
from rollbook.store.events import Event, Json, RunOpened, SegmentDropped, StepPlanned
from rollbook.store.fold.history import CommittedStep, History, family_of
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.parts import loaded_part, named_parts
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.config.config import CriticConfig, OptimizerConfig, TrainConfig, parse_config
from rollbook.train.config.lora import LoraConfig, recorded_lora
from rollbook.train.config.phase import family_names
from rollbook.train.config.recipe import RecipeConfig

STAGE = "training"
"""The stage that these claims are."""
SOURCES = "files"
"""What the environment of `run.opened` has beside that of its steps."""
_AS_SCHEDULED = ("seed", "steps", "micro_batch_size", "tokens_per_micro_batch")
"""Keys of a CONFIG that a manifest's `schedule` repeats."""


@dataclass(slots=True)
class Trainings:
    """The starts of a policy's trainings in a run, and the attempts at steps that each planned.

    Attributes:
        opened: (step, attempt) -> the `run.opened` that stands before its plan, in the plan's lane.
        first_numbers: id of that event -> the lowest `number` of the steps that its training planned.
        complete: whether no event of the log was given up, so that what is missing never was.
    """

    opened: dict[tuple[int, int], Event] = field(default_factory=dict)
    first_numbers: dict[str, int] = field(default_factory=dict)
    complete: bool = True

    def planned(self, plan: StepPlanned, opening: Event | None) -> None:
        """Take note of a plan."""
        if opening is None:
            return
        self.opened[plan.step, plan.attempt] = opening
        if plan.schedule is not None:
            number, key = plan.schedule["number"], opening.event_id
            self.first_numbers[key] = min(number, self.first_numbers.get(key, number))

    def opening(self, plan: StepPlanned) -> RunOpened | None:
        """What the training that planned a step was opened with."""
        event = self.opened.get((plan.step, plan.attempt))
        return event.record if event is not None and isinstance(event.record, RunOpened) else None


def trainings(log: Store, run: str, policy: str) -> Trainings:
    """The trainings of a policy in a run.

    Raises:
        CorruptionError: the log is damaged.
    """
    result, opening = Trainings(), dict[str, Event]()
    for event in log.events_of([RunOpened.KIND, StepPlanned.KIND, SegmentDropped.KIND]):
        match event.record:
            case SegmentDropped():
                result.complete = False
            case RunOpened(command="train", config=config) if event.run == run:
                if config.get("policy") == policy:
                    opening[event.lane] = event
            case StepPlanned() as plan if (event.run, plan.policy) == (run, policy):
                result.planned(plan, opening.get(event.lane))
            case _:
                pass
    return result


def training(history: History, step: CommittedStep, starts: Trainings, *, excerpt: bool) -> StageReplay:
    """The stage `training`: whether a step's records are of its training.

    Args:
        excerpt: whether the log lacks events of the training.
    """
    stage = judge_claim(STAGE, _claim(history, step, starts, excerpt=excerpt))
    if stage.verdict == Verdict.equal and starts.opening(step.planned) is None:
        return StageReplay(STAGE, Verdict.not_recorded, why="what it was opened with")
    return stage


def _claim(history: History, step: CommittedStep, starts: Trainings, *, excerpt: bool) -> Claim:
    """What a step's records say, and what that must be."""
    plan, opened = step.planned, starts.opening(step.planned)
    recorded: Json = {"commit": step.committed.policy_version}
    due: Json = {"commit": plan.policy_version + 1}
    if not excerpt:
        _add(recorded, due, _history_pairs(history, plan, starts))
    if opened is not None:
        _add(recorded, due, _opening_pairs(plan, opened))
        if not excerpt and opened.config.get("source") == "cut":
            first = history.of_family(family_of(plan.phase))[0].planned
            _add(recorded, due, {"cut": (plan.cut, first.cut)})
        if not excerpt and plan.lora is not None:
            begun = history.of_phase(plan.phase)[0].planned
            _add(recorded, due, {"lora.base_version": (plan.lora["base_version"], begun.policy_version)})
        event = starts.opened[plan.step, plan.attempt]
        done, number = opened.config.get("steps_done"), starts.first_numbers.get(event.event_id)
        if not excerpt and done is not None and number is not None:
            _add(recorded, due, {"run.opened.steps_done": (done, number)})
    return Claim(recorded, due)


_Pairs = Mapping[str, tuple[object, object]]
"""Key -> what is said under it, and what that must be."""


def _add(recorded: Json, due: Json, pairs: _Pairs) -> None:
    recorded |= {key: pair[0] for key, pair in pairs.items()}
    due |= {key: pair[1] for key, pair in pairs.items()}


def _history_pairs(history: History, plan: StepPlanned, starts: Trainings) -> _Pairs:
    """A step's starting version and attempt, which follow from the steps and attempts before."""
    pairs: dict[str, tuple[object, object]] = {}
    earlier = [number for number in history.steps if number < plan.step]
    since = range(max(earlier, default=plan.step) + 1, plan.step)
    if earlier and all(number in history.abandoned for number in since):
        versions = [history.steps[since.start - 1].committed.policy_version]
        versions += [history.abandoned[number].goes_on_as for number in since]
        pairs["policy_version"] = plan.policy_version, max(versions)
    if starts.complete and starts.opened:
        there = [
            attempt for number, attempt in starts.opened if number == plan.step and attempt < plan.attempt
        ]
        pairs["attempt"] = plan.attempt, max(there, default=0) + 1
    return pairs


def _opening_pairs(plan: StepPlanned, opened: RunOpened) -> _Pairs:
    """The parts of a manifest that follow from what its training was opened with."""
    config, algorithm = opened.config, recorded_algorithm(plan.algorithm)
    pairs: dict[str, tuple[object, object]] = {
        "phase": _phase(plan, config),
        "run.opened.demand": (config.get("demand"), asdict(algorithm.demand)),
        "optimizer": _read(OptimizerConfig, plan.optimizer, config.get("optimizer")),
        "critic": _critic(plan, config, algorithm),
        "lora": _lora(plan, config),
        "packed": (plan.packed, config.get("tokens_per_micro_batch") is not None),
        "routing_replay": (plan.routing_replay, config.get("routing_replay", False)),
    }
    if plan.rollout_batch is not None and "samples" not in plan.rollout_batch:
        # Of the step that begins the batch the stage `selection` says it.
        pairs["recipe"] = _read(RecipeConfig, plan.recipe, config.get("recipe"))
        pairs["recipe_digest"] = plan.recipe_digest, digest_json(plan.recipe)
    if plan.schedule is not None:
        pairs |= {f"schedule.{key}": (plan.schedule[key], config.get(key)) for key in _AS_SCHEDULED}
    if "dtype" in config:
        pairs["environment.dtype"] = plan.environment["dtype"], config["dtype"]
    if opened.environment:
        before = {key: value for key, value in opened.environment.items() if key != SOURCES}
        pairs["environment"] = plan.environment, before
    return {key: pair for key, pair in pairs.items() if not _not_in_opening(key, config)}


def _not_in_opening(key: str, config: Json) -> bool:
    """Whether the release that opened a training did not record a key."""
    wanted = {
        "run.opened.demand": "demand",
        "optimizer": "optimizer",
        "recipe": "recipe",
        "recipe_digest": "recipe",
        **{f"schedule.{name}": name for name in _AS_SCHEDULED},
    }
    return key in wanted and wanted[key] not in config


def _phase(plan: StepPlanned, config: Json) -> tuple[object, object]:
    """A step's phase, and that which the configuration names; the same where the configuration cannot be
    read here."""
    family = family_of(plan.phase)
    names = _names(config)
    return family, family if names is None or family in names else names[0]


def _names(config: Json) -> list[str] | None:
    """The names of the training that a configuration describes; None where it cannot be read here: it
    lacks what a training of today says, or names user's parts that were not loaded."""
    values = {key: value for key, value in config.items() if key in TrainConfig.model_fields}
    try:
        for name in named_parts(values.get("algorithm") or {}):
            loaded_part(name)
        return family_names(parse_config(values, "run.opened"), config["source"])
    except (ConfigError, TrainError, KeyError):
        return None


def _read(table: type[Table], recorded: Json, opened: Json | None) -> tuple[object, object]:
    """Two tables as they are read today; as they were written where one of them cannot be."""
    if opened is None:
        return recorded, None
    try:
        both = (table.model_validate_json(orjson.dumps(values)) for values in (recorded, opened))
        before, due = (model.model_dump(mode="json") for model in both)
    except ValidationError:
        return recorded, opened
    return before, due


def _critic(plan: StepPlanned, config: Json, algorithm: Algorithm) -> tuple[object, object]:
    """The critic's settings, where the algorithm has one."""
    if plan.critic is None or "values" not in algorithm.needs:
        return plan.critic is None, "values" not in algorithm.needs
    return _read(CriticConfig, plan.critic["optimizer"], config.get("critic") or {})


def _lora(plan: StepPlanned, config: Json) -> tuple[object, object]:
    """The LoRA settings, without the version of the base weights."""
    opened = config.get("lora")
    if plan.lora is None or opened is None:
        return plan.lora, opened
    held = recorded_lora(plan.lora)
    recorded, due = _read(LoraConfig, held.config.model_dump(mode="json"), opened)
    return {"keys": recorded, "seed": held.seed}, {"keys": due, "seed": config.get("seed", held.seed)}
