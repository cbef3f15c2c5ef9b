"""Which trajectory a request belongs to, and what it says of it, with no change to the agent's code. Pure.

In order of precedence: the path `/t/ID/...`, the header X-Rollbook-Trajectory, the API key, then hints that
agents send by themselves. Two that are explicit must agree; a hint never overrules one. What names nothing is
quarantined: kept in a trajectory of its own, and never trained.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import orjson

from rollbook.edge.keys import key_name, sent_key
from rollbook.ingest.fields import OpenTrajectory, check_recordable, check_split, validated
from rollbook.ingest.settings import TRAJECTORY_HEADER
from rollbook.store.errors import RequestError
from rollbook.store.events import Json

HINT_HEADERS = ("x-session-id", "x-litellm-session-id")
"""Headers that verifiers, Harbor's agents, mini-swe-agent and litellm send by themselves."""

_WORDS = ("group", "task", "split", "label")
_PATH = re.compile(r"/t/(?P<said>.+)/(?P<rest>v1/.*)")


@dataclass(frozen=True, slots=True)
class Identity:
    """What a request says of its trajectory.

    Attributes:
        name: the client's name for it; None: quarantine.
        fields: fields that it gave besides, of `OpenTrajectory`; the rest is as it was.
        labels: from path or header; a hint that was overruled is among them.
        by: what named it: path, header, key, hint or nothing.
    """

    name: str | None
    fields: Json
    labels: Json
    by: str

    @property
    def explicit(self) -> bool:
        """Whether the client named the trajectory on purpose: a hint may be anything."""
        return self.by in ("path", "header", "key")

    def wanted(self) -> OpenTrajectory:
        """The trajectory to open, if there is none of that name."""
        return validated(OpenTrajectory, {"id": self.name, "labels": self.labels} | self.fields)


def split_path(path: str) -> tuple[Json, str]:
    """(what the path says: id, group, task, split, labels; the endpoint's path, raw).

    `/t/ID/group/G/task/T/split/S/label/NAME/VALUE/v1/...`, the parts behind ID in any order or absent. An id
    may hold slashes, and `v1`; one of the words as a part of it is written with %2F around it.

    Args:
        path: raw, with its percent signs.

    Raises:
        RequestError: 404, there is no id; 400, a part of it is empty, or one is said twice.
    """
    if not path.startswith("/t/"):
        return {}, path
    match = _PATH.fullmatch(path)
    if match is None:
        raise RequestError(404, "not_found", f"{unquote(path)}: write /t/ID/v1/..., with an id")
    parts = match["said"].split("/")
    if "" in parts:
        text = f"{unquote(path)}: a part of the path is empty; write a slash at an id's end as %2F"
        raise RequestError(400, "bad_path", text)
    at = next((i for i, part in enumerate(parts) if i and part in _WORDS), len(parts))
    fields: Json = {"id": unquote("/".join(parts[:at]))}
    while at < len(parts):
        word, size = parts[at], 3 if parts[at] == "label" else 2
        values = [unquote(part) for part in parts[at + 1 : at + size]]
        if word not in _WORDS or len(values) < size - 1:
            text = f"{unquote(path)}: behind the id come group/G, task/T, split/S and label/NAME/VALUE"
            raise RequestError(404, "not_found", text)
        target = fields.setdefault("labels", {}) if word == "label" else fields
        name, value = values if word == "label" else (word, values[0])
        if target.get(name, value) != value:
            text = f"{unquote(path)}: {name} is {target[name]!r} and {value!r}: send one of them"
            raise RequestError(400, "trajectory_conflict", text)
        target[name] = value
        at += size
    return fields, "/" + match["rest"]


_SAID_ONCE = ("authorization", "x-api-key", *HINT_HEADERS)


def check_said_once(
    headers: Sequence[tuple[bytes, bytes]], naming: Sequence[str] = (TRAJECTORY_HEADER,)
) -> None:
    """Refuse a request whose headers name its trajectory, or its key, in two ways.

    Args:
        headers: raw, each as often as it was sent: mappings of headers show one of them.
        naming: the headers that name a trajectory.

    Raises:
        RequestError: 400, naming the header.
    """
    values: dict[str, bytes] = {}
    for raw, value in headers:
        name = raw.decode("latin-1").lower()
        counts = name.startswith("x-rollbook-") or name in _SAID_ONCE or name in naming
        if counts and values.setdefault(name, value) != value:
            text = f"the header {name} was sent twice, with two values: send it once"
            raise RequestError(400, "trajectory_conflict", text)
    text_of = {name: value.decode("latin-1") for name, value in values.items()}
    bearer = sent_key({k: v for k, v in text_of.items() if k == "authorization"})
    names = {key_name(bearer), key_name(text_of.get("x-api-key"))} - {None}
    if len(names) > 1:
        text = "authorization and x-api-key are keys of two trajectories: send one of them"
        raise RequestError(400, "trajectory_conflict", text)


def header_text(value: str | None) -> str | None:
    """A header's value. HTTP libraries send and give Latin-1; people write UTF-8."""
    try:
        return value if value is None else value.encode("latin-1").decode()
    except UnicodeDecodeError:
        return value


def identify(
    path_said: Json,
    headers: Mapping[str, str],
    body: Json,
    key: str | None,
    naming: Sequence[str] = (TRAJECTORY_HEADER,),
) -> Identity:
    """Who the request is from.

    Args:
        path_said: what `split_path` found.
        headers: by lower-case name.
        key: the API key as sent, or None.
        naming: the headers that name a trajectory.

    Raises:
        RequestError: 400, two of path, header and key name different trajectories, or a header is no JSON.
    """
    by_header = [("header", header_text(headers.get(name)) or None) for name in naming]
    explicit = [("path", path_said.get("id")), *by_header, ("key", key_name(key))]
    named = [(by, name) for by, name in explicit if name]
    for by, name in named[1:]:
        if name != named[0][1]:
            text = f"the {named[0][0]} names trajectory {named[0][1]!r}, the {by} {name!r}: send one of them"
            raise RequestError(400, "trajectory_conflict", text)
    fields = {w: header_text(headers.get(f"x-rollbook-{w}")) for w in ("group", "task", "split")}
    fields = {w: value for w, value in fields.items() if value is not None}
    for word in ("group", "task", "split"):
        if word in path_said:
            if fields.get(word, path_said[word]) != path_said[word]:
                text = (
                    f"the path says {word} {path_said[word]!r}, the header {fields[word]!r}: send one of them"
                )
                raise RequestError(400, "trajectory_conflict", text)
            fields[word] = path_said[word]
    if "split" in fields:
        check_split(str(fields["split"]))
    labels = _header_labels(headers) | path_said.get("labels", {})
    hint = _hint(headers, body)
    if named:
        if hint is not None and hint != named[0][1]:
            labels = {"session_id": hint} | labels
        return Identity(named[0][1], fields, labels, named[0][0])
    return Identity(hint, fields, labels, "nothing" if hint is None else "hint")


def _header_labels(headers: Mapping[str, str]) -> Json:
    raw = header_text(headers.get("x-rollbook-labels"))
    if raw is None:
        return {}
    try:
        labels = orjson.loads(raw)
    except orjson.JSONDecodeError:
        labels = None
    if not isinstance(labels, dict):
        text = f'x-rollbook-labels is {raw[:200]!r}: send a JSON object, such as {{"attempt": 2}}'
        raise RequestError(400, "bad_labels", text)
    check_recordable(labels, "x-rollbook-labels")
    return labels


def _hint(headers: Mapping[str, str], body: Json) -> str | None:
    """A conversation's id that an agent sends by itself, if it fits as a name."""
    metadata = body.get("metadata")
    metadata = metadata if isinstance(metadata, dict) else {}
    return hinted(
        (
            *(header_text(headers.get(name)) for name in HINT_HEADERS),
            metadata.get("trajectory_id"),
            metadata.get("session_id"),
            body.get("prompt_cache_key"),
        )
    )


def hinted(hints: Iterable[Any]) -> str | None:
    """The first hint that fits as a name."""
    return next((h for h in hints if isinstance(h, str) and 0 < len(h) <= 256), None)
