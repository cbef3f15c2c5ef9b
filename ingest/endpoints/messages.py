"""Anthropic's messages: blocks in and out.

System text becomes a system message, `tool_use` a tool call, `tool_result` a tool message, and thinking is
reasoning; call ids are the same ones that OpenAI's endpoints give. So a conversation makes the same turns
through either.

In this order: requests in chat form, replies whole, replies as events (blocks one after another, each opened,
filled and closed), and both as they pass to an upstream.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import orjson

from rollbook.edge.server_sent_events import event, json_of
from rollbook.ingest.endpoints.api import AgentApi, History, UpstreamForm, line_of, no_history
from rollbook.ingest.endpoints.openai_form import MODEL, template_kwargs
from rollbook.ingest.endpoints.upstream_choices import LenientReader, as_text
from rollbook.ingest.endpoints.upstream_reply import UpstreamChoice, UpstreamReply, without_nulls
from rollbook.ingest.fields import SamplingFields, validated
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import (
    arguments_in_form,
    content_in_form,
    refused,
    shown,
    text_of,
    unread,
)
from rollbook.ingest.turns.in_flight import CompletedTurn
from rollbook.ingest.turns.model_call import ModelCall, check_answerable, check_tools, function_tool
from rollbook.ingest.turns.reply import STOP_STRING
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

PATH = "/v1/messages"
OWN_FIELDS = frozenset(["messages", "system", "stop_sequences", "max_tokens"])
MISSING_FIELDS = frozenset(["n", "stop"])
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


def read(body: Json, history: History) -> ModelCall:
    """A request for a message.

    Raises:
        RequestError: 400, it is none.
    """
    choice = body.get("tool_choice")
    kind = choice.get("type", "auto") if isinstance(choice, dict) else "auto"
    chosen = _CHOICES.get(kind, choice) if isinstance(kind, str) else choice
    mapped = body | {"stop": body.get("stop_sequences"), "tool_choice": chosen, "n": None}
    fields = validated(SamplingFields, {k: v for k, v in mapped.items() if v is not None})
    if fields.max_tokens is None:
        raise RequestError(400, "bad_request", "max_tokens: Field required")
    sent = body.get("messages")
    if not isinstance(sent, list):
        raise RequestError(400, "bad_request", "messages: send a list of messages")
    messages = [*_system(body.get("system")), *(m for i, s in enumerate(sent) for m in _chat_form(i, s))]
    check_answerable(messages)
    tools, odd = _tools(body.get("tools"))
    return ModelCall(
        endpoint=PATH,
        messages=messages,
        tools=tools,
        fields=fields,
        rest={k: v for k, v in body.items() if k != "messages"},
        items=sent,
        tool_calls_wanted=fields.tool_choice != "none",
        template_kwargs=template_kwargs(fields),
        not_honoured=(*odd, *_unread(sent)),
        own_fields=OWN_FIELDS,
        missing_fields=MISSING_FIELDS,
    )


def read_for_count(body: Json) -> ModelCall:
    """A request whose prompt is only to be counted, so it need not say how much to sample."""
    return read({"max_tokens": 1} | body, no_history)


def _bad(where: str, why: str) -> RequestError:
    return RequestError(400, "bad_request", f"{where}: {why}")


def _system(system: Any) -> list[Json]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    blocks = _blocks("system", system)
    for index, block in enumerate(blocks):
        if block["type"] != "text":
            raise refused(f"system[{index}].type", block["type"], "send text")
    texts = [text_of(f"system[{index}]", block) for index, block in enumerate(blocks)]
    return [{"role": "system", "content": "".join(texts)}]


def _blocks(where: str, content: Any) -> list[Json]:
    """The blocks of a content that is no text. A bare text among them is one of type text.

    Raises:
        RequestError: 400, they are none.
    """
    if not isinstance(content, list):
        raise refused(where, content, "send a text or a list of blocks")
    blocks: list[Json] = []
    for index, block in enumerate(content):
        if isinstance(block, str):
            blocks.append({"type": "text", "text": block})
        elif not isinstance(block, dict):
            raise refused(f"{where}[{index}]", block, "send an object with a type")
        else:
            kind = block.get("type", "text" if "text" in block else None)
            if not isinstance(kind, str):
                raise refused(f"{where}[{index}].type", kind, "send text, image, tool_use or tool_result")
            blocks.append(block | {"type": kind})
    return blocks


def _chat_form(index: int, message: Any) -> list[Json]:
    """A message as one or more in chat form: results of tools come in front of what the user says."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        role = message.get("role") if isinstance(message, dict) else message
        raise RequestError(400, "unknown_role", f"{where}.role is {shown(role)}: use user or assistant")
    content, where = message.get("content"), f"{where}.content"
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    blocks = _blocks(where, content)
    if message["role"] == "assistant":
        return [assistant_message(where, blocks)]
    placed = [(f"{where}[{place}]", block) for place, block in enumerate(blocks)]
    results = [_tool_result(at, block) for at, block in placed if block["type"] == "tool_result"]
    rest = [_part(at, block) for at, block in placed if block["type"] != "tool_result"]
    if rest or not results:
        return [*results, {"role": message["role"], "content": content_in_form(where, rest)}]
    return results


def _part(where: str, block: Json) -> Json:
    kind = block["type"]
    if kind == "text":
        return {"type": "text", "text": text_of(where, block)}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(where, block.get("source"))}}
    text = f"{where}.type is {shown(kind)}, which is not served: send text, image, tool_use or tool_result"
    raise RequestError(400, "content_not_served", text)


def _image_url(where: str, source: Any) -> str:
    fields = source if isinstance(source, dict) else {}
    kind = fields.get("type")
    names = ("media_type", "data") if kind == "base64" else ("url",)
    texts = [fields.get(name) for name in names]
    if kind not in ("base64", "url") or not all(isinstance(text, str) and text for text in texts):
        raise _bad(f"{where}.source", "send type base64 with media_type and data, or type url")
    return f"data:{texts[0]};base64,{texts[1]}" if kind == "base64" else str(texts[0])


def _id(where: str, block: Json, name: str) -> str | None:
    if not isinstance(block.get(name), str | None):
        raise refused(f"{where}.{name}", block[name], "send a text")
    return block.get(name)


def _tool_result(where: str, block: Json) -> Json:
    content = block.get("content")
    if content is not None and not isinstance(content, str):
        parts = _blocks(f"{where}.content", content)
        converted = [_part(f"{where}.content[{place}]", part) for place, part in enumerate(parts)]
        content = content_in_form(f"{where}.content", converted)
    result = {"role": "tool", "tool_call_id": _id(where, block, "tool_use_id"), "content": content or ""}
    return result | ({"is_error": True} if block.get("is_error") else {})


def assistant_message(where: str, blocks: list[Json]) -> Json:
    """An assistant's blocks as one message: reasoning, content and calls.

    Raises:
        RequestError: 400, a block of a kind that is not served, or with something else than text in it.
    """
    message: Json = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        match block.get("type"):
            case "text":
                texts.append(text_of(at, block))
            case "thinking":
                thoughts.append(text_of(at, block, "thinking"))
            case "redacted_thinking":
                pass
            case "tool_use":
                calls.append(_tool_use(at, block))
            case kind:
                text = f"{at}.type is {shown(kind)}, which is not served in an assistant's message"
                raise RequestError(400, "content_not_served", text)
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _tool_use(where: str, block: Json) -> Json:
    if not isinstance(block.get("input"), dict | None):
        raise refused(f"{where}.input", block["input"], "send an object")
    arguments = arguments_in_form(f"{where}.input", block.get("input"))
    function = {"name": text_of(where, block, "name"), "arguments": arguments}
    return {"id": _id(where, block, "id"), "type": "function", "function": function}


_READ = {
    "text": ("text",),
    "image": ("source",),
    "thinking": ("thinking", "signature"),
    "tool_use": ("name", "input"),
    "tool_result": ("tool_use_id", "content", "is_error"),
}
"""Type of a block -> the fields of it that are read."""


def _unread(messages: list[Json]) -> tuple[str, ...]:
    """What chat form has no place for: fields that are not read, and content only its provider can read."""
    names: set[str] = set()
    for message in messages:
        names |= unread(message, ("role", "content"))
        for block in _inner(message["content"]):
            read = _READ.get(block.get("type", "text"))
            names |= {"redacted_thinking"} if read is None else {f"content.{k}" for k in unread(block, read)}
    return tuple(sorted(f"messages.{name}" for name in names))


def _inner(content: Any) -> Iterator[Json]:
    """The blocks of a content, those of tools' results among them."""
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            yield block
            yield from _inner(block.get("content") if block.get("type") == "tool_result" else None)


def _tools(tools: Any) -> tuple[list[Json] | None, tuple[str, ...]]:
    """(tools in chat form, what is not served)"""
    tools = check_tools(tools)
    functions: list[Json] = []
    odd: set[str] = set()
    for index, tool in enumerate(tools):
        kind = tool.get("type", "custom")
        if kind not in ("custom", None):
            odd.add(f"tools.{kind if isinstance(kind, str) else shown(kind)}")  # it runs at the provider
            continue
        function = {"name": tool.get("name")}
        if tool.get("description") is not None:
            function["description"] = tool["description"]
        function["parameters"] = tool.get("input_schema") or {}
        functions.append(function_tool(f"tools[{index}]", function))
    return functions or None, tuple(sorted(odd))


ERROR_KINDS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
PREFIX = "msg_"
_REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


def stop_reason(turn: CompletedTurn, call: ModelCall) -> tuple[str, str | None]:
    """(stop_reason, stop_sequence); of several stop sequences the log does not say which one it was."""
    if STOP_STRING in turn.completed.flags and turn.completed.finish_reason == "stop":
        return "stop_sequence", call.stops[0] if len(call.stops) == 1 else None
    return _REASONS.get(turn.completed.finish_reason, "end_turn"), None


def thinking_block(turn_id: str, text: str) -> Json:
    """Clients send thinking back with its signature; ours names the turn."""
    return {"type": "thinking", "thinking": text, "signature": turn_id}


def tool_block(call: Json) -> Json:
    """A tool call."""
    function = call["function"]
    return {
        "type": "tool_use",
        "id": call["id"],
        "name": function["name"],
        "input": orjson.loads(function["arguments"] or "{}"),
    }


def reply_blocks(turn: CompletedTurn) -> list[Json]:
    """Thinking, text and tool uses, those that there are."""
    reply = turn.reply
    blocks: list[Json] = []
    if reply.get("reasoning_content"):
        blocks.append(thinking_block(turn.turn_id, reply["reasoning_content"]))
    if reply.get("content"):
        blocks.append({"type": "text", "text": reply["content"]})
    return [*blocks, *(tool_block(call) for call in turn.calls)]


def reply(call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
    """The message."""
    turn = turns[0]
    reason, stopped_by = stop_reason(turn, call)
    return {
        "id": PREFIX + turn.turn_id,
        "type": "message",
        "role": "assistant",
        "model": call.fields.model or MODEL,
        "content": reply_blocks(turn),
        "stop_reason": reason,
        "stop_sequence": stopped_by,
        "usage": {
            "input_tokens": turn.completed.prompt_length,
            "output_tokens": len(turn.completed.completion_ids),
        },
    }


def error(status: int, code: str, message: str) -> Json:
    """An error in Anthropic's form; `code` is our addition."""
    kind = ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


class MessagesWriter:
    """message_start, content blocks, message_delta, message_stop."""

    keep_alive = event({"type": "ping"}, "ping")

    def __init__(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> None:
        self._call, self._turn_id, self._model = call, turn_ids[0], call.fields.model or MODEL
        self._index = -1
        self._open = ""

    def begin(self) -> bytes:
        """The message without content. The length of its prompt is in the last event."""
        message: Json = {
            "id": PREFIX + self._turn_id,
            "type": "message",
            "role": "assistant",
            "model": self._model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": {"input_tokens": 0, "output_tokens": 0},
        }
        return self._event("message_start", message=message)

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """More of the thinking or of the text."""
        parts = []
        if reasoning:
            parts.append(self._enter("thinking", {"type": "thinking", "thinking": "", "signature": ""}))
            parts.append(self._delta({"type": "thinking_delta", "thinking": reasoning}))
        if content:
            parts.append(self._enter("text", {"type": "text", "text": ""}))
            parts.append(self._delta({"type": "text_delta", "text": content}))
        return b"".join(parts)

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """Tool uses, why it stopped, and the usage."""
        turn = turns[0]
        parts = [self._leave()]
        for call in turn.calls:
            block = tool_block(call)
            parts.append(self._enter(block["id"], block | {"input": {}}))
            arguments = call["function"]["arguments"]
            parts.append(self._delta({"type": "input_json_delta", "partial_json": arguments}))
            parts.append(self._leave())
        reason, stopped_by = stop_reason(turn, self._call)
        usage = {
            "input_tokens": turn.completed.prompt_length,
            "output_tokens": len(turn.completed.completion_ids),
        }
        delta = {"stop_reason": reason, "stop_sequence": stopped_by}
        parts.append(self._event("message_delta", delta=delta, usage=usage))
        return b"".join([*parts, self._event("message_stop")])

    def failed(self, error: Json) -> bytes:
        """An error event."""
        return event(error, "error")

    def _enter(self, block: str, start: Json) -> bytes:
        """Open a block, unless it is open."""
        if self._open == block:
            return b""
        before = self._leave()
        self._index += 1
        self._open = block
        return before + self._event("content_block_start", index=self._index, content_block=start)

    def _leave(self) -> bytes:
        if not self._open:
            return b""
        signature = b""
        if self._open == "thinking":
            signature = self._delta({"type": "signature_delta", "signature": self._turn_id})
        self._open = ""
        return signature + self._event("content_block_stop", index=self._index)

    def _delta(self, delta: Json) -> bytes:
        return self._event("content_block_delta", index=self._index, delta=delta)

    def _event(self, kind: str, **fields: object) -> bytes:
        return event({"type": kind} | fields, kind)


_BLOCKS = {
    "assistant": ("text", "thinking", "redacted_thinking", "tool_use"),
    "user": ("text", "image", "tool_result"),
}


# Requests ---------------------------------------------------------------------------------------


def _known_blocks(message: Json) -> Json:
    """The message, with blocks of other kinds left out where the assistant said them, and else as text."""
    content, role = message.get("content"), message.get("role")
    if not isinstance(content, list):
        return message
    known = _BLOCKS["assistant" if role == "assistant" else "user"]
    blocks = [sound_block(b) for b in content if b.get("type") in known]
    if role != "assistant":
        blocks = [_result(sound_block(b)) if b.get("type") in known else as_text(b) for b in content]
    return message | {"content": blocks}


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
    return block | {"content": [b if b.get("type") in ("text", "image") else as_text(b) for b in content]}


_READER = LenientReader(PATH, "messages", read, lambda sent: [_known_blocks(message) for message in sent])


# Replies ----------------------------------------------------------------------------------------

_UPSTREAM_REASONS = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "tool_use": "tool_calls",
}
_PLAIN_BLOCKS = {"text": {"type", "text"}, "tool_use": {"type", "id", "name", "input"}}
_KNOWN_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")


def read_reply(body: Json) -> UpstreamReply:
    """The blocks as one message; the blocks are kept beside it where the message loses something."""
    blocks = body["content"]
    message = assistant_message("content", [sound_block(b) for b in blocks if b.get("type") in _KNOWN_BLOCKS])
    if message["content"] is None and len(message) == 2:
        message["content"] = ""
    calls = [b for b in blocks if b.get("type") == "tool_use"]
    for call, block in zip(message.get("tool_calls", ()), calls, strict=True):
        if "partial_input" in block:
            call["function"]["arguments"] = block["partial_input"]  # it was cut off
    plain = all(
        without_nulls(b).keys() - {"citations"} <= _PLAIN_BLOCKS.get(b.get("type", ""), set())
        and not b.get("citations")
        and sound_block(b) == b
        for b in blocks
    )
    reason = _UPSTREAM_REASONS.get(body.get("stop_reason") or "", body.get("stop_reason"))
    choice = UpstreamChoice(message, reason, extra={} if plain else {"content": blocks})
    return UpstreamReply((choice,), None, without_nulls(body, "content", "role", "type"))


# Streams ----------------------------------------------------------------------------------------


def gather(events: Sequence[Json]) -> Json | None:
    """The message that the events are of."""
    whole: Json | None = None
    blocks: dict[int, Json] = {}
    inputs: dict[int, str] = {}
    for part in events:
        match part.get("type"):
            case "message_start":
                whole = dict(part["message"])
            case "content_block_start":
                blocks[part["index"]] = dict(part["content_block"])
            case "content_block_delta" if part["index"] in blocks:
                _add_block_delta(blocks[part["index"]], inputs, part)
            case "message_delta" if whole is not None:
                whole |= {k: v for k, v in part["delta"].items() if v is not None}
                usage = {k: v for k, v in (part.get("usage") or {}).items() if v is not None}
                whole["usage"] = (whole.get("usage") or {}) | usage
    if whole is None:
        return None
    for index, text in inputs.items():
        parsed = json_of(text.encode(errors="replace") or b"{}")
        blocks[index] |= {"input": parsed} if isinstance(parsed, dict) else {"partial_input": text}
    return whole | {"content": [blocks[i] for i in sorted(blocks)]}


def _add_block_delta(block: Json, inputs: dict[int, str], event: Json) -> None:
    delta = event["delta"]
    match delta.get("type"):
        case "text_delta":
            block["text"] = block.get("text", "") + delta["text"]
        case "thinking_delta":
            block["thinking"] = block.get("thinking", "") + delta["thinking"]
        case "signature_delta":
            block["signature"] = block.get("signature", "") + delta["signature"]
        case "citations_delta":
            block["citations"] = [*(block.get("citations") or ()), delta["citation"]]
        case "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]


UPSTREAM = UpstreamForm(
    read=lambda body, known: _READER.call(body),
    reply=read_reply,
    gather=gather,
    last_event=line_of(rb"(?:event: ?|data: ?\{\"type\": ?\")message_stop\b"),
    paths=(f"POST {PATH}", f"POST {PATH}/count_tokens"),
    key_header="x-api-key",
)


API = AgentApi(
    path=PATH,
    conversation="messages",
    read=read,
    reply=reply,
    writer=MessagesWriter,
    error=error,
    upstream=UPSTREAM,
    count=read_for_count,
)
