"""OpenAI's chat completions: the form that everything else is mapped to.

In this order: requests, replies as one object and as chunks, and both as they pass to an upstream.
"""

from __future__ import annotations

from typing import Any

import orjson

from rollbook.edge.errors import openai_error
from rollbook.edge.server_sent_events import DONE, event
from rollbook.ingest.endpoints.api import AgentApi, History, UpstreamForm
from rollbook.ingest.endpoints.openai_form import MODEL, chat_usage, finish_of, template_kwargs
from rollbook.ingest.endpoints.upstream_choices import (
    LAST_EVENT,
    LenientReader,
    function_calls,
    gather,
    read_reply,
)
from rollbook.ingest.fields import SamplingFields, validated
from rollbook.ingest.tokens.chat_template import ChatTokenizer
from rollbook.ingest.tokens.message_form import shown
from rollbook.ingest.trajectories.rewards import RESPONSE_PREFIX
from rollbook.ingest.turns.in_flight import CompletedTurn, created_s, logprob_entry
from rollbook.ingest.turns.model_call import ModelCall, check_messages, check_tools, function_tool
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

PATH = "/v1/chat/completions"
OWN_FIELDS = frozenset(["messages", "n", "stop", "max_tokens", "max_completion_tokens", "reasoning_effort"])


def read(body: Json, history: History) -> ModelCall:
    """A chat request.

    Raises:
        RequestError: 400, it is none.
    """
    fields = validated(SamplingFields, body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise RequestError(400, "bad_request", "messages: send a list of messages")
    check_messages(messages)
    tools, odd = chat_tools(body.get("tools"))
    return ModelCall(
        endpoint=PATH,
        messages=messages,
        tools=tools,
        fields=fields,
        rest={k: v for k, v in body.items() if k != "messages"},
        tool_calls_wanted=fields.tool_choice != "none",
        logprobs=bool(body.get("logprobs")),
        template_kwargs=template_kwargs(fields, body.get("reasoning_effort")),
        not_honoured=odd,
        own_fields=OWN_FIELDS,
    )


def chat_tools(tools: Any) -> tuple[list[Json] | None, tuple[str, ...]]:
    """(the functions among the tools, what is not served): other kinds run at a provider, not here.

    Raises:
        RequestError: 400, it is no list of tools.
    """
    tools = check_tools(tools)
    functions: list[Json] = []
    odd: set[str] = set()
    for index, tool in enumerate(tools):
        kind = tool.get("type", "function")
        if kind == "function":
            function_tool(f"tools[{index}].function", tool.get("function"))
            functions.append(tool)
        else:
            odd.add(f"tools.{kind if isinstance(kind, str) else shown(kind)}")
    return functions or None, tuple(sorted(odd))


def reply(call: ModelCall, turns: list[CompletedTurn], tokenizer: ChatTokenizer) -> Json:
    """The reply, with every field that some client insists on."""
    return {
        "id": RESPONSE_PREFIX + turns[0].turn_id,
        "object": "chat.completion",
        "created": turns[0].created,
        "model": call.fields.model or MODEL,
        "choices": [_choice(call, index, turn, tokenizer) for index, turn in enumerate(turns)],
        "usage": chat_usage(turns),
    }


def _choice(call: ModelCall, index: int, turn: CompletedTurn, tokenizer: ChatTokenizer) -> Json:
    return {
        "index": index,
        "message": turn.reply | {"refusal": None},
        "logprobs": _logprobs(turn, tokenizer) if call.logprobs else None,
        "finish_reason": finish_of(turn),
    }


def _logprobs(turn: CompletedTurn, tokenizer: ChatTokenizer) -> Json | None:
    done = turn.completed
    if done.logprobs is None:
        return None
    pairs = zip(done.completion_ids.tolist(), done.logprobs.tolist(), strict=True)
    return {"content": [logprob_entry(tokenizer, i, p) for i, p in pairs], "refusal": None}


class ChatWriter:
    """Chunks: the role first, text as it comes, calls and the finish at the end."""

    keep_alive = b": keep-alive\n\n"

    def __init__(self, call: ModelCall, turn_ids: list[str], tokenizer: ChatTokenizer) -> None:
        self._call, self._tokenizer, self._choices = call, tokenizer, len(turn_ids)
        self._usage = bool((call.fields.stream_options or {}).get("include_usage"))
        self._head = {
            "id": RESPONSE_PREFIX + turn_ids[0],
            "object": "chat.completion.chunk",
            "created": created_s(turn_ids[0]),
            "model": call.fields.model or MODEL,
        }

    def begin(self) -> bytes:
        """A chunk with the role for each choice."""
        return b"".join(
            self._chunk(index, {"role": "assistant", "content": ""}) for index in range(self._choices)
        )

    def piece(self, choice: int, reasoning: str, content: str, tokens: list[tuple[int, float]]) -> bytes:
        """A chunk of text."""
        delta: Json = {}
        if reasoning:
            delta["reasoning_content"] = reasoning
        if content:
            delta["content"] = content
        entries = [logprob_entry(self._tokenizer, i, p) for i, p in tokens] if self._call.logprobs else []
        if not delta and not entries:
            return b""
        return self._chunk(choice, delta, {"content": entries, "refusal": None} if entries else None)

    def end(self, turns: list[CompletedTurn]) -> bytes:
        """Calls, the finish of each choice, the usage if it was asked for, and the terminator."""
        parts = []
        for index, turn in enumerate(turns):
            calls = [{"index": i} | call for i, call in enumerate(turn.calls)]
            if calls:
                parts.append(self._chunk(index, {"tool_calls": calls}))
            parts.append(self._chunk(index, {}, finish=finish_of(turn)))
        if self._usage:
            parts.append(event(self._head | {"choices": [], "usage": chat_usage(turns)}))
        return b"".join([*parts, DONE])

    def failed(self, error: Json) -> bytes:
        """An error where a chunk would be."""
        return event(error)

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, finish: str | None = None
    ) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}
        usage = {"usage": None} if self._usage else {}
        return b"data: " + orjson.dumps(self._head | {"choices": [choice]} | usage) + b"\n\n"


def _softened(messages: list[Any]) -> list[Json]:
    """The roles alone: content of any kind is recorded as it was sent."""
    return [{"role": message["role"], "content": ""} for message in messages]


def _with_function_calls(messages: list[Any]) -> list[Json]:
    """The messages, with all their calls as calls of functions."""
    converted = []
    for message in messages:
        calls = message.get("tool_calls")
        converted.append(message if not calls else message | {"tool_calls": function_calls(calls)})
    return converted


_READER = LenientReader(PATH, "messages", read, _softened, _with_function_calls)

UPSTREAM = UpstreamForm(
    read=lambda body, known: _READER.call(body),
    reply=read_reply,
    gather=gather,
    last_event=LAST_EVENT,
    paths=(f"POST {PATH}",),
    takes_fields=True,
)


API = AgentApi(
    path=PATH,
    conversation="messages",
    read=read,
    reply=reply,
    writer=ChatWriter,
    error=openai_error,
    upstream=UPSTREAM,
)
