"""What a launcher says of the agents it starts: recorded once, held against the log, and not for agents."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tests.fakes.engines.played import PlayedEngine
from tests.fakes.proxies.in_process import InProcess

from rollbook import store as rb
from rollbook.edge.keys import Key, Keys, Role, digest_of, trajectory_key
from rollbook.store import Event
from rollbook.store.cut import parse_cut
from rollbook.store.events import (
    LaunchEnded,
    LaunchLeaked,
    LaunchStarted,
    TrajectoryFinished,
    TrajectoryOpened,
)
from rollbook.store.secret import store_secret

START: dict[str, Any] = {
    "launch_id": "l-1",
    "rollout": "nightly",
    "place": {"epoch": 0, "task": "task-7", "sample": 2},
    "attempt": 1,
    "launcher": "subprocess",
    "isolation": {"level": "session", "files": False},
    "owner": "host-17",
    "clocks": {"start": 60, "total": 600.5},
}
END: dict[str, Any] = {
    "status": "agent_error",
    "why": "exit code 3",
    "exit_code": 3,
    "seconds": 12.5,
    "peak_rss_mb": 96,
    "output": {"stdout": {"path": "out/stdout.log", "bytes": 900, "kept": 512}},
    "scoring": {"exact": 0.5, "style": None, "judged": {"error": "no reply"}},
}
LEAKS: dict[str, Any] = {"processes": [{"pid": 4711, "command": "sleep 99"}], "found": "end"}
LAUNCHER = {"authorization": "Bearer the-launchers-key"}


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy with a writer's key."""
    key = Key("launching", Role.writer, digest_of("the-launchers-key"))
    return played(keys=Keys([key]))


@pytest.fixture
def name(proxy: InProcess, request: pytest.FixtureRequest) -> str:
    """A trajectory of the test's own, with a slash in its name."""
    trajectory = f"runs/{request.node.name}"
    assert proxy.ask("/v1/trajectories", {"id": trajectory}, headers=LAUNCHER).status == 201
    return trajectory


def _say(proxy: Any, name: str, rest: str, body: Any, headers: Any = LAUNCHER) -> tuple[int, Any]:
    reply = proxy.ask(f"/v1/trajectories/{name}/launches{rest}", body, headers=headers)
    assert reply.error is None
    return reply.status, reply.json


def _refused(proxy: Any, name: str, rest: str, body: Any) -> tuple[int, str, str]:
    status, reply = _say(proxy, name, rest, body)
    return status, reply["error"]["code"], reply["error"]["message"]


def _launch_records(proxy: Any, name: str) -> list[Any]:
    """The records of the trajectory's launches."""
    trajectory_id = proxy.trajectories()[name].opened.trajectory_id
    kinds = (LaunchStarted, LaunchEnded, LaunchLeaked)
    return [e.record for e in proxy.store.events_about([trajectory_id]) if isinstance(e.record, kinds)]


def test_a_launch_from_its_start_to_its_end(proxy: InProcess, name: str) -> None:
    """What was sent is in the log, and who sent it; after the trajectory's finish too."""
    trajectory_id = proxy.trajectories()[name].opened.trajectory_id
    status, details = _say(proxy, name, "", START)
    event_id = details.pop("event_id")
    assert (status, details) == (201, {"id": name, "trajectory_id": trajectory_id, "launch_id": "l-1"})
    assert _say(proxy, name, "/l-1/leaks", LEAKS)[0] == 201
    finished = proxy.ask(f"/v1/trajectories/{name}/finish", {"status": "failed"}, headers=LAUNCHER)
    assert finished.status == 200
    assert _say(proxy, name, "/l-1/end", END)[0] == 201
    clocks = {"start": 60.0, "idle": None, "total": 600.5, "scoring": None}
    isolation = {"level": "session", "files": False}
    details = ("nightly", START["place"], 1, "subprocess", isolation, "host-17", clocks, "launching")
    assert _launch_records(proxy, name) == [
        LaunchStarted(trajectory_id, "l-1", *details),
        LaunchLeaked(trajectory_id, "l-1", LEAKS["processes"], "end", "launching"),
        LaunchEnded(
            *(trajectory_id, "l-1", "agent_error", "exit code 3", 3, None, 12.5, None, 96.0),
            *(END["output"], END["scoring"], "launching"),
        ),
    ]
    assert any(event.event_id == event_id for event in proxy.store.events_of({LaunchStarted.KIND}))
    with rb.connect(proxy.store.path) as connection:
        query = "select launch_id, status, exit_code, leaked, sample from launches where trajectory = ?"
        assert connection.execute(query, [name]).fetchall() == [("l-1", "agent_error", 3, 1, 2)]


def test_how_far_rollouts_are(proxy: InProcess, name: str) -> None:
    """Each place with its last attempt, and the cut that this is of; of other rollouts there is nothing."""
    rollout = name.replace("/", ".")
    assert _say(proxy, name, "", START | {"rollout": rollout})[0] == 201
    progress = proxy.ask(f"/v1/rollouts/{rollout}", method="GET", headers=LAUNCHER).json
    place = {**START["place"], "attempt": 1, "launch_id": "l-1"}
    assert progress["places"] == {
        key: [value] for key, value in (place | {"status": None, "spared": 0}).items()
    }
    trajectory_id = proxy.trajectories()[name].opened.trajectory_id
    assert progress["orphans"] == [place | {"trajectory_id": trajectory_id, "finished": None}]
    assert parse_cut(progress["cut"]).items() <= proxy.store.head().items()
    assert _say(proxy, name, "/l-1/end", END)[0] == 201
    progress = proxy.ask(f"/v1/rollouts/{rollout}", method="GET", headers=LAUNCHER).json
    assert (progress["places"]["status"], progress["orphans"], progress["unlaunched"]) == (
        ["agent_error"],
        [],
        [],
    )
    progress = proxy.ask("/v1/rollouts/none", method="GET", headers=LAUNCHER).json
    assert not any((*progress["places"].values(), progress["orphans"], progress["unlaunched"]))


def test_the_log_is_read_only_of_what_was_not_opened_here(
    proxy: InProcess, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this route, that is: each thing is said once all the same."""
    read: list[Any] = []
    of_store = type(proxy.store).events_about

    def events_about(store: Any, ids: Any) -> Any:
        read.append(ids)
        return of_store(store, ids)

    monkeypatch.setattr(type(proxy.store), "events_about", events_about)
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert proxy.ask("/t/by-request/v1/chat/completions", body, headers=LAUNCHER).status == 200
    for trajectory, reads in ((name, 0), ("by-request", 4)):
        sent = [("", START), ("", START), ("/l-1/end", END), ("/l-1/end", END)]
        assert [_say(proxy, trajectory, *args)[0] for args in sent] == [201, 200, 201, 200]
        assert len(read) == reads
        read.clear()


def test_the_proxy_gives_an_id_where_none_is_sent(proxy: InProcess, name: str) -> None:
    """Another each time; it names the launch."""
    body = {k: v for k, v in START.items() if k not in ("launch_id", "clocks", "isolation")}
    (first, reply), (second, other) = (_say(proxy, name, "", body) for _ in range(2))
    assert (first, second) == (201, 201)
    assert reply["launch_id"] != other["launch_id"]
    assert _say(proxy, name, f"/{other['launch_id']}/end", {"status": "done"})[0] == 201
    assert [record.launch_id for record in _launch_records(proxy, name)] == [
        *(reply["launch_id"], other["launch_id"], other["launch_id"])
    ]
    assert _launch_records(proxy, name)[0].clocks == dict.fromkeys(("start", "idle", "total", "scoring"))


@pytest.mark.parametrize("at_once", [False, True])
def test_what_is_repeated_is_recorded_once(proxy: InProcess, name: str, at_once: bool) -> None:
    """One after the other and at the same time: 200, and the event that says so already."""
    for rest, body in (("", START), ("/l-1/end", END), ("/l-1/leaks", LEAKS)):
        path = f"/v1/trajectories/{name}/launches{rest}"
        if at_once:

            async def ask(path: str = path, body: Any = body) -> Any:
                exchanges = [proxy.exchange(path, body, headers=LAUNCHER) for _ in range(4)]
                return await asyncio.gather(*(exchange.end() for exchange in exchanges))

            replies = proxy.run(ask())
        else:
            replies = [proxy.ask(path, body, headers=LAUNCHER) for _ in range(3)]
        assert sorted(reply.status for reply in replies) == [*[200] * (len(replies) - 1), 201]
        assert len({reply.json["event_id"] for reply in replies}) == 1
    assert [type(record) for record in _launch_records(proxy, name)] == [
        LaunchStarted,
        LaunchEnded,
        LaunchLeaked,
    ]
    other = LEAKS | {"processes": [{"pid": 4712, "command": "sleep 99"}]}
    assert _say(proxy, name, "/l-1/leaks", other)[0] == 201


def test_what_does_not_fit_is_refused(proxy: InProcess, name: str) -> None:
    """Each with what it is about, what is wrong, and what to do; nothing is recorded of it."""
    where = f"launch 'l-1' of trajectory {name!r}"
    for rest, body in (("/l-1/end", END), ("/l-1/leaks", LEAKS)):
        assert _refused(proxy, name, rest, body) == (
            *(422, "unknown_launch"),
            f"{where} never started: say first that it did, by POST /v1/trajectories/{name}/launches",
        )
    _say(proxy, name, "", START)
    _say(proxy, name, "/l-1/end", END)
    assert _refused(proxy, name, "/l-1/end", END | {"status": "done"}) == (
        *(409, "launch_ended"),
        f"{where} has ended already, and in the log its status is 'agent_error': it ends once, so repeat "
        "that or nothing",
    )
    assert _refused(proxy, name, "/l-1/end", END | {"scoring": {}})[:2] == (409, "launch_ended")
    assert _refused(proxy, name, "", START | {"attempt": 2}) == (
        *(409, "launch_started"),
        f"{where} has started already, and in the log its attempt is 1: choose another launch_id, or "
        "leave it out",
    )
    for rest, body in (("", START), ("/l-1/end", END), ("/l-1/leaks", LEAKS)):
        assert _refused(proxy, f"{name}-none", rest, body)[:2] == (404, "unknown_trajectory")
    assert [type(record) for record in _launch_records(proxy, name)] == [LaunchStarted, LaunchEnded]


def test_another_trajectorys_launch_is_another(proxy: InProcess, name: str) -> None:
    """An id is unique in its trajectory alone."""
    proxy.ask("/v1/trajectories", {"id": f"{name}/2"}, headers=LAUNCHER)
    assert _say(proxy, name, "", START)[0] == 201
    assert _refused(proxy, f"{name}/2", "/l-1/end", END)[:2] == (422, "unknown_launch")
    assert _say(proxy, f"{name}/2", "", START | {"attempt": 7})[0] == 201


@pytest.mark.parametrize(
    ("rest", "body", "where"),
    [
        ("", {k: v for k, v in START.items() if k != "owner"}, "owner"),
        ("", START | {"launch_id": "a/b"}, "launch_id"),
        ("", START | {"launch_id": "a\n"}, "launch_id"),
        ("", START | {"attempt": 0}, "attempt"),
        ("", START | {"place": {"epoch": 0, "task": "t"}}, "place.sample"),
        ("", START | {"clocks": {"idle": -1}}, "clocks.idle"),
        ("", START | {"by": "me"}, "by"),
        ("/l-1/end", END | {"status": "running"}, "status"),
        ("/l-1/end", END | {"seconds": "long"}, "seconds"),
        ("/l-1/end", END | {"output": {"stdout": {"path": "x"}}}, "output.stdout.bytes"),
        ("/l-1/end", END | {"scoring": {"exact": [1]}}, "scoring.exact"),
        ("/l-1/leaks", LEAKS | {"processes": []}, "processes"),
        ("/l-1/leaks", LEAKS | {"found": "later"}, "found"),
    ],
)
def test_a_body_that_is_none(proxy: InProcess, rest: str, body: Any, where: str) -> None:
    """400, naming the field."""
    status, code, message = _refused(proxy, "any", rest, body)
    assert (status, code) == (400, "bad_request")
    assert message.startswith(where)


def test_secrets_are_not_recorded(proxy: InProcess, name: str) -> None:
    """Of a command line, of a reason; an id is none, and to repeat it is still to repeat it."""
    key = "sk-ant-api03-" + "a1B2" * 12
    launch_id = "AKIAIOSFODNN7EXAMPLE"
    assert _say(proxy, name, "", START | {"launch_id": launch_id})[1]["launch_id"] == launch_id
    leaks = {"processes": [{"pid": 1, "command": f"agent --api-key {key}"}], "found": "start"}
    end = END | {"why": f"refused: {key}"}
    for rest, body in (("leaks", leaks), ("end", end)):
        assert [_say(proxy, name, f"/{launch_id}/{rest}", body)[0] for _ in range(2)] == [201, 200]
    started, leaked, ended = _launch_records(proxy, name)
    assert started.launch_id == launch_id
    assert key not in repr((leaked, ended))
    assert "[secret:" in leaked.processes[0]["command"]
    assert "[secret:" in ended.why


def test_an_agent_cannot_speak_for_its_launcher(proxy: InProcess, name: str) -> None:
    """The key that it is given opens none of these routes, for its own trajectory neither."""
    assert _say(proxy, name, "", START)[0] == 201
    key = trajectory_key(name, "default", store_secret(proxy.store.path, "trajectory keys"))
    own = {"authorization": f"Bearer {key}"}
    for rest, body in (("", START | {"launch_id": "l-2"}), ("/l-1/end", END), ("/l-1/leaks", LEAKS)):
        status, reply = _say(proxy, name, rest, body, own)
        path = f"/v1/trajectories/{name}/launches{rest}"
        assert (status, reply["error"]["code"]) == (403, "other_trajectory")
        assert reply["error"]["message"] == (
            f"this API key is of one trajectory alone, and POST {path} is for: operator, writer"
        )
    assert len(_launch_records(proxy, name)) == 1


def test_of_what_retention_dropped_there_is_no_launch(
    proxy: InProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is known still, its events are not there."""
    name, body = "dropped", {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    assert proxy.ask(f"/t/{name}/v1/chat/completions", body, headers=LAUNCHER).status == 200
    with monkeypatch.context() as patch:
        patch.setattr(rb.Store, "events_about", lambda *_: [])
        assert _refused(proxy, name, "", START)[:2] == (404, "trajectory_dropped")
    assert _launch_records(proxy, name) == []


def test_another_proxys_trajectory(proxy: Any, chat: Any, tmp_path: Path) -> None:
    """One that another proxy still writes, or has finished; its launch goes to this one's lane."""
    log = rb.open(tmp_path / "store", create=True)
    with log.writer("elsewhere") as writer:
        opened = [TrajectoryOpened(name, f"name-{name}") for name in ("open", "ended")]
        records: list[Any] = [*opened, TrajectoryFinished("ended")]
        writer.append([Event(record, "default") for record in records]).result(30)
        here = type(proxy)(log.path, PlayedEngine(chat()), chat())
        try:
            for name in ("open", "ended"):
                assert _say(here, f"name-{name}", "", START)[0] == 201
                assert _say(here, f"name-{name}", "/l-1/end", END)[0] == 201
                assert _say(here, f"name-{name}", "/l-1/end", END)[0] == 200
        finally:
            here.close()
    with rb.connect(log.path) as connection:
        rows = connection.execute("select trajectory, status, lane from launches order by 1").fetchall()
    assert rows == [("name-ended", "agent_error", "serve"), ("name-open", "agent_error", "serve")]
