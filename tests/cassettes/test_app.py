"""Agents are answered from what a real proxy recorded, through real clients, and are told the same."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
from tests.cassettes.conftest import Recording
from tests.fakes.agents import program as agent_program
from tests.fakes.upstreams.server import HttpUpstream, chat_reply, whole

from rollbook.cassettes.app import EngineBehind
from rollbook.engines.address import EngineAddress
from rollbook.ingest.upstream.paths import Upstream
from rollbook.testing.asgi import free_port

Play = Callable[..., str]


@pytest.mark.parametrize("agent", ["chat", "responses", "messages"])
def test_an_agent_is_told_what_it_was_told_by_the_engine(
    by_engine: Recording, play: Play, agent: str
) -> None:
    """Every field of every reply: ids, usage, calls, choices, the resampled answers in order, the failure."""
    cassette = by_engine.cassette(agent)
    assert getattr(agent_program, agent)(play(cassette)) == by_engine.told[agent]
    assert (cassette.unused, cassette.misses) == ([], [])


@pytest.mark.parametrize("agent", ["chat", "responses", "messages", "completions"])
def test_an_agent_is_told_what_an_upstream_told_it(by_upstream: Recording, play: Play, agent: str) -> None:
    """The upstream's own ids, usage, items, blocks and signatures, and its error."""
    cassette = by_upstream.cassette(agent)
    assert getattr(agent_program, agent)(play(cassette)) == by_upstream.told[agent]
    assert (cassette.unused, cassette.misses) == ([], [])


@pytest.mark.parametrize("agent", ["chat", "responses", "messages"])
def test_an_agent_that_names_nothing_is_answered(by_engine: Recording, play: Play, agent: str) -> None:
    """Of several trajectories the first that has its request; so it is with a name that none has."""
    cassette = by_engine.cassette()
    url = play(cassette)
    for name in (None, "some/other"):
        assert getattr(agent_program, agent)(url, name) == by_engine.told[agent]
        cassette.rewind()


def test_one_changed_message_is_named(by_engine: Recording, play: Play) -> None:
    """With the difference to the nearest recorded request, as an error that no client tries again."""
    cassette = by_engine.cassette("chat")
    with pytest.raises(openai.NotFoundError) as caught:
        agent_program.chat(play(cassette), first="call two, please")
    error: Any = caught.value.body
    assert error["code"] == "not_recorded"
    assert caught.value.response.headers["x-should-retry"] == "false"
    assert error["nearest"]["turn"] == 1
    assert error["nearest"]["differences"] == [
        {
            "where": "messages[1]",
            "what": "user: its text differs",
            "diff": ["--- recorded", "+++ asked", "@@ -1 +1 @@", "-call two", "+call two, please"],
        }
    ]
    assert "-call two\n  +call two, please" in error["message"]
    assert len(cassette.misses) == 1


def test_an_error_has_the_form_of_its_api(by_engine: Recording, play: Play) -> None:
    """Anthropic's clients get Anthropic's."""
    url = play(by_engine.cassette("messages"))
    body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "call"}]}
    reply = httpx.post(f"{url}/v1/messages", json=body)
    answer = reply.json()
    assert (reply.status_code, answer["type"], answer["error"]["type"]) == (404, "error", "not_found_error")
    wheres = [difference["where"] for difference in answer["error"]["nearest"]["differences"]]
    assert wheres == ["tools.calc", "max_tokens"]


def _ask(url: str, text: str = "hi", path: str = "/v1", **more: Any) -> httpx.Response:
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "n": 2} | more
    return httpx.post(f"{url}{path}/chat/completions", json=body)


def test_headers_say_where_an_answer_is_from(by_engine: Recording, play: Play) -> None:
    """Which turns it is, and whether it was given before."""
    cassette = by_engine.cassette("chat")
    url = play(cassette)
    replies = [_ask(url) for _ in range(2)]
    assert [r.headers["x-rollbook-cassette"] for r in replies] == ["recorded", "repeated"]
    assert [r.headers["x-rollbook-cassette-answer"] for r in replies] == ["1/1"] * 2
    assert replies[0].content == replies[1].content
    [request] = [r for r in cassette.requests if len(r.turn_ids) == 2]
    assert replies[0].headers["x-rollbook-turn-id"].split(",") == list(request.turn_ids)
    assert replies[0].headers["x-rollbook-trajectory-id"] == request.tape


def test_through_another_api_the_answer_has_its_form(by_engine: Recording, play: Play) -> None:
    """What was asked of Anthropic's API is answered through OpenAI's, with the same ids of calls."""
    url = play(by_engine.cassette("messages"))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "call"}]
        reply = client.chat.completions.create(model="m", messages=messages, tools=[agent_program.CALC])
    [call] = reply.choices[0].message.tool_calls or []
    [block] = [b for b in by_engine.told["messages"][0]["content"] if b["type"] == "tool_use"]
    assert (call.id, json.loads(call.function.arguments)) == (block["id"], block["input"])


def test_an_engine_answers_what_was_not_recorded(by_engine: Recording, play: Play) -> None:
    """And only that: its headers and bytes are the reply, and a header says so."""
    upstream = HttpUpstream([whole(chat_reply("from the engine"), x_other="1")])
    upstream.start()
    behind = EngineBehind([Upstream(EngineAddress.of(upstream.url), "secret")])
    url = play(by_engine.cassette("chat"), engine=behind)
    assert _ask(url).headers["x-rollbook-cassette"] == "recorded"
    reply = _ask(url, "unheard", "/t/chat/v1", temperature=2)
    assert (reply.headers["x-rollbook-cassette"], reply.headers["x-other"]) == ("engine", "1")
    assert reply.json()["choices"][0]["message"]["content"] == "from the engine"
    [request] = upstream.asked
    assert (request.target, request.json["temperature"]) == ("/v1/chat/completions", 2)
    assert request.header("authorization") == "Bearer secret"
    upstream.close()
    gone = EngineBehind([Upstream(EngineAddress.of(f"http://127.0.0.1:{free_port()}"))])
    reply = _ask(play(by_engine.cassette("chat"), engine=gone), "unheard")
    assert (reply.status_code, reply.json()["error"]["code"]) == (502, "engine_failed")


@pytest.mark.parametrize("stream", [False, True])
def test_timing_takes_as_long_as_it_took(by_engine: Recording, play: Play, stream: bool) -> None:
    """Only where it is asked for."""
    cassette = by_engine.cassette("chat")
    slow = [replace(r, took_s=1.5) for r in cassette.requests]
    cassette._requests[:] = slow
    took = {}
    for timing in (False, True):
        url = play(cassette, timing=timing)
        began = time.monotonic()
        assert _ask(url, stream=stream).status_code == 200
        took[timing] = time.monotonic() - began
    assert took[False] < 1.4 < took[True] < 20


def test_a_program_that_records_itself_runs_unchanged(by_engine: Recording, play: Play) -> None:
    """Trajectories are opened, rewarded and finished as at the proxy; nothing is recorded."""
    head = by_engine.store.head()
    url = play(by_engine.cassette("chat"))
    opened = httpx.post(f"{url}/v1/trajectories", json={"id": "chat"})
    assert (opened.status_code, opened.json()["api_key"]) == (201, "trajectory:chat")
    replies = [
        httpx.post(f"{url}/v1/trajectories/chat/{what}", json={"reward": 1.0})
        for what in ("rewards", "finish")
    ]
    assert [r.status_code for r in replies] == [201, 200]
    assert replies[1].json() == {"id": "chat", "status": "finished", "turns": 6}
    assert [m["id"] for m in httpx.get(f"{url}/t/chat/v1/models").json()["data"]] == ["m"]
    assert by_engine.store.head() == head


def test_a_response_is_found_by_its_id(by_upstream: Recording, play: Play) -> None:
    """By the one that the upstream gave it."""
    url = play(by_upstream.cassette("responses"))
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        response = client.responses.retrieve("resp_up1")
        assert response.model_dump() == by_upstream.told["responses"][0]
        with pytest.raises(openai.NotFoundError):
            client.responses.retrieve("resp_none")


def test_the_state_says_what_was_asked_for(by_engine: Recording, play: Play) -> None:
    """And begins anew on request."""
    url = play(by_engine.cassette("chat"))
    _ask(url)
    _ask(url, "unheard")
    state = httpx.get(f"{url}/cassette").json()
    assert (state["requests"], state["used"], len(state["misses"])) == (6, 1, 1)
    assert [request["turn"] for request in state["unused"]] == [1, 2, 3, 4, 7]
    assert httpx.post(f"{url}/cassette/rewind").json()["used"] == 0


def test_a_web_page_of_another_is_refused(by_engine: Recording, play: Play) -> None:
    """A recording is read by nobody whom a browser was led to."""
    url = play(by_engine.cassette("chat"))
    assert httpx.get(f"{url}/cassette", headers={"host": "evil.example"}).status_code == 421
