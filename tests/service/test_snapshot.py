"""The fold as a file: whoever goes on from it has what whoever folds the log has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from rollbook import store as rb
from rollbook.service.journal import Journal
from rollbook.store import Event, Store
from rollbook.store.errors import RequestError
from rollbook.store.events import (
    LaneOrdered,
    OperationAccepted,
    OperationEnded,
    SamplerOpened,
    SessionEnded,
    SessionOpened,
    WeightsChanged,
    WeightsCopied,
    WeightsFreed,
)
from rollbook.train.tenants import operations as tenants
from rollbook.train.tenants import snapshot
from rollbook.train.tenants.history import Folded, fold_operations
from rollbook.train.tenants.operations import Operations, path_of, request_id_of
from rollbook.train.tenants.snapshot import FILE, read_snapshot, write_snapshot

MODEL, COPY, SAMPLER = "s1:train:0", "s2:train:0", "s1:sample:0"
STATE, COPIED = path_of(MODEL, "weights", "a"), path_of(COPY, "weights", "a")
MADE = {"lora": {"rank": 4}, "seed": 3}
PASS = {"loss": "ppo", "tokens": 9, "targets": 3, "turns": [None], "versions": [], "rewards": {"q1": 0.5}}


def _accepted(number: int, operation: str, of: str = MODEL, **settings: Any) -> OperationAccepted:
    body = {"protobuf": "abcd"}
    return OperationAccepted(request_id_of(of, number), of, number, operation, body, f"d{number}", settings)


def _ended(number: int, name: str = MODEL, checkpoint: str | None = None, **digests: Any) -> OperationEnded:
    return OperationEnded(request_id_of(name, number), name, number, {}, None, digests, checkpoint)


def _sample(number: int) -> list[Any]:
    accepted = _accepted(number, "sample", SAMPLER, sequence_ids=[f"q{number}"])
    return [accepted, _ended(number, SAMPLER, sequences=[f"k{number}"])]


STORY: list[Any] = [
    SessionOpened("s1", "once", {"tags": []}, "alice"),
    SessionOpened("s2", None, {}, None),
    SamplerOpened(SAMPLER, "s1", "tiny", None, None, 2, "d", None),
    _accepted(0, "create_model", **MADE),
    *_sample(0),
    _ended(0, adapter="a", optimizer="b"),
    *_sample(1),
    _accepted(1, "forward_backward", **PASS),
    _accepted(2, "optim_step", learning_rate=0.1),
    _ended(1, gradients="c"),
    LaneOrdered(1),
    _ended(2, checkpoint="checkpoints/2", adapter="e", optimizer="f"),
    _accepted(3, "save_weights", kind="weights", name="a", overwrite=False),
    _ended(3, checkpoint="checkpoints/3", adapter="e"),
    WeightsChanged(MODEL, STATE, "checkpoints/3", "published", None, "alice"),
    WeightsCopied(
        *(COPY, COPIED, STATE, MODEL, 3, 1, "checkpoints/3", {"adapter": "e"}, None, None, "key", "bob")
    ),
    *_sample(2),
    *_sample(5),
    _accepted(4, "forward_backward", **PASS),
    _accepted(6, "optim_step", learning_rate=0.1),
    _ended(4, gradients="g"),
    WeightsChanged(MODEL, STATE, "checkpoints/3", "deleted"),
    WeightsChanged(COPY, COPIED, "checkpoints/3", "expired"),
    WeightsFreed(MODEL, 3, "checkpoints/3", 9),
    _accepted(3, "sample", SAMPLER, sequence_ids=["q3"]),
    *_sample(6),
    _accepted(5, "forward", **PASS),
    SessionEnded("s2", {"reason": {"type": "success"}}),
    LaneOrdered(2),
    *_sample(7),
]


@pytest.fixture(autouse=True)
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few ended samples are known without the log."""
    monkeypatch.setattr(tenants, "MOST_SAMPLED", 3)


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Store]:
    """The story in a lane."""
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("service") as writer:
        for record in STORY:
            writer.append([Event(record, "r")]).result()
    return log


def plain(folded: Folded) -> Any:
    """All that a fold knows, to be compared."""
    known = {f.name: getattr(folded.operations, f.name) for f in fields(Operations)}
    known |= {"origins": folded.operations.origins.rows(), "sequences": +known["sequences"]}
    models = [[*model.operations] for model in folded.operations.models.values()]
    return known, models, [*known["samplers"]], folded.cut, folded.positions


@pytest.mark.parametrize("end", range(1, len(STORY) + 1))
def test_it_goes_on_from_any_event(log: Store, end: int) -> None:
    """As if everything had been folded; what waits has its body."""
    write_snapshot(log, fold_operations(log, {"service": end}))
    read = read_snapshot(log)
    assert read.cut == {"service": end}
    assert plain(read) == plain(fold_operations(log, {"service": end}))
    assert plain(fold_operations(log, None, read)) == plain(fold_operations(log))


def test_the_end_of_the_story(log: Store) -> None:
    """Four samples are known to the log alone, three without it, and one waits."""
    operations = fold_operations(log).operations
    assert [*operations.sampled] == [request_id_of(SAMPLER, number) for number in (5, 6, 7)]
    assert (operations.older, [*operations.sampling]) == ({SAMPLER: 2}, [request_id_of(SAMPLER, 3)])
    assert operations.sampling[request_id_of(SAMPLER, 3)].accepted.body == {"protobuf": "abcd"}


def _damage(log: Store) -> None:
    file = log.path / FILE
    file.write_bytes(file.read_bytes().replace(b'"alice"', b'"mallo"'))


def _other_release(log: Store) -> None:
    snapshot_release, snapshot._RELEASE = snapshot._RELEASE, "other"
    write_snapshot(log, fold_operations(log))
    snapshot._RELEASE = snapshot_release


def _of_another_log(log: Store) -> None:
    other = rb.open(log.path.parent / "other", create=True)
    with other.writer("service") as writer:
        writer.append([Event(record, "r") for record in STORY]).result()
    write_snapshot(other, fold_operations(other))
    (log.path / FILE).write_bytes((other.path / FILE).read_bytes())


def _longer(log: Store) -> None:
    folded = fold_operations(log)
    with log.writer("service") as writer:
        writer.append([Event(STORY[0], "r")]).result()
    write_snapshot(log, fold_operations(log))
    longer = (log.path / FILE).read_bytes()
    assert folded.cut != fold_operations(log).cut
    (log.path / FILE).write_bytes(longer[:-30])


@pytest.mark.parametrize("spoil", [_damage, _other_release, _of_another_log, _longer])
def test_one_that_cannot_be_used_is_not(log: Store, spoil: Any) -> None:
    """Then everything is folded anew."""
    write_snapshot(log, fold_operations(log))
    assert read_snapshot(log).cut == {"service": len(STORY)}
    spoil(log)
    assert read_snapshot(log).cut == {}


def test_a_service_goes_on_from_its_own(log: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which it writes at its end, and after so many events."""
    monkeypatch.setattr("rollbook.service.journal.SNAPSHOT_LEAST", 1)
    monkeypatch.setattr("rollbook.service.journal.SNAPSHOT_EVENTS", 3)
    with log.writer("service") as writer:
        journal = Journal(log, writer)
        for number in range(8, 14):
            journal.open([Event(record, "r") for record in _sample(number)])
        assert read_snapshot(log).cut["service"] > len(STORY)
        journal.close()
    before = plain(journal._folded)
    assert plain(read_snapshot(log)) == before
    with log.writer("service") as writer:
        journal = Journal(log, writer)
        assert plain(journal._folded) == plain(fold_operations(log))
        assert plain(journal._folded)[0] == before[0]
        journal.close()


def test_requests_that_ended_long_ago_are_answered_from_the_log(log: Store) -> None:
    """Again and with their results; another body is refused, another caller finds nothing."""
    with log.writer("service") as writer:
        journal = Journal(log, writer)
        request_id = request_id_of(SAMPLER, 1)

        async def ask() -> tuple[Any, Any]:
            older = await journal.older(request_id)
            return older, await journal.result(request_id, "alice")

        older, ended = asyncio.run(ask())
        assert (older.accepted.resolved, ended.number) == ({"sequence_ids": ["q1"]}, 1)
        assert asyncio.run(journal.older(request_id_of(SAMPLER, 4))) is None
        for name, caller in ((request_id, "bob"), (request_id_of(SAMPLER, 4), "alice")):
            with pytest.raises(RequestError, match="is not there"):
                asyncio.run(journal.request(name, caller))
        journal.close()
