"""Real clients through the record-only proxy, before a real server: one `rollbook serve` behind another."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.store.fold.trajectory import Trajectory, fold


@pytest.fixture(scope="module")
def behind(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
    """A served script: the upstream."""
    model = str(text_model("chatml"))
    return serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer")


@pytest.fixture(scope="module")
def front(serve: Callable[..., Served], behind: Served) -> Served:
    """What only records."""
    return serve("--engine", "upstream", "--engine-url", f"{behind.url}/v1")


@pytest.fixture
def client(front: Served) -> Iterator[openai.OpenAI]:
    """The openai SDK, where only base_url was changed."""
    with openai.OpenAI(base_url=f"{front.url}/t/sdk/v1", api_key="none", max_retries=0) as sdk:
        yield sdk


def _trajectory(served: Any, name: str, turns: int) -> Trajectory:
    deadline = time.monotonic() + 30
    while True:
        trajectories = {t.opened.name: t for t in fold(store.open(served.path).events()).values()}
        if (
            name in trajectories
            and sum(t.delivered is not None for t in trajectories[name].turns.values()) >= turns
        ):
            return trajectories[name]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_an_agents_loop_is_one_trajectory(client: openai.OpenAI, front: Any, behind: Any, tools: Any) -> None:
    """Calls, their results, a stream, several choices: one trajectory there, and one behind it."""
    messages: list[Any] = [{"role": "user", "content": "call two"}]
    first = client.chat.completions.create(model="m", messages=messages, tools=tools)
    message = first.choices[0].message
    assert message.tool_calls is not None
    messages.append(message)
    messages += [{"role": "tool", "tool_call_id": c.id, "content": "95"} for c in message.tool_calls]
    chunks = list(
        client.chat.completions.create(
            model="m", messages=messages, tools=tools, stream=True, stream_options={"include_usage": True}
        )
    )
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == "4: 95"
    messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    several = client.chat.completions.create(model="m", messages=messages, tools=tools, n=2)
    assert [c.message.content for c in several.choices] == ["6: more"] * 2

    trajectory = _trajectory(front, "sdk", 4)
    root, second, third, fourth = trajectory.turns.values()
    assert [t.requested.parent_turn_id for t in (root, second, third, fourth)] == [
        None,
        root.turn_id,
        second.turn_id,
        second.turn_id,
    ]
    assert [t.completed.flags for t in trajectory.turns.values() if t.completed] == [["text_only"]] * 4
    assert [t.completed.finish_reason for t in (root, second) if t.completed] == ["tool_calls", "stop"]
    ids = [t.completed.upstream["id"] for t in trajectory.turns.values() if t.completed]
    assert ids == [first.id, chunks[0].id, several.id, several.id]
    done = second.completed
    assert done is not None
    assert done.upstream["usage"] == chunks[-1].usage.model_dump(exclude_none=True)  # type: ignore[union-attr]
    # Behind it the traffic named nothing: it is the same conversation, in quarantine.
    [there] = [t for t in fold(store.open(behind.path).events()).values() if len(t.turns) == 4]
    kept = [(t.completed.reply, t.completed.finish_reason) for t in there.turns.values() if t.completed]
    assert [m["content"] for m, _ in kept] == [None, "4: 95", "6: more", "6: more"]


def test_the_other_apis_of_the_sdk(front: Served) -> None:
    """Responses, whole and streamed, completions and models."""
    with openai.OpenAI(base_url=f"{front.url}/t/apis/v1", api_key="none", max_retries=0) as sdk:
        assert sdk.models.list().data[0].owned_by == "rollbook"
        assert sdk.responses.create(model="m", input="hello").output_text == "1: hello"
        events = list(sdk.responses.create(model="m", input="hello", stream=True))
        assert events[-1].type == "response.completed"
        with pytest.raises(openai.InternalServerError):  # the script wants messages
            sdk.completions.create(model="m", prompt="Once")
    turns = list(_trajectory(front, "apis", 2).turns.values())
    assert [t.completed.reply["content"] for t in turns if t.completed] == ["1: hello", "1: hello"]
    assert [t.requested.wire["endpoint"] for t in turns][:2] == ["/v1/responses"] * 2


def test_anthropics_sdk(front: Served) -> None:
    """Messages, whole and streamed."""
    anthropic = pytest.importorskip("anthropic")
    with anthropic.Anthropic(base_url=f"{front.url}/t/claude", api_key="none", max_retries=0) as sdk:
        body = {"model": "m", "max_tokens": 50, "messages": [{"role": "user", "content": "hello"}]}
        assert sdk.messages.create(**body).content[0].text == "1: hello"
        with sdk.messages.stream(**body) as stream:
            assert stream.get_final_text() == "1: hello"
    turns = list(_trajectory(front, "claude", 2).turns.values())
    first, second = (t.completed for t in turns)
    assert first is not None
    assert second is not None
    assert first.reply == second.reply == {"role": "assistant", "content": "1: hello"}
    assert first.finish_reason == second.finish_reason == "stop"


def test_an_error_is_the_sdks_own(client: openai.OpenAI, front: Served) -> None:
    """The SDK reads the upstream's error as if nobody stood between."""
    with pytest.raises(openai.InternalServerError) as raised:
        client.with_options(base_url=f"{front.url}/t/errors/v1").chat.completions.create(
            model="m", messages=[{"role": "user", "content": "boom"}]
        )
    assert raised.value.status_code >= 500
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        rows = store.connect(front.path).execute("select error from turns where status = 'failed'").fetchall()
        if rows:
            break
    assert f"the upstream answers {raised.value.status_code}" in rows[0][0]


def test_a_reply_is_the_bytes_that_the_upstream_said(front: Served, behind: Served) -> None:
    """The same request to either gives the same headers and bytes, but for ids and times."""
    body = {"model": "m", "messages": [{"role": "user", "content": "hello"}], "stream": True}
    direct, passed = (
        httpx.post(f"{served.url}/v1/chat/completions", json=body) for served in (behind, front)
    )
    texts = [_untimed(reply.text) for reply in (direct, passed)]
    assert texts[0] == texts[1]
    ours = ("x-rollbook", "date", "server")
    shown = [{k: v for k, v in reply.headers.items() if not k.startswith(ours)} for reply in (direct, passed)]
    assert shown[0] == shown[1]


def _untimed(text: str) -> list[Any]:
    events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
    return [{k: v for k, v in event.items() if k not in ("id", "created")} for event in events]
