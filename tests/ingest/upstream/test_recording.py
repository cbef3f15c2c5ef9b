"""What passed is recorded as it was said, the same whole and streamed, and conversations hang together."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
from tests.fakes.upstreams.replies import ENDPOINTS, TEXT, USER
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, sse, streamed, whole
from tests.ingest.upstream.conftest import Passed

CHAT = "/v1/chat/completions"


def _record(turn: Any) -> dict[str, Any]:
    """What of a completed turn does not depend on when it was."""
    done = turn.completed
    names = ("reply", "finish_reason", "flags", "upstream", "logprob_semantics", "prompt_length")
    return {name: getattr(done, name) for name in names}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_whole_and_streamed_are_one_record(passed: Passed, upstream: HttpUpstream, path: str) -> None:
    """Reasoning, text, parallel calls, finish reason, usage and id: through every API, either way."""
    endpoint = ENDPOINTS[path]
    upstream.answers += [
        whole(endpoint["whole"]),
        streamed(endpoint["stream"], range(3, len(endpoint["stream"]), 11), pause_s=0.001),
    ]
    assert passed.post(path, endpoint["asks"]).json() == endpoint["whole"]
    first = passed.turn()
    assert passed.post(path, endpoint["asks"] | {"stream": True}).content == endpoint["stream"]
    second = passed.turns(count=2)[1]
    assert first.completed.reply == endpoint["message"]
    assert first.completed.finish_reason == endpoint["finish"]
    assert first.completed.flags == ["text_only"]
    assert first.completed.upstream["id"] == endpoint["whole"]["id"]
    assert first.completed.upstream["usage"] == endpoint["whole"]["usage"]
    assert _record(first) == _record(second)
    counts = "upstream_prompt_tokens, upstream_completion_tokens, prompt_length, completion_length"
    usage = endpoint["whole"]["usage"]
    prompt, answered = (
        next((usage[name] for name in names if name in usage), None)
        for names in (("prompt_tokens", "input_tokens"), ("completion_tokens", "output_tokens"))
    )
    assert prompt
    assert passed.sql(f"select {counts} from turns") == [(prompt, answered, 0, 0)] * 2
    for turn in (first, second):
        assert turn.delivered == "sent"
        assert turn.requested.wire["endpoint"] == path
        assert turn.requested.requested_model == "m"
        assert (len(turn.completed.prompt_ids), len(turn.completed.completion_ids)) == (0, 0)
        assert turn.completed.logprobs is None


def test_what_chat_form_has_no_place_for_is_kept(passed: Passed, upstream: HttpUpstream) -> None:
    """Signatures, encrypted reasoning and unknown fields survive beside the message in chat form."""
    for path in ("/v1/messages", "/v1/responses"):
        upstream.answers.append(whole(ENDPOINTS[path]["whole"]))
        passed.post(path, ENDPOINTS[path]["asks"], name=path[4:])
    message, response = passed.turn("messages"), passed.turn("responses")
    assert message.completed.upstream["choice"]["content"] == ENDPOINTS["/v1/messages"]["whole"]["content"]
    assert response.completed.upstream["choice"]["output"] == ENDPOINTS["/v1/responses"]["whole"]["output"]
    choice = {"index": 0, "message": {"role": "assistant", "content": "x", "new": {"a": [1]}}, "odd": 5}
    upstream.answers.append(whole(chat_reply(choices=[choice], novel="v")))
    passed.chat(USER, name="c")
    done = passed.turn("c").completed
    assert done.reply == {"role": "assistant", "content": "x", "new": {"a": [1]}}
    assert (done.upstream["choice"], done.upstream["novel"]) == ({"odd": 5}, "v")


@pytest.mark.parametrize("path", [p for p in ENDPOINTS if ENDPOINTS[p]["goes_on"]])
def test_a_conversation_is_one_path(passed: Passed, upstream: HttpUpstream, path: str) -> None:
    """The next request, which shows the reply with its results, hangs on it; nothing is stored twice."""
    endpoint = ENDPOINTS[path]
    upstream.answers += [streamed(endpoint["stream"]), whole(endpoint["whole"]), whole(endpoint["whole"])]
    passed.post(path, endpoint["asks"] | {"stream": True})
    passed.post(path, endpoint["goes_on"])
    passed.post(path, endpoint["asks"])
    parent, child, fork = passed.turns(count=3)
    assert child.requested.parent_turn_id == parent.turn_id
    assert (parent.requested.root_reason, fork.requested.root_reason) == ("first_turn", "no_matching_turn")
    assert fork.requested.parent_turn_id is None
    trajectory = passed.trajectories()["t"]
    roles = [m["role"] for m in trajectory.messages(child) if m["role"] != "system"]
    assert roles == ["user", "assistant", "tool", "tool"]
    name = "input" if path == "/v1/responses" else "messages"
    if path == CHAT:
        assert trajectory.messages(child) == endpoint["goes_on"]["messages"]
    else:
        assert trajectory.items(child) == endpoint["goes_on"][name]
        assert child.requested.wire["shared_items"] == 1
    assert parent.delivered in ("sent", "echoed")


def test_forks_hang_on_the_turn_they_fork_from(passed: Passed, upstream: HttpUpstream) -> None:
    """Two ways to go on from one reply, and a retry that the client counts, are children of one turn."""
    reply = passed.chat(USER).json()["choices"][0]["message"]
    left, right = {"role": "user", "content": "left"}, {"role": "user", "content": "right"}
    passed.chat(USER, reply, left)
    passed.chat(USER, reply, right)
    body = {"model": "m", "messages": [USER, reply, right]}
    passed.post(CHAT, body, headers={"x-stainless-retry-count": "2"})
    root, *children = passed.turns(count=4)
    assert [c.requested.parent_turn_id for c in children] == [root.turn_id] * 3
    assert [c.requested.wire.get("retry") for c in children] == [None, None, 2]
    rows = passed.sql("select count(*) from paths")
    assert rows == [(3,)]


def test_the_next_request_may_come_before_the_streams_last_byte(
    passed: Passed, upstream: HttpUpstream
) -> None:
    """A client acts on [DONE]; that the upstream is slow to close must not tear the conversation apart."""
    hold = threading.Event()
    data = sse({"id": "c", "choices": [{"index": 0, "delta": {"content": "Hi"}, "finish_reason": "stop"}]})
    upstream.answers.append(streamed(data + b": bye\n\n", [len(data)], hold=hold, held=1))
    with passed.http.stream("POST", f"/t/t{CHAT}", json={"messages": [USER], "stream": True}) as reply:
        parts = reply.iter_raw()
        assert next(parts) == data
        passed.chat(USER, {"role": "assistant", "content": "Hi"}, USER)
        hold.set()
        list(parts)
    parent, child = passed.turns(count=2)
    assert child.requested.parent_turn_id == parent.turn_id


@pytest.mark.parametrize("stream", [False, True])
def test_several_choices_are_siblings(passed: Passed, upstream: HttpUpstream, stream: bool) -> None:
    """n > 1: a turn for each choice, in whatever order they come, and any of them may be gone on from."""
    texts = ["zero", "one", "two"]
    order = [2, 0, 1]
    if stream:
        events = [
            {"id": "c", "choices": [{"index": i, "delta": {"content": part}}]}
            for part_of in (slice(0, 2), slice(2, None))
            for i in order
            for part in [texts[i][part_of]]
        ]
        events += [
            {"id": "c", "choices": [{"index": i, "delta": {}, "finish_reason": "stop"}]} for i in order
        ]
        upstream.answers.append(streamed(sse(*events)))
    else:
        choices = [
            {"index": i, "message": {"role": "assistant", "content": texts[i]}, "finish_reason": "stop"}
            for i in order
        ]
        upstream.answers.append(whole(chat_reply(choices=choices)))
    reply = passed.chat(USER, n=3, stream=stream)
    passed.chat(USER, {"role": "assistant", "content": "one"}, USER)
    *siblings, child = passed.turns(count=4)
    assert [t.completed.reply["content"] for t in siblings] == texts
    assert [t.requested.wire.get("choice", 0) for t in siblings] == [0, 1, 2]
    assert len({t.requested.request_id for t in siblings}) == 1
    assert reply.headers["x-rollbook-turn-id"] == ",".join(t.turn_id for t in siblings)
    assert child.requested.parent_turn_id == siblings[1].turn_id


def test_choices_that_nobody_foresaw_are_turns_too(passed: Passed, upstream: HttpUpstream) -> None:
    """Several prompts give a choice each, and an upstream may give more or fewer than it was asked for."""
    choices = [{"index": i, "text": str(i), "finish_reason": "stop"} for i in range(4)]
    upstream.answers += [whole(chat_reply(choices=choices)), whole(chat_reply(choices=choices[:1]))]
    passed.post("/v1/completions", {"prompt": ["a", "b"], "n": 2}, name="p")
    assert [t.completed.reply["content"] for t in passed.turns("p", 4)] == ["0", "1", "2", "3"]
    passed.post("/v1/completions", {"prompt": ["a", "b"]}, name="q")
    first, second = passed.turns("q", 2)
    assert first.completed.reply["content"] == "0"
    assert second.failed.error == "the upstream gave no such choice"
    extra = [{"index": i, "message": {"role": "assistant", "content": str(i)}} for i in range(2)]
    upstream.answers.append(whole(chat_reply(choices=extra)))
    passed.chat(USER, name="r")
    assert [t.completed.reply["content"] for t in passed.turns("r", 2)] == ["0", "1"]


@pytest.mark.parametrize("path", ENDPOINTS)
def test_a_client_that_leaves_ends_the_upstreams_work(
    passed: Passed, upstream: HttpUpstream, path: str
) -> None:
    """What came until then is kept, as aborted and undelivered; the upstream's connection is closed."""
    data = ENDPOINTS[path]["stream"]
    half = TEXT[: len(TEXT) // 2]
    place = data.find(b"\n\n", data.find(half.encode())) + 2
    hold = threading.Event()
    upstream.answers.append(streamed(data, [place], hold=hold, held=1))
    body = ENDPOINTS[path]["asks"] | {"stream": True}
    with passed.http.stream("POST", f"/t/t{path}", json=body) as reply:
        assert next(reply.iter_raw()) == data[:place]
    assert upstream.left.wait(60)
    turn = passed.turn()
    done = turn.completed
    assert (done.finish_reason, turn.delivered, done.flags) == ("abort", None, ["text_only"])
    message = ENDPOINTS[path]["message"] | {"content": half}
    assert done.reply == {k: v for k, v in message.items() if k != "tool_calls"}
    assert passed.finish().status_code == 200


def test_a_client_that_leaves_before_the_reply_begins(passed: Passed, upstream: HttpUpstream) -> None:
    """The upstream is not left to work for nobody, and the turn failed."""
    import httpx

    answer = whole(chat_reply())
    answer.hold = threading.Event()
    upstream.answers.append(answer)
    with pytest.raises(httpx.ReadTimeout):
        passed.post(CHAT, {"messages": [USER]}, timeout=0.3)
    assert upstream.left.wait(60)
    turn = passed.turn()
    assert turn.failed.error == "the upstream gave no reply: the client left before it began"


def test_a_client_that_leaves_after_the_last_event_has_it_all(passed: Passed, upstream: HttpUpstream) -> None:
    """Some clients close the connection at [DONE] and never see that the body ends."""
    hold = threading.Event()
    data = ENDPOINTS[CHAT]["stream"]
    upstream.answers.append(streamed(data + b"\n", [len(data)], hold=hold, held=1))
    with passed.http.stream("POST", f"/t/t{CHAT}", json={"messages": [USER], "stream": True}) as reply:
        assert next(reply.iter_raw()) == data
    turn = passed.turn()
    assert (turn.completed.finish_reason, turn.delivered) == ("tool_calls", "sent")


@pytest.mark.parametrize(
    ("path", "error"),
    [
        (CHAT, {"error": {"message": "overloaded", "code": 500}}),
        ("/v1/messages", {"type": "error", "error": {"type": "overloaded_error", "message": "overloaded"}}),
        ("/v1/responses", {"type": "error", "code": "x", "message": "overloaded"}),
    ],
)
def test_an_error_within_a_stream(
    passed: Passed, upstream: HttpUpstream, path: str, error: dict[str, Any]
) -> None:
    """With nothing said before, the turn failed; else what was said is kept as aborted, and the error."""
    data = ENDPOINTS[path]["stream"]
    part = data[: data.find(b"\n\n", len(data) // 2) + 2]
    named = path != CHAT
    upstream.answers += [streamed(sse(error, named=named, done=False))]
    upstream.answers += [streamed(part + sse(error, named=named, done=False))]
    passed.post(path, ENDPOINTS[path]["asks"] | {"stream": True}, name="at-once")
    passed.post(path, ENDPOINTS[path]["asks"] | {"stream": True}, name="later")
    assert "overloaded" in passed.turn("at-once").failed.error
    done = passed.turn("later").completed
    assert done.finish_reason == "abort"
    assert "overloaded" in str(done.upstream["error"])


def test_a_finish_waits_for_the_reply(passed: Passed, upstream: HttpUpstream) -> None:
    """A trajectory that is finished while its reply streams holds the whole reply, and its delivery."""
    hold = threading.Event()
    data = ENDPOINTS[CHAT]["stream"]
    upstream.answers.append(streamed(data, [40], hold=hold, held=1))
    with passed.http.stream("POST", f"/t/t{CHAT}", json={"messages": [USER], "stream": True}) as reply:
        parts = reply.iter_raw()
        next(parts)
        answers: list[Any] = []
        finish = threading.Thread(target=lambda: answers.append(passed.finish(reward=1.0)))
        finish.start()
        time.sleep(0.1)
        assert not answers
        hold.set()
        list(parts)
    finish.join(10)
    assert answers[0].json()["turns"] == 1
    assert passed.turn().delivered == "sent"
    rows = passed.sql("select arg_max(kind, seq) from events where trajectory_id is not null")
    assert rows == [("trajectory.finished",)]


def test_responses_are_gone_on_from_by_their_id(passed: Passed, upstream: HttpUpstream) -> None:
    """previous_response_id names the upstream's own response: the conversation still hangs together."""
    path = "/v1/responses"
    endpoint = ENDPOINTS[path]
    fields = {k: v for k, v in endpoint["asks"].items() if k != "input"}
    output = {"type": "function_call_output", "call_id": "call_0", "output": "18 C"}
    upstream.answers += [whole(endpoint["whole"]), whole(endpoint["whole"] | {"id": "resp_u2"})]
    passed.post(path, endpoint["asks"])
    passed.post(path, fields | {"input": [output], "previous_response_id": "resp_u1"})
    parent, child = passed.turns(count=2)
    assert child.requested.parent_turn_id == parent.turn_id
    assert passed.trajectories()["t"].items(child) == [output]
    assert child.requested.request["previous_response_id"] == "resp_u1"
    passed.post(path, {"input": "x", "previous_response_id": "resp_unknown"})
    third = passed.turns(count=3)[2]
    assert third.requested.root_reason == "unresolved_reference"
    assert third.requested.wire["unresolved"] == ["previous_response_id resp_unknown"]


def test_unnamed_traffic_is_quarantined_and_told_apart(passed: Passed, upstream: HttpUpstream) -> None:
    """Each conversation in a trajectory of its own."""
    reply = passed.chat(USER, name=None)
    message = reply.json()["choices"][0]["message"]
    again = passed.chat(USER, message, USER, name=None)
    other = passed.chat(USER, name=None)
    names = [r.headers["x-rollbook-quarantined"] for r in (reply, again, other)]
    assert names[0] == names[1] != names[2]
    assert len(passed.turns(names[0].replace("%2F", "/"), 2)) == 2


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": [USER, {"role": "assistant", "content": "I b"}]}),
        (CHAT, {"messages": [USER], "top_p": 0, "temperature": "hot", "tools": [{"type": "web_search"}]}),
        ("/v1/messages", {"messages": [USER], "max_tokens": 5, "top_k": "x"}),
        (
            "/v1/messages",
            {
                "max_tokens": 5,
                "messages": [
                    {"role": "user", "content": [{"type": "document", "source": {"type": "text"}}]},
                    {"role": "assistant", "content": [{"type": "server_tool_use", "id": "s"}]},
                    USER,
                ],
            },
        ),
        ("/v1/responses", {"input": [USER, {"type": "web_search_call", "id": "w"}], "background": True}),
    ],
)
def test_what_we_would_refuse_passes_and_hangs_together(
    passed: Passed, upstream: HttpUpstream, path: str, body: dict[str, Any]
) -> None:
    """An upstream knows more than we do: the request is kept as sent, and its conversation goes on."""
    name = "input" if path == "/v1/responses" else "messages"
    endpoint = ENDPOINTS[path]
    upstream.answers += [whole(endpoint["whole"]), whole(endpoint["whole"])]
    assert passed.post(path, body).status_code == 200
    echo = endpoint["goes_on"][name][1:]
    passed.post(path, body | {name: [*body[name], *echo]})
    parent, child = passed.turns(count=2)
    trajectory = passed.trajectories()["t"]
    sent = trajectory.items(parent) if path != CHAT else trajectory.messages(parent)
    assert sent == body[name]
    assert parent.requested.request == {k: v for k, v in body.items() if k != name}
    assert child.requested.parent_turn_id == parent.turn_id


def test_custom_tools_hang_together(passed: Any, upstream: HttpUpstream) -> None:
    """A call of a tool that is no function is kept as it was, and as a function's in the message."""
    custom = {"id": "c1", "type": "custom", "custom": {"name": "patch", "input": "*** Begin"}}
    message = {"role": "assistant", "content": None, "tool_calls": [custom]}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls"}
    upstream.answers.append(whole(chat_reply(choices=[choice])))
    passed.chat(USER)
    passed.chat(USER, message, {"role": "tool", "tool_call_id": "c1", "content": "ok"})
    parent, child = passed.turns(count=2)
    assert parent.completed.upstream["choice"]["tool_calls"] == [custom]
    assert parent.completed.reply["tool_calls"][0]["function"]["arguments"] == "*** Begin"
    assert child.requested.parent_turn_id == parent.turn_id
    assert passed.trajectories()["t"].items(child)[1] == message


def test_stored_size_grows_with_what_is_new(passed: Passed, upstream: HttpUpstream) -> None:
    """Of a long conversation each message is stored once, through an API with a form of its own too."""
    messages: list[Any] = [{"role": "user", "content": "x" * 2000}]
    for turn in range(12):
        reply = {"id": f"msg_{turn}", "content": [{"type": "text", "text": "Hi"}], "stop_reason": "end_turn"}
        upstream.answers.append(whole(reply))
        passed.post("/v1/messages", {"model": "m", "max_tokens": 5, "messages": messages})
        assert upstream.asked[-1].json["messages"] == messages
        messages = [*messages, {"role": "assistant", "content": "Hi"}]
        messages.append({"role": "user", "content": f"{turn} " + "y" * 2000})
    turns = passed.turns(count=12)
    assert sum(len(str(t.requested.wire["items"])) for t in turns) < 12 * 2600
    assert passed.trajectories()["t"].items(turns[-1]) == messages[:-2]
