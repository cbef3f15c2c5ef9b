"""Events of an upstream's stream put together into the reply that they are of. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from rollbook.ingest.upstream.stream_responses import gather_response
from rollbook.store.events import Json

_LAST = {
    "/v1/chat/completions": rb"data: ?\[DONE\]",
    "/v1/completions": rb"data: ?\[DONE\]",
    "/v1/responses": rb"(?:event: ?|data: ?\{\"type\": ?\")response\.(?:completed|incomplete|failed)\b",
    "/v1/messages": rb"(?:event: ?|data: ?\{\"type\": ?\")message_stop\b",
}
_ENDS = {path: re.compile(rb"(?:^|[\r\n])" + pattern) for path, pattern in _LAST.items()}
_LONG_EVENT, _LONG_PATTERN = 1 << 20, 64
_BLANK = re.compile(rb"\r?\n\r?\n|\r\r")


class EndFinder:
    """Tells of a stream's bytes, in whatever packets they come, when its last event is there."""

    def __init__(self, endpoint: str) -> None:
        self._end, self._tail = _ENDS[endpoint], bytearray()
        self._seen = 0
        self._named = False

    def feed(self, data: bytes) -> bool:
        """Whether the stream has said everything, with these bytes."""
        self._tail += data
        behind = 0
        for blank in _BLANK.finditer(self._tail, max(self._seen - 3, 0)):
            behind = blank.end()
        if behind:
            ended = self._named or self._end.search(self._tail, 0, behind) is not None
            del self._tail[:behind]
            self._named = False
        else:
            ended = False
            self._shorten()
        self._seen = len(self._tail)
        return ended

    def _shorten(self) -> None:
        """Of an event that does not end, remember whether it is the last one, and how it goes on."""
        if len(self._tail) > _LONG_EVENT:
            self._named = self._named or self._end.search(self._tail) is not None
            self._tail[:-_LONG_PATTERN] = b"."  # so that what follows is not taken for a line's beginning


def json_of(data: bytes) -> Any:
    """A JSON value, also with the NaN that some servers write; None where it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None


def events_of(data: bytes) -> list[Json]:
    """The JSON events of a stream's bytes; not its comments, its end, or an event that was cut off."""
    found = []
    text = data.removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for part in text.split(b"\n\n"):
        lines = [line[5:].strip() for line in part.split(b"\n") if line.startswith(b"data:")]
        event = json_of(b"\n".join(lines)) if lines else None
        if isinstance(event, dict):
            found.append(event)
    return found


def gathered(endpoint: str, events: Sequence[Json]) -> Json | None:
    """The whole reply, in the form in which the endpoint gives it unstreamed; None where there is none.

    An error within the stream is in it as `error`.
    """
    gather = _GATHERERS.get(endpoint)
    try:
        whole = None if gather is None else gather(events)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return None
    error = next((e["error"] for e in events if e.get("error")), None)
    if error is None:
        error = next((e for e in events if e.get("type", e.get("object")) == "error"), None)
    return whole if error is None else (whole or {}) | {"error": error}


def _gather_openai(events: Sequence[Json]) -> Json | None:
    """Chunks put together into a whole reply."""
    whole: Json = {}
    choices: dict[int, Json] = {}
    for event in events:
        if not isinstance(event.get("choices"), list):
            continue
        told = event.get("prompt_token_ids") if event["choices"] else None
        here = ("choices", "prompt_token_ids") if told else ("choices",)
        whole |= {k: v for k, v in event.items() if k not in here and v is not None}
        for chunk in event["choices"]:
            # What an event says of a prompt is of the choices that it holds.
            said = chunk if told is None else {"prompt_token_ids": told} | chunk
            _add_chunk(choices.setdefault(int(chunk.get("index") or 0), {}), said)
    if not choices:
        return None
    if whole.get("object") == "chat.completion.chunk":
        whole["object"] = "chat.completion"
    for choice in choices.values():
        message = choice.get("message", {})
        if "tool_calls" in message:
            message["tool_calls"] = [call for _, call in sorted(message["tool_calls"].items())]
    return whole | {"choices": [choices[i] | {"index": i} for i in sorted(choices)]}


def _add_chunk(choice: Json, chunk: Json) -> None:
    for name, value in chunk.items():
        if value is None or name == "index":
            continue
        if name == "delta":
            _add_delta(choice.setdefault("message", {"role": "assistant", "content": None}), value)
        elif name == "logprobs":
            kept = choice.setdefault("logprobs", {})
            for key, entries in value.items():
                if isinstance(entries, list):
                    kept.setdefault(key, []).extend(entries)
        elif name == "prompt_token_ids" and choice.get(name, value) != value:
            choice[name] = [choice[name], value]  # two that disagree are no ids
        elif name == "text" or (isinstance(value, list) and name != "prompt_token_ids"):
            choice[name] = choice.get(name, type(value)()) + value
        else:
            choice[name] = value


def _add_delta(message: Json, delta: Json) -> None:
    for name, value in delta.items():
        if value is None:
            continue
        if name == "tool_calls":
            for part in value:
                _add_call(message.setdefault("tool_calls", {}), part)
        elif name == "function_call":
            _add_function(message.setdefault("function_call", {}), value)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        elif isinstance(value, list):
            message[name] = [*(message.get(name) or ()), *value]
        else:
            message[name] = value


def _add_call(calls: dict[int, Json], part: Json) -> None:
    """A piece of a call. Who tells no index gives calls whole, each with an id, or goes on with the last."""
    last = max(calls, default=-1)
    index = part.get("index")
    if index is None:
        goes_on = calls and part.get("id") in (None, "", calls[last].get("id"))
        index = last if goes_on else last + 1
    call = calls.setdefault(int(index), {"id": None, "type": "function"})
    for name, value in part.items():
        if name in ("function", "custom") and isinstance(value, dict):
            _add_function(call.setdefault(name, {}), value)
        elif name != "index" and value not in (None, ""):
            call[name] = value


def _add_function(function: Json, part: Json) -> None:
    for name, value in part.items():
        if isinstance(value, str):
            # A name comes in one piece, though some servers repeat it with every piece of the arguments.
            said = function.get(name, "")
            function[name] = said if name == "name" and said == value else said + value
        elif value is not None:
            function[name] = value


def _gather_anthropic(events: Sequence[Json]) -> Json | None:
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
                told = {k: v for k, v in (event.get("usage") or {}).items() if v is not None}
                whole["usage"] = (whole.get("usage") or {}) | told
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


_GATHERERS: Mapping[str, Callable[[Sequence[Json]], Json | None]] = {
    "/v1/chat/completions": _gather_openai,
    "/v1/completions": _gather_openai,
    "/v1/responses": gather_response,
    "/v1/messages": _gather_anthropic,
}
