"""The tail and the cursors over HTTP: what a remote reader gets is what a local one reads."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import orjson
import pyarrow as pa
import pytest
import uvicorn
from tests.fakes.proxies.served import Served
from tests.fakes.proxies.settings import proxy_parts
from typer.testing import CliRunner

from rollbook import store as rb
from rollbook.cli.app import app as command
from rollbook.client.tail import HttpTail
from rollbook.edge.server_sent_events import Message, read_messages
from rollbook.engines.scripted import ScriptedEngine
from rollbook.ingest.recording.recorder import Recorder
from rollbook.ingest.recording.runner import TurnRunner
from rollbook.ingest.replies.choose import FAMILIES
from rollbook.ingest.replies.json_calls import HERMES
from rollbook.ingest.replies.written import ReplyWriter
from rollbook.ingest.routes import event_feed
from rollbook.ingest.serve.proxy import build_app
from rollbook.ingest.tokens.bridge import Bridges
from rollbook.store import Event, Store, format_cut, parse_cut
from rollbook.store.errors import CutError, RequestError, StoreError
from rollbook.store.events import CursorMoved, StepPlanned, TurnCompleted, TurnFailed, TurnRequested
from rollbook.store.events.codec import as_json, decode, from_json
from rollbook.store.wal.files import FENCED, lane_folder
from rollbook.testing.asgi import free_port


@pytest.fixture(scope="module")
def arguments(text_model: Callable[[str], Path], script: Path) -> list[str]:
    """What a served script is started with."""
    return ["--model", str(text_model("chatml")), "--engine", "scripted", "--script", f"{script}:answer"]


@pytest.fixture(scope="module")
def server(
    serve: Callable[..., Served], arguments: list[str], story: dict[str, list[Event]], upkeep: list[Event]
) -> Served:
    """A server whose store holds the story in lanes of others, odd floats and a large request."""
    served = serve(*arguments)
    log = rb.open(served.path)
    for lane, events in (story | {"upkeep": upkeep, "odd": list(_odd(story))}).items():
        with log.writer("told-" + lane) as writer:
            writer.append(events).result(30)
    return served


def _odd(story: Any) -> Iterator[Event]:
    """A request with bodies stored apart, and a completion with every sort of float."""
    for event in story["serve"]:
        if isinstance(event.record, TurnRequested):
            text = "\u2028 large \x85" * 3000
            request = replace(event.record, messages=[{"role": "user", "content": text}])
            yield replace(event, record=request, event_id="odd-requested")
        if isinstance(event.record, TurnCompleted):
            bits = np.array([0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x80000000, 1], np.uint32)
            ids = np.arange(6, dtype=np.int32)
            done = replace(event.record, logprobs=bits.view(np.float32), completion_ids=ids)
            yield replace(event, record=done, event_id="odd-completed")
            return


@pytest.fixture
def log(server: Served) -> Store:
    """The server's store."""
    return rb.open(server.path)


def _messages(url: str, headers: dict[str, str] | None = None, **query: Any) -> list[Message]:
    query = {"follow": "false"} | query
    with httpx.stream("GET", f"{url}/v1/events", params=query, headers=headers or {}, timeout=30) as response:
        assert response.status_code == 200, response.read()
        assert response.headers["content-type"].startswith("text/event-stream")
        return list(read_messages(response.iter_raw()))


def _events(messages: list[Message]) -> list[Any]:
    return [value for m in messages if m.type == "message" for value in orjson.loads(m.data)]


def _local(log: Store, start: Any = None, **conditions: Any) -> list[Any]:
    """What a local reader gives, as JSON."""
    return orjson.loads(orjson.dumps([as_json(e) for e in log.tail(start or {}).poll()]))


def _quiet(events: list[Any]) -> list[Any]:
    return [e for e in events if e["kind"] != "cursor.moved"]


# Server-sent events ---------------------------------------------------------------------------------


def test_the_whole_log_and_the_rest_from_any_id(
    server: Served, log: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without `from` everything comes, then the head; from the id of any message comes exactly the rest."""
    messages = _messages(server.url)
    assert _events(messages) == _quiet(_local(log))
    assert messages[-1] == Message("head", format_cut(log.head()), messages[-1].data)
    assert orjson.loads(messages[-1].data) == {"cut": format_cut(log.head())}
    everything = _events(_messages(server.url, kinds="*"))
    assert everything == _local(log)
    for count in (1, 2, 17, 30):
        first = _messages(server.url, kinds="*", limit=count)
        assert len(_events(first)) == count
        assert [m.type for m in first][-1] == "message"
        rest = _messages(server.url, kinds="*", **{"from": first[-1].id})
        assert _events(first) + _events(rest) == everything
        again = _messages(server.url, {"Last-Event-ID": str(first[-1].id)}, kinds="*", **{"from": "empty"})
        assert again == rest


def test_kinds_and_runs_are_filtered(server: Served, log: Store, story: dict[str, list[Event]]) -> None:
    """Kinds and runs are filtered, cursors come only when asked for, and the head says what was passed."""
    kinds = {"turn.completed", "reward.assigned"}
    filtered = _messages(server.url, kinds=",".join(kinds))
    assert _events(filtered) == [e for e in _local(log) if e["kind"] in kinds]
    assert filtered[-1].id == format_cut(log.head())
    assert [e["kind"] for e in _events(_messages(server.url, kinds="cursor.moved"))] == ["cursor.moved"]
    demo = _events(_messages(server.url, run="demo"))
    assert demo == [e for e in _quiet(_local(log)) if e["run"] == "demo"]
    assert [m.type for m in _messages(server.url, run="nobody")] == ["head"]
    head = format_cut(log.head())
    [only] = _messages(server.url, **{"from": "head"})
    assert (only.type, only.id) == ("head", head)
    planned = next(e.record for e in story["train"] if isinstance(e.record, StepPlanned))
    with log.writer("plans") as writer:
        writer.append([Event(replace(planned, step=77, cut="told-serve=16"), "r")]).result(30)
    messages = _messages(server.url, **{"from": "step:77"})
    assert _events(messages) == _quiet(_local(log, {"told-serve": 16}))


@pytest.mark.parametrize(
    ("query", "status", "code", "text"),
    [
        ({"from": "nonsense"}, 400, "bad_cut", "is not lane=count"),
        ({"from": "step:99"}, 400, "bad_cut", "no run planned it"),
        ({"from": "told-serve=999"}, 409, "cut_not_held", "holds 999 events of lane 'told-serve', but the"),
        ({"from": "moon=1"}, 409, "cut_not_held", "is this the store that the cut is from"),
        ({"kinds": "turn.done"}, 400, "bad_query", "'turn.done'.*turn.completed"),
        ({"limit": "0"}, 400, "bad_query", "1 or more"),
        ({"limit": "many"}, 400, "bad_query", "limit=many"),
        ({"follow": "yes"}, 400, "bad_query", "true or false"),
        ({"format": "csv"}, 400, "bad_query", "sse or arrow"),
        ({"format": "arrow", "follow": "true"}, 400, "bad_query", "X-Rollbook-Cut"),
        ({"form": "head"}, 400, "bad_query", "'form'.*follow"),
    ],
)
def test_queries_that_cannot_be_answered_are_refused(
    server: Served, query: Any, status: int, code: str, text: str
) -> None:
    """A query that cannot be answered says what is wrong with it and what to do."""
    import re

    response = httpx.get(f"{server.url}/v1/events", params=query)
    error = response.json()["error"]
    assert (response.status_code, error["code"]) == (status, code)
    assert re.search(text, error["message"])
    assert response.headers["x-should-retry"] == "false"


# The client -----------------------------------------------------------------------------------------


def _all(tail: HttpTail | Any, count: int, timeout_s: float = 30) -> list[Event]:
    events: list[Event] = []
    deadline = time.monotonic() + timeout_s
    while len(events) < count and time.monotonic() < deadline:
        events += tail.poll()
        tail.wait(0.5)
    return events


def test_the_same_events_as_locally_bit_for_bit(
    server: Served, log: Store, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """One poll gives everything at the head: odd floats, large requests, every kind."""
    with HttpTail(server.url, kinds="*") as remote, log.tail() as local:
        events = remote.poll()
        assert [plain(e) for e in events] == [plain(e) for e in local.poll()]
        assert remote.cut() == local.cut() == log.head()
        assert remote.at_head
        assert (remote.poll(), remote.wait(0.05)) == ([], False)
    odd = next(e.record for e in events if e.event_id == "odd-completed")
    assert isinstance(odd, TurnCompleted)
    assert odd.logprobs is not None
    assert odd.logprobs.view(np.uint32).tolist()[3] == 0xFFC00001


def test_new_events_wake_the_tail_and_come_once(server: Served, log: Store) -> None:
    """New events of any lane wake `wait` and come once, with the cut closed after each poll."""
    with HttpTail(server.url, log.head(), run="followed") as remote:
        assert remote.poll() == []
        seen: list[str] = []
        for i in range(6):
            with log.writer(f"lane-{i % 3}") as writer:
                writer.append([Event(TurnFailed("t", f"u{i}", "x"), "followed")]).result(30)
            begun = time.monotonic()
            while len(seen) <= i:
                assert remote.wait(60)
                seen += [e.record.turn_id for e in remote.poll() if isinstance(e.record, TurnFailed)]
            assert time.monotonic() - begun < 30
            assert remote.cut() == log.head()
        assert seen == [f"u{i}" for i in range(6)]
        with log.writer("lane-0") as writer:
            writer.append([Event(TurnFailed("t", "u", "x"), "not followed")]).result(30)
        assert not remote.wait(0.5)
        assert remote.cut() == log.head()


@pytest.mark.crashes
def test_it_goes_on_after_the_server_was_killed(
    serve: Callable[..., Served], arguments: list[str], notes: Callable[..., list[Event]]
) -> None:
    """While lanes grow and the server dies again and again, each event comes once."""
    served = serve(*arguments)
    log = rb.open(served.path)
    done = threading.Event()

    def write() -> None:
        with log.writer("notes") as writer:
            for i in range(600):
                writer.append(notes(1, i)).result(30)
                time.sleep(0.005)
        done.set()

    writer = threading.Thread(target=write)
    writer.start()
    seen: list[Event] = []
    with HttpTail(served.url, kinds=["turn.failed"]) as remote:
        for _ in range(2):
            seen += _all(remote, len(seen) + 20)
            served.kill()
            served.start()
        writer.join()
        while not seen or seen[-1].seq < 599:
            seen += remote.poll(7)
            remote.wait(0.2)
    assert [e.seq for e in seen] == list(range(600))
    served.stop()


def test_what_the_client_is_told(server: Served) -> None:
    """A start that is no cut or is not held, a refused query, and a server that is away are errors."""
    with pytest.raises(CutError, match="is not lane=count"):
        HttpTail(server.url, "nonsense")
    with (
        HttpTail(server.url, {"moon": 1}) as remote,
        pytest.raises(CutError, match="is this the store that the cut is from"),
    ):
        remote.poll()
    with (
        HttpTail(server.url, kinds=["turn.done"]) as remote,
        pytest.raises(RequestError, match="not understood"),
    ):
        remote.wait(60)
    nobody = f"http://127.0.0.1:{free_port()}"
    with HttpTail(nobody, patience_s=0.2) as remote:
        assert not remote.wait(0.01)
        for _ in range(2):  # it goes on trying, and says so again
            with pytest.raises(StoreError, match=r"nothing for 0.2 s .*is `rollbook serve` up"):
                remote.poll()


# How it is sent -------------------------------------------------------------------------------------


class Hosted:
    """A proxy in this process, on a port."""

    def __init__(self, path: Path, tokenizer: Any) -> None:
        self.store = rb.open(path, create=True)
        recorder = Recorder(self.store, "serve", "default")
        engine = ScriptedEngine(ReplyWriter(tokenizer, HERMES), lambda messages, tools: "yes")
        turn_runner = TurnRunner(recorder, engine, Bridges.tested(tokenizer), FAMILIES["hermes"])
        self.app = build_app(turn_runner, *proxy_parts())
        self.streams = self.app.state.streams
        self.server = uvicorn.Server(uvicorn.Config(self.app, port=0, log_level="error"))
        self.streams.stopping = lambda: self.server.should_exit
        self.thread = threading.Thread(target=self.server.run)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def connect(self, query: str) -> socket.socket:
        """A raw connection that has asked for events."""
        client = socket.create_connection(("127.0.0.1", self.port))
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
        client.sendall(f"GET /v1/events?{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return client

    def until_open(self, count: int) -> None:
        """Wait until so many streams are open."""
        deadline = time.monotonic() + 10
        while self.streams.open != count:
            assert time.monotonic() < deadline, self.streams.open
            time.sleep(0.01)

    def stop(self) -> float:
        """Stop the server; how many seconds it took."""
        begun = time.monotonic()
        self.server.should_exit = True
        self.thread.join(30)
        assert not self.thread.is_alive()
        return time.monotonic() - begun


@pytest.fixture
def hosted(tmp_path: Path, chat: Any) -> Iterator[Callable[[], Hosted]]:
    """Makes hosted proxies; stops them."""
    hosts: list[Hosted] = []

    def make() -> Hosted:
        hosts.append(Hosted(tmp_path / f"hosted-{len(hosts)}", chat()))
        return hosts[-1]

    yield make
    for host in hosts:
        host.stop()


def test_a_reader_is_let_go_when_its_client_leaves(hosted: Callable[[], Hosted]) -> None:
    """Streams are open as long as their clients; a server that stops ends those that would never end."""
    host = hosted()
    clients = [host.connect("follow=true") for _ in range(3)]
    host.until_open(3)
    for client in clients[:2]:
        client.recv(4096)
        client.close()
    host.until_open(1)
    assert host.stop() < 25
    data = b""
    while part := clients[2].recv(65536):
        data += part
    assert data.endswith(b"0\r\n\r\n")  # ended as it should be, not broken off
    assert host.streams.open == 0


def test_a_silent_stream_shows_that_it_lives(
    hosted: Callable[[], Hosted], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Comments come while nothing happens."""
    monkeypatch.setattr(event_feed, "KEEP_ALIVE_S", 0.2)
    client = hosted().connect("follow=true")
    client.settimeout(10)
    data = b""
    while data.count(b": still here\n\n") < 3:
        data += client.recv(4096)
    client.close()


def _anonymous_memory() -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split("RssAnon:")[1].split()[0]) * 1024


def _settled_memory() -> int:
    """Once what was written has been heard of by all who listen in this process."""
    held = _anonymous_memory()
    for _ in range(50):
        time.sleep(0.2)
        before, held = held, _anonymous_memory()
        if abs(held - before) < 1e6:
            break
    return held


def test_a_client_that_does_not_read_costs_nothing(hosted: Callable[[], Hosted]) -> None:
    """60 MB asked for by clients that take none of it: little memory is used, and others are answered."""
    host = hosted()
    events = [Event(TurnFailed("t", f"u{i}", f"{i} " + "x" * 30_000), "r") for i in range(2000)]
    with host.store.writer("large") as writer:
        for i in range(0, 2000, 100):
            writer.append(events[i : i + 100]).result(30)
    before = _settled_memory()
    clients = [host.connect("follow=true") for _ in range(4)]
    host.until_open(4)
    time.sleep(1.0)
    begun = time.monotonic()
    assert httpx.get(f"{host.url}/healthz").status_code == 200
    assert time.monotonic() - begun < 30
    assert _anonymous_memory() - before < 80e6  # of 4 times 60 MB
    data = bytearray()
    while b"event: head" not in data[-4096:]:
        data += clients[0].recv(1 << 20)
    assert len(data) > 60e6
    for client in clients:
        client.close()
    host.until_open(0)


# Arrow ----------------------------------------------------------------------------------------------


def _arrow(server: Any, **query: Any) -> tuple[pa.Table, dict[str, int]]:
    response = httpx.get(f"{server.url}/v1/events", params={"format": "arrow"} | query, timeout=30)
    assert response.status_code == 200, response.text
    assert response.headers["content-type"] == "application/vnd.apache.arrow.stream"
    table = pa.ipc.open_stream(response.content).read_all()
    return table, parse_cut(response.headers["x-rollbook-cut"])


def test_arrow_holds_the_logs_columns(
    server: Served, log: Store, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """The lane first, requests whole, arrays bit for bit; the header says how far it goes."""
    table, cut = _arrow(server, kinds="*")
    assert cut == log.head()
    assert table.schema == log.table({}).schema
    back = []
    for lane in sorted(cut):
        for batch in table.filter(pa.compute.equal(table["lane"], lane)).to_batches():
            back += decode(batch.drop_columns("lane"), lane)
    assert [plain(e) for e in back] == [plain(e) for e in log.tail().poll()]
    assert any(e.event_id == "odd-requested" for e in back)


@pytest.mark.parametrize("limit", [1, 5, 16])
def test_arrow_in_parts(server: Served, log: Store, limit: int) -> None:
    """Asked for again from each header's cut, `limit` events at a time, the parts are the whole."""
    parts, cut = [], {}
    while cut != log.head():
        table, cut = _arrow(server, kinds="*", limit=limit, **{"from": format_cut(cut)})
        assert table.num_rows <= limit
        parts += table.select(["lane", "seq"]).to_pylist()
    assert parts == log.table(log.head()).select(["lane", "seq"]).to_pylist()
    empty, same = _arrow(server, **{"from": "head"})
    assert (empty.num_rows, same) == (0, log.head())
    some, cut = _arrow(server, kinds="turn.completed")
    assert set(some["kind"].to_pylist()) == {"turn.completed"}
    assert cut == log.head()


# Cursors --------------------------------------------------------------------------------------------


def test_a_cursor_is_kept_and_only_goes_forward(
    serve: Callable[..., Served], arguments: list[str], notes: Callable[..., list[Event]]
) -> None:
    """PUT and GET, a restart, another lane's proxy: the cursor is the newest, as an event of the log."""
    served = serve(*arguments)
    log = rb.open(served.path)
    with log.writer("notes") as writer:
        writer.append(notes(5)).result(30)
    url = f"{served.url}/v1/cursors/board"
    missing = httpx.get(url)
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_cursor")
    for cut in ("notes=2", "notes=2", "notes=4,serve=1"):
        answer = httpx.put(url, json={"cut": cut})
        assert (answer.status_code, answer.json()) == (200, {"cut": cut})
        assert httpx.get(url).json() == {"cut": cut}
    moved = [e for e in log.events() if isinstance(e.record, CursorMoved)]
    assert [(e.lane, e.record) for e in moved] == [
        ("serve", CursorMoved("board", "notes=2")),
        ("serve", CursorMoved("board", "notes=4,serve=1")),
    ]
    served.stop()
    other = type(served)(served.path, [*arguments, "--lane", "serve2"])
    url = f"{other.url}/v1/cursors/board"
    assert httpx.get(url).json() == {"cut": "notes=4,serve=1"}
    assert httpx.put(url, json={"cut": "notes=5,serve=1"}).status_code == 200
    with log.consumer("local") as consumer:
        consumer.poll()
        consumer.commit()
        local = httpx.get(f"{other.url}/v1/cursors/local").json()["cut"]
        assert parse_cut(local) == consumer.cut()
    for body, status, code in [
        ({"cut": "notes=3,serve=1"}, 409, "cursor_moves_back"),
        ({"cut": "notes=5"}, 409, "cursor_moves_back"),
        ({"cut": "notes=6,serve=1"}, 409, "cut_not_held"),
        ({"cut": "x"}, 400, "bad_cut"),
        ({"cut": 5}, 400, "bad_request"),
        ([], 400, "bad_request"),
    ]:
        refused = httpx.put(url, json=body)
        assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)
    assert httpx.put(url, content=b"{").json()["error"]["code"] == "bad_json"
    assert httpx.get(f"{other.url}/v1/cursors/NO").json()["error"]["code"] == "bad_name"
    assert httpx.get(url).json() == {"cut": "notes=5,serve=1"}
    # Another host has ended the lane, at fewer events than a consumer was given.
    (lane_folder(served.path, "notes") / FENCED).touch()
    for cut in ("notes=6,serve=1", "notes=5,serve=1"):
        assert httpx.put(url, json={"cut": cut}).json() == {"cut": cut}
    feed = httpx.get(f"{other.url}/v1/events", params={"format": "arrow", "from": "notes=7,serve=1"})
    assert parse_cut(feed.headers["x-rollbook-cut"])["notes"] == 5
    other.stop()


# The command ----------------------------------------------------------------------------------------


def _run(*words: str) -> str:
    result = CliRunner().invoke(command, ["tail", *words], catch_exceptions=False)
    assert result.exit_code == 0
    return result.stdout


def test_the_command_prints_the_same_from_both_places(
    server: Served, log: Store, plain: Callable[[Event], dict[str, Any]]
) -> None:
    """JSON lines of a folder and of a URL are equal, and are the events; filters and starts work in both."""
    places = ["--store", str(server.path)], ["--url", server.url]
    texts = [_run(*place, "--no-follow", "--json") for place in places]
    assert texts[0] == texts[1]
    back = [from_json(json.loads(line)) for line in texts[0].split("\n") if line]
    assert [plain(e) for e in back] == [plain(e) for e in log.tail().poll()]
    for place in places:
        some = _run(*place, "--no-follow", "--json", "--kinds", "turn.failed", "--run", "demo")
        assert [json.loads(line)["lane"] for line in some.splitlines()] == ["told-serve"]
        assert _run(*place, "--no-follow", "--from", format_cut(log.head())) == ""
        assert _run(*place, "--no-follow", "--from", "head") == ""
    assert _run(*places[1], "--no-follow", "--run", "nobody") == ""
    with pytest.raises(CutError, match="no run 'nobody'; there are: demo, default"):
        _run(*places[0], "--no-follow", "--run", "nobody")


def test_rollbook_tail_prints_a_line_an_event(server: Served) -> None:
    """Time, place, kind, trajectory and a summary, on one line each."""
    lines = _run("--store", str(server.path), "--no-follow", "--from", "empty", "--events").splitlines()
    by_place = {line.split()[2]: line for line in lines}
    assert by_place["told-serve=3"].split() == [
        *("11-14", "22:13:23.000", "told-serve=3", "turn.completed", "t1"),
        *("3+2", "tokens", "by", "actor", "v0,", "stop:", "4"),
    ]
    assert "alpha task task-7 train" in by_place["told-serve=1"]
    assert "the engine is gone" in by_place["told-serve=9"]
    assert "0.75 from judge" in by_place["told-serve=13"]
    assert "consumer=dashboard cut=serve=3,train=1" in by_place["told-upkeep=1"]


def test_the_command_is_told_where(server: Served) -> None:
    """Neither place, or both, is an error with the remedy."""
    for words in ([], ["--store", str(server.path), "--url", server.url]):
        result = CliRunner().invoke(command, ["tail", *words])
        assert "give --store DIR or --url URL" in str(result.exception)
    result = CliRunner().invoke(command, ["tail", "--store", str(server.path), "--kinds", "x"])
    assert "turn.completed" in str(result.exception)
