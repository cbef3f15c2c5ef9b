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

    def refer(body: Any) -> dict[str, str]:
        data = orjson.dumps(body)
        digest = hashlib.sha256(data).hexdigest()
        store(digest, body)
        return {KEY: digest}

    def shrink(part: Any) -> Any:
        if isinstance(part, str) and len(part) > threshold:
            return refer(part)
        if isinstance(part, dict):
            return refer(part) if KEY in part else {key: shrink(entry) for key, entry in part.items()}
        return [shrink(entry) for entry in part] if isinstance(part, list) else part

    def shrink_entry(part: Any) -> Any:
        small = shrink(part)
        large = isinstance(part, (dict, list)) and len(orjson.dumps(small)) > threshold
        return refer(part) if large else small

    if isinstance(value, list):
        return [shrink_entry(entry) for entry in value]
    if isinstance(value, dict) and KEY not in value:
        return {key: shrink_entry(entry) for key, entry in value.items()}
    return shrink(value)


def resolve(value: Any, body: Callable[[str], Any]) -> Any:
    """The value with each reference replaced by its body, `body(digest)`."""
    if isinstance(value, dict):
        if KEY in value:
            return body(value[KEY])
        return {key: resolve(entry, body) for key, entry in value.items()}
    if isinstance(value, list):
        return [resolve(entry, body) for entry in value]
    return value
