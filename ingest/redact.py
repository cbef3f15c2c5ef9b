"""Secrets are taken out of a request before anything is made of it: no token, no event holds them. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from rollbook.store.errors import ConfigError
from rollbook.store.events import Json

SECRET_FIELDS = frozenset(
    {"api_key", "apikey", "authorization", "extra_headers", "x-api-key", "access_token"}
)
"""Top-level fields of a body that some clients put credentials into."""
GONE = "[redacted]"


class Redactor:
    """Replaces secrets in bodies.

    Args:
        patterns: regular expressions of secrets in text, such as `sk-[A-Za-z0-9]{20,}`.

    Raises:
        ConfigError: a pattern is no regular expression, or matches the empty text.
    """

    def __init__(self, patterns: Sequence[str] = ()) -> None:
        for pattern in patterns:
            try:
                matches_nothing = re.compile(pattern).search("") is not None
            except re.error as error:
                raise ConfigError(f"--redact {pattern!r} is no regular expression: {error}") from error
            if matches_nothing:
                raise ConfigError(f"--redact {pattern!r} matches the empty text: it would match everywhere")
        self._secret = re.compile("|".join(f"(?:{p})" for p in patterns)) if patterns else None

    def body(self, body: Json) -> Json:
        """The body without secrets; the same object where there are none."""
        named = [k for k in body if k.lower() in SECRET_FIELDS and body[k] is not None]
        if named:
            body = body | dict.fromkeys(named, GONE)
        return body if self._secret is None else self._clean(body)

    def _clean(self, value: Any) -> Any:
        assert self._secret is not None
        if isinstance(value, str):
            return self._secret.sub(GONE, value)
        if isinstance(value, list):
            return [self._clean(v) for v in value]
        if isinstance(value, dict):
            return {self._secret.sub(GONE, k): self._clean(v) for k, v in value.items()}
        return value
