"""Upgrades records of older versions, one version at a time. Pure.

A record whose fields change gets a higher version in `VERSIONS` and a function here that turns the old
fields (typed columns and keys of `extra` together, as plain values) into those of the next version. The
log is never rewritten: old events stay as they are, and are read through these.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Values = dict[str, Any]

VERSIONS: Mapping[str, int] = {
    "cursor.moved": 2,
    "label.added": 2,
    "policy.activated": 3,
    "reward.assigned": 2,
    "sample.dropped": 3,
    "step.committed": 2,
    "step.planned": 7,
    "trajectory.finished": 2,
    "trajectory.opened": 3,
    "turn.completed": 3,
    "turn.failed": 2,
    "turn.requested": 3,
}
"""Kind -> version of its record in this release; 1 where it is not named."""


def _nobody(values: Values) -> Values:
    """Version 2 says whose API key did it. Before, that was not written down."""
    return values | {"by": None}


def _sample_dropped_1(values: Values) -> Values:
    """Version 2 says which attempt at the step dropped the sample. Before, there was the first only."""
    return {"attempt": 1} | values


def _sample_dropped_2(values: Values) -> Values:
    """Version 3 says where that was decided, unless by the step's plan. Before, that was not written down."""
    return {"policy_version": None, "cut": None} | values


def _step_planned_1(values: Values) -> Values:
    """Version 2 says of which rollout batch the step is a part, and what the critic does. Before, each was
    one of its own, and there were no critics."""
    return values | {"rollout_batch": None, "critic": None}


def _step_planned_2(values: Values) -> Values:
    """Version 3 says whether samples were packed. Before, they were padded."""
    return values | {"packed": False}


def _step_planned_3(values: Values) -> Values:
    """Version 4 says which dropped members of their groups samples were compared with. Before, with none."""
    return values | {"others": None}


def _step_planned_4(values: Values) -> Values:
    """Version 5 says which low-rank factors were trained. Before, weights were."""
    return values | {"lora": None}


def _step_planned_5(values: Values) -> Values:
    """Version 6 says whether recorded experts were replayed. Before, each router chose for itself."""
    return values | {"routing_replay": False}


def _step_planned_6(values: Values) -> Values:
    """Version 7 says what the schedule follows from. Before, that was not written down."""
    return values | {"schedule": None}


def _step_committed_1(values: Values) -> Values:
    """Version 2 has hashes of parts of stages. Before, there were digests of whole ones alone."""
    return values | {"hashes": None}


def _trajectory_opened_2(values: Values) -> Values:
    """Version 3 says which trajectory was sampled again. Before, none was."""
    return values | {"origin": None}


def _turn_requested_1(values: Values) -> Values:
    """Version 2 says how the request came in. Before, it was a chat completion, and a first attempt."""
    return values | {"wire": {}}


def _turn_requested_2(values: Values) -> Values:
    """Version 3 stores a request for n completions once. Before, each of its turns held all of it."""
    return values | {"sibling_of": None}


def _turn_completed_1(values: Values) -> Values:
    """Version 2 keeps what an upstream said besides. Before, there were no upstreams."""
    return values | {"upstream": {}}


def _turn_completed_2(values: Values) -> Values:
    """Version 3 keeps which experts the tokens went to. Before, no engine was asked."""
    return values | {"routed_experts": {}}


def _policy_activated_1(values: Values) -> Values:
    """Version 2 says what the engine calls the weights, and its checksums. Before, no name was used once."""
    return values | {"weight_name": "", "checksums": ""}


def _policy_activated_2(values: Values) -> Values:
    """Version 3 says how the engine holds the weights. Before, that was not written down."""
    return values | {"held": None}


def _turn_failed_1(values: Values) -> Values:
    """Version 2 keeps the prompt. Before, a turn that failed had none."""
    return {"prompt_ids": None} | values | {"prompt_length": 0, "prompt_sha256": ""}


UPCASTERS: Mapping[tuple[str, int], Callable[[Values], Values]] = {
    ("cursor.moved", 1): _nobody,
    ("label.added", 1): _nobody,
    ("policy.activated", 1): _policy_activated_1,
    ("policy.activated", 2): _policy_activated_2,
    ("reward.assigned", 1): _nobody,
    ("sample.dropped", 1): _sample_dropped_1,
    ("sample.dropped", 2): _sample_dropped_2,
    ("step.committed", 1): _step_committed_1,
    ("step.planned", 1): _step_planned_1,
    ("step.planned", 2): _step_planned_2,
    ("step.planned", 3): _step_planned_3,
    ("step.planned", 4): _step_planned_4,
    ("step.planned", 5): _step_planned_5,
    ("step.planned", 6): _step_planned_6,
    ("trajectory.finished", 1): _nobody,
    ("trajectory.opened", 1): _nobody,
    ("trajectory.opened", 2): _trajectory_opened_2,
    ("turn.completed", 1): _turn_completed_1,
    ("turn.completed", 2): _turn_completed_2,
    ("turn.failed", 1): _turn_failed_1,
    ("turn.requested", 1): _turn_requested_1,
    ("turn.requested", 2): _turn_requested_2,
}
"""(kind, version) -> what makes the next version of it."""


def version_of(kind: str) -> int:
    """Version of the kind's record in this release."""
    return VERSIONS.get(kind, 1)


def upcast(kind: str, version: int, values: Values) -> Values:
    """The fields of a record of `version` in this release's version, which must not be lower."""
    for step in range(version, version_of(kind)):
        values = UPCASTERS[kind, step](values)
    return values
