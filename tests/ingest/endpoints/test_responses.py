"""Responses: items in and out, what a request only refers to, and earlier responses."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
from tests.fakes.clients.streamed import PATHS, asked, response
from tests.fakes.engines.played import Play
from tests.fakes.proxies.in_process import InProcess

PATH = PATHS["responses"]
NAMES = itertools.count()
CALL = '<tool_call>\n{{"name": "calc", "arguments": {{"a": {}}}}}\n</tool_call>'
TOOL = {"type": "function", "name": "calc", "description": "adds", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def proxy(played: Callable[..., InProcess]) -> InProcess:
    """A proxy whose engine the tests tell what to say."""
    return played()


@pytest.fixture(autouse=True)
def _reset(proxy: InProcess) -> None:
    """Each test begins with an engine that says Hello."""
    proxy.engine.answer = lambda *_: "Hello"


@pytest.fixture
def name() -> str:
    """A trajectory's name that no other test uses."""
    return f"r{next(NAMES)}"


def _ask(proxy: Any, name: str, answer: Any = None, **body: Any) -> Any:
    if answer is not None:
        proxy.engine.answer = lambda *_: answer
    reply = proxy.ask(f"/t/{name}{PATH}", body)
    assert reply.status == 200, reply.data
    return response(reply.data) if body.get("stream") else reply.json


def _turns(proxy: Any, name: str) -> list[Any]:
    return list(proxy.trajectories()[name].turns.values())


def _user(text: str) -> Any:
    return {"role": "user", "content": text}


def _output(call: Any, text: str) -> Any:
    return {"type": "function_call_output", "call_id": call["call_id"], "output": text}


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_holds_reasoning_message_and_calls(proxy: InProcess, name: str, stream: bool) -> None:
    """Reasoning, message and calls as items whose ids name the turn; usage; what was asked."""
    text = "<think>hm</think>\n\nLet me see. " + CALL.format(1) + "\n" + CALL.format(2)
    fields = {"tools": [TOOL], "metadata": {"k": "v"}, "temperature": 0.5, "max_output_tokens": 500}
    reply = _ask(proxy, name, text, input="go", stream=stream, instructions="be brief", model="m", **fields)
    (turn,) = _turns(proxy, name)
    at = turn.turn_id
    assert [(i["id"], i["type"], i["status"]) for i in reply["output"]] == [
        (f"rs_{at}", "reasoning", "completed"),
        (f"msg_{at}", "message", "completed"),
        (f"fc_{at}_0", "function_call", "completed"),
        (f"fc_{at}_1", "function_call", "completed"),
    ]
    reasoning, message, first, second = reply["output"]
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "hm"}]
    assert message["content"] == [
        {"type": "output_text", "text": "Let me see.", "annotations": [], "logprobs": []}
    ]
    assert [(c["call_id"], c["name"], c["arguments"]) for c in (first, second)] == [
        (f"call-{at}-0", "calc", '{"a": 1}'),
        (f"call-{at}-1", "calc", '{"a": 2}'),
    ]
    assert (reply["id"], reply["object"], reply["status"]) == (f"resp_{at}", "response", "completed")
    for key, value in (fields | {"instructions": "be brief", "model": "m"}).items():
        assert reply[key] == value
    done = turn.completed
    assert reply["usage"]["input_tokens"] == done.prompt_length
    assert reply["usage"]["output_tokens"] == len(done.completion_ids)
    assert reply["usage"]["total_tokens"] == done.prompt_length + len(done.completion_ids)
    sampling = proxy.engine.samplings[-1]
    assert (sampling.temperature, sampling.max_new_tokens) == (0.5, 500)


@pytest.mark.parametrize("stream", [False, True])
def test_an_unfinished_response_says_so(proxy: InProcess, name: str, stream: bool) -> None:
    """Cut off by its limit: incomplete, with the reason."""
    reply = _ask(proxy, name, Play("Hel", "length", ends=False), input="go", stream=stream)
    assert (reply["status"], reply["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert reply["output"][0]["content"][0]["text"] == "Hel"


@pytest.mark.parametrize("text", ["", "<think>only</think>", "<think>never closed"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_reply_without_text(proxy: InProcess, name: str, stream: bool, text: str) -> None:
    """An empty message is there, streamed too, so that clients have something to read."""
    reply = _ask(proxy, name, text, input="go", stream=stream)
    assert reply["output"][-1]["type"] == "message"
    assert reply["output"][-1]["content"][0]["text"] == ""
    assert len(reply["output"]) == (2 if text else 1)


FORMS: dict[str, Any] = {
    "text": "Hi",
    "message": [_user("Hi")],
    "typed message": [{"type": "message", **_user("Hi")}],
    "parts": [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "H"}, {"type": "input_text", "text": "i"}],
        }
    ],
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_input_is_one_prompt(proxy: InProcess, name: str, form: str) -> None:
    """And the same one as through chat completions."""
    _ask(proxy, name, input=FORMS[form], instructions="Be brief.")
    ids = proxy.engine.prompts[-1].ids.tolist()
    chat = {"messages": [{"role": "system", "content": "Be brief."}, _user("Hi")]}
    proxy.ask(f"/t/{name}{PATHS['chat']}", chat)
    assert proxy.engine.prompts[-1].ids.tolist() == ids


@pytest.mark.parametrize("summary", ["text", ["text"], [{"text": "te"}, "xt"]])
def test_reasoning_of_another_form_is_read(proxy: InProcess, name: str, summary: Any) -> None:
    """A bare text is one, wherever a part with a text may be."""
    items = [_user("a"), {"type": "reasoning", "summary": summary}, {"role": "assistant", "content": "b"}]
    _ask(proxy, name, input=[*items, _user("c")])
    (turn,) = _turns(proxy, name)
    messages = proxy.trajectories()[name].messages(turn)
    assert [m["role"] for m in messages] == ["user", "assistant", "user"]
    assert messages[1]["reasoning_content"] == "text"


@pytest.mark.parametrize(
    ("summary", "place"),
    [
        (True, "summary is true"),
        (5, "summary is 5"),
        ({"text": "x"}, "summary is an object"),
        ([{"text": 5}], "summary[0].text is 5"),
    ],
)
def test_reasoning_that_is_no_text_is_a_400(proxy: InProcess, name: str, summary: Any, place: str) -> None:
    """It names the place: nothing vanishes without a word."""
    items = [_user("a"), {"type": "reasoning", "summary": summary}, _user("c")]
    reply = proxy.ask(f"/t/{name}{PATH}", {"input": items})
    assert reply.status == 400
    assert f"input[1].{place}" in reply.json["error"]["message"]


def _conversation(proxy: Any, name: str, goes_on: Any) -> None:
    """Three turns with a call between them; `goes_on` makes the next request of (body, response, new)."""
    first: Any = {"input": [_user("go")], "tools": [TOOL]}
    reply = _ask(proxy, name, "<think>a</think>\n\nLet me see.\n" + CALL.format(1), **first)
    call = reply["output"][-1]
    second = goes_on(first, reply, [_output(call, "3")])
    later = _ask(proxy, name, "<think>b</think>\n\nIt is 3.", **second)
    _ask(proxy, name, "Bye.", **goes_on(second, later, [_user("thanks")]))


def _resent(body: Any, reply: Any, new: list[Any]) -> Any:
    return body | {"input": [*body["input"], *reply["output"], *new]}


def _referred(body: Any, reply: Any, new: list[Any]) -> Any:
    refers = [{"type": "item_reference", "id": item["id"]} for item in reply["output"]]
    return body | {"input": [*body["input"], *refers, *new]}


def _mixed(body: Any, reply: Any, new: list[Any]) -> Any:
    """As the AI SDK: calls resent, the rest referred to."""
    items = [
        i if i["type"] == "function_call" else {"type": "item_reference", "id": i["id"]}
        for i in reply["output"]
    ]
    return body | {"input": [*body["input"], *items, *new]}


def _previous(body: Any, reply: Any, new: list[Any]) -> Any:
    return {"input": new, "tools": body["tools"], "previous_response_id": reply["id"]}


@pytest.mark.parametrize("goes_on", [_resent, _referred, _mixed, _previous])
def test_a_conversation_is_one_path(proxy: InProcess, name: str, goes_on: Any) -> None:
    """However it says what was said: each turn extends the one before, and nothing said is lost."""
    _conversation(proxy, name, goes_on)
    trajectory = proxy.trajectories()[name]
    first, second, third = trajectory.turns.values()
    assert [t.requested.parent_turn_id for t in (first, second, third)] == [
        None,
        first.turn_id,
        second.turn_id,
    ]
    messages = trajectory.messages(third)
    assert [m["role"] for m in messages] == ["user", "assistant", "tool", "assistant", "user"]
    assert messages[1]["content"] == "Let me see."
    assert messages[1]["tool_calls"][0]["function"]["arguments"] == '{"a": 1}'
    assert messages[3]["content"] == "It is 3."
    whole = proxy.engine.tokenizer.decode(trajectory.prompt_ids(third), special=True)
    for text in ("<think>a</think>", "Let me see.", "It is 3.", "thanks"):
        assert whole.count(text) == 1, text


@pytest.mark.parametrize("goes_on", [_resent, _mixed, _previous])
def test_an_unnamed_conversation_is_one_path(proxy: InProcess, goes_on: Any) -> None:
    """An unnamed conversation is one quarantined trajectory, also where it only refers to what was said."""
    before = set(proxy.trajectories())
    first: Any = {"input": [_user(goes_on.__name__)], "tools": [TOOL]}
    proxy.engine.answer = lambda *_: "Let me see.\n" + CALL.format(1)
    reply = proxy.ask(PATH, first)
    proxy.engine.answer = lambda *_: "3"
    later = proxy.ask(PATH, goes_on(first, reply.json, [_output(reply.json["output"][-1], "3")]))
    assert (reply.status, later.status) == (200, 200), later.data
    (new,) = set(proxy.trajectories()) - before
    a, b = _turns(proxy, new)
    assert b.requested.parent_turn_id == a.turn_id


def test_instructions_do_not_carry_over(proxy: InProcess, name: str) -> None:
    """As OpenAI has it: a request that goes on has its own, or none."""
    reply = _ask(proxy, name, input="a", instructions="first words")
    _ask(proxy, name, input="b", previous_response_id=reply["id"], instructions="second words")
    text = proxy.engine.tokenizer.decode(proxy.engine.prompts[-1].ids, special=True)
    assert "second words" in text
    assert "first words" not in text
    _ask(proxy, name, input="c", previous_response_id=reply["id"])
    assert "words" not in proxy.engine.tokenizer.decode(proxy.engine.prompts[-1].ids, special=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"previous_response_id": "resp_018f0000-0000-7000-8000-000000000000"},
        {"previous_response_id": "resp_other"},
        {"previous_response_id": 5},
        {"input": [{"type": "item_reference", "id": "msg_018f0000-0000-7000-8000-000000000000"}, _user("x")]},
        {"input": [{"type": "item_reference"}, _user("x")]},
    ],
)
def test_an_unknown_reference_is_a_404(proxy: InProcess, name: str, fields: Any) -> None:
    """An unknown response or item is a 404, never an answer to half a conversation."""
    for path in (f"/t/{name}{PATH}", PATH):
        reply = proxy.ask(path, asked("responses") | fields)
        assert reply.status == 404
        assert reply.json["error"]["code"] in ("unknown_response", "unknown_item")
    assert name not in proxy.trajectories()


def test_a_call_that_is_not_there_is_a_404(proxy: InProcess, name: str) -> None:
    """A reference to the second of one call."""
    earlier = _ask(proxy, name, CALL.format(1), input="go", tools=[TOOL])
    item = earlier["output"][-1]["id"].replace("_0", "_1")
    reply = proxy.ask(f"/t/{name}{PATH}", {"input": [{"type": "item_reference", "id": item}, _user("x")]})
    assert (reply.status, reply.json["error"]["code"]) == (404, "unknown_item")


def test_another_trajectorys_response_is_not_there(proxy: InProcess, name: str) -> None:
    """A request that names its trajectory goes on from nothing else."""
    theirs = _ask(proxy, f"{name}-theirs", input="a")["id"]
    _ask(proxy, name, input="b")
    assert proxy.ask(f"/t/{name}{PATH}", asked("responses", previous_response_id=theirs)).status == 404
    assert proxy.ask(f"/t/{name}/v1/responses/{theirs}", method="GET").status == 404


def test_an_earlier_response_can_be_fetched(proxy: InProcess, name: str) -> None:
    """GET returns what POST returned, with or without a trajectory in the path, while it is open."""
    proxy.engine.answer = lambda *_: "<think>hm</think>\n\nHello"
    body = {"input": [_user("go")], "model": "m", "metadata": {"a": "b"}, "tools": [TOOL]}
    first = proxy.ask(f"/t/{name}{PATH}", body)
    streamed = _ask(proxy, name, stream=True, **body)
    for path in ("", f"/t/{name}"):
        for expected in (first.json, streamed):
            again = proxy.ask(f"{path}/v1/responses/{expected['id']}", method="GET")
            assert (again.status, again.json) == (200, expected)
    for odd in ("resp_x", "x", "resp_018f0000-0000-7000-8000-000000000000"):
        reply = proxy.ask(f"/v1/responses/{odd}", method="GET")
        assert (reply.status, reply.json["error"]["code"]) == (404, "unknown_response")
    proxy.ask(f"/v1/trajectories/{name}/finish", {})
    assert proxy.ask(f"/v1/responses/{first.json['id']}", method="GET").status == 404


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"background": True}, "background_not_served"),
        ({"input": 5}, "bad_request"),
        ({"input": [5]}, "bad_request"),
        ({"input": []}, "empty_messages"),
        ({"input": [{"type": "computer_call"}]}, "content_not_served"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, "content_not_served"),
        ({"input": [{"role": "user", "content": 5}]}, "bad_request"),
        ({"input": [{"role": "robot", "content": "x"}]}, "unknown_role"),
        ({"tools": [{"type": "function"}]}, "bad_request"),
        ({"tools": 5}, "bad_request"),
        ({"text": {"format": {"type": "odd"}}}, "bad_response_format"),
    ],
)
def test_an_invalid_request_is_a_400(proxy: InProcess, name: str, fields: Any, code: str) -> None:
    """Each with its code, and nothing is recorded."""
    reply = proxy.ask(f"/t/{name}{PATH}", asked("responses") | fields)
    assert (reply.status, reply.json["error"]["code"]) == (400, code)
    assert name not in proxy.trajectories()


def test_ignored_fields_are_listed_in_a_header(proxy: InProcess, name: str) -> None:
    """Tools that run at a provider, and fields that no engine acts on."""
    tools = [TOOL, {"type": "web_search"}, {"type": "mcp"}]
    body = asked("responses", tools=tools, max_tool_calls=3, truncation="auto") | {
        "text": {"verbosity": "low"}
    }
    reply = proxy.ask(f"/t/{name}{PATH}", body)
    assert reply.status == 200, reply.data
    assert reply.headers["x-rollbook-not-honoured"] == "max_tool_calls,tools.mcp,tools.web_search,truncation"


def test_a_json_schema_constrains_sampling(proxy: InProcess, name: str) -> None:
    """`text.format` constrains sampling as `response_format` does in chat completions."""
    shape = {"type": "json_schema", "name": "n", "schema": {"type": "object"}}
    _ask(proxy, name, "{}", input="go", text={"format": shape})
    assert proxy.engine.samplings[-1].constraint == {"json_schema": {"type": "object"}}
