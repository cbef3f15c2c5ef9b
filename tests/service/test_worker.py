"""Where the log cannot be written, what an operation did is kept, and told once it is durable."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest

from rollbook import store as rb
from rollbook.service.journal import Journal
from rollbook.service.worker import Worker
from rollbook.store import Event
from rollbook.store.errors import WriteFailedError
from rollbook.store.events import OperationAccepted, OperationEnded, SessionOpened
from rollbook.store.log.writer import LaneWriter
from rollbook.train.tenants.model import ClientModel
from rollbook.train.tenants.operations import request_id_of

MODEL = "s1:train:0"


class FullDisk:
    """A writer of a lane whose first appends fail."""

    lane = "service"

    def __init__(self, failures: int) -> None:
        self.failures, self.tries = failures, list[Event]()

    def append(self, events: Sequence[Event]) -> Future[int]:
        """Note the event, and fail for a while."""
        self.tries += events
        future = Future[int]()
        if len(self.tries) <= self.failures:
            future.set_exception(WriteFailedError("no space left"))
        else:
            future.set_result(len(self.tries))
        return future


class Untouched:
    """A model to which nothing is done."""

    def digests(self, *parts: str) -> dict[str, str]:
        """Any."""
        return dict.fromkeys(parts, "d")


def test_an_end_waits_for_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the same event each time, and its model's next operation waits until it is written."""
    monkeypatch.setattr("rollbook.service.journal.AGAIN_S", 0.0)
    log, writer = rb.open(tmp_path, create=True), FullDisk(3)
    journal = Journal(log, cast(LaneWriter, writer))
    named = [(request_id_of(MODEL, number), MODEL, number) for number in (0, 1)]
    refused = OperationAccepted(*named[1], "optim_step", {}, "d", {"refused": "no such key"})
    made = OperationAccepted(*named[0], "create_model", {}, "d", {})
    for record in (SessionOpened("s1", None, {}), made, OperationEnded(*named[0], {}, None, {}), refused):
        journal.operations.add(record)
    anything = cast(Any, None)
    journal.metrics.accepted(refused)
    worker = Worker(journal, anything, 4)
    worker._models[MODEL] = cast(ClientModel, Untouched())
    model = journal.operations.models[MODEL]
    assert model.next is not None
    worker._do(model, model.next)
    assert len({event.event_id for event in writer.tries}) == 1 < len(writer.tries) == 4
    ended = writer.tries[-1].record
    assert isinstance(ended, OperationEnded)
    assert ended.error == {"category": "user", "error": "no such key"}
    assert (model.done, model.next) == (2, None)
