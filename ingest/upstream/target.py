"""Where requests are forwarded to, and with which headers. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from multidict import CIMultiDict

from rollbook.ingest.endpoints.registry import api_below
from rollbook.ingest.engines.address import EngineAddress
from rollbook.ingest.http.forwarding import MADE_ANEW, Headers, end_to_end, header_value
from rollbook.ingest.http.trajectory_keys import KEY_PREFIX
from rollbook.store.events import Json

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
