"""Computes erased events: position, ids, times, numbers and lengths stay, text is removed. Pure.

An erased event has the format of any other event, so every reader can read it: a text is "erased" or
`{"erased": true}`, a list of messages keeps its length, and erased token ids are -1, so that lengths, spans
and token counts still agree. Erased logprobs are null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import orjson

from rollbook.store.events.blobs import KEY
from rollbook.store.events.event import about, kinds_where

TEXT_ERASED = "text_erased"
"""Flag of a completed turn whose reply is gone."""
TOKENS_ERASED = "tokens_erased"
"""Flag of a completed turn whose token ids and logprobs are gone too: nothing can be trained on it."""
ERASED_TOKEN = -1

CHANGED = ("extra", "prompt_ids", "completion_ids", "logprobs")
"""Columns of the log that erasure may change."""


def text_kinds() -> list[str]:
    """Kinds of a trajectory's events that hold its text; `body.stored` also does, if one of its
    requests names it."""
    return kinds_where(
        lambda properties: properties.of == "trajectory" and (properties.text or properties.counted)
    )


def erase_row(kind: str, row: Mapping[str, Any], *, keep_tokens: bool) -> dict[str, Any]:
    """The columns `CHANGED` of an event after erasure; unchanged for an event that is erased already.

    Args:
        row: the columns; `extra` is JSON text, the lists are arrays or None.
        keep_tokens: leave token ids and logprobs as they are.
    """
    extra = orjson.loads(row["extra"])
    erased = {name: row[name] for name in CHANGED}
    properties = about(kind)
    for name, left in (properties.text if keep_tokens else {**properties.text, **properties.counted}).items():
        if name in extra:
            extra[name] = left(extra[name])
    if "flags" in extra:
        flags = [TEXT_ERASED] if keep_tokens else [TEXT_ERASED, TOKENS_ERASED]
        extra["flags"] = [*extra["flags"], *(f for f in flags if f not in extra["flags"])]
    if not keep_tokens and "prompt_sha256" in extra:  # a completed turn, or one that failed
        if extra.get("routed_experts"):
            extra["routed_experts"] = {}
        extra["prompt_sha256"] = ""  # a short prompt could be found again by trying
        erased |= {name: _no_tokens(row[name]) for name in ("prompt_ids", "completion_ids")}
        erased["logprobs"] = None
    text = orjson.dumps(extra).decode()
    return erased | {"extra": row["extra"] if orjson.loads(row["extra"]) == extra else text}


def _no_tokens(ids: Any) -> Any:
    return None if ids is None else np.full(len(ids), ERASED_TOKEN, np.int32)


def named_bodies(extra: str) -> Iterator[str]:
    """Digests of the bodies that a stored request or completion refers to."""
    if f'"{KEY}"' in extra:
        values = orjson.loads(extra)
        names = {
            name for kind in kinds_where(lambda properties: properties.large) for name in about(kind).large
        }
        yield from _references([values[name] for name in names if name in values])


def _references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if KEY in value:
            yield value[KEY]
        else:
            for entry in value.values():
                yield from _references(entry)
    elif isinstance(value, list):
        for entry in value:
            yield from _references(entry)
