"""Whether a step's learning rate, seed, samples and micro-batches are those that its training's settings
give at this step, and its algorithm what the one before came to.
"""

from __future__ import annotations

from collections.abc import Sequence

from rollbook.replay.claim import Claim
from rollbook.store.errors import TrainError
from rollbook.store.events import Json, StepPlanned
from rollbook.store.fold.history import CommittedStep, History, all_samples, family_of
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Batch, mini_batches
from rollbook.train.config.parallel import recorded_parallel
from rollbook.train.ranks.policy import Policy
from rollbook.train.resume.schedule import divided
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
        batch: of the step; whole: the samples of its rollout batch; policy, critic: any of its training.
    """
    plan, settings = step.planned, step.planned.schedule
    if settings is None:
        return None
    algorithm, earlier = recorded_algorithm(plan.algorithm), history.of_family(family_of(plan.phase))
    number = [one.planned.step for one in earlier].index(plan.step)
    parallel, ranks = recorded_parallel(plan.environment.get("parallel") or {})
    copies = parallel.copies(ranks)
    said: Json = {
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
        "partition": divided(batch.samples, algorithm, settings, copies, policy.shape.work),
        "mini_batch": _mini_batch_due(history, plan, algorithm),
    }
    if plan.rollout_batch is not None:
        said["rollout_batch"] = _without_samples(plan.rollout_batch)
        due["rollout_batch"] = _rollout_batch_due(history, step, algorithm, whole, copies, policy)
    if critic is not None and plan.critic is not None:
        said |= {"critic_learning_rate": plan.critic["learning_rate"], "critic_alone": plan.critic["alone"]}
        due["critic_learning_rate"] = critic.learning_rate(number, settings["steps"])
        due["critic_alone"] = number < recorded_critic(plan).alone_steps
    for key in ("seed", "steps"):
        opened = [config[key] for config in openings if key in config]
        said[f"training_{key}"] = settings[key]
        due[f"training_{key}"] = settings[key] if settings[key] in opened or not opened else opened[-1]
    return Claim(said, due)


def _keys_of(algorithm: Algorithm) -> Json:
    """An algorithm's keys, but for the reference's version where training renews it.

    Algorithms are compared as they are read, and not as they were written: of a key that the release which
    took a step did not have, the default is what that release did.
    """
    dropped = () if algorithm.reference_interval is None else ("reference_version",)
    return {key: value for key, value in algorithm.model_dump(mode="json").items() if key not in dropped}


def _algorithm_due(
    earlier: Sequence[CommittedStep], number: int, openings: Sequence[Json], algorithm: Algorithm
) -> Json:
    """The keys of the algorithm that follow the step before, or that the training was opened with."""
    if number:
        before = earlier[number - 1]
        return _keys_of(recorded_algorithm(before.planned.algorithm).after(before.committed.metrics))
    own = _keys_of(algorithm)
    opened = [_opened(config["algorithm"]) for config in openings]
    return own if own in opened or not opened else opened[-1]


def _opened(said: Json) -> Json:
    """The keys of an algorithm that a training was opened with; of one that cannot be read here, as it was
    written."""
    try:
        return _keys_of(recorded_algorithm(said))
    except TrainError:
        return said


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

    Of one that was scored as it came nothing says in which parts but the manifest itself.
    """
    batch, settings = step.planned.rollout_batch, step.planned.schedule
    assert batch is not None
    assert settings is not None
    first = history.beginning(step).planned.step
    parts = mini_batches(len(whole), algorithm.demand, step_seed(settings["seed"], first))
    said = _without_samples(batch) | {"first_step": first, "steps": len(parts)}
    if "samples" in batch and "iterations" not in batch:
        said["partition"] = divided(whole, algorithm, settings, copies, policy.shape.work)
    return said


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
