"""Events of an upstream's stream put together into the reply that they are of. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from rollbook.store.events import Json


def events_of(data: bytes) -> list[Json]:
    """The JSON events of a stream's bytes; not its comments, its end, or an event that was cut off."""
    found = []
    for part in data.replace(b"\r\n", b"\n").split(b"\n\n"):
        lines = [line[5:].strip() for line in part.split(b"\n") if line.startswith(b"data:")]
        try:
            event = orjson.loads(b"\n".join(lines)) if lines else None
        except orjson.JSONDecodeError:
            continue
        if isinstance(event, dict):
            found.append(event)
    return found


def gathered(endpoint: str, events: Sequence[Json]) -> Json | None:
    """The whole reply, in the form in which the endpoint gives it unstreamed; None where there is none."""
    gather = _GATHERERS.get(endpoint)
    try:
        return None if gather is None else gather(events)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError):
        return None


def _gather_openai(events: Sequence[Json]) -> Json | None:
    """Chunks put together into a whole reply."""
    whole: Json = {}
    choices: dict[int, Json] = {}
    for event in events:
        if "choices" not in event:
            continue
        whole |= {k: v for k, v in event.items() if k != "choices" and v is not None}
        for chunk in event["choices"]:
            _add_chunk(choices.setdefault(int(chunk.get("index", 0)), {}), chunk)
    if not choices:
        return None
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
                _add_call(message.setdefault("tool_calls", []), part)
        elif isinstance(value, str) and name != "role":
            message[name] = (message.get(name) or "") + value
        else:
            message[name] = value


def _add_call(calls: list[Json], part: Json) -> None:
    index = int(part.get("index", len(calls)))
    while len(calls) <= index:
        calls.append({"id": None, "type": "function", "function": {"name": "", "arguments": ""}})
    call = calls[index]
    call["id"] = part.get("id") or call["id"]
    function = part.get("function") or {}
    call["function"]["name"] += function.get("name") or ""
    call["function"]["arguments"] += function.get("arguments") or ""


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
            case "content_block_delta":
                _add_block_delta(blocks[event["index"]], inputs, event)
            case "message_delta" if whole is not None:
                whole |= {k: v for k, v in event["delta"].items() if v is not None}
                whole["usage"] = (whole.get("usage") or {}) | (event.get("usage") or {})
    if whole is None:
        return None
    for index, text in inputs.items():
        blocks[index]["input"] = _json_or_text(text)
    return whole | {"content": [blocks[i] for i in sorted(blocks)]}


def _add_block_delta(block: Json, inputs: dict[int, str], event: Json) -> None:
    delta = event["delta"]
    match delta.get("type"):
        case "text_delta":
            block["text"] = block.get("text", "") + delta["text"]
        case "thinking_delta":
            block["thinking"] = block.get("thinking", "") + delta["thinking"]
        case "signature_delta":
            block["signature"] = delta["signature"]
        case "input_json_delta":
            inputs[event["index"]] = inputs.get(event["index"], "") + delta["partial_json"]


def _json_or_text(text: str) -> Any:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {"": text}  # cut off in the middle


def _gather_response(events: Sequence[Json]) -> Json | None:
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
        elif kind == "response.output_text.delta":
            item = items[event["output_index"]]
            text = item["content"][0]["text"] if item.get("content") else ""
            item["content"] = [{"type": "output_text", "text": text + event["delta"]}]
    return latest | {"output": [items[i] for i in sorted(items)]}


_GATHERERS: Mapping[str, Callable[[Sequence[Json]], Json | None]] = {
    "/v1/chat/completions": _gather_openai,
    "/v1/completions": _gather_openai,
    "/v1/responses": _gather_response,
    "/v1/messages": _gather_anthropic,
}
