"""Recording never gets in the way: where the store fails, traffic passes, and the gap is told and counted."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.upstreams.replies import ENDPOINTS
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, streamed, whole
from tests.ingest.upstream.conftest import Passed

from rollbook.ingest.upstream import recorder
from rollbook.store.errors import WriteFailedError
from rollbook.store.upkeep.verify import incomplete_turns

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
STREAM = ENDPOINTS[CHAT]["stream"]


def _break_the_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    def fdatasync(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fdatasync", fdatasync)


def _gap(passed: Any) -> tuple[float, int, int]:
    """(at /metrics, at /healthz, status of /healthz)"""
    health = passed.http.get("/healthz")
    return passed.metric("rollbook_unrecorded_total"), health.json()["unrecorded"], health.status_code


def _settled(passed: Any, lost: int) -> None:
    """So many turns are told to be lost, at once or a moment after their replies."""
    deadline = time.monotonic() + 30
    while passed.metric("rollbook_unrecorded_total") < lost and time.monotonic() < deadline:
        time.sleep(0.01)
    assert _gap(passed)[:2] == (lost, lost)


def test_a_store_that_failed_before_lets_requests_pass(
    passed: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that has failed already: all passes, each turn is counted, and each reply says so."""
    assert "x-rollbook-unrecorded" not in passed.chat(USER).headers
    passed.turn()
    _break_the_disk(monkeypatch)
    passed.chat(USER, name="first")  # finds out
    while passed.recorder.writer.failure is None:
        pass
    for path, endpoint in ENDPOINTS.items():
        upstream.answers += [whole(endpoint["whole"]), streamed(endpoint["stream"], [50])]
        reply = passed.post(path, endpoint["asks"])
        stream = passed.post(path, endpoint["asks"] | {"stream": True})
        assert (reply.json(), stream.content) == (endpoint["whole"], endpoint["stream"])
        assert reply.headers["x-rollbook-unrecorded"] == stream.headers["x-rollbook-unrecorded"] == "1"
        assert "x-rollbook-turn-id" not in reply.headers
    passed.chat(USER, n=3)
    passed.http.post("/v1/embeddings", json={})
    assert _gap(passed) == (1 + 8 + 3, 1 + 8 + 3, 503)
    assert "No space left" in passed.http.get("/healthz").json()["status"]
    assert len(passed.turns()) == 1


@pytest.mark.parametrize("when", ["during", "at the end"])
def test_a_disk_that_fails_meanwhile_costs_the_client_no_byte(
    passed: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """The disk fails while a reply streams, or with its last event: the client gets every byte of it."""
    hold = threading.Event()
    upstream.answers.append(streamed(STREAM, [100, len(STREAM) - 20], hold=hold, held=2))
    request = ("POST", f"/t/t{CHAT}")
    with passed.http.stream(*request, json={"messages": [USER], "stream": True}) as reply:
        parts = reply.iter_raw()
        data = next(parts)
        passed.turns(ended=False)  # what was asked is durable
        _break_the_disk(monkeypatch)
        if when == "during":
            passed.chat(USER, name="other")
            while passed.recorder.writer.failure is None:
                pass
        hold.set()
        data += b"".join(parts)
        while passed.recorder.writer.failure is None:
            pass
    assert data == STREAM
    lost = 2 if when == "during" else 1
    _settled(passed, lost)
    [turn] = passed.turns(ended=False)
    assert (turn.completed, turn.failed) == (None, None)


def test_a_request_that_cannot_be_written(
    passed: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write that fails is counted once, whether the upstream answers, refuses or cannot be reached."""

    def append_each(appends: Any) -> None:
        for _, future in appends:
            future.set_exception(WriteFailedError("lane 'serve': it is full"))

    monkeypatch.setattr(passed.recorder.writer, "append_each", append_each)
    upstream.answers += [whole(chat_reply()), whole(b"{}", "500 Internal Server Error")]
    assert passed.chat(USER, name="a").json() == chat_reply()
    assert passed.chat(USER, name="b").status_code == 500
    upstream.close()
    assert passed.chat(USER, name="c").status_code == 200  # the connection was kept
    _settled(passed, 3)


def test_recording_goes_on_by_itself(
    passed: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the disk takes events again; what passed unrecorded meanwhile is nobody's parent."""
    reply = passed.chat(USER).json()["choices"][0]["message"]
    passed.turn()
    with monkeypatch.context() as patch:
        _break_the_disk(patch)
        upstream.answers.append(whole(chat_reply("unseen")))
        unseen = passed.chat(USER, reply, USER).json()["choices"][0]["message"]
        while passed.recorder.writer.failure is None:
            pass
        assert passed.chat(USER, name="other").headers["x-rollbook-unrecorded"] == "1"
    deadline = time.monotonic() + 30
    while passed.recorder.writer.failure is not None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    assert _gap(passed) == (2, 2, 200)
    again = passed.chat(USER, reply, USER, unseen, USER)
    assert "x-rollbook-unrecorded" not in again.headers
    assert "x-rollbook-unrecorded" not in passed.chat(USER, name="other").headers
    parent, child = passed.turns(count=2)
    assert child.requested.parent_turn_id == parent.turn_id  # the last that the log knows
    assert passed.trajectories()["t"].messages(child) == [USER, reply, USER, unseen, USER]
    assert passed.metric("rollbook_store_failures_total") == 1
    assert _gap(passed) == (2, 2, 200)


def test_recording_goes_on_after_a_restart(
    passing: Callable[..., Passed], upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What passed unrecorded is a gap; the conversation goes on where the log has it."""
    passed = passing()
    reply = passed.chat(USER).json()["choices"][0]["message"]
    passed.turn()
    with monkeypatch.context() as patch:
        _break_the_disk(patch)
        upstream.answers.append(whole(chat_reply("unseen")))
        unseen = passed.chat(USER, reply, USER).json()["choices"][0]["message"]
        while passed.recorder.writer.failure is None:
            pass
    again = passing()
    assert _gap(again) == (0, 0, 200)
    again.chat(USER, reply, {"role": "user", "content": "else"})
    again.chat(USER, reply, USER, unseen, USER)
    first, second, third = again.turns(count=3)
    assert second.requested.parent_turn_id == first.turn_id
    assert third.requested.parent_turn_id == first.turn_id  # the last that the log knows
    assert again.trajectories()["t"].messages(third) == [USER, reply, USER, unseen, USER]


@pytest.mark.parametrize(
    "body",
    [
        b'{"messages": [{"role": "user", "content": ' + b"[" * 600 + b"]" * 600 + b"}]}",
        b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    ],
    ids=["deep", "half a surrogate"],
)
def test_a_request_that_has_no_stored_form(passed: Passed, upstream: HttpUpstream, body: bytes) -> None:
    """It passes as it is; the lane goes on, and so does its trajectory."""
    first = passed.chat(USER)
    reply = passed.http.post(f"/t/t{CHAT}", content=body)
    assert (reply.status_code, reply.headers["x-rollbook-unrecorded"]) == (200, "1")
    assert upstream.asked[-1].body == body
    passed.chat(USER, first.json()["choices"][0]["message"], USER)
    parent, child = passed.turns(count=2)
    assert child.requested.parent_turn_id == parent.turn_id
    assert _gap(passed) == (1, 1, 200)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(chat_reply(deep=0)).replace(": 0}", ": " + "[" * 600 + "]" * 600 + "}").encode(),
        json.dumps(chat_reply("\ud800")).encode(),
    ],
    ids=["deep", "half a surrogate"],
)
def test_a_reply_that_has_no_stored_form(
    passing: Callable[..., Passed], upstream: HttpUpstream, text: bytes
) -> None:
    """It passes as it is; its turn failed, is counted, and does no harm to later ones, nor to a restart."""
    passed = passing()
    upstream.answers.append(whole(text))
    assert passed.chat(USER).content == text
    assert "cannot be recorded" in passed.turn().failed.error
    assert passed.chat(USER).status_code == 200
    assert [bool(t.completed) for t in passed.turns(count=2)] == [False, True]
    assert _gap(passed) == (1, 1, 200)
    assert passing().chat(USER).status_code == 200


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"[]", b"null", b'{"choices": 5}', b"<html>", b'{"choices": [7]}']
)
@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_reply_that_says_nothing(passed: Passed, upstream: HttpUpstream, path: str, text: bytes) -> None:
    """Whatever an upstream says with status 200, it passes, and the turn did not complete."""
    upstream.answers += [whole(text), streamed(b"data: " + text + b"\n\n")]
    for _ in range(2):
        reply = passed.post(path, ENDPOINTS[path]["asks"])
        assert reply.status_code == 200
    assert [bool(t.failed) for t in passed.turns(count=2)] == [True, True]
    assert passed.metric("rollbook_unrecorded_total") == 0


def test_a_bug_in_recording_harms_no_reply(
    passed: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bug where a request or a reply is recorded is counted, and nobody's reply suffers."""

    def fault(*_: Any, **__: Any) -> Any:
        raise RuntimeError("a bug")

    for place, name in ((recorder, "which_prompt"), (recorder, "completed_turn")):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, fault)
            assert passed.chat(USER, name=name).json() == chat_reply()
    assert "a bug" in passed.turn("completed_turn").failed.error
    assert _gap(passed) == (2, 2, 200)


def test_metrics_count_what_is_recorded(passed: Passed, upstream: HttpUpstream) -> None:
    """Turns and failures are at /metrics as they are of other engines."""
    passed.chat(USER)
    upstream.answers.append(whole(b"{}", "429 Too Many Requests"))
    passed.chat(USER)
    passed.turns(count=2)
    assert passed.metric("rollbook_turns_total") == 1
    assert passed.metric("rollbook_engine_seconds_count") == 1
    assert passed.metric("rollbook_running") == 0
    assert passed.metric("rollbook_unrecorded_total") == 0


def test_record_only_counts_what_is_not_recorded(
    passed: Passed, upstream: HttpUpstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that has no stored form passes, its reply too; it is counted, and others are recorded."""
    nested: Any = 1
    for _ in range(260):
        nested = [nested]
    upstream.answers += [whole(chat_reply()), whole(chat_reply())]
    monkeypatch.setattr("rollbook.ingest.upstream.recorder.check_recordable", lambda *_: None)
    monkeypatch.setattr("rollbook.ingest.upstream.routes.check_depth", lambda *_: None)
    assert passed.chat(USER, name="bad", metadata={"deep": nested}).status_code == 200
    assert passed.chat(USER, name="good").status_code == 200
    assert passed.turns("good")[0].completed is not None
    assert "bad" not in passed.trajectories()
    assert passed.metric("rollbook_unrecorded_total") == 1
    assert passed.http.get("/healthz").json()["unrecorded"] == 1
    assert list(incomplete_turns(passed.recorder.store)) == []
