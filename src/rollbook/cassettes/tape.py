"""A recorded trajectory as the requests that came and how each was answered, read from a store.

Turns of one request are one entry: the choices of `n > 1`. A turn that was started over on another
engine counts as the one that took its place.

Where a turn failed, its answer is made from the recorded error. The log keeps an error's text: an
upstream's begins with the status that it answered with; one of the proxy's own is the error as
Python writes it, and the proxy answers each kind of error in one way.

The ids that an upstream gave a reply and its parts are kept beside those that this code makes of
the turn's id: in its next request an agent names what it was given, so a reply from a cassette has
the recorded ids.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from rollbook.cassettes.asked import ComparedRequest, read_request
from rollbook.edge.errors import describe
from rollbook.ingest.endpoints.api import AgentApi, EarlierTurn, History
from rollbook.ingest.endpoints.chat import PATH as CHAT
from rollbook.ingest.endpoints.completions import PATH as COMPLETIONS
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.endpoints.responses_form import PATH as RESPONSES
from rollbook.ingest.endpoints.responses_form import PREFIX
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.store import errors
from rollbook.store.cut import Cut
from rollbook.store.errors import ReplayError
from rollbook.store.events import Json, TurnCompleted, TurnFailed, TurnRequested
from rollbook.store.fold.trajectory import Trajectory, Turn, fold
from rollbook.store.log.store import Store

IMPORTED = "imported"
"""How a turn that came from a file was delivered."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRequest:
    """A request of a recorded trajectory, and how it was answered.

    Attributes:
        number: of its first turn in the trajectory, from 1, as `rollbook show` counts.
        turns: the completions, by choice; none where it failed.
        failure: how it failed, or None.
        in_part: the recording lacks parameters that the request had: it came from a file of chats.
        taken: whether a client took the reply, as far as is known.
        took_s: seconds from the request to the last of its outcome; 0 where that is unknown.
    """

    tape: str
    name: str
    number: int
    turn_ids: tuple[str, ...]
    asked: ComparedRequest
    turns: tuple[CompletedTurn, ...]
    failure: Failure | None
    in_part: bool
    taken: bool
    took_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Tape:
    """A recorded trajectory.

    Attributes:
        requests: in the order in which they came.
        known: turn -> what later requests may name of it.
        renamed: the id that an upstream gave a response or item -> the one made of the turn's id.
    """

    trajectory_id: str
    name: str
    run: str
    requests: tuple[RecordedRequest, ...]
    known: Mapping[str, EarlierTurn] = field(repr=False)
    renamed: Mapping[str, str] = field(repr=False)


def tape_of(trajectory: Trajectory, times_us: Mapping[str, tuple[int, int]]) -> Tape:
    """A trajectory as a tape.

    Args:
        times_us: turn -> when it was requested, and when its outcome was known.
    """
    known, renamed = _known(trajectory), _renamed(trajectory)
    interned: dict[str, str] = {}
    requests = tuple(
        _request(trajectory, turns, known.get, renamed, interned, times_us)
        for turns in _grouped(trajectory.turns.values())
        if turns[0].requested.wire.get("endpoint", CHAT) in APIS
    )
    opened = trajectory.opened
    return Tape(opened.trajectory_id, opened.name, trajectory.run, requests, known, renamed)


def _grouped(turns: Iterable[Turn]) -> Iterator[list[Turn]]:
    """The turns of each request that were not started over, by choice."""
    groups: dict[str, list[Turn]] = {}
    all_turns = list(turns)
    replaced = {turn.requested.wire.get("instead_of") for turn in all_turns}
    for turn in all_turns:
        if turn.turn_id not in replaced:
            groups.setdefault(turn.requested.request_id, []).append(turn)
    for group in groups.values():
        yield sorted(group, key=lambda turn: turn.requested.wire.get("choice", 0))


def _request(
    trajectory: Trajectory,
    turns: Sequence[Turn],
    history: History,
    renamed: Mapping[str, str],
    interned: dict[str, str],
    times_us: Mapping[str, tuple[int, int]],
) -> RecordedRequest:
    api = APIS[turns[0].requested.wire.get("endpoint", CHAT)]
    request = read_request(api, body_of(api, trajectory, turns), history, lambda i: renamed.get(i, i))
    # Every request of a conversation repeats the ones before it: each message is kept once.
    request = replace(request, messages=tuple(interned.setdefault(m, m) for m in request.messages))
    done = [t for t in turns if t.completed is not None]
    completed = tuple(CompletedTurn(t.requested, t.completed) for t in done if t.completed is not None)
    failure = _failure(turns, completed)
    times = [times_us[t.turn_id] for t in turns if t.turn_id in times_us]
    took_us = max(ends for _, ends in times) - min(begins for begins, _ in times) if times else 0
    return RecordedRequest(
        tape=trajectory.opened.trajectory_id,
        name=trajectory.opened.name,
        number=min(t.position for t in turns) + 1,
        turn_ids=tuple(t.turn_id for t in (turns if failure else done)),
        asked=request,
        turns=() if failure else completed,
        failure=failure,
        in_part=all(t.delivered == IMPORTED for t in turns),
        taken=any(t.delivered for t in turns) or all(t.completed.finish_reason != "abort" for t in completed),
        took_s=max(took_us, 0) / 1e6,
    )


def _failure(turns: Sequence[Turn], completed: Sequence[CompletedTurn]) -> Failure | None:
    """How a request failed: the proxy answers no choice where one failed, an upstream gives those it has."""
    failed = [t.failed for t in turns if t.failed is not None]
    passed_on = any(t.completed.upstream for t in completed)
    if failed and not passed_on:
        return failure_of(failed[0].error)
    return None if completed else NEVER_ENDED


def body_of(api: AgentApi, trajectory: Trajectory, turns: Sequence[Turn]) -> Json:
    """A request's body, made of what the log holds of it.

    Args:
        turns: the request's, by choice.
    """
    first = turns[0]
    rest = first.requested.request
    if api.path == COMPLETIONS:
        return rest | {"prompt": _prompt(trajectory, turns)}
    items = trajectory.items(first)
    if api.path == RESPONSES:
        return rest if items is None or "input" in rest else rest | {"input": items}
    return rest | {"messages": trajectory.messages(first) if items is None else items}


def _prompt(trajectory: Trajectory, turns: Sequence[Turn]) -> object:
    """A raw prompt, or several; ids that went on from an earlier turn are stored as pieces."""
    prompts = {t.requested.wire.get("prompt", 0): trajectory.messages(t) for t in turns[::-1]}
    contents = []
    for _, pieces in sorted(prompts.items()):
        ids = [token_id for piece in pieces for token_id in piece.get("token_ids") or ()]
        contents.append(ids or (pieces[0].get("content") if pieces else None))
    return contents[0] if len(contents) == 1 else contents


def _known(trajectory: Trajectory) -> dict[str, EarlierTurn]:
    """What later requests may name of each completed turn."""
    return {
        turn.turn_id: EarlierTurn(trajectory.messages(turn), turn.requested.request, turn.completed.reply)
        for turn in trajectory.turns.values()
        if turn.completed is not None
    }


def _renamed(trajectory: Trajectory) -> dict[str, str]:
    names: dict[str, str] = {}
    for turn in trajectory.turns.values():
        if turn.completed is not None:
            for ours, theirs in upstream_ids(turn.completed):
                names.setdefault(theirs, ours)
    return names


_UPSTREAM = re.compile(r"the upstream answers (?P<status>\d{3}): (?P<body>.*)", re.DOTALL)
_RAISED = re.compile(r"(?P<kind>\w+)\((?P<said>.*)\)", re.DOTALL)
_NO_REPLY = 502


@dataclass(frozen=True, slots=True)
class Failure:
    """A recorded failure, as a client saw it.

    Attributes:
        body: as the upstream gave it; None: to be made in the form of the API.
    """

    status: int
    code: str
    message: str
    body: Json | None = None


NEVER_ENDED = Failure(_NO_REPLY, "never_answered", "the recording ends before this request was answered")


def failure_of(error: str) -> Failure:
    """The failure that an error in the log describes."""
    upstream = _UPSTREAM.fullmatch(error)
    if upstream is not None:
        try:
            body = orjson.loads(upstream["body"])
        except orjson.JSONDecodeError:
            body = None
        whole = body if isinstance(body, dict) else None
        return Failure(int(upstream["status"]), "recorded_error", upstream["body"], whole)
    raised = _RAISED.fullmatch(error)
    kind = getattr(errors, raised["kind"], None) if raised else None
    if raised and isinstance(kind, type) and issubclass(kind, errors.RollbookError):
        return Failure(*_error_reply(kind, raised["said"]))
    if raised:
        return Failure(500, "internal_error", f"{raised['kind']} in the proxy; its log says more")
    return Failure(_NO_REPLY, "engine_failed", error)


def _error_reply(kind: type[errors.RollbookError], arguments: str) -> tuple[int, str, str]:
    """What the proxy answers to an error of this kind."""
    try:
        values = ast.literal_eval(f"({arguments},)") if arguments else ()
        return describe(kind(*values))
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return describe(errors.EngineError(arguments))


def upstream_ids(completed: TurnCompleted) -> Iterator[tuple[str, str]]:
    """(id as our own replies have it, id as the upstream gave it) of a response and its items."""
    turn_id, upstream = completed.turn_id, completed.upstream
    if isinstance(upstream.get("id"), str):
        yield PREFIX + turn_id, upstream["id"]
    calls = 0
    for item in recorded_output(completed):
        kind, item_id = item.get("type"), item.get("id")
        ours = {"reasoning": f"rs_{turn_id}", "message": f"msg_{turn_id}"}.get(str(kind))
        if kind == "function_call":
            ours, calls = f"fc_{turn_id}_{calls}", calls + 1
        if ours is not None and isinstance(item_id, str):
            yield ours, item_id


def recorded_output(completed: TurnCompleted) -> list[Json]:
    """The items of an upstream's response, as it gave them; none where it was no response."""
    return [item for item in _extra(completed, "output") if isinstance(item, dict)]


def recorded_blocks(completed: TurnCompleted) -> list[Json]:
    """The blocks of an upstream's message, where they say more than its text and calls; else none."""
    return [block for block in _extra(completed, "content") if isinstance(block, dict)]


def _extra(completed: TurnCompleted, name: str) -> list[Any]:
    choice = completed.upstream.get("choice")
    items = choice.get(name) if isinstance(choice, dict) else None
    return items if isinstance(items, list) else []


def read_tapes(log: Store, cut: Cut, ids: Sequence[str]) -> list[Tape]:
    """The trajectories of these ids as they were at a cut, in this order.

    Raises:
        ReplayError: one is not held there, or none of them holds a request.
        CorruptionError: a file that may hold one is damaged.
    """
    events = log.events_about(ids, cut)
    begins: dict[str, int] = {}
    times: dict[str, tuple[int, int]] = {}
    for event in events:
        match event.record:
            case TurnRequested(turn_id=turn_id):
                begins[turn_id] = event.time_us
            case TurnCompleted(turn_id=turn_id) | TurnFailed(turn_id=turn_id):
                times[turn_id] = (begins.get(turn_id, event.time_us), event.time_us)
    folded = fold(events)
    missing = [trajectory_id for trajectory_id in ids if trajectory_id not in folded]
    if missing:
        raise ReplayError(
            f"no trajectory {missing[0]!r} at that cut; list them: "
            "rollbook sql 'select trajectory_id, trajectory from trajectories'"
        )
    tapes = [tape_of(folded[trajectory_id], times) for trajectory_id in dict.fromkeys(ids)]
    if not any(tape.requests for tape in tapes):
        raise ReplayError("the trajectories hold no request yet: there is nothing to answer from")
    return tapes
