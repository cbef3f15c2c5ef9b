"""A request of Anthropic's messages in chat form. Pure.

System text becomes a system message, `tool_use` a tool call, `tool_result` a tool message, and thinking is
reasoning; call ids are the same ones that OpenAI's endpoints give. So a conversation makes the same turns
through either.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rollbook.ingest.endpoints.history import History, no_history
from rollbook.ingest.endpoints.template_kwargs import template_kwargs
from rollbook.ingest.requests.fields import SamplingFields, validated
from rollbook.ingest.tokens.message_form import (
    arguments_in_form,
    content_in_form,
    refused,
    shown,
    text_of,
    unread,
)
from rollbook.ingest.turns.model_call import ModelCall, check_answerable, check_tools, function_tool
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
    given = source if isinstance(source, dict) else {}
    kind = given.get("type")
    names = ("media_type", "data") if kind == "base64" else ("url",)
    texts = [given.get(name) for name in names]
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
        made = [_part(f"{where}.content[{place}]", part) for place, part in enumerate(parts)]
        content = content_in_form(f"{where}.content", made)
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
    found: set[str] = set()
    for message in messages:
        found |= unread(message, ("role", "content"))
        for block in _inner(message["content"]):
            read = _READ.get(block.get("type", "text"))
            found |= {"redacted_thinking"} if read is None else {f"content.{k}" for k in unread(block, read)}
    return tuple(sorted(f"messages.{name}" for name in found))


def _inner(content: Any) -> Iterator[Json]:
    """The blocks of a content, those of tools' results among them."""
    for block in content if isinstance(content, list) else ():
        if isinstance(block, dict):
            yield block
            yield from _inner(block.get("content") if block.get("type") == "tool_result" else None)


def _tools(tools: Any) -> tuple[list[Json] | None, tuple[str, ...]]:
    """(tools in chat form, what is not served)"""
    tools = check_tools(tools)
    made: list[Json] = []
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
        made.append(function_tool(f"tools[{index}]", function))
    return made or None, tuple(sorted(odd))
