"""Any headers, any target and any framing: answered or refused in the API's own form, never a fault."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import orjson
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rollbook.bench.hostile.attack import TOKENS, Ground
from rollbook.bench.hostile.laps import tracebacks
from rollbook.bench.hostile.sender import CUT, Answer
from rollbook.bench.hostile.stage import OPERATOR, Proxy, Stage

BODY = orjson.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]})
OURS = (
    *(
        "X-Rollbook-Trajectory",
        "X-Rollbook-Group",
        "X-Rollbook-Task",
        "X-Rollbook-Split",
        "X-Rollbook-Labels",
    ),
    *(
        "Authorization",
        "x-api-key",
        "X-Session-ID",
        "x-stainless-retry-count",
        "Content-Type",
        "Content-Encoding",
    ),
    *(
        "Origin",
        "Host",
        "X-Forwarded-For",
        "Forwarded",
        "Accept-Encoding",
        "Connection",
        "Expect",
        "Last-Event-ID",
    ),
    *(
        "Transfer-Encoding",
        "Content-Length",
        "Idempotency-Key",
        "anthropic-version",
        "Cookie",
        "Range",
        "Upgrade",
    ),
)
VALUES = (
    *(b"", b"[]", b'{"a": 1}', b'{"a":' * 400, b'{"a":' * 300 + b"1" + b"}" * 300, b"\xff\xfe", b"\xc3\xa9"),
    *(b"a" * 9_000, b"trajectory:x", b"Bearer ", b"0", b"-1", b"9" * 30, b"chunked", b"gzip", b"identity"),
    *(b"null", b"100-continue", b"eval", b"quarantine", b"\x1b[2J", b"close", b'{"\xed\xa0\x80": 1}'),
)
TEXTS = st.binary(max_size=40) | st.sampled_from(VALUES)
NAMES = st.sampled_from([name.encode() for name in OURS]) | st.binary(min_size=1, max_size=20)
LINES = st.lists(st.tuples(NAMES, st.sampled_from([b": ", b":", b" : ", b""]), TEXTS), max_size=12)
PATHS = st.sampled_from(
    [
        b"/v1/chat/completions",
        b"/t/a/v1/chat/completions",
        b"/v1/trajectories",
        b"/v1/events?follow=false&limit=1",
    ]
)
TARGETS = PATHS | st.builds(lambda raw: b"/t/" + raw + b"/v1/messages", st.binary(max_size=30))
METHODS = st.sampled_from([b"POST", b"GET", b"PUT", b"OPTIONS", b"HEAD", b"DELETE", b"post", b"\xff"])
STATUSES = {
    CUT,
    200,
    201,
    204,
    400,
    401,
    403,
    404,
    405,
    408,
    409,
    411,
    413,
    414,
    415,
    417,
    421,
    422,
    426,
    429,
    431,
    501,
    505,
}


@pytest.fixture(scope="module")
def proxy(stage: Stage) -> Iterator[Proxy]:
    """A proxy; at the end it runs, and has printed no traceback."""
    started = stage.standard(TOKENS, "headers")
    yield started
    assert started.victim.running
    assert tracebacks(started.log()) == []


def _send(proxy: Proxy, data: bytes) -> Answer:
    ground = Ground(proxy.url, OPERATOR, "", proxy, random.Random(0))
    return asyncio.run(ground.send(data, 2.0))


@given(method=METHODS, target=TARGETS, lines=LINES, key=st.booleans(), framed=st.booleans())
@settings(max_examples=250, database=None, suppress_health_check=list(HealthCheck))
def test_arbitrary_headers_get_a_documented_status(
    proxy: Proxy, method: bytes, target: bytes, lines: list[tuple[bytes, ...]], key: bool, framed: bool
) -> None:
    """Valid headers, odd values of meaningful ones, and invalid bytes are all answered."""
    host = proxy.url.partition("//")[2].encode()
    head = [method + b" " + target + b" HTTP/1.1", b"Host: " + host]
    head += [b"Authorization: Bearer " + OPERATOR.encode()] if key else []
    head += [b"Content-Length: %d" % len(BODY)] if framed else []
    head += [b"".join(line) for line in lines]
    answer = _send(proxy, b"\r\n".join([*head, b"", BODY]))
    assert answer.status in STATUSES, (answer.status, answer.body[:300])
    if (
        answer.status >= 400
        and answer.headers.get("content-type") == "application/json"
        and method != b"HEAD"
    ):
        assert orjson.loads(answer.body)["error"]["message"]


@given(raw=st.binary(max_size=300))
@settings(max_examples=60, database=None, suppress_health_check=list(HealthCheck))
def test_bytes_that_are_no_http_get_a_client_error(proxy: Proxy, raw: bytes) -> None:
    """What is no HTTP at all."""
    assert _send(proxy, raw + b"\r\n\r\n").status in STATUSES
