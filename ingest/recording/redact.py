"""Takes secrets out of a request before it is used, so that no event holds them. Pure.

Outside the conversation that is always so; inside it only where it was asked for, since it changes what the
model is sent.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rollbook.store.errors import ConfigError
from rollbook.store.events import Json
from rollbook.store.redaction import DEEPEST, PLACEHOLDER, Scrubber, conversation, replace_outside

KNOWN = "known"
"""In the place of a pattern: every key format that is known."""
_FLAGS = re.compile(r"\(\?([aimsx]+)\)")


class Redactor:
    """Takes secrets out of bodies, settings and errors.

    Args:
        patterns: regular expressions of what else is secret, in the conversation too, or `known`.
        key: of the digests that come in their place; None: a random one.

    Raises:
        ConfigError: a pattern is no regular expression, or matches the empty text.
    """

    def __init__(self, patterns: Sequence[str] = (), key: bytes | None = None) -> None:
        self._patterns = tuple(patterns)
        self._secrets = [_compiled(pattern) for pattern in patterns if pattern != KNOWN]
        self._scrub = Scrubber(key or secrets.token_bytes(32))

    def with_patterns(self, patterns: Sequence[str]) -> Redactor:
        """A redactor with other patterns and the same key."""
        redactor = Redactor(patterns)
        redactor._scrub = self._scrub
        return redactor

    def knowing(self, values: Iterable[str]) -> Redactor:
        """A redactor that also knows these secrets, wherever they are outside the conversation."""
        redactor = Redactor(self._patterns)
        redactor._scrub = self._scrub.knowing(values)
        return redactor

    def body(self, body: Json) -> Json:
        """A request of an agent, or a reply, without secrets; the same object where there are none."""
        body = replace_outside(body, self._scrub.field)
        return self._everywhere(body) if self._patterns else body

    def fields(self, values: Json) -> Json:
        """Fields outside any conversation (labels, settings) without secrets; the same object if none."""
        values = self._scrub.value(values)
        return self._everywhere(values) if self._patterns else values

    def text(self, text: str) -> str:
        """An error, or another text of no conversation, without secrets."""
        text = self._scrub.text(text)
        return self._sub(text) if self._patterns else text

    def _everywhere(self, body: Json) -> Json:
        clean: Json = _mapped(body, self._sub)
        return clean

    def _sub(self, text: str) -> str:
        if KNOWN in self._patterns:
            text = self._scrub.keys(text)
        for secret in self._secrets:
            text = secret.sub(self._digest, text)
        return text

    def _digest(self, match: re.Match[str]) -> str:
        return self._scrub.digest(match[0]) if match[0] else ""


def changes_conversation(sent: Json, clean: Json) -> bool:
    """Whether something was taken out of the model's input or output."""
    return sent is not clean and conversation(sent) != conversation(clean)


def _compiled(pattern: str) -> re.Pattern[str]:
    """The pattern, which also matches what replaced a secret: so redacting twice is as redacting once."""
    try:
        if re.compile(pattern).search("") is not None:
            raise ConfigError(f"--redact {pattern!r} matches the empty text: it would match everywhere")
        flags = _FLAGS.match(pattern)
        scoped = f"(?{flags[1]}:{pattern[flags.end() :]})" if flags else f"(?:{pattern})"
        return re.compile(f"{PLACEHOLDER.pattern}|{scoped}")
    except re.error as error:
        raise ConfigError(f"--redact {pattern!r} is no regular expression: {error}") from error


def _mapped(value: Any, change: Callable[[str], str], depth: int = 0) -> Any:
    """The value with each text in it changed, names too; the same object where nothing changes."""
    if isinstance(value, str):
        new = change(value)
        return new if new != value else value
    if depth > DEEPEST or not isinstance(value, dict | list):
        return value
    if isinstance(value, list):
        items = []
        for inner in value:
            items.append(_mapped(inner, change, depth + 1))
        return value if all(a is b for a, b in zip(items, value, strict=True)) else items
    mapping, same = {}, True
    for name, inner in value.items():
        new_name, new_inner = change(name), _mapped(inner, change, depth + 1)
        same = same and new_name == name and new_inner is inner
        mapping[new_name] = new_inner
    return value if same else mapping
