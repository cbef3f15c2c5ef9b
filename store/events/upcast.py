"""Upgrades records of older versions, one version at a time. Pure.

A record whose fields change gets a higher version in `VERSIONS` and a function here that
converts the old fields (typed columns and keys of `extra` together, as plain values) into those
of the next version. The log is never rewritten: old events stay unchanged, and are read through
these functions.
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
    "step.planned": 9,
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


UPCASTERS: Mapping[tuple[str, int], Callable[[Values], Values]] = {
    ("cursor.moved", 1): _nobody,
    ("label.added", 1): _nobody,
    # Version 2 says what the engine calls the weights, and its checksums. Before, no name was used once.
    ("policy.activated", 1): lambda values: values | {"weight_name": "", "checksums": ""},
    # Version 3 says how the engine holds the weights. Before, that was not written down.
    ("policy.activated", 2): lambda values: values | {"held": None},
    ("reward.assigned", 1): _nobody,
    # Version 2 says which attempt at the step dropped the sample. Before, there was the first only.
    ("sample.dropped", 1): lambda values: {"attempt": 1} | values,
    # Version 3 says where that was decided, unless by the step's plan. Before, that was not written down.
    ("sample.dropped", 2): lambda values: {"policy_version": None, "cut": None} | values,
    # Version 2 has hashes of parts of stages. Before, there were digests of whole ones alone.
    ("step.committed", 1): lambda values: values | {"hashes": None},
    # Version 2 says of which rollout batch the step is a part, and what the critic does. Before, each was one
    # of its own, and there were no critics.
    ("step.planned", 1): lambda values: values | {"rollout_batch": None, "critic": None},
    # Version 3 says whether samples were packed. Before, they were padded.
    ("step.planned", 2): lambda values: values | {"packed": False},
    # Version 4 says which dropped members of their groups samples were compared with. Before, with none.
    ("step.planned", 3): lambda values: values | {"others": None},
    # Version 5 says which low-rank factors were trained. Before, weights were.
    ("step.planned", 4): lambda values: values | {"lora": None},
    # Version 6 says whether recorded experts were replayed. Before, each router chose for itself.
    ("step.planned", 5): lambda values: values | {"routing_replay": False},
    # Version 7 says what the schedule follows from. Before, that was not written down.
    ("step.planned", 6): lambda values: values | {"schedule": None},
    # Version 8 says which operations of a service's client the step is. Before, all samples were the log's.
    ("step.planned", 7): lambda values: values | {"operations": None},
    # From version 9 on its step may digest tensors by blocks. Before, digests were of their bytes.
    ("step.planned", 8): lambda values: values,
    ("trajectory.finished", 1): _nobody,
    ("trajectory.opened", 1): _nobody,
    # Version 3 says which trajectory was sampled again. Before, none was.
    ("trajectory.opened", 2): lambda values: values | {"origin": None},
    # Version 2 keeps what an upstream said besides. Before, there were no upstreams.
    ("turn.completed", 1): lambda values: values | {"upstream": {}},
    # Version 3 keeps which experts the tokens went to. Before, no engine was asked.
    ("turn.completed", 2): lambda values: values | {"routed_experts": {}},
    # Version 2 keeps the prompt. Before, a turn that failed had none.
    ("turn.failed", 1): lambda values: (
        {"prompt_ids": None} | values | {"prompt_length": 0, "prompt_sha256": ""}
    ),
    # Version 2 says how the request came in. Before, it was a chat completion, and a first attempt.
    ("turn.requested", 1): lambda values: values | {"wire": {}},
    # Version 3 stores a request for n completions once. Before, each of its turns held all of it.
    ("turn.requested", 2): lambda values: values | {"sibling_of": None},
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
