"""With --on-store-failure refuse nothing passes that is not recorded."""

from __future__ import annotations

import os
from collections.abc import Callable

import httpx
import pytest
from tests.fakes.proxies.settings import proxy_parts
from tests.fakes.upstreams.replies import ENDPOINTS
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook.ingest.serve.serve import recorded_settings

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
STREAM = ENDPOINTS[CHAT]["stream"]


@pytest.fixture
def refusing(passing: Callable[..., Passed]) -> Passed:
    """A proxy that refuses what it cannot record."""
    return passing(on_store_failure="refuse")


def _break_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fdatasync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", fdatasync)


def test_while_the_store_is_well(refusing: Passed, upstream: HttpUpstream) -> None:
    """All passes as it does otherwise, and is recorded."""
    upstream.answers += [whole(chat_reply()), streamed(STREAM, [50])]
    assert refusing.chat(USER).json() == chat_reply()
    assert refusing.chat(USER, stream=True).content == STREAM
    assert [bool(t.completed) for t in refusing.turns(count=2)] == [True, True]
    assert refusing.metric("rollbook_unrecorded_total") == 0


def test_a_store_that_fails(
    refusing: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that finds out is refused before the upstream is asked, and so is every one after it."""
    refusing.chat(USER)
    refusing.turn()
    with monkeypatch.context() as patch:
        _break_the_disk(patch)
        for _ in range(3):
            reply = refusing.chat(USER, name="first")
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_failed")
            assert reply.headers["retry-after"] == "10"
        assert refusing.http.get("/v1/models").status_code == 200  # nothing of it is recorded anyway
    assert [request.target for request in upstream.asked] == [CHAT, "/v1/models"]
    assert refusing.metric("rollbook_unrecorded_total") == 0


@pytest.mark.parametrize("stream", [False, True])
def test_a_store_that_fails_on_the_way(
    refusing: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A reply whose end is not durable does not come to its end; what of it passed is counted."""
    real = os.fdatasync
    calls: list[int] = []

    def fdatasync(fd: int) -> None:
        calls.append(fd)
        if upstream.asked:  # the request is durable by now
            raise OSError(28, "No space left on device")
        real(fd)

    upstream.answers.append(streamed(STREAM, [50]) if stream else whole(chat_reply()))
    with monkeypatch.context() as patch:
        patch.setattr(os, "fdatasync", fdatasync)
        with pytest.raises(httpx.RemoteProtocolError):
            refusing.chat(USER, stream=stream)
    assert len(calls) > 1
    assert refusing.metric("rollbook_unrecorded_total") == 1


@pytest.mark.parametrize("body", [b"no json", b"[]", b'{"messages": ' + b"[" * 600 + b"]" * 600 + b"}"])
def test_a_request_without_a_stored_form(refusing: Passed, upstream: HttpUpstream, body: bytes) -> None:
    """It is the client's own fault, and stays so: 400."""
    reply = refusing.http.post(f"/t/t{CHAT}", content=body)
    assert (reply.status_code, reply.json()["error"]["code"]) == (400, "not_recordable")
    assert reply.headers["x-should-retry"] == "false"
    assert upstream.asked == []
    assert refusing.metric("rollbook_unrecorded_total") == 0


def test_the_choice_to_refuse_is_recorded_with_the_run() -> None:
    """With what else the proxy was told."""
    assert recorded_settings(*proxy_parts(on_store_failure="refuse"))["proxy"]["on_store_failure"] == "refuse"
    assert recorded_settings(*proxy_parts())["proxy"]["on_store_failure"] == "pass"
