"""Whether a step's learning rate, seed, samples and micro-batches are those that its training's
settings give at this step, and whether its algorithm follows from the step before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rollbook.replay.claim import Claim
from rollbook.store.errors import TrainError
from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import CommittedStep, History, all_samples, family_of
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Batch, mini_batches
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.ranks.policy import Policy
from rollbook.train.resume.restore import divide_samples
from rollbook.train.select.samples import Sample
from rollbook.train.step.critic import recorded_critic
from rollbook.train.step.step import step_seed


def schedule(
    history: History,
    step: CommittedStep,
    openings: Sequence[Json],
    batch: Batch,
    whole: Sequence[Sample],
    policy: Policy,
    critic: Policy | None,
) -> Claim | None:
    """The claim of a step's manifest; None where the step did not record what it follows from.

    Args:
        openings: the configurations that the run's trainings of the policy were opened with.
        batch: of the step; whole: the samples of its rollout batch; policy, critic: of its training.
    """
    plan, settings = step.planned, step.planned.schedule
    if settings is None:
        return None
    algorithm, earlier = recorded_algorithm(plan.algorithm), history.of_family(family_of(plan.phase))
    number = [committed.planned.step for committed in earlier].index(plan.step)
    parallel, ranks = recorded_parallel(plan.environment.get("parallel") or {})
    copies = parallel.copies(ranks)
    recorded: Json = {
        "number": settings["number"],
        "seed": plan.seed,
        "learning_rate": plan.learning_rate,
        "algorithm": _keys_of(algorithm),
        "partition": plan.partition,
        "mini_batch": [ref["turn_id"] for ref in plan.samples],
    }
    due: Json = {
        "number": number,
        "seed": step_seed(settings["seed"], plan.step),
        "learning_rate": policy.learning_rate(number, settings["steps"]),
        "algorithm": _algorithm_due(earlier, number, openings, algorithm),
        "partition": divide_samples(batch.samples, algorithm, settings, copies, policy.shape.work),
        "mini_batch": _mini_batch_due(history, plan, algorithm),
    }
    if plan.rollout_batch is not None:
        recorded["rollout_batch"] = _without_samples(plan.rollout_batch)
        due["rollout_batch"] = _rollout_batch_due(history, step, algorithm, whole, copies, policy)
    if critic is not None and plan.critic is not None:
        recorded["critic_learning_rate"] = plan.critic["learning_rate"]
        recorded["critic_alone"] = plan.critic["alone"]
        due["critic_learning_rate"] = critic.learning_rate(number, settings["steps"])
        due["critic_alone"] = number < recorded_critic(plan).alone_steps
    for key in ("seed", "steps"):
        recorded[f"training_{key}"] = settings[key]
        due[f"training_{key}"] = _opened_with(openings, key, settings[key])
    return Claim(recorded, due)


def _opened_with(openings: Sequence[Json], key: str, recorded: Any) -> Any:
    """The recorded value, if a training was opened with it, or none says; otherwise the last one's value."""
    values = [config[key] for config in openings if key in config]
    return recorded if recorded in values or not values else values[-1]


def _keys_of(algorithm: Algorithm) -> Json:
    """An algorithm's keys, but for the reference's version where training renews it.

    Algorithms are compared as they are read, not as they were written: the default of a key that the
    step's release did not have is what that release did.
    """
    dropped = () if algorithm.reference_interval is None else ("reference_version",)
    return {key: value for key, value in algorithm.model_dump(mode="json").items() if key not in dropped}


def _algorithm_due(
    earlier: Sequence[CommittedStep], number: int, openings: Sequence[Json], algorithm: Algorithm
) -> Json:
    """The algorithm's keys as they follow from the step before, or, at the first, from the opening."""
    if number:
        before = earlier[number - 1]
        return _keys_of(recorded_algorithm(before.planned.algorithm).after(before.committed.metrics))
    own = _keys_of(algorithm)
    opened = [_opened(config["algorithm"]) for config in openings]
    return own if own in opened or not opened else opened[-1]


def _opened(settings: Json) -> Json:
    """The keys of the algorithm that a training was opened with; as written where it cannot be read here."""
    try:
        return _keys_of(recorded_algorithm(settings))
    except TrainError:
        return settings


def _without_samples(batch: Json) -> Json:
    return {key: value for key, value in batch.items() if key != "samples"}


def _rollout_batch_due(
    history: History,
    step: CommittedStep,
    algorithm: Algorithm,
    whole: Sequence[Sample],
    copies: int,
    policy: Policy,
) -> Json:
    """What a manifest must say of its rollout batch, beside its samples and which of its parts it takes.

    For a batch that was scored as it came, only the manifest itself says in which parts.
    """
    batch, settings = step.planned.rollout_batch, step.planned.schedule
    assert batch is not None
    assert settings is not None
    first = history.beginning(step).planned.step
    parts = mini_batches(len(whole), algorithm.demand, step_seed(settings["seed"], first))
    due = _without_samples(batch) | {"first_step": first, "steps": len(parts)}
    if "samples" in batch and "iterations" not in batch:
        due["partition"] = divide_samples(whole, algorithm, settings, copies, policy.shape.work)
    return due


def _mini_batch_due(history: History, plan: StepPlanned, algorithm: Algorithm) -> list[str]:
    """The leaf turns of the part of the rollout batch that the step takes."""
    batch = plan.rollout_batch
    if batch is None or batch["steps"] == 1:
        return [ref["turn_id"] for ref in all_samples(plan)]
    whole = history.batch_of(plan)
    assert plan.schedule is not None
    seed = step_seed(plan.schedule["seed"], batch["first_step"])
    parts = mini_batches(len(whole), algorithm.demand, seed)
    part = parts[batch["number"]] if 0 <= batch["number"] < len(parts) else []
    return [whole[i]["turn_id"] for i in part]
