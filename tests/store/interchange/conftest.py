"""A store with what is hard to carry over, and functions that export and read what came out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from tests.fakes.stories.records import turn_completed, turn_requested

from rollbook import store as rb
from rollbook.store import Event, Store
from rollbook.store import events as kinds
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.interchange.export import export_store

TOOLS = [{"type": "function", "function": {"name": "look_up", "parameters": {"type": "object"}}}]
CALL = {"id": "call_1", "type": "function", "function": {"name": "look_up", "arguments": '{"q": "é✓"}'}}
ASKED = [
    {"role": "system", "content": "be brief"},
    {"role": "user", "content": [{"type": "text", "text": "naïve "}, {"type": "text", "text": "文字 🙂"}]},
]
CALLED = {"role": "assistant", "content": None, "tool_calls": [CALL]}
FOUND = [CALLED, {"role": "tool", "tool_call_id": "call_1", "content": "42"}]
LOST = [CALLED, {"role": "tool", "tool_call_id": "call_1", "content": 'nothing\n"quoted"\u2028\\'}]
# Values whose float32 differs from the nearest short decimal's float64, a subnormal one, and an exact one.
HARD = np.array([-0.1, -1e-40, -16.635532], np.float32)


def _turn(
    turn: str, parent: str | None, shared: int, new: Any, delta: Any, whole: Any, reply: Any, sampled: Any
) -> Any:
    """Records of a delivered turn of trajectory `fork` that policy version 3 answered with `sampled`."""
    ids, logprobs = sampled
    request = {"tools": TOOLS, "temperature": 0.5}
    return [
        turn_requested(
            "fork",
            turn,
            request_id=f"r-{turn}",
            parent_turn_id=parent,
            root_reason=None if parent else "first_turn",
            base_turn_id=parent,
            shared_messages=shared,
            messages=new,
            request=request,
            requested_model="gpt-x",
            sampling={"temperature": 0.5},
        ),
        turn_completed(
            "fork",
            turn,
            policy_version=3,
            prompt_ids=np.array(delta, np.int32),
            completion_ids=np.array(ids, np.int32),
            logprobs=logprobs,
            version_spans=(kinds.VersionSpan("actor", 3, 0, len(ids)),),
            prompt_length=len(whole),
            prompt_sha256=prompt_sha256(np.array(whole, np.int32)),
            reply=reply,
            logprob_semantics={"temperature": 0.5},
        ),
        kinds.TurnDelivered("fork", turn, "sent"),
    ]


def _forked() -> list[Any]:
    """One tool call, and two ways to go on from it; the second was scored, and scored again."""
    yes, no = {"role": "assistant", "content": "42 ✓"}, {"role": "assistant", "content": ""}
    return [
        kinds.TrajectoryOpened("fork", "fork/ü", "g", "task", "train", {"k": ["v", 1]}),
        *_turn("f1", None, 0, ASKED, [1, 2, 3], [1, 2, 3], CALLED, ([10, 11, 12], HARD)),
        *_turn("f2", "f1", 2, FOUND, [4], [1, 2, 3, 10, 11, 12, 4], yes, ([13], HARD[:1])),
        *_turn("f3", "f1", 2, LOST, [5, 6], [1, 2, 3, 10, 11, 12, 5, 6], no, ([14, 15], HARD[1:])),
        kinds.RewardAssigned("fork", "f3", 0.125),
        kinds.RewardAssigned("fork", None, 0.5),
        kinds.TrajectoryFinished("fork", "truncated", False),
    ]


def _taught() -> list[Any]:
    """A teacher's trajectory: tokens without logprobs, and not delivered; still open."""
    messages, reply = [{"role": "user", "content": "x"}], {"role": "assistant", "content": "y"}
    prompt = np.array([7, 8], np.int32)
    return [
        kinds.TrajectoryOpened("taught", "taught", split="teacher"),
        turn_requested("taught", "a1", request_id="q1", root_reason="first_turn", messages=messages),
        turn_completed(
            "taught",
            "a1",
            policy=None,
            prompt_ids=prompt,
            completion_ids=np.array([9], np.int32),
            prompt_length=2,
            prompt_sha256=prompt_sha256(prompt),
            reply=reply,
        ),
        kinds.TurnDelivered("taught", "a1", "sent"),
        turn_requested(
            "taught", "a2", request_id="q2", parent_turn_id="a1", base_turn_id="a1", shared_messages=1
        ),
    ]


@pytest.fixture
def woods(story_store: Store) -> Store:
    """The story's store, with a forked trajectory rewarded anew from another lane, and an open one."""
    late = kinds.RewardAssigned("fork", None, -2.5, "agent", "e-woods-11")
    for lane, run, records in (
        ("woods", "woods", [*_forked(), *_taught()]),
        ("woods-late", "woods", [late]),
    ):
        with story_store.writer(lane) as writer:
            events = [Event(r, run, f"e-{lane}-{i:02}", 1_700_000_000_000_000) for i, r in enumerate(records)]
            writer.append(events).result(30)
    return story_store


@pytest.fixture
def empty(tmp_path: Path) -> Store:
    """A store without an event."""
    return rb.open(tmp_path / "empty", create=True)


@pytest.fixture
def chats(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Export a store as JSONL and read it: its lines as objects."""
    count = 0

    def export(store: Store, **options: Any) -> list[dict[str, Any]]:
        nonlocal count
        count += 1
        out = tmp_path / f"chats-{count}.jsonl"
        export_store(store.path, out, "jsonl", **options)
        return [orjson.loads(line) for line in out.read_bytes().splitlines()]

    return export
