"""Streamed replies put together again, as strictly as the APIs' documents allow. Anything odd is an error."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import orjson

TURN = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")


def events(data: bytes) -> list[tuple[str | None, Any]]:
    """(name, data) of every event; comments are left out, `[DONE]` stays a text."""
    assert data.endswith(b"\n\n")
    parsed = []
    for block in data.decode().removesuffix("\n\n").split("\n\n"):
        lines = block.split("\n")
        if all(line.startswith(":") for line in lines):
            continue
        fields = [line.partition(": ") for line in lines]
        names = [value for key, _, value in fields if key == "event"]
        [text] = [value for key, _, value in fields if key == "data"]
        assert {key for key, _, _ in fields} <= {"event", "data"}
        parsed.append((names[0] if names else None, text if text == "[DONE]" else orjson.loads(text)))
    return parsed


def unnamed(data: bytes) -> list[Any]:
    """The data of OpenAI's chunks, which must end with `[DONE]`."""
    pairs = events(data)
    assert all(name is None for name, _ in pairs)
    *chunks, (_, done) = pairs
    assert done == "[DONE]"
    return [chunk for _, chunk in chunks]


def numbered(value: Any) -> Any:
    """The reply with its turns' ids as numbers and without its time, so that two replies compare."""
    text = orjson.dumps(value).decode()
    seen: dict[str, str] = {}
    text = TURN.sub(lambda match: seen.setdefault(match[0], f"turn{len(seen)}"), text)
    return orjson.loads(re.sub(r'"(created|created_at)":\d+', r'"\1":0', text))


def chat(data: bytes, usage: bool = False) -> Any:
    """A chat completion from its chunks."""
    chunks = unnamed(data)
    counts = None
    if usage:
        assert chunks[-1]["choices"] == []
        counts = chunks.pop()["usage"]
    [head] = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
    assert head[1] == "chat.completion.chunk"
    assert all(("usage" in c) == usage and c.get("usage") is None for c in chunks)
    by_index: dict[int, Any] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        index, delta = choice["index"], choice["delta"]
        if index not in by_index:
            assert delta.pop("role") == "assistant", "the role comes first"
            by_index[index] = {"index": index, "message": {"role": "assistant"}, "logprobs": None}
        _add_to(by_index[index], delta, choice)
    choices = [by_index[index] for index in sorted(by_index)]
    whole = {"id": head[0], "object": "chat.completion", "created": head[2], "model": head[3]}
    return whole | {"choices": choices, "usage": counts}


def _add_to(choice: Any, delta: Any, chunk: Any) -> None:
    assert "finish_reason" not in choice, "nothing follows the finish"
    message = choice["message"]
    for key in ("content", "reasoning_content"):
        if key in delta:
            message[key] = message.get(key, "") + delta.pop(key)
    for call in delta.pop("tool_calls", ()):
        calls = message.setdefault("tool_calls", [])
        assert call.pop("index") == len(calls)
        calls.append(call)
    assert delta == {}
    if chunk["logprobs"] is not None:
        logprobs = choice["logprobs"] or {"content": [], "refusal": None}
        logprobs["content"] += chunk["logprobs"]["content"]
        choice["logprobs"] = logprobs
    if chunk["finish_reason"] is not None:
        choice["finish_reason"] = chunk["finish_reason"]


def completion(data: bytes, usage: bool = False) -> Any:
    """A text completion from its chunks."""
    chunks = unnamed(data)
    counts = chunks.pop()["usage"] if usage else None
    [head] = {(c["id"], c["object"], c["created"], c["model"]) for c in chunks}
    by_index: dict[int, Any] = {}
    for chunk in chunks:
        [choice] = chunk["choices"]
        whole = by_index.setdefault(choice["index"], {"index": choice["index"], "text": "", "logprobs": None})
        assert "finish_reason" not in whole
        whole["text"] += choice["text"]
        if choice["logprobs"] is not None:
            logprobs = whole["logprobs"] or {k: [] for k in ("tokens", "token_logprobs")}
            for key in ("tokens", "token_logprobs"):
                logprobs[key] += choice["logprobs"][key]
            whole["logprobs"] = logprobs
        if choice["finish_reason"] is not None:
            whole["finish_reason"] = choice["finish_reason"]
    choices = [by_index[index] for index in sorted(by_index)]
    head_ = {"id": head[0], "object": head[1], "created": head[2], "model": head[3]}
    return head_ | {"choices": choices, "usage": counts}


def response(data: bytes) -> Any:
    """A response from its events: what they add up to must be what the last one says."""
    pairs = events(data)
    assert [name for name, _ in pairs] == [event["type"] for _, event in pairs]
    assert [event["sequence_number"] for _, event in pairs] == list(range(len(pairs)))
    kinds = [name for name, _ in pairs]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] in ("response.completed", "response.incomplete")
    items: list[Any] = []
    for kind, event in pairs[2:-1]:
        assert kind is not None
        _add_item(items, kind.removeprefix("response."), event)
    whole = pairs[-1][1]["response"]
    assert whole["output"] == [item["done"] for item in items]
    head = pairs[0][1]["response"]
    assert (head["id"], head["status"], head["output"]) == (whole["id"], "in_progress", [])
    return whole


def _add_item(items: list[Any], kind: str, event: Any) -> None:
    if kind == "output_item.added":
        assert event["output_index"] == len(items)
        assert all("done" in item for item in items), "one item is open at a time"
        items.append({"started": event["item"], "text": "", "parts": 0})
        return
    assert event["output_index"] == len(items) - 1
    item = items[-1]
    assert "done" not in item
    assert event.get("item_id", item["started"]["id"]) == item["started"]["id"]
    match kind:
        case "content_part.added":
            item["parts"] += 1
        case "output_text.delta" | "reasoning_text.delta" | "function_call_arguments.delta":
            item["text"] += event["delta"]
        case "output_text.done" | "reasoning_text.done":
            assert event["text"] == item["text"]
        case "function_call_arguments.done":
            assert event["arguments"] == item["text"]
        case "content_part.done":
            assert event["part"]["text"] == item["text"]
            item["parts"] -= 1
        case "output_item.done":
            assert item["parts"] == 0
            item["done"] = event["item"]
            arguments = item["done"].get("arguments")
            assert item["text"] == (
                arguments if arguments is not None else item["done"]["content"][0]["text"]
            )
            assert item["done"]["id"] == item["started"]["id"]
        case _:
            raise AssertionError(kind)


def message(data: bytes) -> Any:
    """An Anthropic message from its events."""
    pairs = [(name, event) for name, event in events(data) if name != "ping"]
    assert [name for name, _ in pairs] == [event["type"] for _, event in pairs]
    (first, start), *middle, (delta_kind, delta), (last, _) = pairs
    assert (first, delta_kind, last) == ("message_start", "message_delta", "message_stop")
    whole = start["message"]
    assert (whole["content"], whole["stop_reason"]) == ([], None)
    blocks: list[Any] = []
    is_open = False
    for kind, event in middle:
        if kind == "content_block_start":
            assert not is_open
            assert event["index"] == len(blocks)
            blocks.append(event["content_block"])
            is_open = True
            continue
        assert is_open
        assert event["index"] == len(blocks) - 1
        if kind == "content_block_delta":
            _add_to_block(blocks[-1], event["delta"])
        else:
            assert kind == "content_block_stop"
            is_open = False
            if "partial_json" in blocks[-1]:
                blocks[-1]["input"] = orjson.loads(blocks[-1].pop("partial_json"))
    assert not is_open
    return whole | {"content": blocks} | delta["delta"] | {"usage": delta["usage"]}


def _add_to_block(block: Any, delta: Any) -> None:
    kind = delta.pop("type")
    [(key, value)] = delta.items()
    wanted = {"text": "text_delta", "thinking": "thinking_delta", "tool_use": "input_json_delta"}
    assert kind in (wanted[block["type"]], "signature_delta")
    block[key] = block.get(key, "") + value


def text_of(kind: str, data: bytes) -> str:
    """The text of an endpoint's stream so far, whole or not."""
    text = ""
    for name, event in events(data):
        if event == "[DONE]" or name == "ping":
            continue
        if kind == "chat" and event.get("choices"):
            text += event["choices"][0]["delta"].get("content") or ""
        elif kind == "completions" and event.get("choices"):
            text += event["choices"][0]["text"]
        elif name == "response.output_text.delta":
            text += event["delta"]
        elif name == "content_block_delta":
            text += event["delta"].get("text", "")
    return text


TERMINATORS: dict[str, Sequence[bytes]] = {
    "chat": (b"[DONE]", b'"finish_reason":"'),
    "completions": (b"[DONE]", b'"finish_reason":"'),
    "responses": (b"response.completed", b"response.output_text.done"),
    "messages": (b"message_stop", b"message_delta"),
}
"""What a stream says only once its turn is durable."""

KINDS = ("chat", "completions", "responses", "messages")
PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "responses": "/v1/responses",
    "messages": "/v1/messages",
}


def asked(kind: str, text: str = "Hello", **more: Any) -> Any:
    """The least body of a request that says a text."""
    user = {"role": "user", "content": text}
    match kind:
        case "chat":
            return {"messages": [user]} | more
        case "completions":
            return {"prompt": text, "max_tokens": 1000} | more
        case "responses":
            return {"input": text} | more
    return {"messages": [user], "max_tokens": 1000} | more


def together(kind: str, data: bytes, usage: bool = False) -> Any:
    """A streamed reply as the whole one would be."""
    match kind:
        case "chat":
            return chat(data, usage)
        case "completions":
            return completion(data, usage)
        case "responses":
            return response(data)
    return message(data)


def text_in(kind: str, reply: Any) -> str:
    """What a whole reply says."""
    match kind:
        case "chat":
            return str(reply["choices"][0]["message"]["content"])
        case "completions":
            return str(reply["choices"][0]["text"])
        case "responses":
            return "".join(p["text"] for i in reply["output"] if i["type"] == "message" for p in i["content"])
    return "".join(b["text"] for b in reply["content"] if b["type"] == "text")
