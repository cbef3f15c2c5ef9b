"""Anthropic's messages as they pass to an upstream. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import orjson

from rollbook.ingest.endpoints.api import UpstreamForm, line_of
from rollbook.ingest.endpoints.lenient import LenientReader, as_text
from rollbook.ingest.endpoints.messages.read import PATH, assistant_message, read
from rollbook.ingest.endpoints.sse import json_of
from rollbook.ingest.endpoints.upstream_reply import UpstreamChoice, UpstreamReply, without_nulls
from rollbook.store.events import Json

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
    said = [sound_block(b) for b in content if b.get("type") in known]
    if role != "assistant":
        said = [_result(sound_block(b)) if b.get("type") in known else as_text(b) for b in content]
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
    return block | {"content": [b if b.get("type") in ("text", "image") else as_text(b) for b in content]}


_READER = LenientReader(PATH, "messages", read, lambda sent: [_known_blocks(one) for one in sent])


# Replies ----------------------------------------------------------------------------------------

_REASONS = {
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
    reason = _REASONS.get(body.get("stop_reason") or "", body.get("stop_reason"))
    choice = UpstreamChoice(message, reason, extra={} if plain else {"content": blocks})
    return UpstreamReply((choice,), None, without_nulls(body, "content", "role", "type"))


# Streams ----------------------------------------------------------------------------------------


def gather(events: Sequence[Json]) -> Json | None:
    """The message that the events are of."""
    whole: Json | None = None
    blocks: dict[int, Json] = {}
    inputs: dict[int, str] = {}
    for event in events:
        match event.get("type"):
            case "message_start":
                whole = dict(event["message"])
            case "content_block_start":
                blocks[event["index"]] = dict(event["content_block"])
            case "content_block_delta" if event["index"] in blocks:
                _add_block_delta(blocks[event["index"]], inputs, event)
            case "message_delta" if whole is not None:
                whole |= {k: v for k, v in event["delta"].items() if v is not None}
                usage = {k: v for k, v in (event.get("usage") or {}).items() if v is not None}
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
