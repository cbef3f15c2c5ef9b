"""Limits of one request: counts and sizes, generous for every agent. Pure."""

from __future__ import annotations

from typing import Any

import orjson

from rollbook.ingest.turns.model_call import ModelCall
from rollbook.store.errors import LimitError
from rollbook.store.events import Json
from rollbook.store.redaction.places import outside

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

    outside(body, measured)
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
