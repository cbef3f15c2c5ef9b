"""One reply through each of four APIs, whole and as a stream: reasoning, a text, and two calls at once."""

from __future__ import annotations

from typing import Any

from tests.fakes.upstreams.server import sse

REASONING, TEXT = "Let me thînk.", "I'll lòok. 🎉"
ARGUMENTS = ('{"city":"Paris","n":1}', '{"city":"Łódź"}')
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Weather?"}

CALLS = [
    {"id": f"call_{i}", "type": "function", "function": {"name": "look", "arguments": arguments}}
    for i, arguments in enumerate(ARGUMENTS)
]
MESSAGE = {"role": "assistant", "content": TEXT, "reasoning_content": REASONING, "tool_calls": CALLS}
"""What every one of them says, in chat form."""


def _halves(text: str) -> tuple[str, str]:
    return text[: len(text) // 2], text[len(text) // 2 :]


# Chat completions -------------------------------------------------------------------------------

_CHAT = {"id": "chatcmpl-u1", "created": 1, "model": "m-1", "system_fingerprint": "fp", "service_tier": None}
_USAGE = {"prompt_tokens": 9, "completion_tokens": 7, "total_tokens": 16}


def _chat_whole() -> dict[str, Any]:
    message = MESSAGE | {"refusal": None, "annotations": []}
    choice = {"index": 0, "message": message, "finish_reason": "tool_calls", "logprobs": None}
    return _CHAT | {"object": "chat.completion", "choices": [choice], "usage": _USAGE}


def _chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None} | more
    return _CHAT | {"object": "chat.completion.chunk", "choices": [choice], "usage": None}


def _chat_stream() -> bytes:
    events = [_chunk({"role": "assistant", "content": "", "refusal": None})]
    events += [_chunk({"reasoning_content": half}) for half in _halves(REASONING)]
    events += [_chunk({"content": half}) for half in _halves(TEXT)]
    for i, call in enumerate(CALLS):
        name = call["function"]["name"]
        first = {
            "index": i,
            "id": call["id"],
            "type": "function",
            "function": {"name": name, "arguments": ""},
        }
        events.append(_chunk({"tool_calls": [first]}))
        for half in _halves(ARGUMENTS[i]):
            events.append(_chunk({"tool_calls": [{"index": i, "function": {"arguments": half}}]}))
    events.append(_chunk({}, finish_reason="tool_calls"))
    events.append(_CHAT | {"object": "chat.completion.chunk", "choices": [], "usage": _USAGE})
    return sse(*events)


# Messages ---------------------------------------------------------------------------------------

_BLOCKS = [
    {"type": "thinking", "thinking": REASONING, "signature": "c2ln"},
    {"type": "text", "text": TEXT},
    {"type": "tool_use", "id": "call_0", "name": "look", "input": {"city": "Paris", "n": 1}},
    {"type": "tool_use", "id": "call_1", "name": "look", "input": {"city": "Łódź"}},
]
_MESSAGE = {
    "id": "msg_u1",
    "type": "message",
    "role": "assistant",
    "model": "m-1",
    "stop_reason": "tool_use",
    "stop_sequence": None,
}


def _messages_whole() -> dict[str, Any]:
    usage = {"input_tokens": 9, "output_tokens": 7, "cache_read_input_tokens": 0}
    return _MESSAGE | {"content": _BLOCKS, "usage": usage}


def _messages_stream() -> bytes:
    usage = {"input_tokens": 9, "output_tokens": 1, "cache_read_input_tokens": 0}
    start = _MESSAGE | {"content": [], "usage": usage, "stop_reason": None}
    events: list[dict[str, Any]] = [{"type": "message_start", "message": start}, {"type": "ping"}]
    for index, block in enumerate(_BLOCKS):
        match block["type"]:
            case "thinking":
                empty = block | {"thinking": "", "signature": ""}
                deltas = [{"type": "thinking_delta", "thinking": h} for h in _halves(REASONING)]
                deltas.append({"type": "signature_delta", "signature": "c2ln"})
            case "text":
                empty = block | {"text": ""}
                deltas = [{"type": "text_delta", "text": h} for h in _halves(TEXT)]
            case _:
                empty = block | {"input": {}}
                halves = _halves(ARGUMENTS[index - 2])
                deltas = [{"type": "input_json_delta", "partial_json": h} for h in ("", *halves)]
        events.append({"type": "content_block_start", "index": index, "content_block": empty})
        events += [{"type": "content_block_delta", "index": index, "delta": delta} for delta in deltas]
        events.append({"type": "content_block_stop", "index": index})
    delta = {"stop_reason": "tool_use", "stop_sequence": None}
    events.append({"type": "message_delta", "delta": delta, "usage": {"output_tokens": 7}})
    events.append({"type": "message_stop"})
    return sse(*events, named=True)


# Responses --------------------------------------------------------------------------------------

_ITEMS = [
    {
        "id": "rs_1",
        "type": "reasoning",
        "summary": [{"type": "summary_text", "text": REASONING}],
        "encrypted_content": "gAAAA",
    },
    {
        "id": "msg_1",
        "type": "message",
        "role": "assistant",
        "status": "completed",
        "content": [{"type": "output_text", "text": TEXT, "annotations": [], "logprobs": []}],
    },
    *(
        {
            "id": f"fc_{i}",
            "type": "function_call",
            "call_id": f"call_{i}",
            "name": "look",
            "arguments": ARGUMENTS[i],
            "status": "completed",
        }
        for i in range(2)
    ),
]
_RESPONSE = {
    "id": "resp_u1",
    "object": "response",
    "created_at": 1,
    "model": "m-1",
    "instructions": "Be brief.",
    "error": None,
    "incomplete_details": None,
    "tools": [{"type": "function", "name": "look", "strict": True}],
}


def _responses_whole() -> dict[str, Any]:
    return _RESPONSE | {"status": "completed", "output": _ITEMS, "usage": {"input_tokens": 9}}


def _responses_events() -> list[dict[str, Any]]:
    begun = _RESPONSE | {"status": "in_progress", "output": [], "usage": None}
    events: list[dict[str, Any]] = [{"type": "response.created", "response": begun}]
    for i, item in enumerate(_ITEMS):
        empty = {k: v for k, v in item.items() if k not in ("arguments", "content", "summary")}
        empty |= {"function_call": {"arguments": ""}, "message": {"content": []}}.get(
            str(item["type"]), {"summary": []}
        )
        at = {"output_index": i, "item_id": item["id"]}
        events.append({"type": "response.output_item.added", "item": empty} | at)
        match item["type"]:
            case "reasoning":
                kind, text, more = "response.reasoning_summary_text.delta", REASONING, {"summary_index": 0}
            case "message":
                kind, text, more = "response.output_text.delta", TEXT, {"content_index": 0}
            case _:
                kind, text, more = "response.function_call_arguments.delta", item["arguments"], {}
        events += [{"type": kind, "delta": half} | at | more for half in _halves(str(text))]
        events.append({"type": "response.output_item.done", "item": item} | at)
    return [*events, {"type": "response.completed", "response": _responses_whole()}]


# Completions ------------------------------------------------------------------------------------

_COMPLETION = {"id": "cmpl-u1", "object": "text_completion", "created": 1, "model": "m-1"}


def _completions_whole() -> dict[str, Any]:
    choice = {"index": 0, "text": TEXT, "finish_reason": "length", "logprobs": None}
    return _COMPLETION | {"choices": [choice], "usage": _USAGE}


def _completions_stream() -> bytes:
    events = [
        _COMPLETION | {"choices": [{"index": 0, "text": h, "finish_reason": None}]} for h in _halves(TEXT)
    ]
    events.append(_COMPLETION | {"choices": [{"index": 0, "text": "", "finish_reason": "length"}]})
    return sse(*events, _COMPLETION | {"choices": [], "usage": _USAGE})


_RESULTS = ["18 C", "9 C"]
_ANTHROPIC_RESULTS = [
    {"type": "tool_result", "tool_use_id": f"call_{i}", "content": text} for i, text in enumerate(_RESULTS)
]
_TOOL_MESSAGES = [
    {"role": "tool", "tool_call_id": f"call_{i}", "content": text} for i, text in enumerate(_RESULTS)
]

ENDPOINTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "asks": {"model": "m", "messages": [USER], "tools": TOOLS},
        "goes_on": {"model": "m", "messages": [USER, MESSAGE, *_TOOL_MESSAGES], "tools": TOOLS},
        "whole": _chat_whole(),
        "stream": _chat_stream(),
        "finish": "tool_calls",
        "message": MESSAGE,
    },
    "/v1/messages": {
        "asks": {"model": "m", "max_tokens": 9, "messages": [USER]},
        "goes_on": {
            "model": "m",
            "max_tokens": 9,
            "messages": [
                USER,
                {"role": "assistant", "content": _BLOCKS},
                {"role": "user", "content": _ANTHROPIC_RESULTS},
            ],
        },
        "whole": _messages_whole(),
        "stream": _messages_stream(),
        "finish": "tool_calls",
        "message": MESSAGE,
    },
    "/v1/responses": {
        "asks": {"model": "m", "input": [USER], "instructions": "Be brief."},
        "goes_on": {
            "model": "m",
            "instructions": "Be brief.",
            "input": [
                USER,
                *_ITEMS,
                *(
                    {"type": "function_call_output", "call_id": f"call_{i}", "output": text}
                    for i, text in enumerate(_RESULTS)
                ),
            ],
        },
        "whole": _responses_whole(),
        "stream": sse(*_responses_events(), named=True),
        "finish": "tool_calls",
        "message": MESSAGE,
    },
    "/v1/completions": {
        "asks": {"model": "m", "prompt": "Once"},
        "goes_on": None,
        "whole": _completions_whole(),
        "stream": _completions_stream(),
        "finish": "length",
        "message": {"role": "assistant", "content": TEXT},
    },
}
