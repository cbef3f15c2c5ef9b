"""What a trainer and a proxy write into the log, as far as admission hears of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from tests.fakes.stories.records import step_planned, turn_completed, turn_requested

from rollbook.store.events import (
    Record,
    RunOpened,
    SampleDropped,
    StepCommitted,
    StepPlanned,
    TrajectoryOpened,
    TurnDelivered,
    TurnRequested,
    VersionSpan,
    token_ids,
)

RUN = "default"


def begins(size: int = 2, batch: int = 1, limit: int | None = 1, **changes: Any) -> RunOpened:
    """What a trainer says that begins to learn from the tail; groups of `size`, or none where that is 1."""
    algorithm: Any = {"name": "grpo", "groups": batch, "group_size": size}
    if size == 1:
        algorithm = {"name": "sft", "batch_size": batch}
    config = {
        "policy": "actor",
        "steps": 1000,
        "steps_done": 0,
        "source": "tail",
        "algorithm": algorithm,
        "recipe": {"max_staleness": limit, "splits": ["train"]},
        "admission": {"hold": True, "order": "windowed", "wait_s": 300.0},
    }
    return RunOpened("train", config | changes)


def opened(name: str, group: str | None = None, split: str = "train") -> TrajectoryOpened:
    """A trajectory; its id is its name."""
    return TrajectoryOpened(name, name, group, None, split)


def asked(name: str) -> TurnRequested:
    """The request of a trajectory's turn."""
    return turn_requested(name, f"{name}.0", request_id=f"r-{name}", root_reason="no_parent", context_key="")


def answered(name: str, version: int | None = 0, *, delivered: bool = True, **semantics: Any) -> list[Record]:
    """A turn of two tokens, in the log and with its client."""
    spans = () if version is None else (VersionSpan("actor", version, 0, 2),)
    ids = token_ids([1, 2])
    turn = turn_completed(
        name,
        f"{name}.0",
        policy_version=version,
        prompt_ids=ids,
        completion_ids=ids,
        logprobs=np.zeros(2, np.float32),
        version_spans=spans,
        prompt_length=2,
        logprob_semantics={"temperature": 1.0} | semantics,
    )
    return [turn, TurnDelivered(name, f"{name}.0", "sent")] if delivered else [turn]


def planned(step: int, names: list[str], policy: str = "actor", version: int | None = None) -> StepPlanned:
    """A step on the trajectories' samples."""
    samples = [{"trajectory_id": name, "turn_id": f"{name}.0"} for name in names]
    version = step if version is None else version
    return step_planned(step, policy=policy, policy_version=version, samples=samples, partition=[[[0]]])


def committed(step: int, policy: str = "actor", version: int | None = None) -> StepCommitted:
    """Its results."""
    return StepCommitted(step, 1, policy, step + 1 if version is None else version, {}, {})


def dropped(name: str) -> SampleDropped:
    """A sample that a recipe's rule kept out."""
    return SampleDropped(name, f"{name}.0", "staleness", "r", 0, {})
