"""Which paths pass with the engine's own key, and which endpoint a path means however it is spelled. Pure.

A proxy that adds its key to clients' requests must bound where they go: an upstream has files, batches, other
people's responses and the account's administration behind the same key. So with a key only the agents' APIs
pass, and only as they are written; without one everything passes, as it would without the proxy.

`Upstream` says where requests are forwarded to, and with which headers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from urllib.parse import unquote

from multidict import CIMultiDict

from rollbook.edge.forwarding import MADE_ANEW, Headers, end_to_end, header_value
from rollbook.edge.keys import KEY_PREFIX
from rollbook.engines.address import EngineAddress
from rollbook.ingest.endpoints.registry import APIS, api_below
from rollbook.store.errors import ConfigError, RequestError
from rollbook.store.events import Json

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
        path = canonical_path(raw)
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
        match = _RULE.fullmatch(rule)
        if match is None or canonical_path(match[2]) != match[2]:
            text = f"--pass-path {rule!r}: write a method and a path below /v1, such as 'POST /v1/rerank'"
            raise ConfigError(f"{text}; * is one part of it, ** one or more")
    return Paths(tuple(_pattern(rule) for rule in (*allowed(), *more)))


def _pattern(rule: str) -> re.Pattern[str]:
    parts = {"*": "[^/]+", "**": ".+"}
    return re.compile("/".join(parts.get(part, re.escape(part)) for part in rule.split("/")))


def canonical_path(raw: str) -> str:
    """The path that a server may read a raw one as: decoded, with `.`, `..`, `//` and `;...` resolved.

    Requests are recorded by it: a spelling that only the upstream understands does not bypass the log.
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
    """The response that a request is about, by its path, as `canonical_path` gives it."""
    named = (api.ids.in_path(method, path) for api in APIS.values() if api.ids is not None)
    return next((response_id for response_id in named if response_id is not None), None)


_KEYS = ("authorization", "x-api-key")


@dataclass(frozen=True, slots=True)
class Upstream:
    """Where requests go.

    Attributes:
        address: with or without /v1 at the end. A login in it takes the place of the agent's own.
        key: sent instead of the agent's own; None: the agent's is passed on.
        ask: fields put into chat completions and completions, such as `return_token_ids`.
        passes: more methods and paths that may be asked with the key, as `paths.ALLOWED` has them.
    """

    address: EngineAddress
    key: str | None = field(default=None, repr=False)
    ask: Json | None = None
    passes: tuple[str, ...] = ()

    def target(self, path: str, query: str) -> str:
        """The address of an endpoint's path."""
        whole = "&".join(part for part in (self.address.query, query) if part)
        return self.url.removesuffix("/v1") + path + (f"?{whole}" if whole else "")

    @property
    def url(self) -> str:
        """Its address, to be shown."""
        return self.address.url

    @property
    def secrets(self) -> tuple[str, ...]:
        """The secrets that open the upstream, besides those that agents send."""
        return (*self.address.secrets, *([self.key] if self.key else []))

    def headers(self, sent: Headers, path: str, *, own_keys: bool, plain: bool) -> CIMultiDict[str]:
        """Headers to pass on.

        Args:
            own_keys: the key that was sent is the proxy's own, and is not passed on.
            plain: the reply is to be read here, so it must come uncompressed.
        """
        passed: CIMultiDict[str] = CIMultiDict()
        for name, value in end_to_end(sent):
            if name not in MADE_ANEW and not name.startswith(b"x-rollbook-"):
                passed.add(name.decode("latin-1"), header_value(value))
        mine = own_keys or any(_names_trajectory(passed.get(key_header, "")) for key_header in _KEYS)
        if self.key is not None or mine:
            bare = "x-api-key" in passed or (
                "authorization" not in passed and _key_header(path) == "x-api-key"
            )
            for key_header in _KEYS:
                passed.popall(key_header, None)
            if self.key is not None:
                named = ("x-api-key", self.key) if bare else ("authorization", f"Bearer {self.key}")
                passed.add(*named)
        if self.address.login is not None:
            passed["authorization"] = self.address.login
        if plain:
            passed["accept-encoding"] = "identity"
        return passed


def _key_header(path: str) -> str:
    """The header in which an upstream expects its key, for agents that send none."""
    api = api_below(path)
    return "authorization" if api is None else api.upstream.key_header


def _names_trajectory(value: str) -> bool:
    """Whether it is a key of one trajectory, as a bearer token or bare."""
    bearer = value[:7].lower() == "bearer "
    return (value[7:] if bearer else value).strip().startswith(KEY_PREFIX)
