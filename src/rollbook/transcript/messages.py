"""Splits chat messages into parts to show: text, reasoning, calls, images. Pure.

Clients spell messages in many ways, and anything a client sent was recorded as it is. So nothing here
refuses a message: what is not understood is shown as the JSON it is.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from rollbook.store.events.about import MARK
from rollbook.transcript.text import json_text, one_line

TEXT, REASONING, CALL, IMAGE, OTHER, ERASED = "text", "reasoning", "call", "image", "other", "erased"
_TEXT_TYPES = ("text", "input_text", "output_text", "refusal")
_REASONING_KEYS = ("reasoning_content", "reasoning")
_END_OF_THOUGHT = "</think>"


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a message.

    Attributes:
        kind: text, reasoning, call, image, other or erased.
        text: the text; a call's arguments; an image's link, or nothing where it holds the image itself.
        name: of the function called; an image's media type; an unknown part's type.
        sha256: of an image's bytes.
        bytes: how many those are.
    """

    kind: str
    text: str = ""
    name: str = ""
    sha256: str = ""
    bytes: int = 0


@dataclass(frozen=True, slots=True)
class Message:
    """A message: its role, of a tool's result the function's name, and whether it repeats a turn's reply."""

    role: str
    parts: tuple[Part, ...]
    name: str = ""
    echo: bool = False


def read_message(value: Any, calls: Mapping[str, str], *, echo: bool = False) -> Message:
    """A message as recorded.

    Args:
        calls: id of a tool call -> name of its function.
    """
    if value == MARK:
        return Message(ERASED, (Part(ERASED),), echo=echo)
    if not isinstance(value, dict):
        return Message("?", (Part(OTHER, json_text(value)),), echo=echo)
    role = str(value.get("role") or value.get("type") or "?")
    name = calls.get(str(value.get("tool_call_id") or value.get("call_id")), "")
    return Message(role, tuple(_parts(value, role)), name or str(value.get("name") or ""), echo)


def call_names(value: Any) -> Iterator[tuple[str, str]]:
    """(id, function's name) of each tool call in a message."""
    for call in _calls(value):
        function = _function(call)
        if isinstance(call.get("id"), str) and isinstance(function.get("name"), str):
            yield call["id"], function["name"]


def beginning(value: Any, width: int) -> str:
    """The beginning of a reply on one line: its text, then its calls; its reasoning if it has neither."""
    if width <= 0:
        return ""
    parts = read_message(value, {}).parts
    spoken = [part for part in parts if part.kind != REASONING] or list(parts)
    return one_line(" ".join(part_words(part, width) for part in spoken), width)


def part_words(part: Part, width: int | None = None) -> str:
    """A part as words, such as `name(argument="value")` for a call; not yet safe to print."""
    match part.kind:
        case "call":
            return f"{part.name}({_arguments(part.text, width)})"
        case "image":
            if not part.sha256:
                return f"[image {part.text[:200]}]"
            return f"[image sha256 {part.sha256[:12]}... {part.name}, {part.bytes:,} bytes]"
        case "erased":
            return "[erased]"
        case "other":
            return f"[{part.name}] {part.text}" if part.name else part.text
    return part.text


def _parts(message: dict[str, Any], role: str) -> Iterator[Part]:
    for key in _REASONING_KEYS:
        if isinstance(message.get(key), str) and message[key]:
            yield Part(REASONING, message[key])
            break
    content = message.get("content", message.get("output"))
    for part in content if isinstance(content, list) else [content]:
        yield from _content(part, role)
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield _call(call)
    if isinstance(message.get("function_call"), dict):
        yield _call({"function": message["function_call"]})
    if message.get("type") == "function_call":
        yield _call(message)


def _content(part: Any, role: str) -> Iterator[Part]:
    if isinstance(part, str):
        yield from _text(part, role)
    elif not isinstance(part, dict):
        if part is not None:
            yield Part(OTHER, json_text(part))
    elif part == MARK:
        yield Part(ERASED)
    else:
        yield from _typed(part, str(part.get("type", "")), role)


def _typed(part: dict[str, Any], kind: str, role: str) -> Iterator[Part]:
    text = part.get("text", part.get("refusal"))
    if kind in _TEXT_TYPES and isinstance(text, str):
        yield from _text(text, role)
    elif "image" in kind:
        yield _image(part)
    elif kind == "thinking" and isinstance(part.get("thinking"), str):
        yield Part(REASONING, part["thinking"])
    elif kind == "tool_use":
        yield _call(part)
    elif kind == "tool_result":
        inner = part.get("content")
        for piece in inner if isinstance(inner, list) else [inner]:
            yield from _content(piece, "tool")
    else:
        yield Part(OTHER, json_text({k: v for k, v in part.items() if k != "type"}), kind)


def _text(text: str, role: str) -> Iterator[Part]:
    """Parts of a text; in a reply, text within reasoning markers is reasoning, including the markers."""
    if role == "assistant":
        thought, mark, rest = text.partition(_END_OF_THOUGHT)
        if mark or text.lstrip().startswith("<think>"):
            yield Part(REASONING, thought + mark)
            text = rest.lstrip("\n")
    if text:
        yield Part(TEXT, text)


def _calls(message: Any) -> list[dict[str, Any]]:
    if not isinstance(message, dict):
        return []
    listed = [message.get("tool_calls"), message.get("content")]
    dicts = [call for calls in listed if isinstance(calls, list) for call in calls if isinstance(call, dict)]
    return [call for call in dicts if "function" in call or call.get("type") in ("tool_use", "custom")]


def _function(call: dict[str, Any]) -> dict[str, Any]:
    inner = call.get("function") or call.get("custom")
    return inner if isinstance(inner, dict) else call


def _call(call: Any) -> Part:
    function = _function(call) if isinstance(call, dict) else {}
    arguments = function.get("arguments", function.get("input", ""))
    text = arguments if isinstance(arguments, str) else json_text(arguments)
    return Part(CALL, text, str(function.get("name", "?")))


def _arguments(text: str, width: int | None) -> str:
    """A call's arguments as `name=value`, where they are a JSON object; else as the text they are."""
    if width is not None and len(text) > 8 * width:
        return text[: 2 * width]  # too long to be worth reading whole
    try:
        values = orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
    if not isinstance(values, dict):
        return text
    return ", ".join(f"{name}={json_text(value)}" for name, value in values.items())


def _image(part: dict[str, Any]) -> Part:
    """An image by the sha256 of its bytes, or by its link."""
    source: Any = part.get("image_url") or part.get("source") or part.get("image") or {}
    source = source if isinstance(source, dict) else {"url": source}
    url = str(source.get("url") or "")
    media, data = str(source.get("media_type") or ""), source.get("data")
    if url.startswith("data:"):
        head, _, data = url.partition(",")
        media = head.removeprefix("data:").partition(";")[0]
    if not isinstance(data, str):
        return Part(IMAGE, url or json_text({k: v for k, v in part.items() if k != "type"}))
    try:
        content = base64.b64decode(data)
    except (binascii.Error, ValueError):
        content = data.encode(errors="surrogatepass")
    return Part(IMAGE, "", media or "image", hashlib.sha256(content).hexdigest(), len(content))
