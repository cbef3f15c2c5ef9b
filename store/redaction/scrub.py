"""Replaces secrets outside conversations: in JSON by field names, in text by patterns. Pure.

Each is replaced by `[secret:DIGEST]`, made with a key that never leaves the store: nobody can
try passwords against it, and equal secrets have equal digests wherever they occur.

Records that quote other sources, such as errors and settings, are scrubbed in the same way.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import html
import json
import re
import secrets
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any
from urllib.parse import quote, quote_plus

from rollbook.store.events import EngineControlled, Record, RunOpened, StepFailed, SyncFailed, TurnFailed
from rollbook.store.redaction.formats import find_keys
from rollbook.store.redaction.names import PLACEHOLDER, is_secret_name, replace_outside
from rollbook.store.redaction.text import replace_credential, split_scheme, without_secrets

_DIGITS = 12
_SCHEMAS = frozenset({"properties", "$defs", "definitions", "patternProperties", "dependentSchemas"})
"""An object in these by a secret's name is a schema: it says of which shape a secret is."""
_NAMING = ("name", "key", "header")
"""An object's fields that may name what its `value` is."""
_SHORTEST, _SHORTEST_WORD = 8, 4
"""Characters of a value that is looked for anywhere in a text; and of one that is looked for as a word."""

DEEPEST = 256
"""Levels of JSON that are looked into: what is nested deeper than 254 has no stored form, and is refused."""
_PLAIN, _SCHEMA, _SECRET, _SECRET_TEXT = range(4)
"""What a value is by its name: anything; schemas by name; a secret; one, unless it is a number."""


class Scrubber:
    """Replaces secrets by digests.

    Args:
        key: of the digests, such as `store_secret(store, "secrets")`.
        values: secrets that are known, such as the credentials of a request: they are looked for as they
            are, and as addresses, JSON, HTML and base64 spell them.
    """

    def __init__(self, key: bytes, values: Iterable[str] = ()) -> None:
        self._key = key
        self._values = frozenset(v for v in values if len(v) >= _SHORTEST_WORD)
        self._spelled = {spelled: v for v in self._values for spelled in _spellings(v)}
        self._known = _any_of(self._spelled) if self._spelled else None

    def knowing(self, values: Iterable[str]) -> Scrubber:
        """A scrubber that also replaces these values."""
        return Scrubber(self._key, {*self._values, *values})

    def digest(self, secret: str) -> str:
        """The placeholder of a secret; a placeholder is returned unchanged."""
        if PLACEHOLDER.fullmatch(secret):
            return secret
        digest = hmac.new(self._key, secret.encode("utf-8", "surrogatepass"), hashlib.sha256).hexdigest()
        return f"[secret:{digest[:_DIGITS]}]"

    def keys(self, text: str) -> str:
        """The text without keys of known formats."""
        matches = find_keys(text)
        if not matches:
            return text
        parts, done = [], 0
        for key in matches:
            parts += [text[done : key.start], self.digest(text[key.start : key.stop])]
            done = key.stop
        return "".join([*parts, text[done:]])

    def text(self, text: str) -> str:
        """The text without any secret that can be recognised in it: an error, a header, an address."""
        if self._known is not None:
            text = self._known.sub(lambda match: self.digest(self._spelled.get(match[0], match[0])), text)
        return without_secrets(self.keys(text), self.digest)

    def value(self, value: Any) -> Any:
        """JSON without secrets in its fields, keys and texts; the same object where nothing changes."""
        return self._walk(value, _PLAIN)

    def field(self, name: str, value: Any) -> Any:
        """The value of a field of this name without secrets; the same object where nothing changes."""
        return self._walk(value, _kind(name))

    def _walk(self, value: Any, kind: int, depth: int = 0) -> Any:
        if isinstance(value, str):
            clean = self.text(value) if kind in (_PLAIN, _SCHEMA) else replace_credential(value, self.digest)
            return clean if clean != value else value
        if depth > DEEPEST:
            return value
        if isinstance(value, dict):
            return self._dict(value, kind, depth + 1)
        if isinstance(value, list):
            return self._list(value, kind, depth + 1)
        if kind == _SECRET and isinstance(value, int | float) and not isinstance(value, bool):
            return self.digest(json.dumps(value))
        return value

    def _dict(self, value: dict[str, Any], kind: int, depth: int) -> dict[str, Any]:
        named = next((value[n] for n in _NAMING if isinstance(value.get(n), str)), "")
        result, same = {}, True
        for name, inner in value.items():
            inside = kind
            if kind == _SCHEMA and isinstance(inner, dict):
                inside = _PLAIN
            elif kind in (_PLAIN, _SCHEMA):
                inside = _SECRET if name == "value" and is_secret_name(named) else _kind(name)
            new_name, new = self.text(name), self._walk(inner, inside, depth)
            same = same and new is inner and new_name == name
            result[new_name] = new
        return value if same else result

    def _list(self, value: list[Any], kind: int, depth: int) -> list[Any]:
        # ["authorization", "..."]: headers as a list of pairs.
        pair = kind == _PLAIN and len(value) == 2 and isinstance(value[0], str) and is_secret_name(value[0])
        items, same = [], True
        for place, inner in enumerate(value):
            new = self._walk(inner, _SECRET if pair and place else kind, depth)
            same = same and new is inner
            items.append(new)
        return value if same else items


class _Collector(Scrubber):
    """A scrubber that collects secrets and replaces nothing."""

    def __init__(self) -> None:
        super().__init__(b"")
        self.secrets: set[str] = set()

    def digest(self, secret: str) -> str:
        if not PLACEHOLDER.fullmatch(secret):
            self.secrets.add(secret)
        return secret


def secrets_in(body: dict[str, Any]) -> set[str]:
    """Every secret of a body that is outside the conversation."""
    collector = _Collector()
    replace_outside(body, collector.field)
    return collector.secrets


def _kind(name: str) -> int:
    if name in _SCHEMAS:
        return _SCHEMA
    if name.lower().endswith("headers"):
        return _SECRET_TEXT
    if is_secret_name(name):
        # A number under `password` is one; `api_keys` may be how many there are, and `token` which.
        return _SECRET_TEXT if name.lower().endswith(("token", "s")) else _SECRET
    return _PLAIN


def _spellings(value: str) -> set[str]:
    """A value as texts spell it."""
    raw = value.encode("utf-8", "surrogatepass")
    urls = [quote(raw, safe=""), quote(raw), quote_plus(raw)]
    urls += [re.sub("%..", lambda coded: coded[0].lower(), url) for url in urls]
    escaped = [json.dumps(value)[1:-1], json.dumps(value, ensure_ascii=False)[1:-1], repr(value)[1:-1]]
    coded = [base64.b64encode(raw).decode(), base64.urlsafe_b64encode(raw).decode()]
    return {value, html.escape(value), *urls, *escaped, *coded, *(c.rstrip("=") for c in coded)}


def _any_of(values: Iterable[str]) -> re.Pattern[str]:
    """A pattern that matches any of these, short ones only as whole words; placeholders match too,
    and first."""
    parts = [PLACEHOLDER.pattern]
    for value in sorted(values, key=len, reverse=True):
        word = re.escape(value)
        parts.append(word if len(value) >= _SHORTEST else rf"(?<![A-Za-z0-9]){word}(?![A-Za-z0-9])")
    return re.compile("|".join(parts))


def credentials(header: str) -> set[str]:
    """The secret parts of a header's value: all of it, the credential behind its scheme, and the
    parts of a login."""
    scheme, credential = split_scheme(header)
    parts = {header.strip(), credential}
    if scheme.lower().startswith("basic"):
        try:
            login = base64.b64decode(credential, validate=True).decode()
        except (binascii.Error, UnicodeDecodeError):
            return parts
        parts |= {login, login.partition(":")[2]}
    return parts - {""}


_OWN = Scrubber(secrets.token_bytes(32))


def shown(text: str) -> str:
    """A message on a screen or in a reply, without secrets; its digests are this process's own."""
    return _OWN.text(text)


def scrub_record(record: Record, text: Callable[[str], str], fields: Callable[[Any], Any]) -> Record:
    """The record to write; the same object if it holds no secret.

    Args:
        text: takes secrets out of an error.
        fields: takes them out of settings.
    """
    match record:
        case TurnFailed() | StepFailed() | SyncFailed():
            error = text(record.error)
            return record if error == record.error else replace(record, error=error)
        case EngineControlled():
            error_text, request = record.error and text(record.error), fields(record.asked)
            same = error_text == record.error and request is record.asked
            return record if same else replace(record, error=error_text, asked=request)
        case RunOpened():
            config = fields(record.config)
            return record if config is record.config else replace(record, config=config)
    return record
