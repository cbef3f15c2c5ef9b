"""What a service has to do and has done, by its log: a row for each model, and for each session's samples."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from rollbook.store import Event, Store
from rollbook.store.events import OperationAccepted, OperationEnded
from rollbook.train.tenants.history import events_of_clients
from rollbook.train.tenants.operations import CREATE, SAMPLE, Operations, session_of

RECENT = 1000
"""Operations whose times are looked at: the last ones of a model or of a session's samplers."""


@dataclass(frozen=True, slots=True)
class Status:
    """Of a model, or of what is sampled in a session.

    Attributes:
        tenant: name of the key; None: keys are not checked.
        rank: of the model's factors; None of samples.
        steps: optimizer steps; saved: weights by name.
        waiting, ended, failed: operations.
        oldest_s: how long the oldest that waits does; p50_s, p95_s: from accepted to ended, of recent ones.
    """

    tenant: str | None
    name: str
    rank: int | None
    steps: int
    saved: int
    waiting: int
    ended: int
    failed: int
    oldest_s: float | None
    p50_s: float | None
    p95_s: float | None


@dataclass(slots=True)
class _Times:
    """When operations came, and how long they took, in microseconds."""

    came: dict[str, int] = field(default_factory=dict)
    took: deque[int] = field(default_factory=lambda: deque(maxlen=RECENT))
    ended: int = 0
    failed: int = 0


def status_of(log: Store, now_us: int) -> list[Status]:
    """The status of everything that clients made, the newest last."""
    return _status(events_of_clients(log), now_us)


def _status(events: Iterable[Event], now_us: int) -> list[Status]:
    operations, times = Operations(), defaultdict[str, _Times](_Times)
    for event in events:
        record = event.record
        operations.add(record, (event.lane, event.seq), event.time_us)
        if isinstance(record, OperationAccepted):
            times[_name(record)].came[record.request_id] = event.time_us
        elif isinstance(record, OperationEnded):
            own = times[_name(operations.by_request[record.request_id].accepted)]
            own.took.append(event.time_us - own.came.pop(record.request_id))
            own.ended, own.failed = own.ended + 1, own.failed + (record.error is not None)
    return [_row(operations, name, own, now_us) for name, own in times.items()]


def _name(accepted: OperationAccepted) -> str:
    """What an operation counts to: its model, or what is sampled in its session."""
    if accepted.operation == SAMPLE:
        return f"{session_of(accepted.model_id)}:sample"
    return accepted.model_id


def _row(operations: Operations, name: str, times: _Times, now_us: int) -> Status:
    model = operations.models.get(name)
    lora = {} if model is None else model.operations[CREATE].accepted.resolved.get("lora") or {}
    return Status(
        tenant=operations.sessions[session_of(name)].by,
        name=name,
        rank=lora.get("rank"),
        steps=0 if model is None else model.steps,
        saved=0 if model is None else len(model.saved),
        waiting=len(times.came),
        ended=times.ended,
        failed=times.failed,
        oldest_s=(now_us - min(times.came.values())) / 1e6 if times.came else None,
        p50_s=_quantile(times.took, 50),
        p95_s=_quantile(times.took, 95),
    )


def _quantile(took_us: Sequence[int], percent: int) -> float | None:
    return float(np.percentile(np.asarray(took_us), percent)) / 1e6 if took_us else None
