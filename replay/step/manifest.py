"""Checks that a step's manifest has what its replay reads, with the right types: the only place that
checks, as the step's event is read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from rollbook.store.errors import ReplayError
from rollbook.store.events import Event, StepPlanned
from rollbook.train.config.config import CriticConfig, OptimizerConfig
from rollbook.train.config.lora import recorded_lora
from rollbook.train.config.parallel import ParallelConfig

Partition = list[list[list[int]]]


class _Keys(BaseModel):
    """Keys that must be there; there may be more."""

    model_config = ConfigDict(strict=True, frozen=True, from_attributes=True)


class _Reference(_Keys):
    trajectory_id: str
    turn_id: str
    tokens: int = 0
    margin: float | None = None


class _Environment(_Keys):
    threads: int
    device: str
    dtype: str
    parallel: dict[str, Any] | None = None
    variables: dict[str, Any] | None = None
    flags: dict[str, Any] = {}


class _Recipe(_Keys):
    reward_source: str
    paths: str = "all"
    age_decay: float = 1.0
    stale_tokens: str = "drop"
    max_staleness: int | None


class _RolloutBatch(_Keys):
    first_step: int
    number: int
    steps: int
    samples: list[_Reference] | None = None
    partition: Partition | None = None
    iterations: list[int] = []


class _Critic(_Keys):
    optimizer: dict[str, Any]
    learning_rate: float
    alone: bool


class _Other(_Keys):
    trajectory_id: str
    run: str
    group: str | None
    reward: float
    tokens: int
    truncated: bool


class _Schedule(_Keys):
    number: int
    steps: int
    seed: int
    micro_batch_size: int | None
    tokens_per_micro_batch: int | None
    slice: int | None


class _Manifest(_Keys):
    """Keys of `step.planned` that a replay reads, and of those the keys that it reads; there may be more."""

    step: int
    attempt: int
    policy: str
    policy_version: int
    phase: str
    cut: str
    recipe: _Recipe
    recipe_digest: str
    samples: list[_Reference]
    partition: Partition
    algorithm: dict[str, Any]
    optimizer: dict[str, Any]
    learning_rate: float
    seed: int
    input_digests: dict[str, str]
    environment: _Environment
    rollout_batch: _RolloutBatch | None
    critic: _Critic | None
    packed: bool
    others: list[_Other] | None
    lora: dict[str, Any] | None
    routing_replay: bool
    schedule: _Schedule | None


def checked(events: Iterable[Event]) -> Iterator[Event]:
    """The events, with each `step.planned` among them checked.

    Raises:
        ReplayError: a manifest lacks what a replay reads, or has it of another type; it names step and
            key.
    """
    for event in events:
        if isinstance(event.record, StepPlanned):
            _check(event, event.record)
        yield event


def _check(event: Event, plan: StepPlanned) -> None:
    if plan.operations is not None:  # of a client: its replay reads those
        return
    try:
        _Manifest.model_validate(plan)
    except ValidationError as error:
        raise _unread(event, plan, "", error) from error
    for key, read in _SETTINGS.items():
        try:
            read(plan)
        except (ValidationError, KeyError, TypeError, ValueError) as error:
            raise _unread(event, plan, key, error) from error
    for key, samples, partition in _divisions(plan):
        if sorted(i for rank in partition for part in rank for i in part) != list(range(samples)):
            raise _unread(event, plan, key, ValueError(f"it is no division of its {samples} samples"))


def _critic(plan: StepPlanned) -> None:
    if plan.critic is not None:
        CriticConfig.model_validate_json(orjson.dumps(plan.critic["optimizer"]))


def _parallel(plan: StepPlanned) -> None:
    settings = plan.environment.get("parallel") or {}
    ParallelConfig.model_validate_json(orjson.dumps({k: v for k, v in settings.items() if k != "data"}))
    if not isinstance(settings.get("data", 1), int):
        raise TypeError(f"data is {settings['data']!r}, no number of copies")


def _divisions(plan: StepPlanned) -> Iterator[tuple[str, int, Partition]]:
    """(key, how many samples there are, their micro-batches) of the step and of its rollout batch."""
    yield "partition", len(plan.samples), plan.partition
    batch = plan.rollout_batch or {}
    if "samples" in batch:
        yield "rollout_batch.partition", len(batch["samples"]), batch.get("partition", [])


def _unread(event: Event, plan: StepPlanned, key: str, error: Exception) -> ReplayError:
    where, why = [key] if key else [], str(error)
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        where, why = [*where, *map(str, first["loc"])], first["msg"]
    elif isinstance(error, KeyError):
        why = f"it has no {error}"
    return ReplayError(
        f"step {plan.step!r} of run {event.run!r}: the manifest's {'.'.join(where)} cannot be read ({why}); "
        "it was not written by a training, or by a newer Rollbook"
    )


_SETTINGS: Mapping[str, Callable[[StepPlanned], object]] = MappingProxyType(
    {
        "optimizer": lambda plan: OptimizerConfig.model_validate_json(orjson.dumps(plan.optimizer)),
        "critic.optimizer": _critic,
        "lora": lambda plan: None if plan.lora is None else recorded_lora(plan.lora),
        "environment.parallel": _parallel,
    }
)
"""What reads the settings under a key."""
