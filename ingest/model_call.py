"""A request for a completion in one form, whichever endpoint it came through. Pure.

Messages and tools are in the form of OpenAI's chat completions, which the chat templates read; so the same
conversation gives the same trajectory through every endpoint.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rollbook.ingest.engines.engine import Sampling
from rollbook.ingest.requests import SamplingFields
from rollbook.store.errors import RequestError
from rollbook.store.events import Json, TokenIds

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
        "model",
        "messages",
        "tools",
        "stream",
        "stream_options",
        "user",
        "metadata",
        "store",
        "n",
        "stop",
        "stop_sequences",
        "input",
        "prompt",
        "instructions",
        "previous_response_id",
        "system",
        "include",
        "safety_identifier",
        "prompt_cache_key",
        "service_tier",
        "chat_template_kwargs",
        "text",
        "reasoning_effort",
        "verbosity",
        "return_token_ids",
        "echo",
        "max_tokens",
        "max_completion_tokens",
        "max_output_tokens",
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
"""Fields whose named values ask for nothing beyond what is done anyhow."""


def unhonoured(call: ModelCall, honoured: frozenset[str]) -> Json:
    """The fields that will not be acted on, each false: what `turn.requested` records of them."""
    asked = {k for k, v in call.rest.items() if v is not None and v not in _DEFAULTS.get(k, ())}
    left = (asked - PLAIN_FIELDS - honoured) | set(call.not_honoured)
    return dict.fromkeys(sorted(left), False)


def check_messages(messages: Sequence[Any]) -> None:
    """Refuse what no chat template can mean.

    Raises:
        RequestError: 400, naming the message.
    """
    if not messages:
        raise RequestError(400, "empty_messages", "messages is empty: send at least one message")
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            text = f"messages[{index}] is {type(message).__name__}: send an object with role and content"
            raise RequestError(400, "bad_request", text)
        role = message.get("role")
        if role not in ROLES:
            text = f"messages[{index}].role is {role!r}: use one of {', '.join(ROLES)}"
            raise RequestError(400, "unknown_role", text)
        _check_calls(index, message.get("tool_calls"))
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


def _check_calls(index: int, calls: Any) -> None:
    if calls is None:
        return
    sound = isinstance(calls, list) and all(
        isinstance(c, dict) and isinstance(c.get("function"), dict) for c in calls
    )
    if not sound:
        text = f"messages[{index}].tool_calls must be a list of objects with a function"
        raise RequestError(400, "bad_tool_calls", text)


def sampling_of(call: ModelCall, seed: int, prompt_length: int, context_length: int) -> Sampling:
    """How to sample this call's reply.

    Args:
        context_length: the model's, in tokens; 0 where it is unknown.

    Raises:
        RequestError: 400, prompt and reply do not fit into the context.
    """
    asked = call.fields
    wanted = asked.max_completion_tokens or asked.max_tokens
    room = (context_length or 2**31) - prompt_length
    if room < 1 or (wanted or 1) > room:
        text = (
            f"the prompt holds {prompt_length} tokens and {wanted or 1} more were asked for, but "
            f"the model's context is {context_length}"
        )
        raise RequestError(400, "context_length_exceeded", text)
    return Sampling(
        max_new_tokens=wanted or min(room, DEFAULT_MAX_TOKENS),
        temperature=1.0 if asked.temperature is None else asked.temperature,
        seed=seed,
        top_p=1.0 if asked.top_p is None else asked.top_p,
        top_k=-1 if asked.top_k is None or asked.top_k < 1 else asked.top_k,
        min_p=asked.min_p or 0.0,
        frequency_penalty=asked.frequency_penalty or 0.0,
        presence_penalty=asked.presence_penalty or 0.0,
        repetition_penalty=asked.repetition_penalty or 1.0,
        min_new_tokens=asked.min_tokens or 0,
        stop=call.stops,
        logit_bias=asked.logit_bias or None,
        constraint=constraint_of(asked.response_format),
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
    found: list[str] = []
    for message in messages:
        content = message.get("content")
        if not isinstance(content, list):
            continue
        for part in content:
            if isinstance(part, dict) and part.get("type") == "image_url":
                image = part.get("image_url")
                found.append(str(image.get("url") if isinstance(image, dict) else image))
    return tuple(found)
