"""Which paths pass with the engine's own key, and which endpoint a path means however it is spelled. Pure.

A proxy that adds its key to clients' requests must bound where they go: an upstream has files, batches, other
people's responses and the account's administration behind the same key. So with a key only the agents' APIs
pass, and only as they are written; without one everything passes, as it would without the proxy.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from rollbook.ingest.endpoints.registry import APIS
from rollbook.store.errors import ConfigError, RequestError

BESIDE_APIS = ("POST /v1/embeddings", "GET /v1/models", "GET /v1/models/**")
"""What agents' libraries use beside the APIs' own paths; `*` is one part of a path, `**` one or more."""

_RULE = re.compile(r"(GET|HEAD|POST|PUT|PATCH|DELETE|OPTIONS) (/v1/[!-~]+)")
_PLAIN = re.compile(r"[!-~]+")


@dataclass(frozen=True, slots=True)
class Paths:
    """The paths that pass with the engine's key."""

    patterns: tuple[re.Pattern[str], ...]

    def check(self, method: str, raw: str) -> None:
        """Refuse a path that is not allowed.

        Args:
            raw: the endpoint's path, with its percent signs.

        Raises:
            RequestError: 404, its spelling may mean several paths; 403, it is not allowed.
        """
        path = meant(raw)
        if unquote(raw) != path or _PLAIN.fullmatch(path) is None:
            text = (
                f"{raw[:200]}: with --engine-key paths are written plainly, without '..', '//', ';' and such"
            )
            raise RequestError(404, "not_found", text)
        if not any(pattern.fullmatch(f"{method} {path}") for pattern in self.patterns):
            text = f"{method} {path[:200]} is no agents' endpoint, and would go with the engine's own key: "
            raise RequestError(
                403, "path_not_allowed", text + "it passes only with --pass-path 'METHOD /v1/...'"
            )


def allowed() -> tuple[str, ...]:
    """The methods and paths that pass with the engine's own key."""
    return (*(path for api in APIS.values() for path in api.upstream.paths), *BESIDE_APIS)


def paths_of(more: Sequence[str] = ()) -> Paths:
    """Those that are `allowed`, and more, written likewise.

    Raises:
        ConfigError: one is not.
    """
    for rule in more:
        found = _RULE.fullmatch(rule)
        if found is None or meant(found[2]) != found[2]:
            text = f"--pass-path {rule!r}: write a method and a path below /v1, such as 'POST /v1/rerank'"
            raise ConfigError(f"{text}; * is one part of it, ** one or more")
    return Paths(tuple(_pattern(rule) for rule in (*allowed(), *more)))


def _pattern(rule: str) -> re.Pattern[str]:
    parts = {"*": "[^/]+", "**": ".+"}
    return re.compile("/".join(parts.get(part, re.escape(part)) for part in rule.split("/")))


def meant(raw: str) -> str:
    """The path that a server may take a raw one for: decoded, with `.`, `..`, `//` and `;...` resolved.

    What is asked is recorded by this: a spelling that only the upstream understands is no way around the log.
    """
    path = raw
    while (decoded := unquote(path)) != path:
        path = decoded
    parts: list[str] = []
    for part in path.replace("\\", "/").split("/"):
        name = part.partition(";")[0].strip()
        if name == "..":
            parts[-1:] = []
        elif name not in ("", "."):
            parts.append(name)
    return "/" + "/".join(parts)


def response_named(method: str, path: str) -> str | None:
    """The response that a request is about, by its path, as `meant` gives it."""
    named = (api.ids.in_path(method, path) for api in APIS.values() if api.ids is not None)
    return next((found for found in named if found is not None), None)
