"""A normal form of chat messages, for matching a request to its parent turn only, never for rendering.

Clients re-serialise what they echo: key order, `10.0` for `10`, null for an empty string, parts for a
string, extra keys. Two messages with one normal form say the same thing. White space in content counts.
Reasoning is not part of it: many clients drop it, so it is compared apart, by `reasoning_fits`. Nor are names
and ids: whether they count depends on what the template reads, which `TemplateTraits.same` compares.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import orjson

from rollbook.ingest.tokens.message_form import REASONING, in_form
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

_ROLES = {"developer": "system", "function": "tool"}


def normal(message: Json) -> list[Any]:
    """[role, content, [[call name, canonical arguments], ...]] of a message."""
    role = message.get("role")
    try:
        form = in_form(message)
    except RequestError:
        # Of an upstream that takes it, or of a log of the time when it was taken here.
        return [_ROLES.get(str(role), role), message.get("content"), message.get("tool_calls")]
    calls = [
        [call["function"]["name"], canonical_arguments(call["function"]["arguments"])]
        for call in form.get("tool_calls") or ()
    ]
    return [_ROLES.get(str(role), role), _content(form["content"]), calls]


def _content(content: str | list[Json]) -> Any:
    """A text; or the texts and, each in a list of its own, the addresses of the images between them."""
    if isinstance(content, str):
        return content
    parts: list[Any] = []
    for part in content:
        if part["type"] != "text":
            parts.append([part["image_url"]["url"]])
        elif parts and isinstance(parts[-1], str):
            parts[-1] += part["text"]
        else:
            parts.append(part["text"])
    return parts


def reasoning_of(message: Json) -> str:
    """The reasoning a message shows, under any name that clients use; empty where it shows none."""
    said = next((message[name] for name in REASONING if message.get(name)), None)
    return said.strip() if isinstance(said, str) else ""


def reasoning_fits(known: Sequence[Json], shown: Sequence[Json]) -> bool:
    """Whether messages shown again have the reasoning they are known by, each unchanged or left out."""
    for one, other in zip(known, shown, strict=False):
        said = reasoning_of(other)
        if said and said != reasoning_of(one):
            return False
    return True


def reasoning_removed(known: Sequence[Json], shown: Sequence[Json]) -> bool:
    """Whether a message shown again lacks the reasoning it is known by."""
    pairs = zip(known, shown, strict=False)
    return any(one is not other and reasoning_of(one) and not reasoning_of(other) for one, other in pairs)


def canonical_arguments(arguments: Any) -> str:
    """Call arguments as canonical JSON; text that is no JSON, or nested too deep, stays as it is."""
    if not isinstance(arguments, str):
        return _canonical(arguments)
    try:
        return _canonical(orjson.loads(arguments))
    except (orjson.JSONDecodeError, orjson.JSONEncodeError, RecursionError):
        return arguments


def _canonical(value: Any) -> str:
    return orjson.dumps(_integral(value), option=orjson.OPT_SORT_KEYS).decode()


def _integral(value: Any) -> Any:
    """Integral floats as integers, throughout: JavaScript clients write 10 for 10.0."""
    if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
        return int(value)
    if isinstance(value, list):
        return [_integral(v) for v in value]
    if isinstance(value, dict):
        return {k: _integral(v) for k, v in value.items()}
    return value


def chain(previous: bytes, message: Json) -> bytes:
    """Hash of a message list, from the hash of the list without its last message."""
    return hashlib.sha256(previous + orjson.dumps(normal(message))).digest()


def chain_all(messages: Sequence[Json], known: Sequence[bytes] = (b"",)) -> list[bytes]:
    """Hashes of every prefix: element k covers the first k messages (element 0 is empty).

    Args:
        known: the first of them, where they were computed before.
    """
    hashes = list(known)
    for message in messages[len(hashes) - 1 :]:
        hashes.append(chain(hashes[-1], message))
    return hashes


def conversation_digest(messages: Sequence[Json]) -> bytes:
    """Hash of a whole message list."""
    return chain_all(messages)[-1]
