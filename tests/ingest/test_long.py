"""A long conversation costs bytes in proportion to its turns, and a large tool schema is stored once."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from rollbook import store
from rollbook.store.lane.files import read_watermark

TURNS = 128
SCHEMA = {"type": "object", "description": "look it up. " * 750}
TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server(serve: Any, text_model: Any, script: Any) -> Any:
    """A served script."""
    model = str(text_model("chatml"))
    return serve("--model", model, "--engine", "scripted", "--script", f"{script}:answer")


def _talk(server: Any, name: str, turns: int) -> Iterator[list[Any]]:
    """Talk for so many turns, each request with all messages and the tools; gives the messages sent."""
    messages: list[Any] = [{"role": "system", "content": "you are careful. " * 500}]
    with openai.OpenAI(base_url=f"{server.url}/t/{name}/v1", api_key="none", max_retries=0) as client:
        for i in range(turns):
            messages.append({"role": "user", "content": f"question {i}"})
            sent = list(messages)
            reply = client.chat.completions.create(model="m", messages=messages, tools=TOOLS)
            messages.append({"role": "assistant", "content": reply.choices[0].message.content})
            yield sent


def _bytes(server: Any) -> int:
    """Bytes of frames; a segment's file may have room for more."""
    marks = {lane: read_watermark(lane) for lane in server.path.glob("lanes/*")}
    assert all(mark.segment == 1 for mark in marks.values())
    return sum(mark.offset for mark in marks.values())


def test_bytes_grow_with_the_turns(server: Any) -> None:
    """Each 32 turns take as many bytes as the 32 before; without deltas they would take ever more."""
    sizes, sent = [_bytes(server)], []
    for messages in _talk(server, "long", TURNS):
        sent.append(messages)
        if len(sent) % 32 == 0:
            sizes.append(_bytes(server))
    grown = [b - a for a, b in itertools.pairwise(sizes)]
    assert max(grown[1:]) < 1.3 * min(grown[1:]), grown
    # The schema and the system prompt, which every request repeats, are there once.
    assert sum(grown[1:]) < 96 * 6_000
    log = store.open(server.path)
    [trajectory] = [t for t in log.trajectories().values() if t.opened.name == "long"]
    assert [trajectory.messages(turn) for turn in trajectory.turns.values()] == sent
    assert all(turn.requested.request["tools"] == TOOLS for turn in trajectory.turns.values())
    assert len({turn.requested.parent_turn_id for turn in trajectory.turns.values()}) == TURNS
    bodies = (
        store.connect(server.path).execute("SELECT length, copies FROM bodies ORDER BY length").fetchall()
    )
    assert [copies for _, copies in bodies] == [1, 1]
    assert bodies[0][0] == len(sent[0][0]["content"])
