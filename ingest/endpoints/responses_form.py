"""The items of OpenAI's Responses: of replies, whole and streamed, and of requests in chat form. Pure.

Ids of a reply's items name the turn. As events, items come one after another, each added, filled and done.

In a request, what the model said comes as several items: reasoning, a message, calls. Those that follow one
another are one assistant message, as long as they can be of one reply.

What a request only names is looked up in its trajectory: an earlier response (`previous_response_id`) or one
of its items (`item_reference`, which some clients send for everything the model said). Nothing that was said
is lost, and what cannot be found is a 404.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollbook.edge.server_sent_events import event
from rollbook.ingest.endpoints.api import EarlierTurn, History
from rollbook.ingest.endpoints.openai_form import MODEL, template_kwargs
from rollbook.ingest.fields import SamplingFields, validated
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import (
    arguments_in_form,
    content_in_form,
    refused,
    shown,
    text_of,
    unread,
    unread_in_parts,
)
from rollbook.ingest.turns.in_flight import CompletedTurn, created_s
from rollbook.ingest.turns.model_call import ModelCall, check_answerable, check_tools, function_tool
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

PREFIX = "resp_"
_ID = re.compile(r"(?:resp|rs|msg|fc)_(?P<turn>[0-9a-f-]{36})(?:_(?P<index>\d+))?")


def turn_of(item_id: Any) -> str | None:
    """The turn whose response, or part of one, has this id; None if it is none of ours."""
    match = _ID.fullmatch(item_id) if isinstance(item_id, str) else None
    return None if match is None else match["turn"]


def call_index(item_id: str) -> int:
    """Which of its turn's calls an item is."""
    match = _ID.fullmatch(item_id)
    return int(match["index"] or 0) if match else 0


def reasoning_item(turn_id: str, text: str | None, status: str = "completed") -> Json:
    """A reasoning item; None: not filled yet."""
    content = [] if text is None else [{"type": "reasoning_text", "text": text}]
    return {"id": f"rs_{turn_id}", "type": "reasoning", "summary": [], "content": content, "status": status}


def message_item(turn_id: str, text: str | None, status: str = "completed") -> Json:
    """A message item; None: not filled yet."""
    content = [] if text is None else [text_part(text)]
    return {
        "id": f"msg_{turn_id}",
        "type": "message",
        "role": "assistant",
        "status": status,
        "content": content,
    }


def text_part(text: str) -> Json:
    """Text of a message item."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def call_item(turn_id: str, index: int, call: Json, arguments: str, status: str = "completed") -> Json:
    """A function call."""
    return {
        "id": f"fc_{turn_id}_{index}",
        "type": "function_call",
        "call_id": call["id"],
        "name": call["function"]["name"],
        "arguments": arguments,
        "status": status,
    }


def output_items(turn: CompletedTurn) -> list[Json]:
    """Reasoning, message and calls, those that there are; an empty reply is an empty message."""
    reply, turn_id = turn.reply, turn.turn_id
    items: list[Json] = []
    if reply.get("reasoning_content"):
        items.append(reasoning_item(turn_id, reply["reasoning_content"]))
    if reply.get("content") or not turn.calls:
        items.append(message_item(turn_id, reply.get("content") or ""))
    return items + [call_item(turn_id, i, c, c["function"]["arguments"]) for i, c in enumerate(turn.calls)]


def response_head(request: Json, model: str, turn_id: str) -> Json:
    """A response that is not answered yet."""
    echoed = {
        name: request.get(name)
        for name in ("instructions", "metadata", "previous_response_id", "temperature", "top_p", "reasoning")
    }
    return {
        "id": PREFIX + turn_id,
        "object": "response",
        "created_at": created_s(turn_id),
        "status": "in_progress",
        "model": model,
        "output": [],
        "parallel_tool_calls": request.get("parallel_tool_calls", True),
        "tool_choice": request.get("tool_choice") or "auto",
        "tools": request.get("tools") or [],
        "text": request.get("text") or {"format": {"type": "text"}},
        "truncation": "disabled",
        "max_output_tokens": request.get("max_output_tokens"),
        "error": None,
        "incomplete_details": None,
        "usage": None,
        **echoed,
    }


def response_body(request: Json, model: str, turn: CompletedTurn) -> Json:
    """The whole response."""
    done = turn.completed
    prompt, sampled = done.prompt_length, len(done.completion_ids)
    cut_off = done.finish_reason == "length"
    return response_head(request, model, turn.turn_id) | {
        "status": "incomplete" if cut_off else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut_off else None,
        "output": output_items(turn),
        "usage": {
            "input_tokens": prompt,
            "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
            "output_tokens": sampled,
            "output_tokens_details": {"reasoning_tokens": 0},
            "total_tokens": prompt + sampled,
        },
    }


def reply(call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
    """The whole response to a request."""
    return response_body(call.rest, call.fields.model or MODEL, turns[0])


class ResponsesWriter:
    """response.created, items with their deltas, response.completed."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> None:
        self._request, self._model, self._turn_id = call.rest, call.fields.model or MODEL, turn_ids[0]
        self._number = 0
        self._index = -1
        self._open = ""
        self._text = ""

    def begin(self) -> bytes:
        """The response without output."""
        head = response_head(self._request, self._model, self._turn_id)
        return self._event("response.created", response=head) + self._event(
            "response.in_progress", response=head
        )

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """More of the reasoning or of the message."""
        parts = []
        if reasoning:
            parts += [self._enter("reasoning"), self._delta("response.reasoning_text.delta", reasoning)]
        if content:
            parts += [self._enter("message"), self._delta("response.output_text.delta", content, logprobs=[])]
        return b"".join(parts)

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """What is open is closed, calls follow, and the whole response."""
        turn = turns[0]
        if not turn.reply.get("content") and not turn.calls:
            parts = [self._enter("message"), self._leave()]
        else:
            parts = [self._leave()]
        for item in output_items(turn):
            if item["type"] == "function_call":
                parts.append(self._call(turn, item))
        whole = response_body(self._request, self._model, turn)
        kind = "response.completed" if whole["status"] == "completed" else "response.incomplete"
        return b"".join([*parts, self._event(kind, response=whole)])

    def failed(self, error: Json) -> bytes:
        """An error event."""
        detail = error["error"]
        return self._event("error", code=detail["code"], message=detail["message"], param=None)

    def _call(self, turn: CompletedTurn, item: Json) -> bytes:
        self._index += 1
        place = {"output_index": self._index, "item_id": item["id"]}
        number = int(item["id"].rpartition("_")[2])
        started = call_item(turn.turn_id, number, turn.calls[number], "", "in_progress")
        arguments = item["arguments"]
        return b"".join(
            [
                self._event("response.output_item.added", output_index=self._index, item=started),
                self._event("response.function_call_arguments.delta", delta=arguments, **place),
                self._event(
                    "response.function_call_arguments.done", arguments=arguments, name=item["name"], **place
                ),
                self._event("response.output_item.done", output_index=self._index, item=item),
            ]
        )

    def _item(self, text: str | None, status: str) -> Json:
        make = reasoning_item if self._open == "reasoning" else message_item
        return make(self._turn_id, text, status)

    def _part(self, text: str) -> Json:
        return {"type": "reasoning_text", "text": text} if self._open == "reasoning" else text_part(text)

    def _enter(self, what: str) -> bytes:
        """Open an item, unless it is open."""
        if self._open == what:
            return b""
        before = self._leave()
        self._index += 1
        self._open, self._text = what, ""
        added = self._event(
            "response.output_item.added", output_index=self._index, item=self._item(None, "in_progress")
        )
        return before + added + self._placed("response.content_part.added", part=self._part(""))

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        name = "reasoning_text" if self._open == "reasoning" else "output_text"
        extra: Json = {} if self._open == "reasoning" else {"logprobs": []}
        parts = [
            self._placed(f"response.{name}.done", text=self._text, **extra),
            self._placed("response.content_part.done", part=self._part(self._text)),
            self._event(
                "response.output_item.done",
                output_index=self._index,
                item=self._item(self._text, "completed"),
            ),
        ]
        self._open = ""
        return b"".join(parts)

    def _delta(self, kind: str, text: str, **extra: Any) -> bytes:
        self._text += text
        return self._placed(kind, delta=text, **extra)

    def _placed(self, kind: str, **fields: Any) -> bytes:
        item_id = ("rs_" if self._open == "reasoning" else "msg_") + self._turn_id
        return self._event(kind, output_index=self._index, item_id=item_id, content_index=0, **fields)

    def _event(self, kind: str, **fields: Any) -> bytes:
        chunk = event({"type": kind, "sequence_number": self._number} | fields, kind)
        self._number += 1
        return chunk


ROLES = ("user", "system", "developer", "assistant")
_PARTS = ("reasoning_content", "content", "tool_calls")
"""In the order in which a reply has them."""


class _MessageBuilder:
    """Chat messages as they are gathered from items."""

    def __init__(self) -> None:
        self.messages: list[Json] = []
        self._reached = len(_PARTS)

    def add(self, message: Json) -> None:
        """Somebody else's message."""
        self.messages.append(message)
        self._reached = len(_PARTS)

    def reply_part(self, name: str, value: Any) -> None:
        """A part of what the model said: of the reply before it, or of a new one."""
        place = _PARTS.index(name)
        follows = self._reached < place or (self._reached == place and name == "tool_calls")
        if not follows:
            self.messages.append({"role": "assistant", "content": None})
        self._reached = place
        last = self.messages[-1]
        last[name] = [*last.get(name, ()), *value] if name == "tool_calls" else value


def chat_messages(items: Sequence[Any], history: History) -> list[Json]:
    """The messages that the items are.

    Raises:
        RequestError: 400, an item of a kind that is not served; 404, a reference to what is not there.
    """
    builder = _MessageBuilder()
    for index, item in enumerate(items):
        if not isinstance(item, dict):
            raise refused(f"input[{index}]", item, "send an object")
        _add(builder, f"input[{index}]", item, history)
    return builder.messages


_READ = {
    "message": ("role", "content"),
    "reasoning": ("content", "summary"),
    "function_call": ("name", "arguments", "call_id"),
    "function_call_output": ("output", "call_id"),
    "item_reference": (),
}
"""Type of an item -> the fields of it that are read."""


def unread_in_items(items: Sequence[Json]) -> tuple[str, ...]:
    """What chat messages have no place for: fields that are not read, such as encrypted reasoning."""
    names: set[str] = set()
    for item in items:
        kind = item.get("type", "message")
        names |= unread(item, _READ[kind])
        if kind == "reasoning":
            names |= {"summary"} if item.get("content") and item.get("summary") else set()
        else:
            names |= unread_in_parts(item.get("content" if kind == "message" else "output"))
    return tuple(sorted(f"input.{name}" for name in names))


def _add(builder: _MessageBuilder, where: str, item: Json, history: History) -> None:
    match item.get("type", "message"):
        case "message":
            _add_message(builder, where, item)
        case "reasoning":
            builder.reply_part("reasoning_content", _reasoning(where, item))
        case "function_call":
            builder.reply_part("tool_calls", [_call(where, item)])
        case "function_call_output":
            content = content_in_form(f"{where}.output", item.get("output"))
            call_id = _call_id(where, item)
            builder.add({"role": "tool", "tool_call_id": call_id, "content": content})
        case "item_reference":
            _add_reference(builder, where, item.get("id"), history)
        case kind:
            text = f"{where}.type is {shown(kind)}, which is not served: send messages, reasoning, calls"
            raise RequestError(400, "content_not_served", text)


def _add_message(builder: _MessageBuilder, where: str, item: Json) -> None:
    role = item.get("role")
    if role not in ROLES:
        text = f"{where}.role is {shown(role)}: use one of {', '.join(ROLES)}"
        raise RequestError(400, "unknown_role", text)
    content = content_in_form(f"{where}.content", item.get("content"))
    if role != "assistant":
        builder.add({"role": role, "content": content})
    elif isinstance(content, str):
        builder.reply_part("content", content)
    else:
        raise RequestError(400, "content_not_served", f"{where}.content holds an image: send text")


def _call(where: str, item: Json) -> Json:
    sent = item.get("arguments")
    arguments = sent if isinstance(sent, str) else arguments_in_form(f"{where}.arguments", sent)
    function = {"name": text_of(where, item, "name"), "arguments": arguments}
    return {"id": _call_id(where, item), "type": "function", "function": function}


def _call_id(where: str, item: Json) -> str | None:
    if not isinstance(item.get("call_id"), str | None):
        raise refused(f"{where}.call_id", item["call_id"], "send a text")
    return item.get("call_id")


def _add_reference(builder: _MessageBuilder, where: str, item_id: Any, history: History) -> None:
    turn_id = turn_of(item_id)
    earlier = None if turn_id is None else history(turn_id)
    if earlier is None:
        text = f"{where}: {shown(item_id)} is no item of this trajectory"
        raise RequestError(404, "unknown_item", text)
    reply = earlier.reply
    if item_id.startswith("rs_"):
        builder.reply_part("reasoning_content", reply.get("reasoning_content") or "")
    elif item_id.startswith("msg_"):
        builder.reply_part("content", reply.get("content") or "")
    else:
        calls = reply.get("tool_calls") or []
        index = call_index(item_id)
        if index >= len(calls):
            raise RequestError(404, "unknown_item", f"{where}: {item_id!r} is no item of this trajectory")
        builder.reply_part("tool_calls", [calls[index]])


def _reasoning(where: str, item: Json) -> str:
    name = "content" if item.get("content") else "summary"
    parts = item.get(name) or []
    if isinstance(parts, str):
        return parts
    if not isinstance(parts, list):
        raise refused(f"{where}.{name}", parts, "send a list of texts")
    texts = []
    for place, part in enumerate(parts):
        if not isinstance(part, dict | str):
            raise refused(f"{where}.{name}[{place}]", part, "send an object with a text")
        texts.append(part if isinstance(part, str) else text_of(f"{where}.{name}[{place}]", part))
    return "".join(texts)


PATH = "/v1/responses"
OWN_FIELDS = frozenset(["input", "instructions", "previous_response_id", "text", "max_output_tokens"])
MISSING_FIELDS = frozenset(["n", "stop", "logprobs"])


def read(body: Json, history: History) -> ModelCall:
    """A request for a response.

    Raises:
        RequestError: 400, it is none; 404, it names what the trajectory does not have.
    """
    if body.get("background"):
        text = "background: true: the reply is given to the request itself; send background: false"
        raise RequestError(400, "background_not_served", text)
    fields = validated(SamplingFields, _sampling(body))
    sent = body.get("input", [])
    items = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    if not isinstance(items, list):
        raise RequestError(400, "bad_request", "input: send a text or a list of items")
    messages = [
        *_instructions(body),
        *_previous(body.get("previous_response_id"), history),
        *chat_messages(items, history),
    ]
    check_answerable(messages)
    tools, odd = _tools(body.get("tools"))
    return ModelCall(
        endpoint=PATH,
        messages=messages,
        tools=tools,
        fields=fields,
        # A text stays with the body: the items are what was sent as a list.
        rest={k: v for k, v in body.items() if k != "input" or isinstance(v, str)},
        items=[] if isinstance(sent, str) else sent,
        tool_calls_wanted=fields.tool_choice != "none",
        template_kwargs=template_kwargs(fields, _effort(body)),
        not_honoured=(*odd, *unread_in_items(items)),
        own_fields=OWN_FIELDS,
        missing_fields=MISSING_FIELDS,
    )


def _sampling(body: Json) -> Json:
    """The sampling fields under chat's names."""
    text = body.get("text")
    shape = text.get("format") if isinstance(text, dict) else None
    mapped = {k: v for k, v in body.items() if k not in ("n", "stop", "max_tokens", "logprobs")}
    if body.get("max_output_tokens") is not None:
        mapped["max_tokens"] = body["max_output_tokens"]
    if isinstance(shape, dict):
        mapped["response_format"] = shape
    return mapped


def _effort(body: Json) -> Any:
    reasoning = body.get("reasoning")
    return reasoning.get("effort") if isinstance(reasoning, dict) else None


def _instructions(body: Json) -> list[Json]:
    text = body.get("instructions")
    if not isinstance(text, str | None):
        raise refused("instructions", text, "send a text")
    return [{"role": "system", "content": text}] if text else []


def _previous(response_id: Any, history: History) -> list[Json]:
    """The conversation up to an earlier response; its own instructions do not carry over."""
    if response_id is None:
        return []
    turn_id = turn_of(response_id)
    earlier: EarlierTurn | None = None if turn_id is None else history(turn_id)
    if earlier is None:
        text = f"previous_response_id is {response_id!r}, which is no response of this trajectory"
        raise RequestError(404, "unknown_response", text)
    messages = earlier.messages
    if _instructions(earlier.request):
        messages = messages[1:]
    return [*messages, earlier.reply]


def _tools(tools: Any) -> tuple[list[Json] | None, tuple[str, ...]]:
    """(functions in chat form, what is not served)"""
    tools = check_tools(tools)
    functions: list[Json] = []
    odd: set[str] = set()
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            odd.add(f"tools.{kind if isinstance(kind, str) else shown(kind)}")
            continue
        named = ("name", "description", "parameters", "strict")
        function = {k: tool[k] for k in named if tool.get(k) is not None}
        functions.append(function_tool(f"tools[{index}]", function))
    return functions or None, tuple(sorted(odd))
