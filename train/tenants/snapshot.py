"""The fold of what clients asked as a file: a start folds only what came after it.

It is derived: where it is not there, or is of another log or another release, everything is folded anew.
Bodies and results are not in it; those of operations that wait are read from the log.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from typing import Any

import orjson
import xxhash

from rollbook.store import Store
from rollbook.store.errors import RollbookError
from rollbook.store.events import (
    Json,
    OperationAccepted,
    OperationEnded,
    SamplerOpened,
    SessionOpened,
)
from rollbook.store.permissions import make_folder, replace_small
from rollbook.store.safe_paths import read_small
from rollbook.train.tenants.history import Folded, event_at, record_at
from rollbook.train.tenants.operations import (
    ModelOperations,
    Operation,
    Operations,
    Place,
    Saved,
    session_of,
    size_of,
)

FILE = "service/operations.json"
MOST_BYTES = 1 << 30
_log = logging.getLogger(__name__)
_KINDS = (SessionOpened, SamplerOpened, OperationAccepted, OperationEnded, Saved, ModelOperations, Operations)
_RELEASE = xxhash.xxh3_64_hexdigest(repr([[f.name for f in fields(kind)] for kind in _KINDS]).encode())
"""Of what a snapshot is written: another one is not read."""


def write_snapshot(log: Store, folded: Folded) -> None:
    """Write the fold, in place of an older one."""
    marks = [(lane, end, event_at(log, (lane, end - 1)).event_id) for lane, end in _written(folded)]
    head = {"release": _RELEASE, "marks": marks, "cut": folded.cut, "positions": folded.positions}
    body = orjson.dumps(head | _parts(folded.operations))
    make_folder((log.path / FILE).parent)
    replace_small(log.path / FILE, xxhash.xxh3_128_hexdigest(body).encode() + b"\n" + body)


def read_snapshot(log: Store) -> Folded:
    """The fold of a cut that the log holds; of nothing where none was written for it."""
    try:
        digest, _, body = read_small(log.path / FILE, MOST_BYTES).partition(b"\n")
        if xxhash.xxh3_128_hexdigest(body).encode() != digest:
            raise ValueError("its digest is another")
        parts = orjson.loads(body)
        if parts["release"] != _RELEASE:
            return Folded()
        for lane, end, event_id in parts["marks"]:
            if event_at(log, (lane, end - 1)).event_id != event_id:
                raise ValueError(f"it is of another log in lane {lane}")
        return Folded(_operations(log, parts), parts["cut"], parts["positions"])
    except FileNotFoundError:
        return Folded()
    except (RollbookError, OSError, ValueError, KeyError, TypeError, IndexError) as error:
        _log.warning("%s is not used, the log is folded anew: %s", log.path / FILE, error)
        return Folded()


def _written(folded: Folded) -> Iterable[tuple[str, int]]:
    """The lanes that clients' events are in, and where the cut ends in them."""
    operations = folded.operations.by_request.values()
    lanes = {place[0] for o in operations for place in (o.accepted_at, o.ended_at)} | {*folded.positions}
    return [(lane, folded.cut[lane]) for lane in sorted(lanes) if folded.cut.get(lane)]


def _parts(operations: Operations) -> Json:
    sampled = [operations.by_request[name] for name in (*operations.sampled, *operations.sampling)]
    return {
        "sessions": [(_row(s), operations.opened_us[s.session_id]) for s in operations.sessions.values()],
        "endings": operations.endings,
        "samplers": [*map(_row, operations.samplers.values())],
        "models": [*map(_model_row, operations.models.values())],
        "sampled": [*map(_operation_row, sampled)],
        "older": operations.older,
        "origins": operations.origins.rows(),
        "copies": [*operations.copies.items()],
        "gone": operations.gone,
        "freed": [*operations.freed],
    }


def _operations(log: Store, parts: Json) -> Operations:
    known = Operations(endings=parts["endings"], older=parts["older"], freed={*parts["freed"]})
    known.copies = {(by, once): path for (by, once), path in parts["copies"]}
    known.gone = {name: (model_id, number) for name, (model_id, number) in parts["gone"].items()}
    for row, opened_us in parts["sessions"]:
        session = SessionOpened(*row)
        known.sessions[session.session_id], known.opened_us[session.session_id] = session, opened_us
        if session.once is not None:
            known.by_key[session.by, session.once] = session.session_id
    for row in parts["samplers"]:
        known.samplers[row[0]] = SamplerOpened(*row)
    for row in parts["models"]:
        _add_model(log, known, row)
    for row in parts["sampled"]:
        _add_sampled(log, known, row)
    for row in parts["origins"]:
        known.origins.restore(*row)
    return known


def _add_model(log: Store, known: Operations, row: Json) -> None:
    operations = [_operation(log, own) for own in row.pop("operations")]
    saved, passes = row.pop("saved"), row.pop("passes")
    model = ModelOperations(**row)
    model.operations = {operation.accepted.number: operation for operation in operations}
    model.passes = [model.operations[number] for number in passes]
    model.saved = {path: Saved(*own) for path, own in saved.items()}
    model.bytes = sum(size_of(operation.accepted) for operation in operations)
    known.models[model.model_id] = model
    known.by_request |= {operation.accepted.request_id: operation for operation in operations}
    if model.next is not None:
        known.ready[model.model_id] = model


def _add_sampled(log: Store, known: Operations, row: Any) -> None:
    operation = _operation(log, row)
    accepted = operation.accepted
    known.by_request[accepted.request_id] = operation
    if operation.ended is None:
        known.sampling[accepted.request_id] = operation
        known.sequences[session_of(accepted.model_id)] += len(accepted.resolved["sequence_ids"])
    else:
        known.sampled.append(accepted.request_id)


def _model_row(model: ModelOperations) -> Json:
    kept = {f.name: getattr(model, f.name) for f in fields(ModelOperations) if f.name != "bytes"}
    return kept | {
        "operations": [*map(_operation_row, model.operations.values())],
        "passes": [operation.accepted.number for operation in model.passes],
        "saved": {path: _row(saved) for path, saved in model.saved.items()},
    }


def _operation_row(operation: Operation) -> Any:
    accepted, ended = operation.accepted, operation.ended
    rows = _row(replace(accepted, body={})), None if ended is None else _row(ended)
    return *rows, operation.accepted_at, operation.ended_at


def _operation(log: Store, row: Any) -> Operation:
    accepted_row, ended_row, accepted_at, ended_at = row
    accepted, place = OperationAccepted(*accepted_row), _place(accepted_at)
    if ended_row is None:
        body: Json = record_at(log, place).body
        return Operation(replace(accepted, body=body), place)
    return Operation(accepted, place, OperationEnded(*ended_row), _place(ended_at))


def _place(row: Any) -> Place:
    lane, seq = row
    return lane, seq


def _row(record: Any) -> list[Any]:
    return [getattr(record, field.name) for field in fields(record)]
