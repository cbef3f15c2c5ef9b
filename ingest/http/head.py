"""Which trajectory the head of a request names, before any of its body is read. Pure.

It is what `identify` finds, as far as no body says it, and what routes about a trajectory have in their path.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from urllib.parse import unquote

from starlette.routing import compile_path

from rollbook.ingest.http.rules import RULES
from rollbook.ingest.http.trajectory_keys import key_name, sent_key
from rollbook.ingest.trajectories.identity import HINT_HEADERS, header_text, hinted, split_path
from rollbook.store.errors import RequestError

_KEYS = ("authorization", "x-api-key")
_BEFORE = "/v1/trajectories/"
_NAMED = [
    (rule.method, compile_path(rule.path)[0]) for rule in RULES if rule.path.startswith(f"{_BEFORE}{{name")
]
_CURSORS = "/v1/cursors/"


def moves_cursor(method: str, raw_path: str) -> bool:
    """Whether a request moves a consumer's cursor: one worker moves them, so that none goes back."""
    return method == "PUT" and raw_path.startswith(_CURSORS)


def named_by_head(
    method: str, raw_path: str, headers: Iterable[tuple[bytes, bytes]], naming: Sequence[str]
) -> tuple[str | None, bool]:
    """(the trajectory that a request names, or None; whether that is a hint, which may hold a secret).

    Args:
        raw_path: with its percent signs, without the query.
        headers: raw, by lower-case name.
        naming: the headers that name a trajectory.
    """
    named = _by_path(method, raw_path)
    if named:
        return named, False
    sent = _interesting(headers, naming)
    by_header = (header_text(sent.get(name)) for name in naming)
    named = next((name for name in by_header if name), None) or key_name(sent_key(sent))
    if named:
        return named, False
    return hinted(header_text(sent.get(name)) for name in HINT_HEADERS), True


def _by_path(method: str, raw_path: str) -> str | None:
    if raw_path.startswith("/t/"):
        try:
            return str(split_path(raw_path)[0]["id"])
        except RequestError:
            return None  # is answered with that error, by whom it may be
    path = unquote(raw_path)
    if path.startswith(_BEFORE):
        for verb, pattern in _NAMED:
            if verb == method and (found := pattern.match(path)):
                return found["name"]
    return None


def _interesting(headers: Iterable[tuple[bytes, bytes]], naming: Sequence[str]) -> Mapping[str, str]:
    """Those headers that may name a trajectory; the first of each."""
    found: dict[str, str] = {}
    for raw, value in headers:
        name = raw.decode("latin-1")
        if name in naming or name in _KEYS or name in HINT_HEADERS:
            found.setdefault(name, value.decode("latin-1"))
    return found
