"""What a manifest holds beside its samples and weights: the settings of its step, and what these
follow from.

Recorded with a step, so that a replay can compute learning rate, seed and micro-batches again,
instead of taking them from the very record that it is to prove.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rollbook.store.events import Json, StepPlanned
from rollbook.train.algorithms.algorithm import Algorithm
from rollbook.train.algorithms.registry import recorded_algorithm
from rollbook.train.batches.batch import Partition, packed_partition, partition
from rollbook.train.config.config import TrainConfig
from rollbook.train.select.samples import Sample
from rollbook.train.step.step import StepSettings


def settings_of(plan: StepPlanned) -> StepSettings:
    """The settings of a step beside its batch, from its manifest."""
    critic = plan.critic or {}
    return StepSettings(
        recorded_algorithm(plan.algorithm),
        plan.learning_rate,
        plan.policy_version,
        critic.get("learning_rate"),
        bool(critic.get("alone")),
    )


def schedule_of(config: TrainConfig, number: int, slice_: int | None) -> Json:
    """The schedule as `step.planned` records it.

    Args:
        number: of the step in its training, from 0.
        slice_: the slice of the epochs that is its rollout batch; None where samples are used
            once.
    """
    return {
        "number": number,
        "steps": config.steps,
        "seed": config.seed,
        "micro_batch_size": config.micro_batch_size,
        "tokens_per_micro_batch": config.tokens_per_micro_batch,
        "slice": slice_,
    }


def divide_samples(
    samples: Sequence[Sample],
    algorithm: Algorithm,
    schedule: Json,
    copies: int,
    work: Callable[[int], int],
) -> Partition:
    """Divide samples into micro-batches, by data-parallel rank.

    Args:
        copies: of the model, between which the samples are shared out.
        work: of a forward pass over a sample of so many tokens.
    """
    unit, most = 2 if "pairs" in algorithm.needs else 1, schedule["tokens_per_micro_batch"]
    if most is None:
        return partition(len(samples), schedule["micro_batch_size"], copies, unit)
    return packed_partition(samples, most, work, unit, copies)
