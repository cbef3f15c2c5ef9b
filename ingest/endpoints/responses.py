"""OpenAI's Responses: items in and out, and requests that name earlier responses.

What a request names instead of repeating it is looked up in what passed in its trajectory; an
upstream keeps its own copy.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import orjson

from rollbook.edge.errors import openai_error
from rollbook.ingest.endpoints.api import AgentApi, ResponseIds, UpstreamForm, line_of
from rollbook.ingest.endpoints.responses_form import (
    PATH,
    ResponsesWriter,
    chat_messages,
    read,
    reply,
    turn_of,
)
from rollbook.ingest.endpoints.upstream_choices import LenientReader
from rollbook.ingest.endpoints.upstream_reply import UpstreamChoice, UpstreamReply, without_nulls
from rollbook.ingest.trajectories.live import Contents
from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.events import Json


@dataclass(frozen=True, slots=True, eq=False)
class EarlierResponse:
    """A response that a later request names: the messages it answers, its reply, and whether the first of
    the messages are instructions, which do not carry over."""

    messages: list[Json]
    reply: Json
    instructed: bool


@dataclass(frozen=True, slots=True, eq=False)
class References:
    """The responses of one trajectory and their items, by the ids that the upstream gave them.

    Attributes:
        known: None: of a trajectory that is new, and has none.
    """

    known: Contents | None = None

    def response(self, response_id: Any) -> EarlierResponse | None:
        """The response of that id."""
        known = self.known
        if known is None or not isinstance(response_id, str) or response_id not in known.replies:
            return None
        turn = known.tree.by_id(known.replies[response_id])
        if turn is None:
            return None
        request = known.requests.get(turn.turn_id, {})
        return EarlierResponse(turn.messages, turn.reply, bool(request.get("instructions")))

    def item(self, item_id: Any) -> Json | None:
        """The item of that id, of the output of any of them."""
        return None if self.known is None or not isinstance(item_id, str) else self.known.outputs.get(item_id)

    def resolved(self, body: Json) -> tuple[Json, tuple[str, ...]]:
        """(the body with items for references to them; what it names that did not pass here)"""
        missing = [name for name in ("conversation", "prompt") if body.get(name)]
        previous = body.get("previous_response_id")
        if previous and self.response(previous) is None:
            missing.append(f"previous_response_id {previous}")
        items = body.get("input")
        if not isinstance(items, list):
            return body, tuple(missing)
        resolved: list[Any] = []
        for item in items:
            if not is_reference(item):
                resolved.append(item)
            elif (target := self.item(item["id"])) is not None:
                resolved.append(target)
            else:
                missing.append(f"item_reference {item['id']}")
        return body | {"input": resolved}, tuple(missing)


def is_reference(item: Any) -> bool:
    """Whether an item names another; its type may be left out."""
    if not isinstance(item, dict) or "id" not in item:
        return False
    kind = item.get("type")
    return kind == "item_reference" or (kind is None and item.keys() <= {"id", "type"})


def named_ids(body: Json) -> Iterator[str]:
    """Ids of the responses and items that a request names."""
    items = body.get("input")
    refers = [i["id"] for i in items if is_reference(i)] if isinstance(items, list) else []
    yield from (i for i in (body.get("previous_response_id"), *refers) if isinstance(i, str))


_ITEMS = ("message", "reasoning", "function_call", "function_call_output")
_INPUT_TOKENS = f"POST {PATH}/input_tokens"
_RESPONSE = re.compile(rf"{PATH}/(?P<id>[^/]+)(?:/.*)?")


# Requests ---------------------------------------------------------------------------------------


def read_call(body: Json, known: Contents | None) -> ModelCall:
    """The request, with each response or item that it names put in place of the name, where it passed
    here."""
    references = References(known)
    resolved, missing = references.resolved(body)
    named = body.get("previous_response_id")
    call = _READER.call({k: v for k, v in resolved.items() if k != "previous_response_id"})
    items = body["input"] if isinstance(body.get("input"), list) else call.items
    call = replace(call, items=items, unresolved=missing)
    return _behind(call, body, references.response(named)) if named else call


def _behind(call: ModelCall, body: Json, earlier: EarlierResponse | None) -> ModelCall:
    rest = call.rest | {"previous_response_id": body["previous_response_id"]}
    if earlier is None or not call.messages:
        return replace(call, rest=rest)
    head = 1 if body.get("instructions") else 0
    before = earlier.messages[1:] if earlier.instructed else earlier.messages
    messages = [*call.messages[:head], *before, earlier.reply, *call.messages[head:]]
    return replace(call, rest=rest, messages=messages)


def _known_items(items: Sequence[Any]) -> list[Json]:
    """The items; of other kinds only what comes from outside, as text."""
    known: list[Json] = []
    for item in items:
        kind = item.get("type", "message")
        if kind in _ITEMS:
            known.append(item)
        elif kind.endswith("_output"):
            known.append({"role": "user", "content": orjson.dumps(item).decode()})
    return known


_READER = LenientReader(PATH, "input", read, _known_items)


def named_in_path(method: str, path: str) -> str | None:
    """The response that a request is about, by its path."""
    match = _RESPONSE.fullmatch(path)
    return None if match is None or f"{method} {path}" == _INPUT_TOKENS else match["id"]


# Replies ----------------------------------------------------------------------------------------

_RESPONSE_ITEMS = ("message", "reasoning", "function_call")
_UNANSWERED = ("failed", "cancelled", "queued")


def read_reply(body: Json) -> UpstreamReply:
    """The output as one message. An error where the response failed without any."""
    # The instructions and tools are the request's own, said once more.
    rest = without_nulls(body, "output", "instructions", "tools")
    output, status = body["output"], body.get("status")
    if status in _UNANSWERED and not output:
        return UpstreamReply((), None, rest, error=f"the response is {status}")
    messages = chat_messages([item for item in output if item.get("type") in _RESPONSE_ITEMS], lambda _: None)
    message: Json = {"role": "assistant", "content": None}
    for name in ("reasoning_content", "content"):
        texts = [part[name] for part in messages if part.get(name)]
        message |= {name: "".join(texts)} if texts else {}
    calls = [call for part in messages for call in part.get("tool_calls") or ()]
    if calls:
        message["tool_calls"] = calls
    elif len(message) == 2 and message["content"] is None:
        message["content"] = ""
    choice = UpstreamChoice(message, _ended(body, calls), extra={"output": output} if output else {})
    return UpstreamReply((choice,), None, rest)


def _ended(body: Json, calls: Sequence[Json]) -> str | None:
    match body.get("status"):
        case "completed":
            return "tool_calls" if calls else "stop"
        case "incomplete":
            reason = (body.get("incomplete_details") or {}).get("reason")
            return "content_filter" if reason == "content_filter" else "length"
    return None


def ids_of(reply: UpstreamReply) -> Iterator[str]:
    """The ids of a response and its items, by which later requests may name them."""
    outputs = [item.get("id") for choice in reply.choices for item in choice.extra.get("output", ())]
    yield from (reply_id for reply_id in (reply.rest.get("id"), *outputs) if isinstance(reply_id, str))


# Streams ----------------------------------------------------------------------------------------

_GROWING = {
    "response.output_text.delta": ("content", "output_text", "text"),
    "response.refusal.delta": ("content", "refusal", "refusal"),
    "response.reasoning_text.delta": ("content", "reasoning_text", "text"),
    "response.reasoning_summary_text.delta": ("summary", "summary_text", "text"),
}
"""Event -> the list of an item that grows, the type of its part, and the part's text."""
_CALLS = {
    "response.function_call_arguments.delta": "arguments",
    "response.custom_tool_call_input.delta": "input",
}


def gather_response(events: Sequence[Json]) -> Json | None:
    """The last event holds everything; a stream that was cut off, what its items came to."""
    latest: Json | None = next(
        (e["response"] for e in reversed(events) if isinstance(e.get("response"), dict)), None
    )
    if latest is None or latest.get("output"):
        return latest
    items: dict[int, Json] = {}
    for event in events:
        kind = event.get("type", "")
        if kind in ("response.output_item.added", "response.output_item.done"):
            items[event["output_index"]] = dict(event["item"])
        elif event.get("output_index") in items:
            _grow(items[event["output_index"]], kind, event)
    return latest | {"output": [items[i] for i in sorted(items)]}


def _grow(item: Json, kind: str, event: Json) -> None:
    if kind in _CALLS:
        name = _CALLS[kind]
        item[name] = (item.get(name) or "") + event["delta"]
    elif kind in _GROWING:
        name, part_type, text = _GROWING[kind]
        place = event.get("summary_index" if name == "summary" else "content_index") or 0
        parts = [dict(part) for part in item.get(name) or ()]
        if place >= len(parts):
            parts.append({"type": part_type, text: ""})
        part = parts[min(place, len(parts) - 1)]
        part[text] = (part.get(text) or "") + event["delta"]
        item[name] = parts


UPSTREAM = UpstreamForm(
    read=read_call,
    reply=read_reply,
    gather=gather_response,
    last_event=line_of(rb"(?:event: ?|data: ?\{\"type\": ?\")response\.(?:completed|incomplete|failed)\b"),
    paths=(
        f"POST {PATH}",
        _INPUT_TOKENS,
        f"GET {PATH}/*",
        f"DELETE {PATH}/*",
        f"POST {PATH}/*/cancel",
        f"GET {PATH}/*/input_items",
    ),
)


API = AgentApi(
    path=PATH,
    conversation="input",
    read=read,
    reply=reply,
    writer=ResponsesWriter,
    error=openai_error,
    upstream=UPSTREAM,
    ids=ResponseIds(in_body=named_ids, in_path=named_in_path, of_reply=ids_of, turn_of=turn_of),
)
