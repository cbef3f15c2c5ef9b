"""A Responses request in chat form. Pure.

What a request only names is looked up in its trajectory: an earlier response (`previous_response_id`) or one
of its items (`item_reference`, which some clients send for everything the model said). Nothing that was said
is lost, and what cannot be found is a 404.
"""

from __future__ import annotations

from typing import Any

from rollbook.ingest.endpoints.history import EarlierTurn, History
from rollbook.ingest.endpoints.responses.input_items import chat_messages, unread_in_items
from rollbook.ingest.endpoints.responses.reply import turn_of
from rollbook.ingest.endpoints.template_kwargs import template_kwargs
from rollbook.ingest.requests.fields import SamplingFields, validated
from rollbook.ingest.tokens.message_form import refused, shown
from rollbook.ingest.turns.model_call import ModelCall, check_answerable, check_tools, function_tool
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

PATH = "/v1/responses"
OWN_FIELDS = frozenset(["input", "instructions", "previous_response_id", "text", "max_output_tokens"])
MISSING_FIELDS = frozenset(["n", "stop", "logprobs"])


def read(body: Json, history: History) -> ModelCall:
    """A request for a response.

    Raises:
        RequestError: 400, it is none; 404, it names what the trajectory does not have.
    """
    if body.get("background"):
        text = "background: true: the reply is given to the request itself; send background: false"
        raise RequestError(400, "background_not_served", text)
    fields = validated(SamplingFields, _sampling(body))
    sent = body.get("input", [])
    items = [{"role": "user", "content": sent}] if isinstance(sent, str) else sent
    if not isinstance(items, list):
        raise RequestError(400, "bad_request", "input: send a text or a list of items")
    messages = [
        *_instructions(body),
        *_previous(body.get("previous_response_id"), history),
        *chat_messages(items, history),
    ]
    check_answerable(messages)
    tools, odd = _tools(body.get("tools"))
    return ModelCall(
        endpoint=PATH,
        messages=messages,
        tools=tools,
        fields=fields,
        # A text stays with the body: the items are what was sent as a list.
        rest={k: v for k, v in body.items() if k != "input" or isinstance(v, str)},
        items=[] if isinstance(sent, str) else sent,
        tool_calls_wanted=fields.tool_choice != "none",
        template_kwargs=template_kwargs(fields, _effort(body)),
        not_honoured=(*odd, *unread_in_items(items)),
        own_fields=OWN_FIELDS,
        missing_fields=MISSING_FIELDS,
    )


def _sampling(body: Json) -> Json:
    """The sampling fields under chat's names."""
    text = body.get("text")
    shape = text.get("format") if isinstance(text, dict) else None
    mapped = {k: v for k, v in body.items() if k not in ("n", "stop", "max_tokens", "logprobs")}
    if body.get("max_output_tokens") is not None:
        mapped["max_tokens"] = body["max_output_tokens"]
    if isinstance(shape, dict):
        mapped["response_format"] = shape
    return mapped


def _effort(body: Json) -> Any:
    reasoning = body.get("reasoning")
    return reasoning.get("effort") if isinstance(reasoning, dict) else None


def _instructions(body: Json) -> list[Json]:
    said = body.get("instructions")
    if not isinstance(said, str | None):
        raise refused("instructions", said, "send a text")
    return [{"role": "system", "content": said}] if said else []


def _previous(response_id: Any, history: History) -> list[Json]:
    """The conversation up to an earlier response; its own instructions do not carry over."""
    if response_id is None:
        return []
    turn_id = turn_of(response_id)
    earlier: EarlierTurn | None = None if turn_id is None else history(turn_id)
    if earlier is None:
        text = f"previous_response_id is {response_id!r}, which is no response of this trajectory"
        raise RequestError(404, "unknown_response", text)
    messages = earlier.messages
    if _instructions(earlier.request):
        messages = messages[1:]
    return [*messages, earlier.reply]


def _tools(tools: Any) -> tuple[list[Json] | None, tuple[str, ...]]:
    """(functions in chat form, what is not served)"""
    tools = check_tools(tools)
    made: list[Json] = []
    odd: set[str] = set()
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if kind != "function":
            odd.add(f"tools.{kind if isinstance(kind, str) else shown(kind)}")
            continue
        named = ("name", "description", "parameters", "strict")
        function = {k: tool[k] for k in named if tool.get(k) is not None}
        made.append(function_tool(f"tools[{index}]", function))
    return made or None, tuple(sorted(odd))
