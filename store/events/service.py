"""Kinds of events about clients of the training service: their sessions, what they ask of a model or of what
samples from it, and what becomes of weights that they saved."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rollbook.store.events.about import About, Record

Json = dict[str, Any]
KEPT, OF_RUN = About(lasting=True), About(of="run", lasting=True)
"""A service folds all of them, whenever it starts."""


@dataclass(frozen=True, slots=True)
class SessionOpened(Record, kind="session.opened", about=KEPT):
    """A client began a session. `once` is what its repetitions of the request have in common, and `client`
    what it says of itself; `by` names its API key, null where none are checked."""

    session_id: str
    once: str | None
    client: Json
    by: str | None = None


@dataclass(frozen=True, slots=True)
class SessionEnded(Record, kind="session.ended", about=KEPT):
    """A client said that its session is over, and why."""

    session_id: str
    reason: Json


@dataclass(frozen=True, slots=True)
class SamplerOpened(Record, kind="sampler.opened", about=OF_RUN):
    """A client may sample from weights that stay as they are: those of a version of the run's policy.

    `path` is what the client calls them, null where they have no name or are the base model's own.
    `checkpoint` is where the adapter is, null for none; `weights_digest` is of its factors, or of the base
    model. `model_id` is the model whose adapter it is, null for none.
    """

    sampler_id: str
    session_id: str
    base_model: str
    model_id: str | None
    path: str | None
    policy_version: int
    weights_digest: str
    checkpoint: str | None


@dataclass(frozen=True, slots=True)
class LaneOrdered(Record, kind="lane.ordered", about=KEPT):
    """Where several processes serve clients, each in a lane of its own: the events behind this one in its
    lane, up to the next of its kind, count at this position of the order of all these lanes, from 1. Events
    before the first one count before all others."""

    position: int


@dataclass(frozen=True, slots=True)
class OperationAccepted(Record, kind="operation.accepted", about=OF_RUN):
    """An operation on a client's model is to be done: its `number`-th, from 0, which makes the model. Where
    `operation` is `sample`, `model_id` is a sampler's, and `number` only tells it from its others.

    `body` is what the client sent, as JSON or as `{"protobuf": base64 of zstd}`, `body_digest` the sha256 of
    what repetitions have in common. `resolved` has every setting that decides its bits, defaults included.
    """

    request_id: str
    model_id: str
    number: int
    operation: str
    body: Json
    body_digest: str
    resolved: Json


@dataclass(frozen=True, slots=True)
class OperationEnded(Record, kind="operation.ended", about=OF_RUN):
    """An operation is done, or failed without a trace in the model: then `error` says why.

    `digests` are of the model's state behind it and of the result; of a `sample` also keys of its
    `sequences`, by their tokens. `checkpoint` is where that state was written, if it was. `metrics` are its
    numbers.
    """

    request_id: str
    model_id: str
    number: int
    result: Json | None
    error: Json | None
    digests: Json
    checkpoint: str | None = None
    metrics: Json = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class WeightsChanged(Record, kind="weights.changed", about=OF_RUN):
    """Weights that a client saved are for all tenants (`published`) or their owner's alone again
    (`unpublished`), are there until another time (`kept`), or are not there any more (`deleted`, `expired`).

    It says so of what `path` names while that is `checkpoint`. `expires_us`, of `kept`, is in microseconds
    since 1970, null for without end. `by` names the API key, null where none are checked, and of `expired`.
    """

    model_id: str
    path: str
    checkpoint: str
    change: str
    expires_us: int | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsCopied(Record, kind="weights.copied", about=OF_RUN):
    """Weights that a client saved have another path too; `model_id` is for that alone, and never trained.

    The files are the same. `source_path` named them, `of_model` is the model that they are of, and `number`
    its operation that saved them. `once` is what repetitions of the request have in common.
    """

    model_id: str
    path: str
    source_path: str
    of_model: str
    number: int
    policy_version: int
    checkpoint: str
    digests: Json
    expires_us: int | None
    metadata: Json | None
    once: str | None = None
    by: str | None = None


@dataclass(frozen=True, slots=True)
class WeightsFreed(Record, kind="weights.freed", about=OF_RUN):
    """Nothing refers to weights that are not there any more: the files that the `number`-th operation of a
    model wrote were removed after this was written, or are at the next start. Their digests stay."""

    model_id: str
    number: int
    checkpoint: str
    bytes: int
