"""Record only: replies without end, bombs, and what is too large to be kept pass on, and are counted."""

from __future__ import annotations

import json
import resource
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from tests.fakes.clients.bombs import bomb
from tests.fakes.upstreams.server import Answer, HttpUpstream, chat_reply, whole
from tests.ingest.upstream.conftest import Passed

from rollbook.ingest.endpoints import chat
from rollbook.ingest.upstream.recorder import ReplyBudget, ReplyCopy
from rollbook.ingest.upstream.routes import EndFinder

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}
MIB = 1 << 20


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def _counted(passed: Any) -> tuple[float, float]:
    return passed.metric("rollbook_unrecorded_total"), passed.metric("rollbook_refusals_total")


@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_that_is_too_large_to_keep(
    passing: Callable[..., Passed], upstream: HttpUpstream, stream: bool
) -> None:
    """It passes byte for byte; its turn says that it was not kept, and is counted. The next one is kept."""
    passed = passing(max_reply_mb=1)
    body = json.dumps(chat_reply("x" * 3 * MIB)).encode()
    kind = "text/event-stream" if stream else "application/json"
    packets = [b"data: " + body + b"\n\n", b"data: [DONE]\n\n"] if stream else [body]
    upstream.answers.append(Answer(packets, headers=[("content-type", kind)]))
    assert passed.chat(USER, stream=stream).content == b"".join(packets)
    assert "more than 1048576 bytes" in passed.turn().failed.error
    assert _counted(passed) == (1, 1)
    upstream.answers.append(whole(chat_reply()))
    assert passed.chat(USER).status_code == 200
    assert [bool(t.completed) for t in passed.turns(count=2)] == [False, True]


def test_a_reply_that_is_a_bomb(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """A gzip of a gzip of 300 MB passes as it is, in no memory; it is counted, and others are answered."""
    passed = passing(max_reply_mb=4)
    sent = bomb(300 * MIB)
    upstream.answers.append(whole(sent, content_encoding="gzip, gzip"))
    before = _peak()
    with httpx.stream("POST", f"{passed.url}/t/t{CHAT}", json={"messages": [USER]}) as reply:
        assert b"".join(reply.iter_raw()) == sent
    assert "larger than 4194304 bytes" in passed.turn().failed.error
    assert _peak() - before < 100 * MIB
    assert _counted(passed) == (1, 1)


def test_a_request_that_is_a_bomb(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """It passes as it is, and is counted as not recorded."""
    passed = passing(max_body_mb=4)
    sent = bomb(300 * MIB)
    upstream.answers.append(whole(chat_reply()))
    before = _peak()
    headers = {"content-encoding": "gzip, gzip"}
    assert passed.http.post(f"/t/t{CHAT}", content=sent, headers=headers).status_code == 200
    assert upstream.asked[-1].body == sent
    assert _peak() - before < 100 * MIB
    assert _counted(passed) == (1, 1)


def test_what_would_unfold_into_memory_is_not_kept(
    passing: Callable[..., Passed], upstream: HttpUpstream
) -> None:
    """A few megabytes of empty objects, in a request or in a reply."""
    passed = passing()
    many = b"[" + b"{}," * 300_000 + b"{}]"
    upstream.answers += [whole(chat_reply()), whole(b'{"choices": ' + many + b"}")]
    body = b'{"messages": [{"role": "user", "content": "hi"}], "x": ' + many + b"}"
    assert passed.http.post(f"/t/one{CHAT}", content=body).status_code == 200
    assert passed.chat(USER, name="two").status_code == 200
    assert "weigh more" in passed.turn("two").failed.error
    assert _counted(passed) == (2, 2)


def test_headers_without_end(passed: Passed, upstream: HttpUpstream) -> None:
    """An upstream that says only headers is a 502 of ours, and the turn failed."""
    upstream.answers.append(whole(chat_reply(), **{f"h{i}": "x" * 100 for i in range(1000)}))
    reply = passed.chat(USER)
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_failed")
    assert "gave no reply" in passed.turn().failed.error


def test_a_stream_without_end_ends_with_its_client(
    passing: Callable[..., Passed], upstream: HttpUpstream
) -> None:
    """An event that never ends passes as it comes, in little memory and time, as long as its client wants."""
    passed = passing(max_reply_mb=2)
    packets = [b"data: "] + [b"x" * 65536] * 10_000
    upstream.answers.append(Answer(packets, headers=[("content-type", "text/event-stream")], pause_s=0))
    before, received = _peak(), 0
    with httpx.stream("POST", f"{passed.url}/t/t{CHAT}", json={"messages": [USER], "stream": True}) as reply:
        for part in reply.iter_raw():
            received += len(part)
            if received > 60 * MIB:
                break
    assert passed.turn().failed is not None
    assert _peak() - before < 50 * MIB


# Parts ----------------------------------------------------------------------------------------------


def test_the_largest_copy_is_given_up() -> None:
    """Where all copies together are too much, small ones are still kept."""
    room = ReplyBudget(100, 150)
    small, large, other = ReplyCopy(room), ReplyCopy(room), ReplyCopy(room)
    small.add(b"s" * 10)
    for _ in range(9):
        large.add(b"l" * 10)
    other.add(b"o" * 60)
    assert (small.given_up, large.given_up, other.given_up) == (False, True, False)
    assert large.whole() == b""
    large.add(b"l" * 10)
    assert (small.whole(), other.whole()) == (b"s" * 10, b"o" * 60)
    other.add(b"o" * 41)
    assert other.given_up  # by itself: it is larger than one may be
    for copy in (small, large, other):
        copy.close()
        copy.close()
    assert room._taken == 0
    ReplyCopy(room).add(b"x" * 100)


@pytest.mark.parametrize("size", [1, 7, 65536])
@pytest.mark.parametrize("where", ["within", "at the end"])
def test_the_end_of_a_stream_is_found_in_any_packets(size: int, where: str) -> None:
    """Also behind an event of megabytes, and within it only where a line begins so."""
    text = b"data: [DONE] " * 200_000 if where == "within" else b"x" * 2_000_000
    stream = b'data: {"a": "' + text + b'"}\n\ndata: [DONE]\n\n'
    if size < 65536:
        stream = stream[-5000:] if where == "within" else b"data: {}\n\n" + stream[-3000:]
        stream = b"data: x" + stream
    finder, begun = EndFinder(chat.API.upstream.last_event), time.monotonic()
    ends = [at for at in range(0, len(stream), size) if finder.feed(stream[at : at + size])]
    assert ends == [(len(stream) - 1) // size * size]
    assert time.monotonic() - begun < 60
