"""What a Responses request names instead of repeating it: found in its own trajectory, or told missing."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.upstreams.server import HttpUpstream, whole
from tests.ingest.upstream.conftest import Passed

PATH = "/v1/responses"
USER = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
MORE = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "More"}]}
REASONING = {
    "id": "rs_up",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "hm"}],
    "encrypted_content": "e" * 999,
}
MESSAGE = {
    "id": "msg_up",
    "type": "message",
    "role": "assistant",
    "status": "completed",
    "content": [{"type": "output_text", "text": "Looking.", "annotations": []}],
}
CALL = {"id": "fc_up", "type": "function_call", "call_id": "c", "name": "look", "arguments": '{"a": 1}'}
RESULT = {"type": "function_call_output", "call_id": "c", "output": "18 C"}
OUTPUT = [REASONING, MESSAGE, CALL]


def _response(response_id: str = "resp_up", output: Any = OUTPUT) -> Any:
    body = {"id": response_id, "object": "response", "status": "completed", "output": output}
    return whole(body)


def _refer(*ids: str) -> list[dict[str, Any]]:
    return [{"type": "item_reference", "id": item_id} for item_id in ids]


def _ask(passed: Any, upstream: Any, answer: Any, name: str | None = "t", **body: Any) -> Any:
    upstream.answers.append(answer)
    reply = passed.post(PATH, body, name)
    assert reply.status_code == 200
    assert upstream.asked[-1].json == body  # whatever is recorded, what is sent is what was asked
    return reply


def _second(passed: Any, name: str = "t") -> Any:
    return passed.turns(name, count=2)[1]


@pytest.mark.parametrize(
    "shown",
    [
        _refer("rs_up", "msg_up", "fc_up"),
        [{"id": "rs_up"}, MESSAGE, {"id": "fc_up", "type": None}],
        [*_refer("rs_up", "msg_up"), CALL],
    ],
    ids=["references", "untyped and mixed", "the call in full"],
)
def test_references_are_what_they_name(passed: Passed, upstream: HttpUpstream, shown: Any) -> None:
    """The AI SDK's default: the conversation hangs together, and is recorded with what it says."""
    _ask(passed, upstream, _response(), input=[USER])
    _ask(passed, upstream, _response("resp_2", [MESSAGE | {"id": "msg_2"}]), input=[USER, *shown, RESULT])
    parent, child = passed.turns(count=2)
    assert child.requested.parent_turn_id == parent.turn_id
    assert child.completed.flags == ["text_only"]
    trajectory = passed.trajectories()["t"]
    assert trajectory.items(child) == [USER, *shown, RESULT]
    message = trajectory.messages(child)[1]
    assert (message["content"], message["reasoning_content"]) == ("Looking.", "hm")
    assert message["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"a": 1}'}
    rows = passed.sql("select count(*) from turns where parent_turn_id is not null")
    assert rows == [(1,)]


def test_references_beside_items_of_other_kinds(passed: Passed, upstream: HttpUpstream) -> None:
    """A request that cannot be read strictly still says what it refers to."""
    _ask(passed, upstream, _response(), input=[USER])
    search = {"type": "web_search_call", "id": "ws", "status": "completed"}
    shown = [USER, search, *_refer("rs_up", "msg_up", "fc_up"), RESULT]
    _ask(passed, upstream, _response("resp_2"), input=shown)
    two = _second(passed)
    assert "Looking." in json.dumps(passed.trajectories()["t"].messages(two))
    assert passed.trajectories()["t"].items(two) == shown


def test_references_outlive_a_restart(passing: Callable[..., Passed], upstream: HttpUpstream) -> None:
    """They are read back from the log with the trajectory."""
    _ask(passing(), upstream, _response(), input=[USER])
    again = passing()
    _ask(again, upstream, _response("resp_2"), input=[USER, *_refer("rs_up", "msg_up", "fc_up"), RESULT])
    _ask(again, upstream, _response("resp_3"), input=[MORE], previous_response_id="resp_up")
    first, second, third = again.turns(count=3)
    assert second.requested.parent_turn_id == third.requested.parent_turn_id == first.turn_id


@pytest.mark.parametrize(
    ("body", "missing"),
    [
        ({"input": [USER, *_refer("rs_up", "msg_other"), MORE]}, ["item_reference msg_other"]),
        # Without the reference it would be the earlier conversation gone on with.
        ({"input": [USER, *_refer("msg_other"), MESSAGE, CALL, RESULT]}, ["item_reference msg_other"]),
        ({"input": [MORE], "previous_response_id": "resp_other"}, ["previous_response_id resp_other"]),
        ({"input": "x", "conversation": "conv_1"}, ["conversation"]),
        ({"input": "x", "prompt": {"id": "pmpt_1"}}, ["prompt"]),
        ({"input": _refer("msg_other")}, ["item_reference msg_other"]),
    ],
)
def test_what_did_not_pass_here_is_told_missing(
    passed: Passed, upstream: HttpUpstream, body: Any, missing: list[str]
) -> None:
    """The turn is a root that says why, and its recorded request is marked incomplete."""
    _ask(passed, upstream, _response(), input=[USER])
    _ask(passed, upstream, _response("resp_2"), **body)
    two = _second(passed)
    assert two.requested.root_reason == "unresolved_reference"
    assert two.requested.parent_turn_id is None
    assert two.requested.wire["unresolved"] == missing
    assert "incomplete_request" in two.completed.flags


@pytest.mark.parametrize(
    "body", [{"input": [USER, *_refer("msg_up"), MORE]}, {"previous_response_id": "resp_up"}]
)
def test_another_trajectorys_responses_are_not_ones_own(
    passed: Passed, upstream: HttpUpstream, body: Any
) -> None:
    """What one agent was told never comes into another's record."""
    _ask(passed, upstream, _response(), input=[USER])
    _ask(passed, upstream, _response("resp_2"), "other", **({"input": [MORE]} | body))
    turn = passed.turn("other")
    assert turn.requested.root_reason == "unresolved_reference"
    assert "Looking." not in json.dumps(passed.trajectories()["other"].messages(turn))


def test_unnamed_traffic_is_told_apart_by_what_it_refers_to(passed: Passed, upstream: HttpUpstream) -> None:
    """It belongs to the conversation whose items it names."""
    first = _ask(passed, upstream, _response(), None, input=[USER])
    again = _ask(
        passed, upstream, _response("resp_2"), None, input=[USER, *_refer("msg_up", "fc_up"), RESULT]
    )
    name = "x-rollbook-quarantined"
    assert first.headers[name] == again.headers[name]


def test_what_only_the_upstream_reads_is_not_kept(passed: Passed, upstream: HttpUpstream) -> None:
    """Encrypted reasoning is in the log, and not in memory; a finished trajectory keeps nothing."""
    _ask(passed, upstream, _response(), input=[USER])
    passed.turn()
    live = passed.recorder.known("t")
    outputs = live.known.outputs
    assert outputs.keys() == {"rs_up", "msg_up", "fc_up"}
    assert "encrypted_content" not in outputs["rs_up"]
    passed.finish()
    assert live.contents is None
    assert not any(passed.recorder.trajectories.of_response(i) for i in ("resp_1", "rs_up", "msg_up"))
