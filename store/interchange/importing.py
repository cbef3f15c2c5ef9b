"""Imports chats from other sources as trajectories of text, for supervised data and comparison.

The file is checked whole before the first event is written. Each trajectory is one append: all of it is
there after a crash, or nothing. Ids of trajectories and turns follow from run, name and content, so that
importing a file again, or after a crash, adds what is missing and nothing else. (Event ids do not: those
of a lane rise with time, which its writer relies on.)

Each message of the assistant becomes a turn without tokens.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from rollbook.store.digest import digest_json
from rollbook.store.errors import InterchangeError
from rollbook.store.events import (
    SPLITS,
    Event,
    Json,
    Record,
    RewardAssigned,
    RunOpened,
    TrajectoryFinished,
    TrajectoryOpened,
    TurnCompleted,
    TurnDelivered,
    TurnRequested,
    token_ids,
)
from rollbook.store.fold.trajectory import prompt_sha256
from rollbook.store.interchange.chats import Chat, ChatFile, Entry
from rollbook.store.interchange.destination import Progress, no_progress
from rollbook.store.log.store import Store
from rollbook.store.open import open_store
from rollbook.store.sql.query import connect

IN_FLIGHT = 64
"""Trajectories that may wait for the disk at one time."""


def import_chats(
    file: Path,
    store: Path,
    run: str,
    *,
    lane: str = "import",
    split: str = "teacher",
    progress: Progress = no_progress,
    shape: Callable[[list[Record]], list[Record]] = list,
    origin: Path | None = None,
) -> dict[str, Any]:
    """Append the file's chats to `run`; what was added, and what was there already.

    Args:
        store: created if missing.
        lane: the lane to write; no other process may be writing it.
        split: train, eval or teacher, for chats that name none.
        shape: makes the records to write from a trajectory's records.
        origin: the file that `file` was made from, if it was.

    Raises:
        InterchangeError: the file is invalid, or the run has another trajectory of such a name.
        LaneLockedError: another process writes the lane, or imports into the run.
        WriteFailedError: events did not become durable; those of earlier trajectories did.
    """
    if split not in SPLITS:
        raise InterchangeError(f"split is {split!r}: use one of {', '.join(SPLITS)}")
    if not run:
        raise InterchangeError("the run has no name: give one with --run")
    size = file.stat().st_size if file.is_file() else 0
    with progress(f"check {(origin or file).name}", size) as advance:
        chats = ChatFile(file, run, split, advance)
    with chats:
        log = open_store(store, create=True)
        with log.claim(f"importing into run {run}", "wait for it, and import again"):
            fresh = _fresh(log, chats, origin)
            turns, events = _write(log, chats, fresh, lane, progress, shape, origin) if fresh else (0, 0)
        return {
            "file": str(origin or file),
            "run": run,
            "lane": lane,
            "lines": chats.lines,
            "trajectories": len(chats.entries),
            "added": len(fresh),
            "already_there": len(chats.entries) - len(fresh),
            "turns": turns,
            "events": events,
        }


def _fresh(log: Store, chats: ChatFile, origin: Path | None) -> list[Entry]:
    """The file's trajectories that the run does not have.

    Raises:
        InterchangeError: the run has another one of that name.
    """
    there = trajectory_ids(log, chats.run)
    for entry in chats.entries:
        if there.get(entry.name, entry.trajectory_id) != entry.trajectory_id:
            where = f"{chats.path}, line {entry.lines[0].number}" if origin is None else f"{origin}"
            raise InterchangeError(
                f"{where}: run {chats.run!r} has a trajectory "
                f"{entry.name!r} with other content already; names are unique within a run: rename it, "
                "or name another --run"
            )
    return [entry for entry in chats.entries if entry.name not in there]


def trajectory_ids(log: Store, run: str) -> dict[str, str]:
    """Name -> id of all trajectories of a run."""
    query = (
        "SELECT json_extract_string(extra, '$.name'), trajectory_id FROM events "
        "WHERE kind = 'trajectory.opened' AND run = ?"
    )
    with connect(log.path) as connection:
        return dict(connection.execute(query, [run]).fetchall())


def _write(
    log: Store,
    chats: ChatFile,
    fresh: list[Entry],
    lane: str,
    progress: Progress,
    shape: Callable[[list[Record]], list[Record]],
    origin: Path | None,
) -> tuple[int, int]:
    """Append trajectories; how many turns and events."""
    config: Json = {
        "file": str(origin or chats.path),
        "sha256": chats.sha256,
        "lane": lane,
        "split": chats.split,
    }
    config |= {"lines": chats.lines, "trajectories": len(chats.entries), "added": len(fresh)}
    waiting: deque[Future[int]] = deque()
    turns = count = 0
    with log.writer(lane) as writer, progress(f"import {(origin or chats.path).name}", len(fresh)) as advance:
        first = [Event(RunOpened("import", config), chats.run)]
        for entry in fresh:
            records = shape(records_of(entry.trajectory_id, entry.name, chats.chats(entry)))
            events = first + [Event(record, chats.run) for record in records]
            first = []
            waiting.append(writer.append(events))
            turns += sum(event.kind == "turn.completed" for event in events)
            count += len(events)
            _settle(waiting, IN_FLIGHT, advance)
        _settle(waiting, 0, advance)
    return turns, count


def _settle(waiting: deque[Future[int]], room: int, advance: Callable[[int], Any]) -> None:
    """Wait until at most so many appends are not yet durable.

    Raises:
        WriteFailedError: one never will be.
    """
    while len(waiting) > room:
        waiting.popleft().result()
        advance(1)


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

    Chats share the turns that they have in common, but each ends in a turn of its own, so that
    there are as many paths as chats. Ids follow from `trajectory_id`: the same chats give the
    same ids.
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


def derived_id(source: str, what: str) -> str:
    """An id that follows from another one: UUIDv5, where the log's own are UUIDv7."""
    return str(uuid.uuid5(uuid.UUID(source), what))


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
