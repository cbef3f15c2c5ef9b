"""A chat request: the form that everything else is mapped to. Pure."""

from __future__ import annotations

from typing import Any

from rollbook.ingest.endpoints.history import History
from rollbook.ingest.endpoints.template_kwargs import template_kwargs
from rollbook.ingest.requests.fields import SamplingFields, validated
from rollbook.ingest.tokens.message_form import shown
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
