"""What one client sends decides nothing of another's, and a reply rests on what is in the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from rollbook import store
from rollbook.ingest.recording import turn_records
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.trajectories import identity
from rollbook.store.errors import UnstorableError
from rollbook.store.events import LabelAdded, TurnFailed
from rollbook.store.fold.trajectory import fold
from rollbook.store.upkeep.verify import incomplete_turns

USER = {"role": "user", "content": "go"}
DEEP = "[" * 300 + "]" * 300
LABELS = {"x-rollbook-labels": '{"deep": ' + DEEP + "}"}


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.fixture
def proxy(played: Callable[..., Any]) -> Any:
    """A proxy whose engine says Hello."""
    return played()


def _post(proxy: Any, name: str, **options: Any) -> Any:
    return proxy.client.post(f"/t/{name}/v1/chat/completions", json={"messages": [USER]}, **options)


def _beside(proxy: Any, honest: int, **hostile: Any) -> tuple[list[int], list[int]]:
    """(statuses of honest clients' requests, of a hostile client's among them), all sent at once."""

    async def all_at_once() -> list[Any]:
        sent = []
        for i in range(honest):
            sent += [_post(proxy, f"honest-{i}"), _post(proxy, "hostile", **hostile)]
        return await asyncio.gather(*sent)

    replies = proxy.run(all_at_once())
    return [r.status_code for r in replies[::2]], [r.status_code for r in replies[1::2]]


def _answered(proxy: Any, names: list[str]) -> bool:
    trajectories = proxy.trajectories()
    return all(t.completed is not None for name in names for t in trajectories[name].turns.values()) and all(
        len(trajectories[name].turns) == 1 for name in names
    )


def test_labels_that_cannot_be_recorded_are_refused_and_harm_nobody(proxy: Any) -> None:
    """A header nested 300 deep is a 400, also of a first request; all others are answered and recorded."""
    honest, hostile = _beside(proxy, 8, headers=LABELS)
    assert (set(honest), set(hostile)) == ({200}, {400})
    assert _answered(proxy, [f"honest-{i}" for i in range(8)])
    assert "hostile" not in proxy.trajectories()
    assert _post_status(proxy, "hostile") == 200  # the name is free


def _post_status(proxy: Any, name: str) -> int:
    return int(proxy.run(_post(proxy, name)).status_code)


def test_what_no_check_foresaw_is_refused_alone(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a request gets to the log and has no stored form, its own client alone is told, by a 400."""
    monkeypatch.setattr(identity, "check_recordable", lambda *_: None)
    honest, hostile = _beside(proxy, 8, headers=LABELS)
    assert (set(honest), set(hostile)) == ({200}, {400})
    assert _answered(proxy, [f"honest-{i}" for i in range(8)])
    assert "hostile" not in proxy.trajectories()
    assert _post_status(proxy, "hostile") == 200
    finished = proxy.post("/v1/trajectories/hostile/finish", json={"reward": 1.0})
    assert finished.status_code == 200
    lines = proxy.run(proxy.client.get("/metrics")).text.splitlines()
    assert float(next(x for x in lines if x.startswith("rollbook_lost_events_total")).split()[1]) >= 1
    assert list(incomplete_turns(proxy.store)) == []


def test_a_request_that_is_not_stored_is_not_answered(proxy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a trajectory that is open: the turn is in no tree, the next one goes on from what is in the log."""
    assert _post_status(proxy, "t") == 200
    monkeypatch.setattr(turn_records, "check_recordable", lambda *_: None)
    monkeypatch.setattr("rollbook.ingest.fields.check_depth", lambda *_, **__: None)
    body = f'{{"messages": [{{"role": "user", "content": "go"}}], "metadata": {{"deep": {DEEP}}}}}'
    refused = proxy.post("/t/t/v1/chat/completions", content=body)
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "not_recordable")
    [turn] = proxy.trajectories()["t"].turns.values()
    assert turn.completed is not None
    reply = proxy.chat("t", USER, {"role": "assistant", "content": "Hello"}, USER)
    assert reply.status_code == 200
    assert list(incomplete_turns(proxy.store)) == []


def test_labels_of_an_open_trajectory_belong_to_the_reply(
    proxy: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A reply that says 200 says that the labels of its request are in the log too."""
    assert _post_status(proxy, "t") == 200
    monkeypatch.setattr(identity, "check_recordable", lambda *_: None)
    assert proxy.run(_post(proxy, "t", headers=LABELS)).status_code == 400


def test_notes_of_several_clients_are_appends_of_their_own(tmp_path: Path) -> None:
    """One that has no stored form is refused; those before and behind it are durable."""
    recorder = Recorder(store.open(tmp_path / "store", create=True), "serve", "r")
    lost: list[int] = []
    recorder.on_lost = lost.append

    async def note() -> list[Any]:
        notes = [recorder.note(TurnFailed("t", f"u{i}", "x")) for i in range(3)]
        notes.insert(
            1, recorder.note(LabelAdded("t", None, "deep", _nested(300)), LabelAdded("t", None, "a", 1))
        )
        await recorder.settle()
        return [note.exception() for note in notes]

    errors = asyncio.run(note())
    recorder.close()
    assert [type(error) for error in errors] == [type(None), UnstorableError, type(None), type(None)]
    assert lost == [2]
    kinds = [event.kind for event in store.open(tmp_path / "store").events()]
    assert kinds == ["turn.failed"] * 3


def test_a_request_for_many_completions_is_stored_once(proxy: Any) -> None:
    """The siblings say what differs; folded and in SQL each of them has asked all of it."""
    fields = {f"field-{i}": "x" * 50 for i in range(400)}
    size = sum(p.stat().st_size for p in proxy.store.path.rglob("*.wal"))
    body = {"messages": [USER], "n": 128, "seed": 7, "metadata": fields} | fields
    assert proxy.post("/t/many/v1/chat/completions", json=body).status_code == 200
    proxy.settled()
    grown = sum(p.stat().st_size for p in proxy.store.path.rglob("*.wal")) - size
    assert grown < 1.5 * len(orjson.dumps(body)) + 128 * 2048  # the request once; each turn's own part
    turns = list(proxy.trajectories()["many"].turns.values())
    assert [turn.requested.sampling["seed"] for turn in turns] == list(range(7, 135))
    assert [turn.requested.wire.get("choice", 0) for turn in turns] == list(range(128))
    request = {key: value for key, value in body.items() if key != "messages"}
    assert all(turn.requested.request == request for turn in turns)
    assert len({orjson.dumps(turn.requested.honoured) for turn in turns}) == 1
    with store.connect(proxy.store.path) as connection:
        rows = connection.execute(
            "SELECT choice, endpoint, CAST(sampling->'seed' AS BIGINT), request->>'seed', new_messages "
            "FROM turns WHERE trajectory = 'many' ORDER BY choice"
        ).fetchall()
    assert [row[:4] for row in rows] == [(i, "/v1/chat/completions", 7 + i, "7") for i in range(128)]
    assert [orjson.loads(row[4]) for row in rows] == [[USER]] + [[]] * 127


def test_a_retry_on_another_engine_stores_the_request_once(desk: Callable[..., Any]) -> None:
    """A turn asked again elsewhere is a sibling of the request's first one; it is whole when it is read."""
    from rollbook.store.errors import EngineLostError

    failed: list[Any] = []

    def answers(messages: Any, tools: Any) -> Any:
        if not failed:
            failed.append(messages)
            raise EngineLostError("gone")
        return "done"

    d = desk(answers)
    answered = d.take([USER], extra={"large": "y" * 1000})
    turn = d.turn(answered)
    assert turn.requested.request["extra"] == {"large": "y" * 1000}
    stored = [e.record for e in d.store.events() if e.kind == "turn.requested"]
    assert [record.sibling_of for record in stored] == [None, stored[0].turn_id]
    assert (stored[1].request, stored[1].wire) == ({}, {"instead_of": stored[0].turn_id})
    assert [t.failed is not None for t in fold(d.store.events())[turn.requested.trajectory_id].turns.values()]
