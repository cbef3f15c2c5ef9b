"""What passes is what was sent, in both directions, byte for byte."""

from __future__ import annotations

import gzip
import json
import random
import socket
import threading
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.upstreams.server import Answer, HttpUpstream, chat_reply, sse, streamed, whole
from tests.ingest.upstream.conftest import Passed

USER = {"role": "user", "content": "Hello"}
BODY = {"model": "m", "messages": [USER]}
CHAT = "/v1/chat/completions"
OURS = ("x-rollbook-turn-id", "x-rollbook-trajectory-id", "x-rollbook-quarantined", "x-rollbook-unrecorded")
FRAMING = ("transfer-encoding", "connection", "keep-alive")

CHUNKS = [
    {"id": "c", "object": "chat.completion.chunk", "choices": [{"index": 0, "delta": {"content": text}}]}
    for text in ("", "naïve ", "日本", "語 🎉", " done")
]
ENDED = {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
ODD_STREAM = (
    b": heartbeat\r\n\r\n"
    + sse(*CHUNKS, done=False).replace(b"\n", b"\r\n")
    + b"event: x-unknown\nid: 7\nretry: 10\ndata: not json\n\n:\n\n"
    + b'data: {"another":\ndata:  "kind"}\n\n'
    + b'data: {"choices": [{"index": 0,\r\ndata: "delta": {"content": "!"}}]}\r\n\r\n'
    + sse(ENDED)
)


def _raw(passed: Any, path: str, body: Any = BODY, **options: Any) -> tuple[Any, bytes]:
    with passed.http.stream("POST", path, json=body, **options) as reply:
        return reply, b"".join(reply.iter_raw())


def _shown(reply: Any, leave: tuple[str, ...] = (*OURS, *FRAMING)) -> list[tuple[str, str]]:
    return [(k.decode().lower(), v.decode()) for k, v in reply.headers.raw if k.decode().lower() not in leave]


@pytest.mark.parametrize("seed", range(6))
def test_a_stream_is_the_same_bytes_however_it_is_cut(
    passed: Passed, upstream: HttpUpstream, seed: int
) -> None:
    """Packets may end anywhere: within a character, a line, a CRLF, an event. The record is the same too."""
    rng = random.Random(seed)
    cuts = range(1, len(ODD_STREAM)) if seed == 0 else sorted(rng.sample(range(1, len(ODD_STREAM)), 40))
    upstream.answers.append(streamed(ODD_STREAM, cuts, pause_s=0.0))
    reply, data = _raw(passed, f"/t/t{CHAT}", BODY | {"stream": True})
    assert data == ODD_STREAM
    assert reply.headers["content-type"] == "text/event-stream; charset=utf-8"
    done = passed.turn().completed
    assert done.reply == {"role": "assistant", "content": "naïve 日本語 🎉 done!"}
    assert done.finish_reason == "stop"


def test_packets_come_as_they_are_said(passed: Passed, upstream: HttpUpstream) -> None:
    """Nothing is held back: the first event is here while the upstream still waits to say the second."""
    hold = threading.Event()
    first, rest = sse(CHUNKS[1], done=False), sse(ENDED)
    upstream.answers.append(streamed(first + rest, [len(first)], hold=hold, held=1))
    with passed.http.stream("POST", f"/t/t{CHAT}", json=BODY | {"stream": True}) as reply:
        parts = reply.iter_raw()
        assert next(parts) == first
        hold.set()
        assert b"".join(parts) == rest


def test_status_and_headers_are_the_upstreams(passed: Passed, upstream: HttpUpstream) -> None:
    """All of them, in order, repeated ones and UTF-8 too; but not those between two neighbours."""
    headers = [
        ("date", "Tue, 01 Jul 2025 00:00:00 GMT"),
        ("server", "somebody"),
        ("content-type", "application/json"),
        ("set-cookie", "a=1; Path=/"),
        ("set-cookie", "b=2; Path=/"),
        ("x-request-id", "req_1"),
        ("openai-organization", "дом"),
        ("connection", "keep-alive, x-hop"),
        ("x-hop", "for the neighbour"),
        ("keep-alive", "timeout=5"),
    ]
    upstream.answers.append(Answer([json.dumps(chat_reply()).encode()], "203 Odd", headers, chunked=False))
    reply, _ = _raw(passed, f"/t/t{CHAT}")
    assert reply.status_code == 203
    kept = [pair for pair in headers if pair[0] not in ("connection", "x-hop", "keep-alive")]
    assert _shown(reply) == [*kept, ("content-length", str(len(json.dumps(chat_reply()).encode())))]
    assert set(OURS[:2]) <= set(reply.headers)


def test_the_request_arrives_as_it_was_sent(passed: Any, upstream: HttpUpstream) -> None:
    """White space, key order, odd numbers, query and headers; nothing of ours is added."""
    body = b'{ "messages" : [{"content":"caf\\u00e9 \xc3\xa9","role":"user"}],\n "seed": 1e2,"model":"m"}'
    headers = [
        ("authorization", "Bearer sk-agent"),
        ("content-type", "application/json; charset=utf-8"),
        ("x-odd", "one"),
        ("x-odd", "two"),
        ("x-utf8", "дом".encode()),
        ("cookie", "mine=1"),
        ("X-Rollbook-Group", "g"),
    ]
    query = "?api-version=2024%2F10&q=a+b%20c&empty="
    passed.http.headers.clear()
    reply = passed.http.post(f"/t/a%20b{CHAT}{query}", content=body, headers=headers)
    assert reply.status_code == 200
    [request] = upstream.asked
    assert (request.method, request.target) == ("POST", f"{CHAT}{query}")
    assert request.body == body
    arrived = sorted((k.lower(), v) for k, v in request.headers)
    own = [(b"host", f"127.0.0.1:{upstream.port}".encode()), (b"content-length", b"%d" % len(body))]
    sent = [(k.encode(), v if isinstance(v, bytes) else v.encode()) for k, v in headers[:-1]]
    assert arrived == sorted([*sent, *own, (b"accept-encoding", b"identity")])
    passed.turns("a b")
    assert passed.trajectories()["a b"].opened.group == "g"


def test_nobody_gets_anothers_cookies(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """What one agent was given to keep is not sent with another's request."""
    passed = passing(url=upstream.url.replace("127.0.0.1", "localhost"))
    upstream.answers.append(whole(chat_reply(), set_cookie="session=one; Path=/"))
    passed.chat(USER, name="one")
    passed.http.cookies.clear()
    passed.chat(USER, name="two")
    assert [request.header("cookie") for request in upstream.asked] == [None, None]


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/embeddings", b'{"input": "x"}'),
        ("GET", "/v1/models", b""),
        ("GET", "/v1/models/org%2Fname", b""),
        ("POST", "/v1/messages/count_tokens", b'{"messages": []}'),
        ("POST", "/v1/audio/transcriptions", bytes(range(256))),
        ("DELETE", "/v1/responses/resp_1", b""),
        ("OPTIONS", "/v1/chat/completions", b""),
        ("GET", "/v1/responses/resp_1?stream=true&starting_after=4", b""),
    ],
)
@pytest.mark.parametrize("prefix", ["", "/t/t"])
def test_what_is_no_completion_passes_unrecorded(
    passed: Passed, upstream: HttpUpstream, method: str, path: str, body: bytes, prefix: str
) -> None:
    """Any path, method and body; nothing of it is in the log, and nothing is counted as lost."""
    data = bytes(reversed(range(256)))
    headers = [("content-type", "application/x-any")]
    upstream.answers.append(Answer([data], "202 Accepted", headers, chunked=False))
    with passed.http.stream(method, prefix + path, content=body) as reply:
        assert (reply.status_code, b"".join(reply.iter_raw())) == (202, data)
        assert _shown(reply, FRAMING) == [*headers, ("content-length", "256")]
    [request] = upstream.asked
    assert (request.method, request.target, request.body) == (method, path, body)
    assert request.header("accept-encoding") != "identity"
    assert passed.trajectories() == {}
    assert passed.metric("rollbook_unrecorded_total") == 0


@pytest.mark.parametrize("body", [b"no json", b"[1]", b'"text"', b"\xff\xfe\x00", b'{"messages": '])
def test_a_body_that_is_no_json_object_passes(passed: Passed, upstream: HttpUpstream, body: bytes) -> None:
    """The upstream says what is wrong with it; that nothing was recorded is told."""
    upstream.answers.append(whole(b'{"error": "what?"}', "400 Bad Request"))
    reply = passed.http.post(f"/t/t{CHAT}", content=body)
    assert (reply.status_code, reply.content) == (400, b'{"error": "what?"}')
    assert reply.headers["x-rollbook-unrecorded"] == "1"
    assert upstream.asked[0].body == body
    assert passed.metric("rollbook_unrecorded_total") == 1


@pytest.mark.parametrize(
    ("status", "headers"),
    [
        ("400 Bad Request", {}),
        ("401 Unauthorized", {"www_authenticate": "Bearer"}),
        ("429 Too Many Requests", {"retry_after": "17", "x_ratelimit_remaining": "0"}),
        ("500 Internal Server Error", {"x_should_retry": "true"}),
        ("529 Site Overloaded", {}),
    ],
)
def test_errors_pass_and_are_failed_turns(
    passed: Passed, upstream: HttpUpstream, status: str, headers: dict[str, str]
) -> None:
    """The agent sees the upstream's error as it is; the log says the turn failed, and how."""
    body = b'{"error":{"message":"no","type":"x"}}'
    upstream.answers.append(whole(body, status, **headers))
    reply, data = _raw(passed, f"/t/t{CHAT}")
    assert (reply.status_code, data) == (int(status[:3]), body)
    for name, value in headers.items():
        assert reply.headers[name.replace("_", "-")] == value
    turn = passed.turn()
    assert turn.completed is None
    assert turn.failed.error == f"the upstream answers {status[:3]}: {body.decode()}"


def test_a_compressed_reply_passes_compressed(passed: Passed, upstream: HttpUpstream) -> None:
    """An upstream may compress though it was not asked to; the record is of what it means."""
    data = gzip.compress(json.dumps(chat_reply("packed")).encode())
    upstream.answers.append(whole(data, content_encoding="gzip"))
    reply, raw = _raw(passed, f"/t/t{CHAT}")
    assert raw == data
    assert reply.headers["content-encoding"] == "gzip"
    assert passed.turn().completed.reply["content"] == "packed"


def test_a_compressed_request_passes_compressed(passed: Passed, upstream: HttpUpstream) -> None:
    """Its bytes are the upstream's business; its record is of what it means."""
    body = gzip.compress(json.dumps(BODY).encode())
    reply = passed.http.post(f"/t/t{CHAT}", content=body, headers={"content-encoding": "gzip"})
    assert reply.status_code == 200
    assert upstream.asked[0].body == body
    [turn] = passed.turns()
    assert turn.requested.messages == [USER]


def test_a_body_in_chunks_and_one_that_waits_for_100(passed: Passed, upstream: HttpUpstream) -> None:
    """However a client frames its body, the upstream gets it whole, and is not asked to say 100 again."""
    body = json.dumps(BODY).encode()
    with socket.create_connection(("127.0.0.1", passed.port)) as client:
        head = f"POST /t/t{CHAT} HTTP/1.1\r\nhost: localhost\r\nexpect: 100-continue\r\n"
        client.sendall(f"{head}transfer-encoding: chunked\r\nconnection: close\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 100")
        for i in range(0, len(body), 7):
            client.sendall(b"%x\r\n%s\r\n" % (len(body[i : i + 7]), body[i : i + 7]))
        client.sendall(b"0\r\n\r\n")
        data = b""
        while part := client.recv(65536):
            data += part
    assert data.endswith(json.dumps(chat_reply()).encode())
    [request] = upstream.asked
    assert (request.body, request.header("expect"), request.header("connection")) == (body, None, None)


def test_a_reply_that_breaks_off_breaks_off(passed: Passed, upstream: HttpUpstream) -> None:
    """The client can tell that it did not get all, and the log does not say it did."""
    import httpx

    upstream.answers.append(streamed(sse(CHUNKS[1], done=False), broken=True))
    with (
        pytest.raises(httpx.RemoteProtocolError),
        passed.http.stream("POST", f"/t/t{CHAT}", json=BODY | {"stream": True}) as reply,
    ):
        b"".join(reply.iter_raw())
    turn = passed.turn()
    assert (turn.completed.finish_reason, turn.delivered) == ("abort", None)
    assert turn.completed.reply["content"] == "naïve "


def test_no_upstream_is_a_502(passed: Passed, upstream: HttpUpstream) -> None:
    """It cannot be reached: the client is told, and the log too, without the query, which may hold a key."""
    upstream.close()
    reply = passed.http.post(f"/t/t{CHAT}?key=sk-in-the-query", json=BODY)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_failed")
    assert "cannot be reached" in reply.json()["error"]["message"]
    assert "sk-in-the-query" not in reply.text
    assert "gave no reply" in passed.turn().failed.error
    assert b"sk-in-the-query" not in passed.bytes_on_disk()


def test_more_requests_than_allowed_are_a_429(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """--max-running holds here too, and who left gives room."""
    passed = passing(max_running=1)
    hold = threading.Event()
    upstream.answers.append(streamed(sse(ENDED), hold=hold, held=0))
    with passed.http.stream("POST", f"/t/t{CHAT}", json=BODY | {"stream": True}) as reply:
        assert passed.chat(USER, name="u").status_code == 429
        hold.set()
        reply.read()
    assert passed.chat(USER, name="u").status_code == 200
