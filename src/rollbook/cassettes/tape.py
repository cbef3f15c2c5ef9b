"""A recorded trajectory as the requests that came and how each was answered, read from a store.

Turns of one request are one entry: the choices of `n > 1`. A turn that was started over on another
engine counts as the one that took its place.

Where a turn failed, its answer is made from the recorded error. The log keeps an error's text: an
upstream's begins with the status that it answered with; one of the proxy's own is the error as
Python writes it, and the proxy answers each kind of error in one way.

The ids that an upstream gave a reply and its parts are kept beside those that this code makes of
the turn's id: in its next request an agent names what it was given, so a reply from a cassette has
the recorded ids.

A request as a cassette compares it: what decides a reply, whichever client wrote it.

Two requests are the same if these are:

- the conversation, message by message: role (`developer` counts as `system`, `function` as `tool`),
  content, names and arguments of calls, reasoning, `name`, and whether a tool's result `is_error`.
  JSON counts by its value: the order of keys, and 10.0 for 10, make no difference. White space
  does. Instructions and system texts are messages; what a request names instead of repeating it
  (`previous_response_id`, `item_reference`) is looked up in the recording. Raw prompts are compared
  as they are;
- the tools, in order: name, description and parameters; a tool that runs at a provider is compared
  whole;
- every other field of the body, except those `BY_CHANCE` and those that a cassette is told to
  ignore. A field that is null is absent.

Not compared are ids of calls, responses and items: many clients make their own. Where several
recorded requests differ in these alone, the one with the same ids is meant. Nor is anything else in
a message compared, such as `cache_control`.

A request that comes through another API than it was recorded by is compared by conversation, tools
and model alone: the names and forms of everything else differ between APIs.
"""

from __future__ import annotations

import ast
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from rollbook.edge.errors import describe
from rollbook.ingest.endpoints.api import AgentApi, EarlierTurn, History
from rollbook.ingest.endpoints.chat import PATH as CHAT
from rollbook.ingest.endpoints.completions import PATH as COMPLETIONS
from rollbook.ingest.endpoints.registry import APIS
from rollbook.ingest.endpoints.responses_form import PATH as RESPONSES
from rollbook.ingest.endpoints.responses_form import PREFIX
from rollbook.ingest.fields import SamplingFields
from rollbook.ingest.tokens.message_form import canonical_arguments, normal, reasoning_of
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store import errors
from rollbook.store.cut import Cut
from rollbook.store.errors import ReplayError, RequestError
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


BY_CHANCE = frozenset(
    [
        *("stream", "stream_options", "user", "metadata", "store", "include", "background"),
        *("safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier", "cache_control"),
        *("logprobs", "top_logprobs", "return_token_ids"),
    ]
)
"""Fields that say how a reply is shown, kept or paid for, and not what it is."""
_CONVERSATION = frozenset(["messages", "input", "prompt", "system", "instructions", "previous_response_id"])
_NAMES = ("name", "is_error")

Renamed = Callable[[str], str]
"""Id of a response or item as it was recorded -> the same as this code makes them of a turn's id."""


@dataclass(frozen=True, slots=True, eq=False)
class ComparedRequest:
    """A request.

    Attributes:
        messages: each as canonical JSON of [role, content, calls, reasoning, marks].
        tools: each as canonical JSON.
        parameters: field -> its value as canonical JSON.
        digest: of the messages.
        ids: of the calls and their results, in order, as JSON.
        call: the request as its API's reader reads it.
    """

    endpoint: str
    messages: tuple[str, ...]
    tools: tuple[str, ...]
    parameters: Mapping[str, str]
    digest: bytes
    ids: bytes
    call: ModelCall


def read_request(api: AgentApi, body: Json, history: History, renamed: Renamed = str) -> ComparedRequest:
    """Read a request of any form; what its API's strict reader does not take is read for its messages
    alone.

    Args:
        history: the recorded turns, which it may name.
    """
    call, strict = _call(api, _with_recorded_ids(body, renamed), history)
    call = _as_sent(call, body)
    conversation = _prompts(body) if api.path == COMPLETIONS else call.messages
    left_out = BY_CHANCE | _read_elsewhere(strict=strict, named=bool(conversation))
    messages = tuple(map(_canonical_message, conversation))
    return ComparedRequest(
        endpoint=api.path,
        messages=messages,
        tools=tuple(_tool(tool) for tool in _list(body.get("tools"))),
        parameters={k: canonical(v) for k, v in body.items() if v is not None and k not in left_out},
        digest=hashlib.sha256("\n".join(messages).encode()).digest(),
        ids=orjson.dumps([_ids(message) for message in conversation]),
        call=call,
    )


def canonical(value: Any) -> str:
    """A value as JSON that is the same for equal values."""
    return canonical_arguments([value])[1:-1]


def differs(
    incoming: ComparedRequest,
    recorded: ComparedRequest,
    ignored: frozenset[str] = frozenset(),
    *,
    in_part: bool = False,
) -> bool:
    """Whether tools or parameters differ; the conversation is compared by its digest.

    Args:
        ignored: names of fields that do not count.
        in_part: only part of the recorded request is known: what it lacks does not count.
    """
    if incoming.tools != recorded.tools and "tools" not in ignored:
        return True
    names = compared_names(incoming, recorded, ignored, in_part=in_part)
    return any(incoming.parameters.get(name) != recorded.parameters.get(name) for name in names)


def compared_names(
    incoming: ComparedRequest, recorded: ComparedRequest, ignored: frozenset[str], *, in_part: bool = False
) -> Sequence[str]:
    """The fields by which two requests are compared, sorted."""
    names = incoming.parameters.keys() | recorded.parameters.keys()
    if in_part:
        names &= recorded.parameters.keys()
    if incoming.endpoint != recorded.endpoint:
        names &= {"model"}
    return sorted(names - ignored)


# Reading ----------------------------------------------------------------------------------------


def _call(api: AgentApi, body: Json, history: History) -> tuple[ModelCall, bool]:
    """(the request, whether all of it could be read)"""
    try:
        return api.read(body, history), True
    except RequestError:
        return api.upstream.read(body, None), False


def _read_elsewhere(*, strict: bool, named: bool) -> frozenset[str]:
    """The fields that are compared as messages and tools; what could not be read so is compared as it is."""
    if strict:
        return _CONVERSATION | {"tools"}
    return (_CONVERSATION - {"previous_response_id"} if named else frozenset()) | {"tools"}


def _as_sent(call: ModelCall, body: Json) -> ModelCall:
    """The call, with the ids that the client knows, and the form in which it wants the reply."""
    named = body.get("previous_response_id")
    rest = call.rest | ({"previous_response_id": named} if named is not None else {})
    wanted: Json = {"stream": body.get("stream") is True}
    if isinstance(body.get("stream_options"), dict):
        wanted["stream_options"] = body["stream_options"]
    if call.fields.model is None and isinstance(body.get("model"), str):
        wanted["model"] = body["model"]
    fields: SamplingFields = call.fields.model_copy(update=wanted)
    return replace(call, rest=rest, fields=fields)


def _with_recorded_ids(body: Json, renamed: Renamed) -> Json:
    """The body with the ids of earlier responses and their items in the form of our own."""
    named = body.get("previous_response_id")
    if isinstance(named, str):
        body = body | {"previous_response_id": renamed(named)}
    items = body.get("input")
    if not isinstance(items, list):
        return body
    return body | {"input": [_renamed_item(item, renamed) for item in items]}


def _renamed_item(item: Any, renamed: Renamed) -> Any:
    if not isinstance(item, dict) or not isinstance(item.get("id"), str):
        return item
    return item | {"id": renamed(item["id"])}


def _prompts(body: Json) -> list[Json]:
    """The prompt, or each of several; a prompt is a text or a list of ids."""
    prompt = body.get("prompt")
    prompts = _list(prompt)
    several = any(isinstance(item, str | list) for item in prompts)
    return [{"role": "prompt", "content": item} for item in (prompts if several else [prompt])]


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


# The form that is compared ----------------------------------------------------------------------


def _canonical_message(message: Json) -> str:
    if message.get("role") == "prompt":
        form: list[Any] = ["prompt", message["content"], []]
    else:
        form = normal(message)
    marks = {name: message[name] for name in _NAMES if message.get(name)}
    return canonical([*form, reasoning_of(message), marks])


def _tool(tool: Any) -> str:
    """A function by name, description and parameters, however its API writes it; any other tool whole."""
    if not isinstance(tool, dict):
        return canonical(tool)
    nested = tool.get("function")
    function = nested if isinstance(nested, dict) else tool
    if tool.get("type") not in (None, "function", "custom") or "name" not in function:
        return canonical({k: v for k, v in tool.items() if k != "cache_control"})
    parameters = function.get("parameters") or function.get("input_schema") or {}
    definition = {"name": function["name"], "description": function.get("description") or ""}
    return canonical(definition | {"parameters": parameters})


def _ids(message: Json) -> list[Any]:
    calls = _list(message.get("tool_calls"))
    return [message.get("tool_call_id"), *(call.get("id") for call in calls if isinstance(call, dict))]
