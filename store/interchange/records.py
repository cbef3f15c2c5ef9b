"""Chats to the records of a trajectory: each message of the assistant becomes a turn without tokens. Pure."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import orjson

from rollbook.store.digest import digest_json
from rollbook.store.events import (
    Json,
    Record,
    RewardAssigned,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnRequested,
    token_ids,
)
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.interchange.chats import Chat

WITHOUT_TOKENS = "without_tokens"
"""Flag of a turn that is text only: it holds nothing that could be trained."""

DELIVERED = "imported"
"""How a client came to have an imported reply: it had it before."""


@dataclass(frozen=True, slots=True)
class _Reply:
    """A message of the assistant within a tree of chats."""

    turn_id: str
    parent: _Reply | None
    messages: list[Json]
    reply: Json
    request: Json
    reward: float | None


def records_of(trajectory_id: str, name: str, chats: Sequence[Chat]) -> list[Record]:
    """All records of a trajectory whose root-to-leaf paths are these chats, which agree on its head.

    Chats share the turns of what they have in common, but each ends in a turn of its own, so that there
    are as many paths as chats. Ids follow from `trajectory_id`: the same chats give the same ids.
    """
    head = chats[0].head
    opened = TrajectoryOpened(trajectory_id, name, head.group, head.task, head.split, head.labels)
    records: list[Record] = [opened]
    replies = _replies(trajectory_id, chats)
    for index, reply in enumerate(replies):
        earlier = reply.parent or (replies[index - 1] if index else None)
        records += _turn_records(trajectory_id, reply, earlier, first=index == 0)
    records += [
        RewardAssigned(trajectory_id, reply.turn_id, reply.reward)
        for reply in replies
        if reply.reward is not None
    ]
    if head.reward is not None:
        records.append(RewardAssigned(trajectory_id, None, head.reward))
    if head.status != "open":
        records.append(TrajectoryFinished(trajectory_id, head.status, head.success))
    return records


def derived_id(of: str, what: str) -> str:
    """An id that is decided by another one: UUIDv5, where the log's own are UUIDv7."""
    return str(uuid.uuid5(uuid.UUID(of), what))


def _replies(trajectory_id: str, chats: Sequence[Chat]) -> list[_Reply]:
    """The forest's nodes, parents before children."""
    inner: dict[tuple[str, str], _Reply] = {}
    replies: list[_Reply] = []
    for chat in chats:
        parent: _Reply | None = None
        for end in chat.replies():
            start = len(parent.messages) if parent else 0
            mark = chat.marks.get(end)
            key = (
                parent.turn_id if parent else "",
                digest_json([chat.messages[start : end + 1], chat.request, mark]),
            )
            is_leaf = end == len(chat.messages) - 1
            reply = None if is_leaf else inner.get(key)
            if reply is None:
                reply = _Reply(
                    turn_id=derived_id(trajectory_id, f"turn {len(replies)}"),
                    parent=parent,
                    messages=chat.messages[:end],
                    reply=chat.messages[end],
                    request=chat.request,
                    reward=mark[1] if mark else None,
                )
                replies.append(reply)
                if not is_leaf:
                    inner[key] = reply
            parent = reply
    return replies


def _turn_records(
    trajectory_id: str, reply: _Reply, earlier: _Reply | None, *, first: bool
) -> Iterator[Record]:
    shared = _shared(earlier.messages, reply.messages) if earlier else 0
    reason = "first_turn" if first else "no_matching_turn"
    yield TurnRequested(
        trajectory_id=trajectory_id,
        turn_id=reply.turn_id,
        request_id=derived_id(reply.turn_id, "request"),
        parent_turn_id=reply.parent.turn_id if reply.parent else None,
        root_reason=None if reply.parent else reason,
        base_turn_id=earlier.turn_id if earlier and shared else None,
        shared_messages=shared,
        messages=reply.messages[shared:],
        request=reply.request,
        requested_model=_model(reply.request),
        sampling={},
        honoured={},
        context_key="",
    )
    nothing = token_ids([])
    yield TurnCompleted(
        trajectory_id=trajectory_id,
        turn_id=reply.turn_id,
        policy=None,
        policy_version=None,
        prompt_ids=nothing,
        completion_ids=nothing,
        logprobs=None,
        version_spans=(),
        prompt_length=0,
        prompt_sha256=prompt_sha256(nothing),
        finish_reason="unknown",
        reply=reply.reply,
        logprob_semantics={},
        flags=[WITHOUT_TOKENS],
        timings={},
    )
    yield TurnDelivered(trajectory_id, reply.turn_id, DELIVERED)


def _shared(earlier: Sequence[Json], messages: Sequence[Json]) -> int:
    """How many messages two requests begin with in common."""
    shared = 0
    for old, new in zip(earlier, messages, strict=False):
        # Compared as JSON: to Python, 1 and 1.0 and True are equal.
        if orjson.dumps(old) != orjson.dumps(new):
            break
        shared += 1
    return shared


def _model(request: Json) -> str | None:
    model = request.get("model")
    return model if isinstance(model, str) else None
