"""Requests of shapes that the proxy itself would refuse pass as they are, and are recorded as sent."""

from __future__ import annotations

from typing import Any

import pytest
from tests.fakes.upstreams.replies import ENDPOINTS
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, whole
from tests.ingest.upstream.conftest import Passed

CHAT = "/v1/chat/completions"
USER = {"role": "user", "content": "Hello"}
ODD: list[Any] = [
    [{"type": "input_audio", "input_audio": {"data": "AA==", "format": "wav"}}],
    [{"type": "file", "file": {"file_id": "f"}}, {"type": "text", "text": "a"}],
    [{"type": "text", "text": None}],
    ["a", 5, None],
    5,
    {"type": "text", "text": "a"},
]


@pytest.mark.parametrize("content", ODD)
def test_chat_content_of_any_shape_is_recorded(passed: Passed, upstream: HttpUpstream, content: Any) -> None:
    """Verbatim, once; and the next request goes on from it."""
    message = {"role": "user", "content": content, "name": 5}
    upstream.answers += [whole(chat_reply("Hi")), whole(chat_reply("Ho"))]
    assert passed.chat(message).status_code == 200
    passed.chat(message, {"role": "assistant", "content": "Hi"}, USER)
    assert upstream.asked[0].json["messages"] == [message]
    parent, child = passed.turns(count=2)
    assert passed.trajectories()["t"].messages(parent) == [message]
    assert child.requested.parent_turn_id == parent.turn_id
    assert len(child.requested.messages) == 2


@pytest.mark.parametrize(
    "calls",
    [[{"id": ["c"], "function": {"name": 5}}], [{"id": 1, "type": "custom", "custom": {"name": "f"}}]],
)
def test_calls_of_any_shape_are_recorded(passed: Passed, upstream: HttpUpstream, calls: Any) -> None:
    """Ids that are no texts name nothing, and are no fault."""
    message = {"role": "assistant", "content": None, "tool_calls": calls}
    upstream.answers += [whole(chat_reply(choices=[{"index": 0, "message": message}]))] * 2
    passed.chat(USER)
    assert passed.chat(USER, message, USER).status_code == 200
    turns = passed.turns(count=2)
    assert all(turn.completed is not None for turn in turns)
    assert passed.http.get("/healthz").json()["unrecorded"] == 0


def test_blocks_of_another_shape_are_read_as_far_as_they_go(passed: Passed, upstream: HttpUpstream) -> None:
    """A text that is null, a call whose input is no object: the reply and the next request are recorded."""
    path = "/v1/messages"
    content = [{"type": "text", "text": None}, {"type": "tool_use", "id": "c", "name": "f", "input": [1]}]
    upstream.answers += [whole(ENDPOINTS[path]["whole"] | {"content": content})] * 2
    passed.post(path, {"max_tokens": 4, "messages": [USER]})
    passed.post(path, {"max_tokens": 4, "messages": [USER, {"role": "assistant", "content": content}, USER]})
    parent, child = passed.turns(count=2)
    assert parent.completed is not None
    assert parent.completed.upstream["choice"]["content"] == content
    assert child.requested.parent_turn_id == parent.turn_id
