"""A request for a completion in one form, whichever endpoint it came through. Pure.

Messages and tools are in the form of OpenAI's chat completions, which the chat templates read; so the same
conversation gives the same trajectory through every endpoint.

Its limits, counts and sizes, are generous for every agent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from rollbook.engines.engine import Sampling
from rollbook.ingest.fields import SamplingFields
from rollbook.ingest.tokens.message_form import in_form, refused, shown
from rollbook.store.errors import LimitError, RequestError
from rollbook.store.events import Json, TokenIds
from rollbook.store.redaction.names import replace_outside

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
DEFAULT_MAX_TOKENS = 1024


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """What is asked.

    Attributes:
        endpoint: the path it came to, such as /v1/chat/completions.
        messages: in chat form; empty for a raw prompt.
        tools: functions in chat form, or None.
        fields: what it says about sampling.
        rest: the body as sent, without its messages.
        items: the messages as sent, where the endpoint's form is another than chat's.
        prompt: text or ids that no chat template shapes (completions), or None.
        tool_calls_wanted: whether calls are to be read from the reply.
        logprobs: whether the reply is to show them.
        not_honoured: fields, or parts of them, that this endpoint does not serve.
        unresolved: references to earlier messages that are not in the log; so messages are missing.
        own_fields: fields of the body that its API's reader acts on.
        missing_fields: fields that engines know by chat's names, and that its API does not have.
    """

    endpoint: str
    messages: list[Json]
    tools: list[Json] | None
    fields: SamplingFields
    rest: Json
    items: list[Any] | None = None
    prompt: str | TokenIds | None = None
    tool_calls_wanted: bool = True
    logprobs: bool = False
    template_kwargs: Json = field(default_factory=dict)
    not_honoured: tuple[str, ...] = ()
    unresolved: tuple[str, ...] = ()
    own_fields: frozenset[str] = frozenset()
    missing_fields: frozenset[str] = frozenset()

    @property
    def stream(self) -> bool:
        """Whether the reply is wanted piece by piece."""
        return bool(self.fields.stream)

    @property
    def stops(self) -> tuple[str, ...]:
        """Strings that end the reply."""
        stop = self.fields.stop
        return tuple(s for s in ([stop] if isinstance(stop, str) else stop or ()) if s)


PLAIN_FIELDS = frozenset(
    [
        *("model", "tools", "stream", "stream_options", "user", "metadata", "store", "include"),
        *("safety_identifier", "prompt_cache_key", "service_tier", "chat_template_kwargs", "verbosity"),
        "return_token_ids",
    ]
)
"""Request fields that ask nothing of an engine, or that the proxy answers for itself."""

_DEFAULTS: Json = {
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "background": (False,),
    "top_p": (1, 1.0),
    "presence_penalty": (0, 0.0),
    "frequency_penalty": (0, 0.0),
    "best_of": (1,),
    "logprobs": (False,),
    "thinking": ({"type": "disabled"},),
}
"""Field values that ask for nothing beyond the default behaviour."""


def unhonoured(call: ModelCall, honoured: frozenset[str]) -> Json:
    """The fields that will not be acted on, each false, as `turn.requested` records them."""
    requested = {k for k, v in call.rest.items() if v is not None and v not in _DEFAULTS.get(k, ())}
    acted_on = (honoured - call.missing_fields) | call.own_fields
    left = (requested - PLAIN_FIELDS - acted_on) | set(call.not_honoured)
    return dict.fromkeys(sorted(left), False)


def check_messages(messages: Sequence[Any]) -> None:
    """Refuse messages that no chat template can render.

    Raises:
        RequestError: 400, naming the message.
    """
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            text = f"messages[{index}] is {shown(message)}: send an object with role and content"
            raise RequestError(400, "bad_request", text)
        role = message.get("role")
        if role not in ROLES:
            text = f"messages[{index}].role is {shown(role)}: use one of {', '.join(ROLES)}"
            raise RequestError(400, "unknown_role", text)
        in_form(message, f"messages[{index}]")
    check_answerable(messages)


def check_answerable(messages: Sequence[Json]) -> None:
    """Refuse a conversation that is empty, or ends with the assistant.

    Raises:
        RequestError: 400.
    """
    if not messages:
        raise RequestError(400, "empty_messages", "messages is empty: send at least one message")
    if messages[-1].get("role") == "assistant":
        text = "the last message is the assistant's: nothing is left to answer"
        raise RequestError(400, "nothing_to_answer", text)


def check_tools(tools: Any) -> list[Json]:
    """The tools of a request in its endpoint's own form; none where there are none.

    Raises:
        RequestError: 400, they are no list of objects.
    """
    if not tools:
        return []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RequestError(400, "bad_request", "tools: send a list of objects")
    return tools


def function_tool(where: str, function: Any) -> Json:
    """A function in chat form.

    Args:
        function: with its name, and perhaps description, parameters and strict.

    Raises:
        RequestError: 400, naming what cannot be read.
    """
    if not isinstance(function, dict):
        raise refused(where, function, "send an object with a name")
    if not isinstance(function.get("name"), str) or not function["name"]:
        raise refused(f"{where}.name", function.get("name"), "send a text that is not empty")
    for name, kind, remedy in (("description", str, "send a text"), ("parameters", dict, "send a schema")):
        if not isinstance(function.get(name), kind | None):
            raise refused(f"{where}.{name}", function[name], remedy)
    return {"type": "function", "function": function}


def check_ids(call: ModelCall, vocabulary: int) -> None:
    """Refuse ids that the model does not have, in a prompt or among biases.

    Args:
        vocabulary: how many it has; 0 where it is not known.

    Raises:
        RequestError: 400, naming the first of them.
    """
    prompt = call.prompt
    if not isinstance(prompt, str | None) and vocabulary:
        beyond = np.flatnonzero((prompt < 0) | (prompt >= vocabulary))
        if len(beyond):
            text = f"prompt[{beyond[0]}] is {prompt[beyond[0]]}: the model's ids are 0 to {vocabulary - 1}"
            raise RequestError(400, "bad_prompt", text)
    for key in call.fields.logit_bias or ():
        if not (key.isascii() and key.isdigit() and (not vocabulary or int(key[:12]) < vocabulary)):
            most = f"from 0 to {vocabulary - 1}" if vocabulary else "from 0"
            raise RequestError(400, "bad_request", f"logit_bias.{key[:40]}: keys are ids of tokens, {most}")


def sampling_of(call: ModelCall, seed: int, prompt_length: int, context_length: int) -> Sampling:
    """How to sample this call's reply.

    Args:
        context_length: the model's, in tokens; 0 where it is unknown.

    Raises:
        RequestError: 400, prompt and reply do not fit into the context.
    """
    fields = call.fields
    wanted = fields.max_completion_tokens or fields.max_tokens
    room = (context_length or 2**31) - prompt_length
    if room < 1 or (wanted or 1) > room:
        text = (
            f"the prompt holds {prompt_length} tokens and {wanted or 1} more were asked for, but "
            f"the model's context is {context_length}"
        )
        raise RequestError(400, "context_length_exceeded", text)
    return Sampling(
        max_new_tokens=wanted or min(room, DEFAULT_MAX_TOKENS),
        temperature=1.0 if fields.temperature is None else fields.temperature,
        seed=seed,
        top_p=1.0 if fields.top_p is None else fields.top_p,
        top_k=-1 if fields.top_k is None or fields.top_k < 1 else fields.top_k,
        min_p=fields.min_p or 0.0,
        frequency_penalty=fields.frequency_penalty or 0.0,
        presence_penalty=fields.presence_penalty or 0.0,
        repetition_penalty=fields.repetition_penalty or 1.0,
        min_new_tokens=fields.min_tokens or 0,
        stop=call.stops,
        logit_bias=fields.logit_bias or None,
        constraint=constraint_of(fields.response_format),
    )


def constraint_of(response_format: Json | None) -> Json | None:
    """What a response format masks the logits by, or None for text.

    Raises:
        RequestError: 400, it is no response format.
    """
    kind = (response_format or {}).get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"json_schema": {"type": "object"}}
    assert response_format is not None
    described = response_format.get("json_schema", response_format)
    schema = described.get("schema") if isinstance(described, dict) else None
    if kind != "json_schema" or not isinstance(schema, dict):
        text = "response_format: send type text, json_object, or json_schema with json_schema.schema"
        raise RequestError(400, "bad_response_format", text)
    return {"json_schema": schema}


def check_images(call: ModelCall, engine: str, *, takes_images: bool) -> None:
    """Refuse images for an engine that takes none.

    Raises:
        RequestError: 400.
    """
    if not takes_images and images_of(call.messages):
        text = f"the messages hold an image, and the {engine} engine takes none: send text"
        raise RequestError(400, "images_not_served", text)


def images_of(messages: Sequence[Json]) -> tuple[str, ...]:
    """Addresses (data URLs or links) of the images in messages, in order."""
    urls: list[str] = []
    for message in messages:
        if isinstance(message.get("content"), list):
            content = in_form(message)["content"]
            parts = content if isinstance(content, list) else []
            urls += [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
    return tuple(urls)


MOST_MESSAGES = 10_000
MOST_TOOLS = 1_024
MOST_STOPS, STOPS_LENGTH = 64, 2_048
MOST_BIASES = 4_096
SCHEMA_BYTES = 256 << 10
TEMPLATE_KEYS, TEMPLATE_BYTES = 64, 64 << 10
OUTSIDE_BYTES = 2 << 20
"""Most bytes outside the conversation: they are searched for secrets, at up to two seconds a megabyte."""


def check_call(call: ModelCall, size: int, most: int) -> None:
    """Refuse a call that asks for more than is served at once.

    Args:
        size: bytes of its body.
        most: bytes that a body may have: each completion that is asked for counts its prompt once.

    Raises:
        LimitError: 400, naming the field and what it may hold.
    """
    fields = call.fields
    choices = fields.n or 1
    if choices * size > most and choices > 1:
        text = (
            f"n is {choices} and the body holds {size} bytes: together {choices * size}, and {most} is the "
            f"most (--max-body-mb): ask for {max(most // size, 1)} completions at once"
        )
        raise LimitError(400, "n_too_large", text)
    _check_count("messages", len(call.messages), MOST_MESSAGES)
    _check_count("tools", len(call.tools or ()), MOST_TOOLS)
    _check_count("stop", len(call.stops), MOST_STOPS)
    _check_count("stop, in characters,", sum(map(len, call.stops)), STOPS_LENGTH)
    _check_count("logit_bias", len(fields.logit_bias or ()), MOST_BIASES)
    _check_count("chat_template_kwargs", len(call.template_kwargs), TEMPLATE_KEYS)
    _check_bytes("chat_template_kwargs", call.template_kwargs, TEMPLATE_BYTES)
    _check_bytes("response_format", fields.response_format, SCHEMA_BYTES)


def check_outside(body: Json) -> None:
    """Refuse a body that holds more outside its conversation than is searched for secrets.

    Raises:
        LimitError: 413.
    """
    size = 0

    def measured(_: str, value: Any) -> Any:
        nonlocal size
        size += len(orjson.dumps(value))
        return value

    replace_outside(body, measured)
    if size > OUTSIDE_BYTES:
        text = (
            f"fields beside the conversation (metadata, user, tools' connections ...) hold {size} bytes of "
            f"JSON: send at most {OUTSIDE_BYTES}"
        )
        raise LimitError(413, "fields_too_large", text)


def _check_count(field: str, count: int, most: int) -> None:
    if count > most:
        raise LimitError(400, "field_too_large", f"{field} holds {count}: send at most {most}")


def _check_bytes(field: str, value: Any, most: int) -> None:
    if value and (size := len(orjson.dumps(value))) > most:
        raise LimitError(400, "field_too_large", f"{field} holds {size} bytes of JSON: send at most {most}")
