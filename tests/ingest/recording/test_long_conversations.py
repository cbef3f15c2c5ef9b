"""A long conversation costs bytes in proportion to its turns, and a large tool schema is stored once."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tests.fakes.proxies.served import Served

from rollbook import store
from rollbook.ingest.recording.runner import LARGE_BYTES
from rollbook.store.wal.files import read_watermark

TURNS = 128
SCHEMA = {"type": "object", "description": "look it up. " * 750}
TOOLS: Any = [{"type": "function", "function": {"name": "search", "parameters": SCHEMA}}]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Served], text_model: Callable[[str], Path], script: Path) -> Served:
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


@pytest.mark.more
def test_bytes_grow_with_the_turns(server: Served) -> None:
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


def test_large_requests_that_open_a_trajectory_at_once_are_of_one(server: Served) -> None:
    """Their prompts are made in threads: the trajectory is opened once, each is a turn of it, and
    what follows extends the one it shows.
    """
    messages: list[Any] = [{"role": "user", "content": "a long page"}]
    large: Any = {"metadata": {"page": "x" * LARGE_BYTES}}  # what counts is the body

    async def both() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{server.url}/t/large/v1", api_key="none", max_retries=0)
        async with client:
            body: Any = {"model": "m", "messages": messages, "extra_body": large}
            return await asyncio.gather(*(client.chat.completions.create(**body) for _ in range(3)))

    replies = asyncio.run(both())
    with openai.OpenAI(base_url=f"{server.url}/t/large/v1", api_key="none", max_retries=0) as client:
        reply: Any = {"role": "assistant", "content": replies[1].choices[0].message.content}
        more: Any = [*messages, reply, {"role": "user", "content": "and?"}]
        last = client.chat.completions.create(model="m", messages=more, extra_body=large)
    [trajectory] = [t for t in store.open(server.path).trajectories().values() if t.opened.name == "large"]
    turns = {f"chatcmpl-{turn_id}": turn for turn_id, turn in trajectory.turns.items()}
    assert set(turns) == {r.id for r in [*replies, last]}
    assert [turns[r.id].requested.parent_turn_id for r in replies] == [None] * 3
    parent = turns[last.id].requested.parent_turn_id
    assert f"chatcmpl-{parent}" in {r.id for r in replies}
    assert len(trajectory.prompt_ids(turns[last.id])) == last.usage.prompt_tokens
