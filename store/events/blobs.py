"""Stores large parts of requests once: images, tool schemas, long system prompts. Pure.

In a stored request a large value is replaced by `{"$body": "<sha256>"}`, and an event `body.stored` with
the value comes before it in the same segment. Once a *segment*, not once a store: so every segment can be
dropped, shipped or erased on its own, and no count of references has to be kept. A value that a client
itself sent as an object with the key `$body` is stored as a body too, so that a reference is never
mistaken for data.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import orjson

KEY = "$body"


def externalize(value: Any, threshold: int, store: Callable[[str, Any], None]) -> Any:
    """The value with its large parts replaced by references.

    Strings longer than `threshold` characters are replaced wherever they are; then also
    top-level entries of a dict or list whose JSON is still longer than `threshold` bytes.

    Args:
        store: called with (digest, body) for each reference made; the same body may come again.
    """

    if isinstance(value, list):
        return [_shrunk_entry(entry, threshold, store) for entry in value]
    if isinstance(value, dict) and KEY not in value:
        return {key: _shrunk_entry(entry, threshold, store) for key, entry in value.items()}
    return _shrunk(value, threshold, store)


# Not functions within the one above: one that calls itself is a circle, and keeps what `store` holds, the
# bodies, in memory until a collection.


def _reference(body: Any, store: Callable[[str, Any], None]) -> dict[str, str]:
    digest = hashlib.sha256(orjson.dumps(body)).hexdigest()
    store(digest, body)
    return {KEY: digest}


def _shrunk(part: Any, threshold: int, store: Callable[[str, Any], None]) -> Any:
    if isinstance(part, str) and len(part) > threshold:
        return _reference(part, store)
    if isinstance(part, dict):
        if KEY in part:
            return _reference(part, store)
        return {key: _shrunk(entry, threshold, store) for key, entry in part.items()}
    return [_shrunk(entry, threshold, store) for entry in part] if isinstance(part, list) else part


def _shrunk_entry(part: Any, threshold: int, store: Callable[[str, Any], None]) -> Any:
    small = _shrunk(part, threshold, store)
    large = isinstance(part, (dict, list)) and len(orjson.dumps(small)) > threshold
    return _reference(part, store) if large else small


def resolve(value: Any, body: Callable[[str], Any]) -> Any:
    """The value with each reference replaced by its body, `body(digest)`."""
    if isinstance(value, dict):
        if KEY in value:
            return body(value[KEY])
        return {key: resolve(entry, body) for key, entry in value.items()}
    if isinstance(value, list):
        return [resolve(entry, body) for entry in value]
    return value
