"""What a request that passes asks for, in chat form. Pure.

An upstream may take what we do not know. So what cannot be read strictly is read leniently, for the sake of
its messages alone, and what cannot be read at all is kept as it was sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import orjson

from rollbook.ingest.endpoints.history import no_history
from rollbook.ingest.requests.fields import SamplingFields, validated
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.ingest.turns.respond import Endpoint
from rollbook.ingest.upstream.references import EarlierResponse, References
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

_CHAT = "/v1/chat/completions"
_SENT = {
    _CHAT: "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/messages": "messages",
}
"""Where the endpoints have what is said."""
_SHAPING = ("messages", "input", "system", "instructions")
_BLOCKS = {
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "user": ("text", "image", "tool_result"),
}
_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_PLACEHOLDER: Json = {"role": "user", "content": ""}


def read_call(endpoint: Endpoint, body: Json, references: References) -> ModelCall:
    """The request in our form; where nothing is known of it, without messages and the items as sent."""
    own, named = body, None
    missing: tuple[str, ...] = ()
    if endpoint.path == "/v1/responses":
        named = body.get("previous_response_id")
        own, missing = references.resolved(body)
        own = {k: v for k, v in own.items() if k != "previous_response_id"}
    try:
        call = endpoint.read(own, no_history)
    except RequestError:
        call = _leniently(endpoint, own)
    if call.prompt is not None:
        call = replace(call, messages=[{"role": "prompt", "content": body["prompt"]}], prompt=None)
    if own is not body:
        items = body["input"] if isinstance(body.get("input"), list) else call.items
        call = replace(call, items=items, unresolved=missing)
    if named:
        call = _behind(call, body, references.response(named))
    return call


def _behind(call: ModelCall, body: Json, earlier: EarlierResponse | None) -> ModelCall:
    rest = call.rest | {"previous_response_id": body["previous_response_id"]}
    if earlier is None or not call.messages:
        return replace(call, rest=rest)
    head = 1 if body.get("instructions") else 0
    before = earlier.messages[1:] if earlier.instructed else earlier.messages
    messages = [*call.messages[:head], *before, earlier.reply, *call.messages[head:]]
    return replace(call, rest=rest, messages=messages)


def _leniently(endpoint: Endpoint, body: Json) -> ModelCall:
    n, name = body.get("n"), _SENT[endpoint.path]
    fields: Json = {"model": body["model"]} if isinstance(body.get("model"), str) else {}
    fields |= {"n": n} if type(n) is int and 1 <= n <= 128 else {}
    known = validated(SamplingFields, fields)
    sent = body.get(name, [])
    rest = {k: v for k, v in body.items() if k != name}
    if endpoint.path == "/v1/completions" and isinstance(sent, str | list):
        return ModelCall(endpoint.path, [{"role": "prompt", "content": sent}], None, known, rest)
    items = sent if isinstance(sent, list) else [sent]
    try:
        soft, added = _softened(endpoint.path, body)
        call = endpoint.read(soft, no_history)
    except (RequestError, AttributeError, KeyError, TypeError, ValueError):
        return ModelCall(endpoint.path, [], None, known, rest, items=items)
    messages = call.messages[:-1] if added else call.messages
    if endpoint.path == _CHAT:
        messages = [_with_functions(message) for message in items]  # whatever their content is
    kept = None if call.items is None and messages == items else items
    return ModelCall(endpoint.path, messages, None, known, rest, items=kept)


def _softened(path: str, body: Json) -> tuple[Json, bool]:
    """(what of the body makes its messages, in a form that is served; whether a message was added to it).

    An assistant's message may be the last: then the reply goes on from it.
    """
    soft = {k: body[k] for k in _SHAPING if k in body} | {"max_tokens": 1}
    name = _SENT[path]
    sent = body.get(name)
    if not isinstance(sent, list):
        return soft, False
    if path == _CHAT:
        sent = [{"role": message["role"], "content": ""} for message in sent]
    elif path == "/v1/messages":
        sent = [_known_blocks(message) for message in sent]
    elif path == "/v1/responses":
        sent = _known_items(sent)
    added = bool(sent) and sent[-1].get("role") == "assistant"
    return soft | {name: [*sent, _PLACEHOLDER] if added else sent}, added


def _with_functions(message: Json) -> Json:
    """The message, with all its calls as calls of functions."""
    calls = message.get("tool_calls")
    return message if not calls else message | {"tool_calls": function_calls(calls)}


def function_calls(calls: Sequence[Json]) -> list[Json]:
    """Calls of tools as calls of functions; of a custom tool the input is the arguments."""
    made = []
    for call in calls:
        custom = call.get("custom")
        if isinstance(call.get("function"), dict):
            made.append(call)
        elif isinstance(custom, dict):
            function = {"name": custom.get("name"), "arguments": custom.get("input")}
            made.append({"id": call.get("id"), "type": "function", "function": function})
    return made


def _known_blocks(message: Json) -> Json:
    """The message, with blocks of other kinds left out where the assistant said them, and else as text."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(content, list):
        return message
    known = _BLOCKS["assistant" if role == "assistant" else "user"]
    said = [sound_block(b) for b in content if b.get("type") in known]
    if role != "assistant":
        said = [_result(sound_block(b)) if b.get("type") in known else _as_text(b) for b in content]
    return message | {"content": said}


def sound_block(block: Json) -> Json:
    """A block of Anthropic's, with a text and an object wherever there is to be one."""
    sound = dict(block)
    for name in ("text", "thinking", "name"):
        if not isinstance(block.get(name, ""), str):
            sound[name] = "" if block[name] is None else orjson.dumps(block[name]).decode()
    return sound | ({"input": {}} if not isinstance(block.get("input"), dict | None) else {})


def _result(block: Json) -> Json:
    content = block.get("content")
    if block.get("type") != "tool_result" or not isinstance(content, list):
        return block
    return block | {"content": [b if b.get("type") in ("text", "image") else _as_text(b) for b in content]}


def _as_text(value: Any) -> Json:
    return {"type": "text", "text": orjson.dumps(value).decode()}


def _known_items(items: Sequence[Any]) -> list[Json]:
    """The items; of other kinds only what comes from outside, as text."""
    made: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        if kind in _ITEMS:
            made.append(item)
        elif kind.endswith("_output"):
            made.append({"role": "user", "content": orjson.dumps(item).decode()})
    return made
