"""A request as a cassette compares it: what decides a reply, whichever client wrote it. Pure.

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

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from rollbook.ingest.endpoints.api import AgentApi, History
from rollbook.ingest.endpoints.completions import PATH as COMPLETIONS
from rollbook.ingest.fields import SamplingFields
from rollbook.ingest.tokens.message_form import canonical_arguments, normal, reasoning_of
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

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
    call, strict = _call(api, _renamed(body, renamed), history)
    call = _as_sent(call, body)
    conversation = _prompts(body) if api.path == COMPLETIONS else call.messages
    left_out = BY_CHANCE | _read_elsewhere(strict=strict, said=bool(conversation))
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


def _read_elsewhere(*, strict: bool, said: bool) -> frozenset[str]:
    """The fields that are compared as messages and tools; what could not be read so is compared as it is."""
    if strict:
        return _CONVERSATION | {"tools"}
    return (_CONVERSATION - {"previous_response_id"} if said else frozenset()) | {"tools"}


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


def _renamed(body: Json, renamed: Renamed) -> Json:
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
