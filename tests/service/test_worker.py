"""Where the log cannot be written, what an operation did is kept, and told once it is durable."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, cast

import pytest
from tests.fakes.clients.raw_tinker import good, pass_of
from tests.fakes.stories import fabric

from rollbook import store as rb
from rollbook.service import worker as module
from rollbook.service.config import ServiceConfig
from rollbook.service.journal import Journal
from rollbook.service.requests import Adam
from rollbook.service.serve import _journal
from rollbook.service.worker import Worker
from rollbook.store import Event
from rollbook.store.errors import ConfigError, WriteFailedError
from rollbook.store.events import OperationAccepted, OperationEnded, SessionOpened
from rollbook.store.log.writer import LaneWriter
from rollbook.train.tenants.base import load_base
from rollbook.train.tenants.bodies import stored_body
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
    worker._models[MODEL], worker._behind[MODEL] = cast(ClientModel, Untouched()), 0
    model = journal.operations.models[MODEL]
    assert model.next is not None
    worker._do(model, model.next)
    assert len({event.event_id for event in writer.tries}) == 1 < len(writer.tries) == 4
    ended = writer.tries[-1].record
    assert isinstance(ended, OperationEnded)
    assert ended.error == {"category": "user", "error": "no such key"}
    assert (model.done, model.next) == (2, None)


def _asked() -> Iterator[OperationAccepted]:
    """A model, and three steps of it; its weights are saved."""
    passed = stored_body("protobuf", pass_of(MODEL, 1, good()))
    keys = {"loss": "cross_entropy", "keys": {}, "tokens": 12, "targets": 4, "turns": [None]}
    adam = Adam(learning_rate=0.1).resolved()
    lora = {"rank": 2, "targets": ["q_proj"]}
    rounds = [("forward_backward", passed, keys | {"versions": [], "rewards": {}}), ("optim_step", {}, adam)]
    saved = {"kind": "weights", "name": "a", "overwrite": False}
    what = [
        ("create_model", {}, {"base_model": "tiny", "lora": lora, "seed": 1}),
        *rounds * 3,
        ("save_weights", {}, saved),
    ]
    for number, (operation, body, settings) in enumerate(what):
        named = request_id_of(MODEL, number), MODEL, number
        yield OperationAccepted(*named, operation, body, f"d{number}", settings)


@pytest.mark.parametrize("most", [1, 4])
def test_a_model_that_another_worker_went_on_with(tmp_path: Path, most: int) -> None:
    """Is taken up where that left it, also where an older state of it is in memory."""
    base = load_base("tiny", fabric.model_folder(), device="cpu", dtype="float32", threads=1, recompute=False)
    digests = []
    for name, turns in (("alone", "aaaaaaaa"), ("in turns", "aabbaaba")):
        log = rb.open(tmp_path / name, create=True)
        with log.writer("service") as writer:
            journal = Journal(log, writer)
            journal.open([Event(SessionOpened("s1", None, {}), "service")])
            workers = {turn: Worker(journal, {"tiny": base}, most) for turn in "ab"}
            for accepted in _asked():
                journal.open([Event(accepted, "r")])
            model = journal.operations.models[MODEL]
            for turn in turns:
                assert model.next is not None
                workers[turn]._do(model, model.next)
            ends = [operation.ended for operation in model.operations.values()]
            digests.append([end.digests for end in ends if end is not None and end.error is None])
            journal.close()
    assert digests[0] == digests[1]
    assert len(digests[0]) == 8


def test_whole_models_are_in_memory_one_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before one is made or comes back, the weights of the one before it are gone; an adapter stays."""
    log, names = rb.open(tmp_path, create=True), [f"s1:train:{at}" for at in range(3)]
    journal = Journal(log, cast(LaneWriter, FullDisk(0)))
    journal.operations.add(SessionOpened("s1", None, {}))
    lora = {"rank": 1, "targets": ["q_proj"]}
    for name, adapts in zip(names, (None, None, lora), strict=True):
        for number, what in enumerate(("create_model", "save_weights")):
            settings = {
                "base_model": "tiny",
                "lora": adapts,
                "seed": 0,
                "kind": "weights",
                "name": "a",
                "overwrite": False,
            }
            accepted = OperationAccepted(request_id_of(name, number), name, number, what, {}, "d", settings)
            journal.metrics.accepted(accepted)
            journal.operations.add(accepted)
    base = load_base("tiny", fabric.model_folder(), device="cpu", dtype="float32", threads=1, recompute=False)
    worker, made = Worker(journal, {"tiny": base}, 4, 1), list[weakref.ref[Any]]()
    alive = list[int]()

    def noted(*what: Any) -> ClientModel:
        alive.append(sum(model() is not None for model in made))
        here = module_made(*what)
        if here.lora is None:
            made.append(weakref.ref(here._policy._parts.module.embedding.word_embeddings.weight))
        return here

    module_made = module.made
    monkeypatch.setattr(module, "made", noted)
    models = [journal.operations.models[name] for name in names]
    digests = []
    for model in (models[0], models[2], models[1], models[2], models[0], models[1]):
        assert model.next is not None
        worker._do(model, model.next)
        ended = model.operations[model.done - 1].ended
        assert ended is not None
        assert ended.error is None
        digests.append(ended.digests)
    assert alive == [0, 1, 0, 0, 0]
    assert [*worker._models] == [names[2], names[1]]
    assert digests[4] == digests[0] == digests[2] == digests[5]


def test_processes_that_share_a_folder_do_not_go_with_a_medium(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has a folder of its own there: the error says what goes."""
    monkeypatch.setenv("ROLLBOOK_ALLOW", str(tmp_path))
    log = rb.open(tmp_path / "store", create=True)
    (log.path / "store.toml").write_text(f'[medium]\nurl = "file://{tmp_path}/medium"\n')
    log = rb.open(log.path)
    config = ServiceConfig(base=str(tmp_path / "model"), name="m", shared=True)
    with (
        pytest.raises(ConfigError, match="processes of a service share one folder"),
        _journal(config, log, True, ()),
    ):
        pass
