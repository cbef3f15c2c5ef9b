"""Agents as their users write them: what each got is what was recorded, and their turns make one path."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import orjson
import pytest
from tests.clients.conftest import Proxy, Run, Told
from tests.clients.programs.conversation import ANSWER, QUESTION

from rollbook.store.fold.trajectory import Trajectory, Turn
from rollbook.train.select.samples import samples_of

FINISHES = {
    "tool_use": "tool_calls",
    "tool-calls": "tool_calls",
    "end_turn": "stop",
}
"""Names of other APIs and libraries for the reasons why a reply ended."""


@dataclass(frozen=True, slots=True)
class Client:
    """One way to use one client.

    Attributes:
        endpoint: the path it speaks to.
        hides: what its library does not show of a reply.
        forks: why each of its turns is a root of its own; None: they extend one another.
        refers: how it names what was said before instead of repeating it.
    """

    program: str
    words: tuple[str, ...] = ()
    endpoint: str = "/v1/chat/completions"
    hides: frozenset[str] = frozenset()
    forks: str | None = None
    refers: str | None = None

    def __str__(self) -> str:
        return "-".join([self.program.partition(".")[0], *self.words])


def _clients(
    program: str, *modes: str, streams: bool = True, hides: str = "", stream_hides: str = "", **more: Any
) -> list[Client]:
    """Clients of each mode, streamed and not."""
    clients = []
    for mode in modes or ("",):
        words = tuple(mode.split())
        endpoint = next((e for word, e in ENDPOINTS.items() if word in words), None)
        extra = ({"endpoint": endpoint} if endpoint else {}) | more
        clients.append(Client(program, words, hides=frozenset(hides.split()), **extra))
        if streams:
            hidden = frozenset([*hides.split(), *stream_hides.split()])
            clients.append(Client(program, (*words, "stream"), hides=hidden, **extra))
    return clients


ENDPOINTS = {
    "responses": "/v1/responses",
    "stored": "/v1/responses",
    "previous": "/v1/responses",
    "anthropic": "/v1/messages",
}

CLIENTS = [
    *_clients("openai_chat.py", "", "plain"),
    *_clients("openai_responses.py", endpoint="/v1/responses", hides="finish"),
    *_clients("openai_responses.py", "previous", hides="finish", refers="previous_response_id"),
    *_clients("anthropic_messages.py", endpoint="/v1/messages"),
    *_clients("langgraph_agent.py", "", "prebuilt", hides="reasoning", stream_hides="usage"),
    *_clients("langgraph_agent.py", "responses", hides="reasoning finish"),
    *_clients("openai_agents.py", endpoint="/v1/responses", hides="finish"),
    *_clients("openai_agents.py", "previous", hides="finish", refers="previous_response_id"),
    *_clients("openai_agents.py", "chat", hides="finish", stream_hides="usage"),
    *_clients("pydantic_agent.py", "chat", "responses", "anthropic", hides="finish"),
    *_clients("litellm_loop.py", "openai", "hosted_vllm"),
    *_clients("smolagents_agent.py", hides="reasoning finish", forks="turns are rewritten as text"),
    *_clients("qwen_agent_assistant.py", "native", streams=False, hides="finish usage"),
    *_clients(
        "qwen_agent_assistant.py", streams=False, hides="content finish usage", forks="calls are spelled anew"
    ),
    *_clients("mini_swe.py", streams=False, hides="finish usage"),
    *_clients("ai_sdk.mjs", "responses", "chat", hides="reasoning"),
    *_clients("ai_sdk.mjs", "stored", hides="reasoning", refers="item_reference"),
    *_clients("ai_sdk.mjs", "anthropic"),
    *_clients("ai_sdk.mjs", "compatible", stream_hides="usage"),
]


@pytest.mark.parametrize("client", CLIENTS, ids=str)
def test_an_agents_three_turns_are_recorded(client: Client, proxy: Proxy, run: Run) -> None:
    """Three turns: the answer, the turns, their links, their tokens, and what the client was shown."""
    name = proxy.new_name()
    output = run(client.program, *client.words, at=proxy.base(name))
    trajectory = proxy.trajectory(name)
    turns = list(trajectory.turns.values())
    assert output.answer == ANSWER
    assert [turn.requested.wire["endpoint"] for turn in turns] == [client.endpoint] * 3
    assert [turn.delivered for turn in turns] == ["sent"] * 3
    assert [turn.requested.wire.get("retry") for turn in turns] == [None] * 3
    _check_tokens(proxy, trajectory, turns)
    _check_links(client, trajectory, turns)
    _check_samples(trajectory, turns)
    _check_shown(client, output, turns)
    if client.refers == "previous_response_id":
        _check_previous(trajectory, turns)
    elif client.refers == "item_reference":
        _check_references(trajectory, turns)


def _check_tokens(proxy: Proxy, trajectory: Trajectory, turns: list[Turn]) -> None:
    """Every completion is what the engine made, and every prompt reads as the conversation."""
    for turn in turns:
        done = turn.completed
        assert done is not None
        assert done.completion_ids.tolist() == proxy.made(trajectory, turn).tolist()
        assert done.flags == []
        prompt = trajectory.prompt_ids(turn)
        assert len(prompt) == done.prompt_length
        parent = trajectory.parent(turn)
        if parent is None:
            _check_root(proxy, trajectory, turn)
            continue
        assert parent.completed is not None
        whole = np.concatenate([trajectory.prompt_ids(parent), parent.completed.completion_ids])
        assert prompt[: len(whole)].tolist() == whole.tolist()
        results = trajectory.messages(turn)[len(trajectory.messages(parent)) + 1 :]
        shown = "".join(f"\n<tool_response>\n{m['content']}\n</tool_response>" for m in results)
        assert proxy.tokenizer.decode(prompt[len(whole) :], special=True) == (
            f"\n<|im_start|>user{shown}<|im_end|>\n<|im_start|>assistant\n"
        )


def _check_root(proxy: Proxy, trajectory: Trajectory, turn: Turn) -> None:
    """Its prompt is the template's; tools in another form than the template's are looked for by name."""
    messages, tools = trajectory.messages(turn), turn.requested.request.get("tools")
    prompt = trajectory.prompt_ids(turn)
    if turn.requested.wire["endpoint"] == "/v1/chat/completions":
        rendered = proxy.tokenizer.render(messages, tools, generate=True)
        assert prompt.tolist() == proxy.tokenizer.encode(rendered).tolist()
    else:
        text = proxy.tokenizer.decode(prompt, special=True)
        assert '"name": "add", "description": "Add two numbers."' in text
        assert text.endswith(f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n")


def _check_links(client: Client, trajectory: Trajectory, turns: list[Turn]) -> None:
    """One path, or as many roots as turns where the client changes what was said."""
    links = [(t.requested.parent_turn_id, t.requested.root_reason) for t in turns]
    if client.forks:
        assert links == [(None, "first_turn"), (None, "no_matching_turn"), (None, "no_matching_turn")]
    else:
        assert links == [(None, "first_turn"), (turns[0].turn_id, None), (turns[1].turn_id, None)]


def _check_samples(trajectory: Trajectory, turns: list[Turn]) -> None:
    """The masks cover what was sampled, each id once and nothing else."""
    samples = list(samples_of(trajectory))
    assert len(samples) == len(list(trajectory.paths()))
    trained = [sample.tokens[sample.loss_mask].tolist() for sample in samples]
    completions = [t.completed.completion_ids.tolist() for t in turns if t.completed]
    assert [i for part in trained for i in part] == [i for part in completions for i in part]


def _check_shown(client: Client, output: Told, turns: list[Turn]) -> None:
    """What the library shows of each reply is the reply that the log holds."""
    assert len(output.turns) == len(turns)
    for shown, turn in zip(output.turns, turns, strict=True):
        done = turn.completed
        assert done is not None
        reply = done.reply
        logged = {
            "content": reply["content"] or "",
            "reasoning": reply["reasoning_content"],
            "finish": done.finish_reason,
            "usage": [done.prompt_length, len(done.completion_ids)],
        }
        seen = {k: v for k, v in shown.items() if k != "calls" and k not in client.hides}
        if "finish" in seen:
            seen["finish"] = FINISHES.get(seen["finish"], seen["finish"])
        assert seen == {k: v for k, v in logged.items() if k not in client.hides}
        assert shown["calls"] == [_as_shown(c, s) for c, s in _paired(reply, shown)]


def _paired(reply: dict[str, Any], shown: dict[str, Any]) -> list[tuple[Any, Any]]:
    """Calls as logged and as shown. Who sends no tools reads the calls out of the text."""
    calls = reply.get("tool_calls") or [
        {"function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
        for call in map(
            orjson.loads, re.findall("<tool_call>(.*?)</tool_call>", reply["content"] or "", re.S)
        )
    ]
    assert len(calls) == len(shown["calls"])
    return list(zip(calls, shown["calls"], strict=True))


def _as_shown(call: dict[str, Any], shown: dict[str, Any]) -> dict[str, Any]:
    """A logged call in the form that a library shows: its text, or the object that it spells."""
    arguments = call["function"]["arguments"]
    if not isinstance(shown["arguments"], str):
        arguments = orjson.loads(arguments)
    known = {"name": call["function"]["name"], "arguments": arguments, "id": call.get("id")}
    return {name: value for name, value in known.items() if name in shown}


def _check_previous(trajectory: Trajectory, turns: list[Turn]) -> None:
    """Later requests held what the tools gave, and named the response before."""
    for earlier, turn in pairwise(turns):
        assert turn.requested.request["previous_response_id"] == f"resp_{earlier.turn_id}"
        items = trajectory.items(turn)
        assert items is not None
        assert {item["type"] for item in items} == {"function_call_output"}


def _check_references(trajectory: Trajectory, turns: list[Turn]) -> None:
    """The last request named every part of the earlier replies that was no call; none of it is lost."""
    items = trajectory.items(turns[-1])
    assert items is not None
    named = [item["id"] for item in items if item.get("type") == "item_reference"]
    first, second = turns[0].turn_id, turns[1].turn_id
    calls = [f"fc_{first}_0", f"fc_{second}_0", f"fc_{second}_1"]
    assert [i for i in named if i not in calls] == [f"rs_{first}", f"msg_{first}", f"rs_{second}"]
    replies = [turn.completed.reply for turn in turns if turn.completed]
    shown = [m for m in trajectory.messages(turns[-1]) if m["role"] == "assistant"]
    for reply, message in zip(replies, shown, strict=False):
        assert (message["content"] or "") == (reply["content"] or "")
        assert message["reasoning_content"] == reply["reasoning_content"]
