"""Operations are read with their bodies from the log by one reading, however they arrived."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store.events import Json, OperationAccepted, OperationEnded, SessionOpened
from rollbook.train.tenants.history import fold_operations, wholes
from rollbook.train.tenants.operations import request_id_of, run_of

MODEL = "s1:train:0"


def _accepted(number: int, body: Json, model: str = MODEL) -> OperationAccepted:
    named = request_id_of(model, number), model, number
    return OperationAccepted(*named, "forward_backward", body, "d", {"turns": []})


def _ended(number: int) -> OperationEnded:
    return OperationEnded(request_id_of(MODEL, number), MODEL, number, {}, None, {})


@pytest.fixture
def log(tmp_path: Path) -> Store:
    """Operations 1 to 4 that arrived as 2, 1, 4, 3, one of another model among them, and 5, which waits."""
    log = rb.open(tmp_path, create=True)
    made = OperationAccepted(request_id_of(MODEL, 0), MODEL, 0, "create_model", {}, "d", {})
    records: list[Any] = [SessionOpened("s1", None, {}), made, _ended(0)]
    records += [_accepted(number, {"protobuf": f"body {number}"}) for number in (2, 1)]
    records += [_accepted(0, {"protobuf": "another's"}, "s1:train:1")]
    records += [_accepted(number, {"protobuf": f"body {number}"}) for number in (4, 3)]
    records += [*map(_ended, (1, 2, 3, 4)), _accepted(5, {"protobuf": "body 5"})]
    with log.writer("service") as writer:
        for record in records:
            writer.append([Event(record, run=run_of(MODEL))]).result()
    return log


def test_bodies_come_in_the_order_of_operations(log: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of those that ended by one reading, which leaves out what lies before and behind them."""
    operations = fold_operations(log).operations.models[MODEL].operations
    readings: list[Any] = []
    real = Store.events_of

    def read(self: Store, kinds: Any, cut: Any = None, start: Any = None) -> Iterator[Event]:
        readings.append((start, cut))
        return real(self, kinds, cut, start)

    monkeypatch.setattr(Store, "events_of", read)
    asked = [operations[number] for number in (1, 2, 3, 5)]
    assert not any(operation.accepted.body for operation in asked[:-1])
    bodies = [accepted.body["protobuf"] for accepted in wholes(log, asked)]
    assert bodies == ["body 1", "body 2", "body 3", "body 5"]
    assert readings == [({"service": 3}, {"service": 8})]
    assert [*wholes(log, [])] == []
