"""Anthropic's messages, in chat form and back. Pure.

System text becomes a system message, `tool_use` a tool call, `tool_result` a tool message, and thinking is
reasoning; call ids are the same ones that OpenAI's endpoints give. So a conversation makes the same turns
through either.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollbook.ingest.answered import AnsweredTurn
from rollbook.ingest.endpoints.chat import MODEL
from rollbook.ingest.endpoints.history import History
from rollbook.ingest.endpoints.messages_stream import MessagesWriter
from rollbook.ingest.endpoints.messages_wire import ERROR_KINDS, reply_blocks, stop_reason
from rollbook.ingest.model_call import ModelCall, check_messages, check_tools
from rollbook.ingest.requests import SamplingFields, validated
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

PREFIX = "msg_"
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


class Messages:
    """POST /v1/messages."""

    path = "/v1/messages"

    def read(self, body: Json, history: History) -> ModelCall:
        """A request for a message.

        Raises:
            RequestError: 400, it is none.
        """
        choice = body.get("tool_choice")
        kind = choice.get("type", "auto") if isinstance(choice, dict) else "auto"
        chosen = _CHOICES.get(kind, choice) if isinstance(kind, str) else choice
        mapped = body | {"stop": body.get("stop_sequences"), "tool_choice": chosen}
        fields = validated(SamplingFields, {k: v for k, v in mapped.items() if v is not None})
        if fields.max_tokens is None:
            raise RequestError(400, "bad_request", "max_tokens: Field required")
        sent = body.get("messages")
        if not isinstance(sent, list):
            raise RequestError(400, "bad_request", "messages: send a list of messages")
        messages = [*_system(body.get("system")), *(m for i, s in enumerate(sent) for m in _chat_form(i, s))]
        check_messages(messages)
        tools, odd = _tools(body.get("tools"))
        return ModelCall(
            endpoint=self.path,
            messages=messages,
            tools=tools,
            fields=fields,
            rest={k: v for k, v in body.items() if k != "messages"},
            items=sent,
            tool_calls_wanted=fields.tool_choice != "none",
            template_kwargs=dict(fields.chat_template_kwargs or {}),
            not_honoured=odd,
        )

    def reply(self, call: ModelCall, turns: list[AnsweredTurn], tokenizer: ChatTokenizer) -> Json:
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

    def writer(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> MessagesWriter:
        """What writes it as events."""
        return MessagesWriter(call, PREFIX + turn_ids[0], call.fields.model or MODEL)

    def error(self, status: int, code: str, message: str) -> Json:
        """An error in Anthropic's form; `code` is our addition."""
        kind = ERROR_KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
        return {"type": "error", "error": {"type": kind, "message": message, "code": code}}


def _bad(where: str, why: str) -> RequestError:
    return RequestError(400, "bad_request", f"{where}: {why}")


def _system(system: Any) -> list[Json]:
    if not system:
        return []
    if isinstance(system, str):
        return [{"role": "system", "content": system}]
    if not isinstance(system, list) or not all(isinstance(b, dict) for b in system):
        raise _bad("system", "send a text or a list of text blocks")
    return [{"role": "system", "content": "".join(str(b.get("text", "")) for b in system)}]


def _chat_form(index: int, message: Any) -> list[Json]:
    """A message as one or more in chat form: results of tools come in front of what the user says."""
    where = f"messages[{index}]"
    if not isinstance(message, dict) or message.get("role") not in ("user", "assistant", "system"):
        role = message.get("role") if isinstance(message, dict) else message
        raise RequestError(400, "unknown_role", f"{where}.role is {role!r}: use user or assistant")
    content = message.get("content")
    if isinstance(content, str):
        return [{"role": message["role"], "content": content}]
    if not isinstance(content, list) or not all(isinstance(b, dict) for b in content):
        raise _bad(f"{where}.content", "send a text or a list of blocks")
    if message["role"] == "assistant":
        return [assistant_message(where, content)]
    results = [_tool_result(where, b) for b in content if b.get("type") == "tool_result"]
    rest = [_part(where, b) for b in content if b.get("type") != "tool_result"]
    if rest or not results:
        return [*results, {"role": message["role"], "content": _text_or_parts(rest)}]
    return results


def _text_or_parts(parts: list[Json]) -> str | list[Json]:
    """Text alone is one string, as OpenAI's clients send it."""
    if all(p["type"] == "text" for p in parts):
        return "".join(p["text"] for p in parts)
    return parts


def _part(where: str, block: Json) -> Json:
    kind = block.get("type")
    if kind == "text":
        return {"type": "text", "text": str(block.get("text", ""))}
    if kind == "image":
        return {"type": "image_url", "image_url": {"url": _image_url(where, block.get("source"))}}
    text = f"{where}: a block of type {kind!r} is not served: send text, image, tool_use or tool_result"
    raise RequestError(400, "content_not_served", text)


def _image_url(where: str, source: Any) -> str:
    if isinstance(source, dict) and source.get("type") == "base64":
        return f"data:{source.get('media_type')};base64,{source.get('data')}"
    if isinstance(source, dict) and source.get("type") == "url":
        return str(source.get("url"))
    raise _bad(f"{where}.source", "send type base64 with media_type and data, or type url")


def _tool_result(where: str, block: Json) -> Json:
    content = block.get("content")
    if isinstance(content, list):
        content = _text_or_parts([_part(where, b) for b in content if isinstance(b, dict)])
    result = {"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": content or ""}
    return result | ({"is_error": True} if block.get("is_error") else {})


def assistant_message(where: str, blocks: list[Json]) -> Json:
    """An assistant's blocks as one message: reasoning, content and calls."""
    message: Json = {"role": "assistant", "content": None}
    texts, thoughts, calls = [], [], []
    for block in blocks:
        match block.get("type"):
            case "text":
                texts.append(str(block.get("text", "")))
            case "thinking":
                thoughts.append(str(block.get("thinking", "")))
            case "redacted_thinking":
                pass
            case "tool_use":
                arguments = orjson.dumps(block.get("input") or {}).decode()
                function = {"name": str(block.get("name", "")), "arguments": arguments}
                calls.append({"id": block.get("id"), "type": "function", "function": function})
            case kind:
                text = f"{where}: an assistant's block of type {kind!r} is not served"
                raise RequestError(400, "content_not_served", text)
    if texts:
        message["content"] = "".join(texts)
    if thoughts:
        message["reasoning_content"] = "".join(thoughts)
    return message | ({"tool_calls": calls} if calls else {})


def _tools(tools: Any) -> tuple[list[Json] | None, tuple[str, ...]]:
    """(tools in chat form, what is not served)"""
    tools = check_tools(tools)
    made: list[Json] = []
    odd: set[str] = set()
    for tool in tools:
        if tool.get("type", "custom") != "custom":
            odd.add(f"tools.{tool['type']}")  # such a tool runs at the provider, not here
            continue
        if not tool.get("name"):
            raise _bad("tools", "each needs a name")
        function = {"name": tool["name"]}
        if "description" in tool:
            function["description"] = tool["description"]
        function["parameters"] = tool.get("input_schema") or {}
        made.append({"type": "function", "function": function})
    return made or None, tuple(sorted(odd))
