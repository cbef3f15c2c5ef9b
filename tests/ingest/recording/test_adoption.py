"""A proxy goes on with the conversations of one that was killed, in a lane of its own."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.ingest.fields import OpenTrajectory
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import RequestError
from rollbook.store.events import TrajectoryAdopted, TurnRequested
from rollbook.store.fold.trajectory import Trajectory, fold


def _say(url: str, name: str, messages: list[Any]) -> tuple[str, list[Any]]:
    """One turn: its id, and the messages with the reply."""
    client = openai.OpenAI(base_url=f"{url}/t/{name}/v1", api_key="none", max_retries=0)
    reply = client.chat.completions.create(model="m", messages=messages)
    message = {"role": "assistant", "content": reply.choices[0].message.content}
    return reply.id.removeprefix("chatcmpl-"), [*messages, message]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _trajectory(path: Path, name: str) -> Trajectory:
    log = store.open(path)
    orders = [list(log.events()), sorted(log.events(), key=lambda e: e.lane, reverse=True)]
    trajectory, other = ({t.opened.name: t for t in fold(events).values()}[name] for events in orders)
    assert list(trajectory.turns) == list(other.turns)
    return trajectory


@pytest.mark.crashes
def test_conversations_survive_the_death_of_their_proxy(
    serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path
) -> None:
    """kill -9 amid a turn; a proxy of another lane goes on: tokens fold exactly, and there is no new root.
    When that one is killed too, the first lane takes the conversation back."""
    common = ["--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"]
    first = serve(*common, "--lane", "serve")
    turns: list[str] = []
    turn, messages = _say(first.url, "a", [_user("one")])
    turns.append(turn)
    httpx.post(f"{first.url}/v1/trajectories", json={"id": "quiet"}).raise_for_status()
    _say(first.url, "done", [_user("bye")])
    httpx.post(f"{first.url}/v1/trajectories/done/finish", json={"reward": 1.0}).raise_for_status()
    asking = [*messages, _user("sleep 30")]

    def ask_in_vain() -> None:
        with pytest.raises(openai.APIError):
            _say(first.url, "a", asking)

    cut_off = threading.Thread(target=ask_in_vain)
    cut_off.start()
    log = store.open(first.path)
    while not any(isinstance(e.record, TurnRequested) and e.record.parent_turn_id for e in log.events()):
        time.sleep(0.02)
    first.kill()
    cut_off.join()

    # Sorted before, and after, the lane that it adopts from.
    second = type(first)(first.path, [*common, "--lane", "early"])
    assert "adopted 2 open trajectories of lane serve" in second.log.read_text()
    for text in ("two", "three"):
        turn, messages = _say(second.url, "a", [*messages, _user(text)])
        turns.append(turn)
    assert httpx.post(f"{second.url}/v1/trajectories/done/finish", json={}).status_code == 409
    second.kill()

    third = type(first)(first.path, [*common, "--lane", "serve"])
    turn, messages = _say(third.url, "a", [*messages, _user("four")])
    turns.append(turn)
    body = {"reward": 1.0, "turn_rewards": [0.1, 0.2, 0.3, 0.4]}
    httpx.post(f"{third.url}/v1/trajectories/a/finish", json=body).raise_for_status()
    third.stop()

    trajectory = _trajectory(first.path, "a")
    done = [t for t in trajectory.turns.values() if t.completed]
    assert [t.turn_id for t in done] == turns
    assert [t.requested.parent_turn_id for t in done] == [None, *turns[:-1]]
    assert [t.requested.root_reason for t in done[1:]] == [None] * 3
    assert [path[-1].turn_id for path in trajectory.paths()] == [turns[-1]]
    assert trajectory.messages(done[-1]) == messages[:-1]
    assert all(trajectory.prompt_ids(t).size == t.completed.prompt_length for t in done if t.completed)
    assert [trajectory.reward(turn_id=turn_id) for turn_id in turns] == [0.1, 0.2, 0.3, 0.4]
    pending = [t for t in trajectory.turns.values() if not t.completed]
    assert [(t.position, t.requested.parent_turn_id) for t in pending] == [(1, turns[0])]

    _check_adoptions(log, trajectory.opened.trajectory_id)


def _check_adoptions(log: store.Store, trajectory_id: str) -> None:
    events = list(log.events())
    adoptions = [e for e in events if isinstance(e.record, TrajectoryAdopted)]
    of_a = [e for e in adoptions if e.record.trajectory_id == trajectory_id]
    assert [(e.lane, e.record.from_lane) for e in of_a] == [("early", "serve"), ("serve", "early")]
    for adoption in of_a:
        record = adoption.record
        assert isinstance(record, TrajectoryAdopted)
        mine = [e for e in events if getattr(e.record, "trajectory_id", None) == record.trajectory_id]
        later = [e.seq for e in mine if e.lane == adoption.lane and e.seq > adoption.seq]
        assert later  # it comes before anything else that its lane writes of it
        [last] = [e for e in mine if e.event_id == record.last_event_id]
        assert last.lane == record.from_lane


def test_a_lane_whose_process_lives_is_left_alone(
    tmp_path: Path, chat: Callable[[str], ChatTokenizer]
) -> None:
    """Its trajectories are 409 to others until it is gone; then the next proxy adopts them, once."""
    log = store.open(tmp_path / "store", create=True)
    living = Recorder(log, "one", "default")
    live = living.draft(OpenTrajectory(id="x"))
    living.record_opening(live)
    living.close()
    living = Recorder(log, "one", "default")
    assert living.adopted == {}
    other = Recorder(log, "two", "default")
    assert other.adopted == {}
    with pytest.raises(RequestError, match=r"written by the proxy of lane 'one'"):
        other.find("x")
    other.close()
    living.close()
    elsewhere = Recorder(log, "two", "another-run")
    assert (elsewhere.adopted, elsewhere.find("x")) == ({}, None)
    elsewhere.close()
    for expected in ({"one": 1}, {}):
        other = Recorder(log, "two", "default")
        assert other.adopted == expected
        trajectory = other.find("x")
        assert trajectory is not None
        assert (trajectory.lane, trajectory.opened) == ("two", live.opened)
        other.close()
    assert [e.kind for e in log.events() if e.lane == "two"] == ["trajectory.adopted"]


def test_what_was_whole_but_not_acknowledged_is_adopted_too(
    tmp_path: Path, chat: Callable[[str], ChatTokenizer]
) -> None:
    """Frames behind the dead lane's watermark are recovered before the adoption names its last event."""
    log = store.open(tmp_path / "store", create=True)
    recorder = Recorder(log, "one", "default")
    live = recorder.draft(OpenTrajectory(id="x"))
    recorder.record_opening(live)
    mark = log.path / "lanes" / "one" / "WATERMARK"
    assert recorder._last is not None
    recorder._last.result(30)
    before = mark.read_bytes()
    recorder.mark_delivered(live, "u1", "sent")
    recorder.close()
    mark.write_bytes(before)
    assert log.head() == {"one": 1}
    other = Recorder(log, "two", "default")
    other.close()
    assert log.head() == {"one": 2, "two": 1}
    [adoption] = [e.record for e in log.events() if isinstance(e.record, TrajectoryAdopted)]
    [delivered] = [e for e in log.events() if e.kind == "turn.delivered"]
    assert (adoption.from_lane, adoption.last_event_id) == ("one", delivered.event_id)


def test_an_opening_that_was_not_acknowledged_keeps_its_name(tmp_path: Path) -> None:
    """A proxy was killed between its write and the watermark: no other one opens the name a second time."""
    log = store.open(tmp_path / "store", create=True)
    recorder = Recorder(log, "one", "default")
    mark = log.path / "lanes" / "one" / "WATERMARK"
    before = mark.read_bytes()
    live = recorder.draft(OpenTrajectory(id="x"))
    recorder.record_opening(live)
    recorder.close()
    mark.write_bytes(before)
    assert log.head() == {}
    other = Recorder(log, "two", "default")
    assert other.adopted == {"one": 1}
    with pytest.raises(RequestError, match="trajectory 'x' exists"):
        other.draft(OpenTrajectory(id="x"))
    other.close()
    assert [(e.lane, e.kind) for e in log.events()] == [
        ("one", "trajectory.opened"),
        ("two", "trajectory.adopted"),
    ]
